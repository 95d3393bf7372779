"""Seconds of one training step of a strategy, part by part, from sizes alone."""

import dataclasses

import numpy as np

from jaxtp.cost.block import BlockSeconds, block_seconds, exposed, host_seconds
from jaxtp.cost.data_parallel import gather_seconds, reduce_seconds, update_seconds, vocab_ways
from jaxtp.cost.habits import Habits
from jaxtp.cost.peak_memory import kept_bytes
from jaxtp.cost.products import memory_rate, product_seconds
from jaxtp.cost.strategy import ModelSizes, Number, Strategy, inner_devices, tokens_of
from jaxtp.cost.wire import Wires
from jaxtp.mesh.axes import Axis

HEAD_BYTES = 55
"""Bytes that softmax and cross entropy move per logit, both passes. Megatron-LM's kernels: float32
made (6), maximum (4), subtracted (8), exponential (8), sum (4), divided (8), gradient (8) and cast
back (6) are 52. Fitted."""

ENDS_LAUNCHES = 2.5
"""Host time of one micro-batch outside the blocks, relative to a block's forward pass: batch,
masks, embedding, head and loss, both passes. Fitted."""

VOCAB_MULTIPLE = 128
"""Rows of the token table on one device are padded to it, as Megatron-LM does by default."""

INTERLEAVED_HIDDEN = 0.85
"""Share of tensor-parallel messages that two halves of a micro-batch hide behind each other's
products, in compiled schedules; the rest is attention phases that are shorter than a message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPrice:
    """Seconds of one step on the device that is busy longest; the parts add up to `total`.

    Attributes:
        compute: Kernels of the blocks, the head and the embedding.
        tensor: Tensor-parallel messages that nothing hides.
        context: Messages along the context axis.
        experts: Tokens on their way to experts and back.
        bubble: Waiting for the pipeline to fill and drain.
        sends: Micro-batches on their way to the next stage.
        gathers: Under ZeRO 3, gathers of parameters and scatters of gradients that nothing hides.
        gradients: Gradients' reduction after the last backward pass that nothing hides.
        optimizer: The update.
        host: What the host does while GPUs wait, launches that are slower than kernels included.
    """

    compute: Number
    tensor: Number
    context: Number
    experts: Number
    bubble: Number
    sends: Number
    gathers: Number
    gradients: Number
    optimizer: Number
    host: Number

    @property
    def total(self) -> Number:
        """Seconds of the step."""
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, slots=True)
class _Ends:
    """Embedding, head and loss of one micro-batch, both passes; seconds."""

    compute: Number
    tensor: Number
    lookup: Number


def price(model: ModelSizes, s: Strategy, wires: Wires, habits: Habits) -> StepPrice:
    """The price of one step.

    m micro-batches through p stages take m of the slowest stage's time; filling and draining costs
    the other stages' time once, divided by the rounds (Narayanan et al. 2021, section 2.2).
    """
    pp, m, v = np.asarray(s.pp), np.asarray(s.micro_batches), np.asarray(s.rounds)
    forward, backward = block_seconds(model, s, wires, habits)
    hidden = np.where(s.interleaved, INTERLEAVED_HIDDEN, habits.overlaps_tensor)
    (tensor_f, host_f), (tensor_b, host_b) = (
        exposed(block, hidden, habits) for block in (forward, backward)
    )
    stacking = habits.kept_copies * kept_bytes(model, s, habits) * tokens_of(model, s)
    compute = forward.compute + backward.compute + stacking / memory_rate(wires.device)
    tensor = tensor_f + tensor_b
    context, host = forward.context + backward.context, host_f + host_b
    experts = forward.experts + backward.experts
    block = compute + tensor + context + experts + host
    layers, ends = np.ceil(model.layers / pp), _ends(model, s, wires, habits)
    share = np.where((pp > 1) & (not habits.last_stage_head), 1 / pp, 1.0)
    own_ends = ends.compute * share + np.where(pp == 1, ends.lookup, 0.0)
    own_messages = ends.tensor * share * np.where(pp == 1, 2, 1)
    ends_host = host_seconds(own_ends + own_messages, ENDS_LAUNCHES * habits.launch_seconds, habits)
    whole_ends = own_ends + own_messages + ends_host
    stage, all_stages = layers * block + whole_ends, model.layers * block
    all_stages = all_stages + whole_ends * np.where(habits.last_stage_head, 1, pp)
    return StepPrice(
        compute=m * (layers * compute + own_ends),
        tensor=m * (layers * tensor + own_messages),
        context=m * layers * context,
        experts=m * layers * experts,
        bubble=np.where(pp > 1, np.maximum(all_stages - stage, 0.0) / v, 0.0),
        sends=_send_seconds(model, s, wires, habits),
        gathers=gather_seconds(model, s, wires, habits, *_stage_compute(layers, forward, backward)),
        gradients=reduce_seconds(model, s, wires, habits, layers * (backward.compute + tensor_b)),
        optimizer=update_seconds(model, s, wires.device, habits),
        host=m * (layers * host + ends_host) + habits.step_seconds,
    )


def _stage_compute(
    layers: Number, forward: BlockSeconds, backward: BlockSeconds
) -> tuple[Number, Number]:
    """Kernels of one stage on one micro-batch: what gathers may run beside."""
    return layers * forward.compute, layers * backward.compute


def _ends(model: ModelSizes, s: Strategy, wires: Wires, habits: Habits) -> _Ends:
    device, tp, tokens = wires.device, np.asarray(s.tp), tokens_of(model, s)
    ways = vocab_ways(model, s, habits)
    padded = np.ceil(model.vocab / ways / VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    columns = np.where(habits.pads_alone | (tp > 1), padded, model.vocab)
    work = (
        product_seconds(device, tokens, columns, model.hidden)
        + product_seconds(device, tokens, model.hidden, columns)
        + product_seconds(device, model.hidden, columns, tokens)
    )
    loss = HEAD_BYTES * habits.traffic * tokens * columns / memory_rate(device)
    size = 2.0 * tokens * model.hidden
    message = wires.seconds("all-reduce", size, tp, inner_devices(s, Axis.TP))
    # Looking up, and adding the gradients to the table's, reads and writes the stream three times.
    return _Ends(work + loss, message, 6 * size / 2 / memory_rate(device))


def _send_seconds(model: ModelSizes, s: Strategy, wires: Wires, habits: Habits) -> Number:
    """Seconds of sends between stages: one each way, a chunk and a micro-batch."""
    pp, m, v = np.asarray(s.pp), np.asarray(s.micro_batches), np.asarray(s.rounds)
    split = np.where(s.sequence_parallel, s.tp, s.tp if habits.scatters_sends else 1)
    size = 2.0 * tokens_of(model, s) * model.hidden / split
    one = wires.send_seconds(size, inner_devices(s, Axis.PP))
    return np.where(pp > 1, 2 * one * (v * m + pp - 1), 0.0)
