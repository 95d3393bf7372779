"""Strategies of a traced model, priced: the formulas of `jaxtp.cost` on what its program shows."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jaxtp.cost.data_parallel import beside
from jaxtp.cost.habits import Habits
from jaxtp.cost.peak_memory import PeakMemory
from jaxtp.cost.products import fused_attention_seconds, memory_rate, product_seconds
from jaxtp.cost.ranking import Ranking, ranked
from jaxtp.cost.step import StepPrice
from jaxtp.cost.strategy import Number, Strategy, inner_devices
from jaxtp.cost.traced.live import Share, peak_bytes
from jaxtp.cost.traced.program import Block
from jaxtp.cost.traced.work import EqualProducts, Work
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import DeviceKind
from jaxtp.mesh.axes import Axis

FORWARD_SHARE = 1 / 3
"""Of a step's products one of three is of the forward pass (Kaplan et al. 2020, section 2.1)."""

MOMENTS = 2
"""Arrays that Adam keeps of a parameter, in its type."""

SUM_BYTES = 4
"""Bytes of a gradient that micro-batches are summed in: float32 (`jaxtp.train.update`)."""

DIMS = ("rows", "columns", "depth", "count")
"""Sizes of an `EqualProducts`, one of which the batch multiplies."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredParams:
    """Parameters on one device along the tensor axis, before ZeRO shards them.

    Attributes:
        elements: All that have a gradient.
        num_bytes: All of them, as they are stored.
        trained_bytes: Those that have a gradient.
        messages: Bytes of each all-gather of parameters under ZeRO 3, in the type of the products.
        sums: Bytes of all gradients as replicas reduce them.
    """

    elements: float
    num_bytes: float
    trained_bytes: float
    messages: tuple[float, ...]
    sums: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step along one tensor axis.

    Attributes:
        block: The program of loss and gradients.
        work: What it does.
        stored: Its parameters.
        batch: Sequences that it was traced on.
    """

    block: Block
    work: Work
    stored: StoredParams
    batch: int


@dataclasses.dataclass(slots=True)
class _Columns:
    """What a loop over candidates fills: one entry each."""

    compute: NDArray[np.float64]
    tensor: NDArray[np.float64]
    gathers: NDArray[np.float64]
    gradients: NDArray[np.float64]
    optimizer: NDArray[np.float64]
    state: NDArray[np.float64]
    activations: NDArray[np.float64]


def rank_traced(
    steps: Mapping[int, TracedStep],
    strategies: Strategy,
    wires: Wires,
    habits: Habits,
    *,
    memory_bytes: float,
    flops: float,
) -> Ranking:
    """Prices and orders strategies of a traced model.

    Args:
        steps: Size of the tensor axis -> the step along it.
        strategies: Arrays of one length.
        wires: The machine's links.
        habits: How the framework runs a step.
        memory_bytes: Of one device.
        flops: Model FLOPs of the whole batch, forward and backward.
    """
    size = np.shape(strategies.tp)
    found = _Columns(*(np.zeros(size) for _ in dataclasses.fields(_Columns)))
    for tp, step in steps.items():
        (where,) = np.nonzero(np.asarray(strategies.tp) == tp)
        if len(where):
            _fill(found, where, step, strategies.take(where), wires, habits)
    nothing = np.zeros(size)
    parts = StepPrice(
        compute=found.compute,
        tensor=found.tensor,
        context=nothing,
        experts=nothing,
        bubble=nothing,
        sends=nothing,
        gathers=found.gathers,
        gradients=found.gradients,
        optimizer=found.optimizer,
        host=nothing + habits.step_seconds,
    )
    memory = PeakMemory(
        state=found.state, activations=found.activations, logits=nothing, working=nothing
    )
    devices = float(np.asarray(strategies.devices).flat[0])
    at_peak = flops / (devices * wires.device.peak_flops)
    return ranked(strategies, parts, memory, memory_bytes=memory_bytes, seconds_at_peak=at_peak)


def _fill(
    found: _Columns,
    where: NDArray[np.intp],
    step: TracedStep,
    s: Strategy,
    wires: Wires,
    habits: Habits,
) -> None:
    """The candidates of one tensor axis."""
    micro, m, zero = np.asarray(s.micro_batch), np.asarray(s.micro_batches), np.asarray(s.zero)
    sizes, back = np.unique(micro, return_inverse=True)
    once = compute_seconds(step.work, sizes / step.batch, wires.device, habits)[back]
    tensor = _tensor_seconds(step.work, sizes / step.batch, wires, int(s.tp[0]))[back]
    stored = step.stored
    found.compute[where] = m * once
    found.tensor[where] = m * tensor
    found.gathers[where] = _gather_seconds(stored, s, once, wires, habits)
    found.gradients[where] = _reduce_seconds(stored, s, (1 - FORWARD_SHARE) * once, wires, habits)
    shards = np.where(zero >= 1, s.fsdp, 1)
    moved = stored.elements * habits.update_bytes / memory_rate(wires.device)
    found.optimizer[where] = moved / shards
    found.state[where] = _state_bytes(stored, s)
    found.activations[where] = _live(step, s)


def compute_seconds(
    work: Work, scale: Number, device: DeviceKind, habits: Habits
) -> NDArray[np.float64]:
    """Seconds of products and of what lies between them, forward and backward.

    Args:
        work: What a step does on one device.
        scale: Sequences of the micro-batch, over those traced: an array.
        device: The GPU.
        habits: The framework.
    """
    total = np.zeros(np.shape(scale))
    for product, times in work.products.items():
        total = total + times * _product_seconds(product, scale, device, habits)
    moved, fixed = work.moved
    stacked = work.stacked[0] * habits.kept_copies
    traffic = habits.traffic * (moved * scale + fixed) + stacked * scale
    return total + traffic / memory_rate(device)


def _product_seconds(
    product: EqualProducts, scale: Number, device: DeviceKind, habits: Habits
) -> Number:
    sizes: dict[str, Number] = {name: getattr(product, name) for name in DIMS}
    if product.scaled:
        sizes[product.scaled] = sizes[product.scaled] * scale
    rows, columns, depth, count = (sizes[name] for name in DIMS)
    if product.attention:
        return fused_attention_seconds(
            device,
            rows,
            columns,
            product.depth,
            count,
            backward=product.attention == "backward",
            relative=habits.attention,
            own_kernel=habits.own_attention,
        )
    return product_seconds(device, rows, columns, depth, count=count)


def _tensor_seconds(work: Work, scale: Number, wires: Wires, tp: int) -> Number:
    """Seconds of all-reduces along the tensor axis, of one micro-batch."""
    total = np.zeros(np.shape(scale))
    for num_bytes, times in work.sent.items():
        total = total + times * wires.seconds("all-reduce", num_bytes * scale, tp, 1)
    return total


def _gather_seconds(
    stored: StoredParams, s: Strategy, once: Number, wires: Wires, habits: Habits
) -> Number:
    """As `data_parallel.gather_seconds`: every micro-batch gathers twice and scatters once."""
    inner = inner_devices(s, Axis.FSDP)

    def all_of(kind: str) -> Number:
        return sum(wires.seconds(kind, size, s.fsdp, inner) for size in stored.messages)

    gather, scatter = all_of("all-gather"), all_of("reduce-scatter")
    share = habits.overlaps_gathers
    one = beside(gather, share, FORWARD_SHARE * once)
    one = one + beside(gather + scatter, share, (1 - FORWARD_SHARE) * once)
    return np.where(np.asarray(s.zero) >= 3, s.micro_batches * one, 0.0)


def _reduce_seconds(
    stored: StoredParams, s: Strategy, backward: Number, wires: Wires, habits: Habits
) -> Number:
    """As `data_parallel.reduce_seconds`."""
    zero, inner = np.asarray(s.zero), inner_devices(s, Axis.FSDP)
    shards = np.where(zero >= 1, s.fsdp, 1)
    over_dp = wires.seconds("all-reduce", stored.sums / shards, s.dp, inner_devices(s, Axis.DP))
    sharded = wires.seconds("reduce-scatter", stored.sums, s.fsdp, inner)
    sharded = sharded + wires.seconds("all-gather", stored.trained_bytes, s.fsdp, inner)
    whole = wires.seconds("all-reduce", stored.sums, s.fsdp, inner)
    over_fsdp = np.where(zero >= 3, 0.0, np.where(zero >= 1, sharded, whole))
    return beside(over_dp + over_fsdp, habits.overlaps_gradients, backward)


def _state_bytes(stored: StoredParams, s: Strategy) -> Number:
    """Parameters, moments, and the sums of micro-batches' gradients."""
    zero = np.asarray(s.zero)
    by_3, by_1, by_2 = (np.where(zero >= stage, s.fsdp, 1) for stage in (3, 1, 2))
    sums = np.where(np.asarray(s.micro_batches) > 1, SUM_BYTES * stored.elements, 0.0)
    return stored.num_bytes / by_3 + MOMENTS * stored.trained_bytes / by_1 + sums / by_2


def _live(step: TracedStep, s: Strategy) -> Number:
    """Bytes that loss and gradients hold at their fullest moment."""
    gradients = np.where(np.asarray(s.zero) >= 2, s.fsdp, 1)
    asked = np.stack([s.micro_batch, gradients, np.asarray(s.zero) >= 3], axis=1)
    rows, back = np.unique(asked, axis=0, return_inverse=True)
    found = [
        peak_bytes(
            step.block,
            Share(batch=micro / step.batch, gradients=int(shards), gathers=bool(gathers)),
        )
        for micro, shards, gathers in rows.tolist()
    ]
    return np.asarray(found)[back.reshape(-1)]
