"""What a search tells beside its table: links, what a slower network would change, what to try."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np

from jaxtp.cost.ranking import EQUAL_WITHIN, Candidate, Ranking
from jaxtp.cost.strategy import AXES, Strategy
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import Target
from jaxtp.mesh.axes import Axis
from jaxtp.train.pricing import wires_of

SLOWER = 4
"""The network of the question "what would a slower network change": so many times slower."""

TELLING_SHARE = 0.1
"""A part of the step that is worth a sentence."""

REMEDIES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tensor": ("tp messages", ("a smaller mesh.tp", "communication.sequence_parallel")),
    "bubble": ("stages that wait", ("a larger batch.accumulation", "pipeline.rounds")),
    "gathers": (
        "gathers of parameters",
        (
            "a larger micro-batch, so that fewer of them are needed",
            "communication.overlap = aggressive",
            "zero.stage = 2 where the memory allows",
        ),
    ),
    "gradients": (
        "the gradients' reduction",
        ("a larger batch", "fewer replicas by a larger mesh.tp"),
    ),
    "experts": (
        "tokens on their way to experts",
        ("a smaller mesh.ep", "a smaller capacity_factor"),
    ),
    "context": ("keys and values along cp", ("a smaller mesh.cp",)),
    "optimizer": ("the update", ("zero.stage = 1",)),
}
"""Part of a step -> what waits, and what makes it smaller."""

SEARCHED: Mapping[str, tuple[str, int]] = {
    "communication.sequence_parallel": ("sequence_parallel", 1),
    "communication.overlap = aggressive": ("interleaved", 1),
    "pipeline.rounds": ("rounds", 2),
    "zero.stage = 1": ("zero", 1),
}
"""Remedy -> the field of a strategy that it is, and the least value that has it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """How one model is priced.

    Attributes:
        rank: The same candidates on another machine.
        message_bytes: Of one all-reduce along the tensor axis under a candidate, in bytes.
        messages: How many of them a layer, or the whole model, waits for.
    """

    rank: Callable[[Target], Ranking]
    message_bytes: Callable[[Candidate], float]
    messages: str


def advice(ranking: Ranking, pricing: Pricing, target: Target, first: Candidate) -> list[str]:
    """Sentences on the first mesh of a ranking; none where it does not fit.

    Args:
        ranking: All candidates.
        pricing: The model.
        target: The machine.
        first: The candidate of the table's first row.
    """
    if not first.fits:
        return []
    wires = wires_of(target)
    return [
        *_links(first, wires),
        *_tensor(first, pricing, wires),
        *_slower(ranking, pricing, target, first),
        *_remedies(ranking, first),
    ]


def _links(first: Candidate, wires: Wires) -> Iterator[str]:
    inner = 1
    for axis in reversed(AXES):
        size = first.settings.get(axis, 1)
        if size > 1 and inner * size <= wires.domain:
            yield f"{axis}={size}: inside an NVLink domain of {wires.domain} GPUs"
        elif size > 1:
            rate = f"{wires.network / 1e9:,.0f} GB/s a GPU sustained"
            yield f"{axis}={size}: over the network, {rate}"
        inner *= size


def _tensor(first: Candidate, pricing: Pricing, wires: Wires) -> Iterator[str]:
    """Why tp ends at the NVLink domain."""
    tp = first.settings[Axis.TP]
    if tp == 1 or math.prod(first.settings[axis] for axis in AXES) <= wires.domain:
        return
    size = pricing.message_bytes(first)
    inside = float(wires.seconds("all-reduce", size, tp, 1))
    across = float(wires.seconds("all-reduce", size, 2 * wires.domain, 1))
    yield (
        f"tp stays inside NVLink: {pricing.messages} of {size / 2**20:,.0f} MiB a micro-batch, "
        f"{inside * 1e3:.2f} ms each with tp={tp}, {across * 1e3:.2f} ms over two "
        "domains; fsdp, dp and pp send less often"
    )


def _slower(ranking: Ranking, pricing: Pricing, target: Target, first: Candidate) -> Iterator[str]:
    """What the same search finds on a slower network."""
    if target.num_devices <= wires_of(target).domain:
        return
    nic = target.device.nic_bandwidth / SLOWER
    slow = dataclasses.replace(target, device=dataclasses.replace(target.device, nic_bandwidth=nic))
    again = pricing.rank(slow)
    best = again.candidate(int(again.order[0]))
    same = np.flatnonzero(ranking.seconds == first.seconds)
    then = float(again.seconds[same].min())
    gbps = nic * 8 / 1e9
    text = f"on a network of {gbps:,.0f} Gbit/s a GPU this mesh would take {then:,.3f} s"
    if best.fits and then > best.seconds * (1 + EQUAL_WITHIN):
        text += f", and {mesh_text(best)} would be first with {best.seconds:,.3f} s"
    yield f"{text} (--network {gbps:.0f}gbps)"


def _remedies(ranking: Ranking, first: Candidate) -> Iterator[str]:
    """What to try first, where one part of the step stands out."""
    part = max(REMEDIES, key=lambda name: first.parts[name])
    if (share := first.parts[part] / first.seconds) < TELLING_SHARE:
        return
    what, remedies = REMEDIES[part]
    if left := [one for one in remedies if _is_open(ranking.strategies, first, one)]:
        yield f"to try first: {share:.0%} of the step waits for {what}: {', or '.join(left)}"


def _is_open(s: Strategy, first: Candidate, remedy: str) -> bool:
    """Whether a remedy is not in use, and some candidate of the same mesh has it."""
    if remedy not in SEARCHED:
        return True
    field, least = SEARCHED[remedy]
    same = np.logical_and.reduce(
        [np.asarray(getattr(s, axis)) == first.settings.get(axis, 1) for axis in AXES]
    )
    offered = bool(np.any(same & (np.asarray(getattr(s, field)) >= least)))
    return offered and first.settings[field] < least


def mesh_text(candidate: Candidate) -> str:
    """The axes of a candidate that have more than one device.

    >>> mesh_text(Candidate(settings={"dp": 2, "tp": 4}, seconds=1, parts={},
    ...     mfu=0, memory_bytes=0, state_bytes=0, fits=True))
    'dp=2 tp=4'
    """
    return axes_text(candidate.settings)


def axes_text(settings: Mapping[str, int]) -> str:
    """The same of the fields of a strategy."""
    sizes = {axis: settings.get(axis, 1) for axis in AXES}
    return " ".join(f"{a}={n}" for a, n in sizes.items() if n > 1) or "one device"
