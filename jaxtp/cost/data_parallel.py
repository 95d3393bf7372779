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
    """Elements of the blocks of one stage, before tp splits them."""
    return np.ceil(model.layers / np.asarray(s.pp)) * model.layer_params


def _beside(comm: Number, share: float, compute: Number) -> Number:
    """Seconds that communication adds where a share of it may run beside compute."""
    hidden = np.minimum(share * comm, compute)
    return comm - hidden + (SLOWDOWN - 1) * hidden


def gather_seconds(
    model: ModelSizes, s: Strategy, wires: Wires, habits: Habits, forward: Number, backward: Number
) -> Number:
    """Seconds that gathers and scatters over fsdp under ZeRO 3 add to a step.

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
    size = 2.0 * model.layer_params / np.asarray(s.tp)
    inner = inner_devices(s, Axis.FSDP)
    gather = wires.seconds("all-gather", size, s.fsdp, inner)
    scatter = wires.seconds("reduce-scatter", size * habits.gradient_bytes / 2, s.fsdp, inner)
    share = habits.overlaps_gathers
    one = _beside(layers * gather, share, forward)
    one = one + _beside(layers * (gather + scatter), share, backward)
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
    size, zero = local_params(model, s, habits), np.asarray(s.zero)
    num_bytes, tp = size * habits.gradient_bytes, np.asarray(s.tp)
    dp, fsdp = (inner_devices(s, axis) for axis in (Axis.DP, Axis.FSDP))
    shards = np.where(zero >= 1, s.fsdp, 1)
    over_dp = wires.seconds("all-reduce", num_bytes / shards, s.dp, dp)
    scatter = wires.seconds("reduce-scatter", num_bytes, s.fsdp, fsdp)
    sharded = scatter + wires.seconds("all-gather", 2.0 * size, s.fsdp, fsdp)
    whole = wires.seconds("all-reduce", num_bytes, s.fsdp, fsdp)
    over_fsdp = np.where(zero >= 3, 0.0, np.where(zero >= 1, sharded, whole))
    # A tied table has a copy on the first and on the last stage.
    table = 2 * habits.gradient_bytes * model.table_params / tp
    tied = wires.send_seconds(table, inner_devices(s, Axis.PP))
    tied = np.where((np.asarray(s.pp) > 1) & model.tied, tied, 0.0)
    return _beside(over_dp + over_fsdp, habits.overlaps_gradients, last_backward) + tied


def update_seconds(model: ModelSizes, s: Strategy, device: DeviceKind, habits: Habits) -> Number:
    """Seconds of the optimizer, which memory bandwidth limits."""
    shards = np.where(np.asarray(s.zero) >= 1, s.fsdp, 1)
    return local_params(model, s, habits) / shards * habits.update_bytes / memory_rate(device)
