"""Seconds of one block on one micro-batch: products, attention, elementwise work, messages."""

import dataclasses

import numpy as np

from jaxtp.cost.habits import Habits
from jaxtp.cost.products import (
    fused_attention_seconds,
    linear_seconds,
    memory_rate,
    unfused_attention_seconds,
)
from jaxtp.cost.strategy import (
    ModelSizes,
    Number,
    Recompute,
    Strategy,
    inner_devices,
    is_recompute,
    tokens_of,
)
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import DeviceKind
from jaxtp.mesh.axes import Axis

BACKWARD_LAUNCHES = 1.9
"""Host time of a block's backward pass, relative to its forward pass. Fitted."""

ROUTED_LAUNCHES = 3.0
"""Host time of a block with experts, relative to a plain one: router, sorting, a product an expert.
An estimate: in the published runs the device takes longer."""

ROUTED_COPIES = 8
"""Times that the routed tokens are read or written on their way to experts and back: copied for the
send, sorted by expert, sorted back, and weighted and summed."""

SOFTMAX_LAUNCHES = 0.37
"""Host time of softmax in steps (`Habits.softmax_multiple`), in each pass, relative to a block's
forward pass. Fitted: 0.35 on models of width 1,024, 0.38 on those of 2,048."""

RANK_JITTER = 0.0085
"""Share that each pair of devices along tp adds to host time: in every all-reduce each waits for
all others' hosts. Fitted."""

HOST_OVERLAP = 6
"""Power mean of host and device time: 1 would add them, infinity take the longer. In a pass whose
two times are close, each waits for the other now and then. Fitted."""


@dataclasses.dataclass(frozen=True, slots=True)
class BlockSeconds:
    """One pass over one block on one micro-batch, on one device.

    Attributes:
        compute: Products, attention and elementwise kernels, recomputation included.
        tensor: Collectives along the tensor axis, alone on the machine.
        context: Collectives along the context axis.
        experts: All-to-alls that bring tokens to experts and back.
        launch: Host time in which the pass is launched.
    """

    compute: Number
    tensor: Number
    context: Number
    experts: Number
    launch: Number


def block_seconds(
    model: ModelSizes, s: Strategy, wires: Wires, habits: Habits
) -> tuple[BlockSeconds, BlockSeconds]:
    """The forward and the backward pass of one block, recomputation in the latter."""
    device = wires.device
    forward, backward = (_parts(model, s, device, habits, backward=b) for b in (False, True))
    whole = sum(forward)
    columns, attention, rows, moved = forward
    again = (
        is_recompute(s, Recompute.FULL) * whole
        + is_recompute(s, Recompute.OUTPUTS, Recompute.STAGE) * (columns + attention + moved)
        + is_recompute(s, Recompute.STAGE) * whole
        + is_recompute(s, Recompute.OPS) * ((columns + rows) / 2 + moved)
        + is_recompute(s, Recompute.DOTS) * (attention + moved)
        + is_recompute(s, Recompute.ATTENTION) * np.where(is_fused(s, habits), 0.0, attention)
    )
    adding = block_params(model, s) * habits.accumulate_bytes / memory_rate(device)
    message, gather = message_seconds(model, s, wires)
    context = context_seconds(model, s, wires)
    routed = routed_seconds(model, s, wires)
    # A block from its input on needs its reductions again; XLA leaves the last one out.
    rerun = 2 * is_recompute(s, Recompute.FULL, Recompute.STAGE)
    regather = np.where(s.sequence_parallel, 2 * gather, 0.0)
    pairs = np.asarray(s.tp) * (np.asarray(s.tp) - 1) / 2
    share = model.routed_layers / model.layers
    launch = habits.launch_seconds * (1 + RANK_JITTER * pairs)
    launch = launch * (1 + share * (ROUTED_LAUNCHES - 1))
    steps = SOFTMAX_LAUNCHES * habits.launch_seconds * is_softmax_in_steps(model, s, habits)
    passes = is_recompute(s, Recompute.FULL, Recompute.STAGE, Recompute.OUTPUTS)
    return (
        BlockSeconds(whole, 2 * message, context, routed, launch + steps),
        BlockSeconds(
            sum(backward) + again + adding,
            (2 + rerun) * message + regather,
            context * (2 + passes),
            routed * (1 + _routed_again(s, habits)),
            launch * (BACKWARD_LAUNCHES + passes) + steps * (1 + passes),
        ),
    )


def _routed_again(s: Strategy, habits: Habits) -> Number:
    """What the backward pass runs again of a block's two all-to-alls: 0.5 is the way there alone.

    As in jaxtp's compiled steps: under "dots", "block_outputs" and "full" a layer takes the way
    there again; under "stage" once both ways, for the layer behind it, and then as under
    "block_outputs". Products alone are kept under "dots", and what they take is not.
    """
    layer = is_recompute(s, Recompute.FULL, Recompute.OUTPUTS)
    there = layer + is_recompute(s, Recompute.DOTS) + 2 * is_recompute(s, Recompute.STAGE)
    back = habits.returns_again * layer + is_recompute(s, Recompute.STAGE)
    return (there + back) / 2


def exposed(block: BlockSeconds, hidden: Number, habits: Habits) -> tuple[Number, Number]:
    """Tensor messages that nothing hides, and host time on top, of one pass over one block."""
    tensor = block.tensor * (1 - hidden)
    device = block.compute + tensor + block.context + block.experts
    return tensor, host_seconds(device, block.launch, habits)


def host_seconds(device: Number, launch: Number, habits: Habits) -> Number:
    """Seconds that launching work for so many seconds adds to the device's own."""
    power = 1 if habits.launches_block else HOST_OVERLAP
    return (device**power + launch**power) ** (1 / power) - device


def _parts(
    model: ModelSizes, s: Strategy, device: DeviceKind, habits: Habits, *, backward: bool
) -> tuple[Number, Number, Number, Number]:
    """Seconds of column products, of attention, of row products and of elementwise kernels."""
    tokens, tp = tokens_of(model, s), np.asarray(s.tp)

    def linear(columns: Number, depth: Number, rows: Number = tokens, count: Number = 1) -> Number:
        return linear_seconds(device, rows, columns, depth, backward=backward, count=count)

    if model.kv_latent:
        down = model.query_latent + model.kv_latent + model.rotary_dim
        columns = linear(down, model.hidden) + linear(model.width / tp, model.query_latent)
        columns = columns + linear(model.kv_up / tp, model.kv_latent)
    else:
        columns = linear((model.width + model.kv_width) / tp, model.hidden)
    rows = linear(model.hidden, model.values / tp)
    for share, width, grouped in _mlps(model):
        # Balanced: an expert of a device gets its share of all that its group routes.
        count = model.experts / np.asarray(s.ep) if grouped else 1
        each = tokens * model.chosen * model.capacity / count if grouped else tokens
        ups = (2 if model.gated else 1) * width / tp
        columns = columns + share * linear(ups, model.hidden, each, count)
        rows = rows + share * linear(model.hidden, width / tp, each, count)
    moved = elementwise_bytes(model, s, backward=backward) * habits.traffic / memory_rate(device)
    return columns, _attention(model, s, device, habits, backward=backward), rows, moved


def _mlps(model: ModelSizes) -> list[tuple[float, int, bool]]:
    """(share of the blocks that have it, width, whether they are experts) of each kind of MLP."""
    share = model.routed_layers / model.layers
    kinds = (
        (1 - share, model.plain_ffn, False),
        (share, model.shared_ffn, False),
        (share, model.ffn, True),
    )
    return [kind for kind in kinds if kind[0] and kind[1]]


def _attention(
    model: ModelSizes, s: Strategy, device: DeviceKind, habits: Habits, *, backward: bool
) -> Number:
    heads = np.asarray(s.micro_batch) * model.heads / s.tp
    queries = model.seq / np.asarray(s.cp)
    # Of scores and values each is half of the work.
    head_dim = (model.width + model.values) / (2 * model.heads)
    sizes = (device, queries, model.seq, head_dim, heads)
    fused = is_fused(s, habits)
    found: Number = 0.0
    if np.any(fused):
        found = fused_attention_seconds(
            *sizes,
            backward=backward,
            relative=habits.attention,
            own_kernel=habits.own_attention,
        )
    if not np.all(fused):
        traffic = habits.traffic * habits.score_traffic
        steps = is_softmax_in_steps(model, s, habits)
        slow = unfused_attention_seconds(*sizes, backward=backward, traffic=traffic, in_steps=steps)
        found = np.where(fused, found, slow)
    return found


def is_fused(s: Strategy, habits: Habits) -> Number:
    """Whether attention keeps its scores in the chip."""
    return np.asarray(s.fused, bool) & habits.fused_attention


def is_softmax_in_steps(model: ModelSizes, s: Strategy, habits: Habits) -> Number:
    """Whether mask, scale and softmax of scores in memory are kernels of their own."""
    rows = np.asarray(s.micro_batch) * model.heads / np.asarray(s.tp)
    return (np.mod(rows, habits.softmax_multiple) != 0) & np.logical_not(is_fused(s, habits))


def elementwise_bytes(model: ModelSizes, s: Strategy, *, backward: bool) -> Number:
    """Bytes that norms, residual sums, activations and copies of one block move, 16 bits each.

    Forward, in widths of a token: two norms read and write (4 hidden), two sums of bias, dropout
    and residual (7 hidden: 2 read, 1 written, a mask of half a width), the activation of the MLP
    (2 or 3 ffn), and one copy of q, k and v (2 widths). Routed tokens are copied `ROUTED_COPIES`
    times more. Backward reads the kept inputs as well: 1.5 times that.
    """
    tp = np.asarray(s.tp)
    split = np.where(s.sequence_parallel, tp, 1)
    inner = (3 if model.gated else 2) * model.active_ffn + 2 * (model.width + model.kv_width)
    copies = ROUTED_COPIES * model.chosen * model.capacity * model.routed_layers / model.layers
    widths = (11 + copies) * model.hidden / split + inner / tp
    return 2 * tokens_of(model, s) * widths * (1.5 if backward else 1.0)


def block_params(model: ModelSizes, s: Strategy) -> Number:
    """Elements of the matrices of one block on one device, before ZeRO shards them."""
    routed = model.mlp_params(model.experts * model.ffn) * model.routed_layers / model.layers
    return ((model.layer_params - routed) + routed / np.asarray(s.ep)) / np.asarray(s.tp)


def routed_seconds(model: ModelSizes, s: Strategy, wires: Wires) -> Number:
    """Seconds in which tokens reach their experts along ep, and come back, in one pass."""
    split = np.where(s.sequence_parallel, s.tp, 1)
    sent = tokens_of(model, s) * model.chosen * model.capacity / split
    size = 2.0 * sent * model.hidden
    one = wires.seconds("all-to-all", size, s.ep, inner_devices(s, Axis.EP))
    return 2 * one * model.routed_layers / model.layers


def message_seconds(model: ModelSizes, s: Strategy, wires: Wires) -> tuple[Number, Number]:
    """Seconds of one reduction of the residual stream over tp, and of one gather of it.

    With sequence parallelism the reduction is a reduce-scatter, and the gather before the next
    product belongs to it. Two halves that take turns send two messages of half the size.
    """
    size = 2.0 * tokens_of(model, s) * model.hidden * np.where(s.interleaved, 0.5, 1.0)
    times = np.where(s.interleaved, 2.0, 1.0)
    inner = inner_devices(s, Axis.TP)
    gather = wires.seconds("all-gather", size, s.tp, inner)
    halves = gather + wires.seconds("reduce-scatter", size, s.tp, inner)
    plain = wires.seconds("all-reduce", size, s.tp, inner)
    return np.where(s.sequence_parallel, halves, plain) * times, gather * times


def context_seconds(model: ModelSizes, s: Strategy, wires: Wires) -> Number:
    """Seconds in which keys and values of the whole sequence reach every device along cp."""
    whole = 2.0 * np.asarray(s.micro_batch) * model.seq * model.kv_width / s.tp
    return wires.seconds("all-gather", whole, s.cp, inner_devices(s, Axis.CP))
