"""Seconds of what data parallelism adds: gathers under ZeRO 3, gradients, the update."""

import numpy as np

from jaxtp.cost.habits import Habits
from jaxtp.cost.products import memory_rate
from jaxtp.cost.strategy import ModelSizes, Number, Strategy, inner_devices
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import DeviceKind
from jaxtp.mesh.axes import Axis

SLOWDOWN = 1.1
"""Factor on compute that runs beside communication, which takes cores and bandwidth: measured as
1.1 to 1.3 (Miao et al. 2022, Galvatron, section 4)."""

GATHERED_AHEAD = 0.95
"""Share of gathers and scatters that runs beside layers where each is gathered one layer ahead, in
compiled schedules (`scripts/bench_comm.py --only bound`: fsdp alone is within 1 % of its longest
part)."""


def vocab_ways(model: ModelSizes, s: Strategy, habits: Habits) -> Number:
    """Devices that the token table is split over: those along tp, where its rows divide."""
    divides = habits.pads_vocab | (np.mod(model.vocab, s.tp) == 0)
    return np.where(divides, s.tp, 1)


def local_params(model: ModelSizes, s: Strategy, habits: Habits) -> Number:
    """Elements of parameters of the fullest stage on one device, before ZeRO shards them.

    In stages of one program every device holds both tables.
    """
    tp, pp = np.asarray(s.tp), np.asarray(s.pp)
    tables = (1 if model.tied else 2) * model.table_params / vocab_ways(model, s, habits)
    ends = model.positions * model.hidden + tables
    last = model.table_params / vocab_ways(model, s, habits)
    return layer_params_here(model, s) / tp + np.where(
        (pp > 1) & habits.last_stage_head, last, ends
    )


def layer_params_here(model: ModelSizes, s: Strategy) -> Number:
    """Elements of the blocks of the fullest stage that one device has, before tp splits them."""
    layers = np.ceil(model.layers / np.asarray(s.pp))
    routed = np.minimum(layers, model.routed_layers)
    plain = routed * model.mlp_params(model.shared_ffn)
    plain = plain + (layers - routed) * model.mlp_params(model.plain_ffn)
    return layers * model.attention_params + plain + expert_params_here(model, s)


def expert_params_here(model: ModelSizes, s: Strategy) -> Number:
    """How many of them are of experts."""
    routed = np.minimum(np.ceil(model.layers / np.asarray(s.pp)), model.routed_layers)
    return routed * model.mlp_params(model.experts * model.ffn) / np.asarray(s.ep)


def sharded_params(
    model: ModelSizes, s: Strategy, habits: Habits, plain_ways: Number, expert_ways: Number
) -> Number:
    """Elements that one device has where so many share everything but experts, and experts."""
    experts = expert_params_here(model, s) / np.asarray(s.tp)
    plain = local_params(model, s, habits) - experts
    return plain / plain_ways + experts / expert_ways


def zero_ways(s: Strategy, habits: Habits) -> Number:
    """Devices that ZeRO shards gradients and parameters of experts over."""
    along_cp = (np.asarray(s.zero) >= 1) & (habits.zero_along_cp >= 2)
    return np.asarray(s.fsdp) * np.where(along_cp, s.cp, 1)


def beside(comm: Number, share: Number, compute: Number) -> Number:
    """Seconds that communication adds where a share of it may run beside compute."""
    hidden = np.minimum(share * comm, compute)
    return comm - hidden + (SLOWDOWN - 1) * hidden


def _kinds_here(
    model: ModelSizes, s: Strategy, habits: Habits
) -> list[tuple[Number, Number, Number]]:
    """Of everything but experts, and of experts: elements, ways, distance.

    Elements are those of one stage's blocks before tp splits them, ways the devices that ZeRO
    shards them over, distance the devices between neighbours of those.
    """
    experts = expert_params_here(model, s)
    ways = zero_ways(s, habits)
    # Neighbours are those along cp where ZeRO shards over it too, else those along fsdp.
    along_cp = ways > np.asarray(s.fsdp)
    inner = np.where(along_cp, inner_devices(s, Axis.CP), inner_devices(s, Axis.FSDP))
    plain = (layer_params_here(model, s) - experts, ways * s.ep, inner_devices(s, Axis.EP))
    return [plain, (experts, ways, inner)][: 2 if model.experts else 1]


def gather_seconds(
    model: ModelSizes, s: Strategy, wires: Wires, habits: Habits, forward: Number, backward: Number
) -> Number:
    """Seconds that gathers and scatters of parameters under ZeRO 3 add to a step.

    Every micro-batch gathers each block's parameters in the forward and in the backward pass, and
    scatters its gradients. Nothing hides the first gather and the last scatter.

    Args:
        model: Sizes.
        s: The strategy.
        wires: The links.
        habits: The framework.
        forward: Seconds of kernels of one stage and micro-batch, forward.
        backward: The same, backward.
    """
    layers = np.ceil(model.layers / np.asarray(s.pp))
    gather: Number = 0.0
    scatter: Number = 0.0
    for here, ways, inner in _kinds_here(model, s, habits):
        size = 2.0 * here / layers / np.asarray(s.tp)
        gather = gather + wires.seconds("all-gather", size, ways, inner)
        wide = size * habits.gradient_bytes / 2
        scatter = scatter + wires.seconds("reduce-scatter", wide, ways, inner)
    share = np.where(s.interleaved, GATHERED_AHEAD, habits.overlaps_gathers)
    one = beside(layers * gather, share, forward)
    one = one + beside(layers * (gather + scatter), share, backward)
    return np.where(np.asarray(s.zero) >= 3, s.micro_batches * one + gather + scatter, 0.0)


def reduce_seconds(
    model: ModelSizes, s: Strategy, wires: Wires, habits: Habits, last_backward: Number
) -> Number:
    """Seconds that the gradients' reduction adds, and under ZeRO 1 and 2 the gather of parameters.

    Args:
        model: Sizes.
        s: The strategy.
        wires: The links.
        habits: The framework.
        last_backward: Seconds of the last micro-batch's backward pass.
    """
    zero, tp = np.asarray(s.zero), np.asarray(s.tp)
    tables = local_params(model, s, habits) - layer_params_here(model, s) / tp
    over_dp: Number = 0.0
    over_fsdp: Number = 0.0
    for here, ways, inner in _kinds_here(model, s, habits):
        size, tables = here / tp + tables, 0.0
        num_bytes = size * habits.gradient_bytes
        shards = np.where(zero >= 1, ways, 1)
        outer = inner_devices(s, Axis.DP)
        over_dp = over_dp + wires.seconds("all-reduce", num_bytes / shards, s.dp, outer)
        scatter = wires.seconds("reduce-scatter", num_bytes, ways, inner)
        sharded = scatter + wires.seconds("all-gather", 2.0 * size, ways, inner)
        whole = wires.seconds("all-reduce", num_bytes, ways, inner)
        along_cp = wires.seconds("all-reduce", num_bytes / shards, s.cp, inner_devices(s, Axis.CP))
        in_zero = habits.zero_along_cp == 1 or (zero >= 1) & (habits.zero_along_cp >= 2)
        over_dp = over_dp + np.where(in_zero, 0.0, along_cp)
        once = np.where(zero >= 1, sharded, whole)
        over_fsdp = over_fsdp + np.where(zero >= 3, 0.0, once)
    # A tied table has a copy on the first and on the last stage.
    table = 2 * habits.gradient_bytes * model.table_params / tp
    tied = wires.send_seconds(table, inner_devices(s, Axis.PP))
    tied = np.where((np.asarray(s.pp) > 1) & model.tied, tied, 0.0)
    return beside(over_dp + over_fsdp, habits.overlaps_gradients, last_backward) + tied


def update_seconds(model: ModelSizes, s: Strategy, device: DeviceKind, habits: Habits) -> Number:
    """Seconds of the optimizer, which memory bandwidth limits."""
    shards = np.where(np.asarray(s.zero) >= 1, zero_ways(s, habits), 1)
    plain = np.where(np.asarray(s.zero) >= 1, shards * np.asarray(s.ep), 1)
    size = sharded_params(model, s, habits, plain, shards)
    return size * habits.update_bytes / memory_rate(device)
