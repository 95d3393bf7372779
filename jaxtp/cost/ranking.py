"""Strategies of one machine, priced and ranked, with the reason why each one lost."""

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from jaxtp.cost.candidates import complexity, describe_fields
from jaxtp.cost.habits import Habits
from jaxtp.cost.peak_memory import PeakMemory, peak_memory
from jaxtp.cost.step import StepPrice, price
from jaxtp.cost.strategy import AXES, ModelSizes, Strategy
from jaxtp.cost.wire import Wires
from jaxtp.hardware.links import GIB

EXPECTED_ERROR = 0.08
"""Mean error of the step time over published runs that no constant was fitted on, one source left
out at a time (`scripts/fit_cost.py`)."""

EQUAL_WITHIN = 0.03
"""Modelled steps this close are called equal: comparing two meshes of one model, most of the error
is in both (`scripts/bench_cost.py`, regret)."""

USABLE_MEMORY = 0.94
"""Share of a GPU's memory that a program may fill: the CUDA context and NCCL take about 3 GiB of
80, and the allocator cannot use every gap."""

PARTS: Mapping[str, str] = {
    "compute": "of computing: narrower products, or recomputation",
    "tensor": "of tp messages that nothing hides",
    "bubble": "of bubble: stages that wait",
    "sends": "of sends between stages",
    "gathers": "of fsdp gathers and scatters that nothing hides",
    "gradients": "of gradients' reduction that nothing hides",
    "optimizer": "of updating state that is not sharded",
    "context": "of keys and values along cp",
    "experts": "of tokens on their way to experts",
    "host": "of host time",
}
"""Part of a step -> what it means where it is what makes a strategy lose."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One strategy and its price.

    Attributes:
        settings: Field of `Strategy` -> value.
        seconds: Modelled step.
        parts: Seconds of its parts, see `StepPrice`.
        mfu: Model FLOPs (attention in full) over devices x seconds x the data sheet's peak.
        memory_bytes: Modelled peak on one device.
        state_bytes: How much of it is parameters, gradients and optimizer state.
        fits: Whether the peak is within `USABLE_MEMORY` of the device.
        reason: Why it lost, or "" for the first.
    """

    settings: Mapping[str, int]
    seconds: float
    parts: Mapping[str, float]
    mfu: float
    memory_bytes: float
    state_bytes: float
    fits: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Prices of all candidates, as arrays, fastest first among those that fit.

    Attributes:
        strategies: The candidates.
        seconds: Modelled step of each.
        parts: The same, part by part.
        memory: Bytes of each at the peak.
        limit_bytes: What may be used of a device.
        order: Indices, best first: those that fit by time, ties to the simpler one, then the rest
            by how far they are from fitting.
        seconds_at_peak: Seconds of the model's FLOPs at the peak of all devices: a step of MFU 1.
    """

    strategies: Strategy
    seconds: NDArray[np.float64]
    parts: StepPrice
    memory: PeakMemory
    limit_bytes: float
    order: NDArray[np.intp]
    seconds_at_peak: float

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def fits(self) -> NDArray[np.bool_]:
        """Which candidates fit."""
        return np.asarray(self.memory.total) <= self.limit_bytes

    def candidate(self, index: int, *, best: "Candidate | None" = None) -> Candidate:
        """One candidate as plain numbers.

        Args:
            index: Its position in the arrays.
            best: The first one, to say why this one lost; by default this is the first.
        """
        parts = {name: float(_at(getattr(self.parts, name), index)) for name in PARTS}
        memory = float(_at(self.memory.total, index))
        found = Candidate(
            settings=describe_fields(self.strategies, index),
            seconds=float(self.seconds[index]),
            parts=parts,
            mfu=self.seconds_at_peak / float(self.seconds[index]),
            memory_bytes=memory,
            state_bytes=float(_at(self.memory.state, index)),
            fits=memory <= self.limit_bytes,
        )
        reason = self.reason(found, best or found) if best or not found.fits else ""
        return dataclasses.replace(found, reason=reason)

    def reason(self, one: Candidate, best: Candidate) -> str:
        """Why one candidate lost to another."""
        if not one.fits:
            return f"does not fit by {(one.memory_bytes - self.limit_bytes) / GIB:,.1f} GiB"
        if one.seconds <= best.seconds * (1 + EQUAL_WITHIN):
            return "equal within the error of the prices"
        part = max(PARTS, key=lambda name: one.parts[name] - best.parts[name])
        more = one.parts[part] - best.parts[part]
        text = f"{more:,.2f} s" if more >= 1 else f"{more * 1e3:,.3g} ms"
        return f"+{text} {PARTS[part]}"

    def by_mesh(self) -> list[int]:
        """The best candidate of each mesh, in order."""
        seen: set[tuple[int, ...]] = set()
        found: list[int] = []
        s = self.strategies
        for index in self.order:
            axes = (getattr(s, axis) for axis in AXES)
            mesh = tuple(int(np.asarray(axis)[index]) for axis in axes)
            if mesh not in seen:
                seen.add(mesh)
                found.append(int(index))
        return found


def rank(
    model: ModelSizes, strategies: Strategy, wires: Wires, habits: Habits, *, memory_bytes: float
) -> Ranking:
    """Prices and orders strategies.

    Args:
        model: Sizes.
        strategies: Arrays of one length.
        wires: The machine's links.
        habits: How the framework runs a step.
        memory_bytes: Of one device.
    """
    parts, memory = price(model, strategies, wires, habits), peak_memory(model, strategies, habits)
    devices = float(np.asarray(strategies.devices).flat[0])
    tokens = float(np.asarray(strategies.batch).flat[0]) * model.seq
    attention = 6 * model.seq * (model.width + model.values) * model.layers
    products = 6 * (model.layers * model.active_params + model.table_params)
    at_peak = tokens * (products + attention) / (devices * wires.device.peak_flops)
    return ranked(strategies, parts, memory, memory_bytes=memory_bytes, seconds_at_peak=at_peak)


def ranked(
    strategies: Strategy,
    parts: StepPrice,
    memory: PeakMemory,
    *,
    memory_bytes: float,
    seconds_at_peak: float,
) -> Ranking:
    """Priced strategies, ordered.

    Args:
        strategies: Arrays of one length.
        parts: Their steps.
        memory: Their peaks.
        memory_bytes: Of one device.
        seconds_at_peak: As in `Ranking`.
    """
    size = np.shape(strategies.tp)
    seconds = np.broadcast_to(np.asarray(parts.total), size)
    total = np.broadcast_to(np.asarray(memory.total), size)
    limit = USABLE_MEMORY * memory_bytes
    fits = total <= limit
    best = seconds[fits].min() if fits.any() else seconds.min()
    # Steps of one bin are equal; the first bin starts at the best.
    bins = np.floor(np.log(seconds / best) / np.log1p(EQUAL_WITHIN))
    keys = (seconds, complexity(strategies), np.where(fits, bins, total), ~fits)
    order = np.lexsort(keys)
    return Ranking(strategies, seconds, parts, memory, limit, order, seconds_at_peak)


def _at(values: object, index: int) -> float:
    array = np.asarray(values)
    return float(array[index] if array.shape else array)
