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

RANK_JITTER = 0.011
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
        launch: Host time in which the pass is launched.
    """

    compute: Number
    tensor: Number
    context: Number
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
        + is_recompute(s, Recompute.ATTENTION) * (0 if habits.fused_attention else attention)
    )
    adding = model.layer_params / np.asarray(s.tp) * habits.accumulate_bytes / memory_rate(device)
    message, gather = message_seconds(model, s, wires, habits)
    context = context_seconds(model, s, wires, habits)
    # A block from its input on needs its reductions again; XLA leaves the last one out.
    rerun = 2 * is_recompute(s, Recompute.FULL, Recompute.STAGE)
    regather = np.where(s.sequence_parallel, 2 * gather, 0.0)
    pairs = np.asarray(s.tp) * (np.asarray(s.tp) - 1) / 2
    launch = habits.launch_seconds * (1 + RANK_JITTER * pairs)
    passes = is_recompute(s, Recompute.FULL, Recompute.STAGE, Recompute.OUTPUTS)
    return (
        BlockSeconds(whole, 2 * message, context, launch),
        BlockSeconds(
            sum(backward) + again + adding,
            (2 + rerun) * message + regather,
            context * (2 + passes),
            launch * (BACKWARD_LAUNCHES + passes),
        ),
    )


def exposed(block: BlockSeconds, hidden: Number, habits: Habits) -> tuple[Number, Number]:
    """Tensor messages that nothing hides, and host time on top, of one pass over one block."""
    tensor = block.tensor * (1 - hidden)
    return tensor, host_seconds(block.compute + tensor + block.context, block.launch, habits)


def host_seconds(device: Number, launch: Number, habits: Habits) -> Number:
    """Seconds that launching work for so many seconds adds to the device's own."""
    power = 1 if habits.launches_block else HOST_OVERLAP
    return (device**power + launch**power) ** (1 / power) - device


def _parts(
    model: ModelSizes, s: Strategy, device: DeviceKind, habits: Habits, *, backward: bool
) -> tuple[Number, Number, Number, Number]:
    """Seconds of column products, of attention, of row products and of elementwise kernels."""
    tokens, tp = tokens_of(model, s), np.asarray(s.tp)

    def linear(columns: Number, depth: Number) -> Number:
        return linear_seconds(device, tokens, columns, depth, backward=backward)

    ups = 2 if model.gated else 1
    columns = linear((model.width + model.kv_width) / tp, model.hidden)
    columns = columns + linear(ups * model.ffn / tp, model.hidden)
    rows = linear(model.hidden, model.width / tp) + linear(model.hidden, model.ffn / tp)
    moved = elementwise_bytes(model, s, backward=backward) * habits.traffic / memory_rate(device)
    return columns, _attention(model, s, device, habits, backward=backward), rows, moved


def _attention(
    model: ModelSizes, s: Strategy, device: DeviceKind, habits: Habits, *, backward: bool
) -> Number:
    heads = np.asarray(s.micro_batch) * model.heads / s.tp
    queries = model.seq / np.asarray(s.cp)
    sizes = (device, queries, model.seq, model.head_dim, heads)
    if habits.fused_attention:
        return fused_attention_seconds(*sizes, backward=backward, relative=habits.attention)
    return unfused_attention_seconds(*sizes, backward=backward, traffic=habits.traffic)


def elementwise_bytes(model: ModelSizes, s: Strategy, *, backward: bool) -> Number:
    """Bytes that norms, residual sums, activations and copies of one block move, 16 bits each.

    Forward, in widths of a token: two norms read and write (4 hidden), two sums of bias, dropout
    and residual (7 hidden: 2 read, 1 written, a mask of half a width), the activation of the MLP
    (2 or 3 ffn), and one copy of q, k and v (2 widths). Backward reads the kept inputs as well: 1.5
    times that.
    """
    tp = np.asarray(s.tp)
    split = np.where(s.sequence_parallel, tp, 1)
    inner = (3 if model.gated else 2) * model.ffn + 2 * (model.width + model.kv_width)
    widths = 11 * model.hidden / split + inner / tp
    return 2 * tokens_of(model, s) * widths * (1.5 if backward else 1.0)


def message_seconds(
    model: ModelSizes, s: Strategy, wires: Wires, habits: Habits
) -> tuple[Number, Number]:
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


def context_seconds(model: ModelSizes, s: Strategy, wires: Wires, habits: Habits) -> Number:
    """Seconds in which keys and values of the whole sequence reach every device along cp."""
    whole = 2.0 * np.asarray(s.micro_batch) * model.seq * model.kv_width / s.tp
    return wires.seconds("all-gather", whole, s.cp, inner_devices(s, "cp"))
