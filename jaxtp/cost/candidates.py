"""Every way to spread a step over a machine that jaxtp can run, as arrays."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxtp.cost.strategy import ModelSizes, Recompute, Strategy
from jaxtp.errors import BadUsage, join
from jaxtp.mesh.axes import Axis

POLICIES: Mapping[str, Recompute] = {
    "none": Recompute.NONE,
    "block_outputs": Recompute.OUTPUTS,
    "dots": Recompute.DOTS,
    "full": Recompute.FULL,
    "stage": Recompute.STAGE,
}
"""Remat policy of a config -> what the prices call it."""

LEAST_PIECE = 2048
"""Tokens of a sequence that a device has at least where several share one; with fewer its queries
are done before the next keys and values have come."""

ROUNDS = (1, 2, 4)
"""Rounds that are tried; more send more for what little idle time is left."""

SETTINGS: Mapping[str, str] = {
    **{f"mesh.{axis}": axis.value for axis in Axis},
    "pipeline.rounds": "rounds",
    "batch.micro_size": "micro_batch",
    "batch.accumulation": "micro_batches",
    "zero.stage": "zero",
    "remat": "recompute",
    "communication.sequence_parallel": "sequence_parallel",
    "communication.overlap": "interleaved",
}
"""Settings of a config that the search chooses -> field of `Strategy`."""


def candidates(
    model: ModelSizes,
    num_devices: int,
    batch: int,
    *,
    fixed: Mapping[str, int] | None = None,
    domain: int = 8,
    interleaves: bool = True,
) -> Strategy:
    """All strategies of one machine and batch; every field an array of the same length.

    Left out is what jaxtp refuses or what cannot win: tp that cuts a head or leaves the NVLink
    domain, experts on more devices than a domain has or than divide them, sequences in pieces
    shorter than `LEAST_PIECE`, stages without layers, rounds that do not divide the layers, ZeRO
    with nothing to shard over, halves of a batch of one, gathers ahead of what nobody gathers.

    Args:
        model: Sizes.
        num_devices: GPUs in all.
        batch: Sequences of the global batch.
        fixed: Field of `Strategy` -> the value that it must have.
        domain: GPUs that reach each other over NVLink.
        interleaves: Whether the model can run two halves of a batch in turns.

    Raises:
        BadUsage: TP132, if nothing is left.
    """
    wanted = dict(fixed or {})
    rows = [
        row
        for row in _rows(model, num_devices, batch, domain, interleaves)
        if all(row[name] == value for name, value in wanted.items())
    ]
    if not rows:
        given = join(f"{name}={value}" for name, value in wanted.items())
        raise BadUsage(
            f"no mesh of {num_devices} GPUs runs a batch of {batch} with {given or 'these sizes'}",
            fix="fix fewer settings, or a batch that more data-parallel devices divide",
        )
    return Strategy(**{name: np.asarray([row[name] for row in rows]) for name in rows[0]})


def _rows(
    model: ModelSizes, num_devices: int, batch: int, domain: int, interleaves: bool
) -> Iterator[dict[str, int]]:
    for tp, pp in itertools.product(divisors(num_devices), divisors(num_devices)):
        cuts_heads = model.heads % tp or model.ffn % tp
        if cuts_heads or tp > domain or pp > model.layers or num_devices % (tp * pp):
            continue
        for cp, ep in itertools.product(_contexts(model), _experts(model, domain // tp)):
            if num_devices % (tp * pp * cp * ep) or batch % (num_devices // (tp * pp * cp)):
                continue
            base = {Axis.TP.value: tp, Axis.PP.value: pp, Axis.CP.value: cp, Axis.EP.value: ep}
            yield from _batches(model, base, num_devices, batch, interleaves)


def _batches(
    model: ModelSizes, base: Mapping[str, int], num_devices: int, batch: int, interleaves: bool
) -> Iterator[dict[str, int]]:
    """How the rest of the devices shard the state, and in how many pieces the batch comes."""
    data = num_devices // math.prod(base.values())
    each = batch // data // base[Axis.EP]
    for fsdp, zero in sharding(data, base[Axis.CP] * base[Axis.EP]):
        for micro_batches in divisors(each):
            sizes = {
                Axis.DP.value: data // fsdp,
                Axis.FSDP.value: fsdp,
                "zero": zero,
                "micro_batches": micro_batches,
                "micro_batch": each // micro_batches,
            }
            yield from _settings(model, {**base, **sizes}, interleaves)


def _contexts(model: ModelSizes) -> Sequence[int]:
    """Devices that may share a sequence."""
    pieces = max(model.seq // LEAST_PIECE, 1)
    return [n for n in divisors(pieces) if n == 1 or model.seq % (2 * n) == 0]


def _experts(model: ModelSizes, most: int) -> Sequence[int]:
    """Devices that experts may be sharded over."""
    return [n for n in divisors(model.experts or 1) if n <= most]


def _settings(
    model: ModelSizes, base: Mapping[str, int], interleaves: bool
) -> Iterator[dict[str, int]]:
    """What is chosen besides the mesh and the batch."""
    pp, micro_batches = base["pp"], base["micro_batches"]
    if pp > 1 and micro_batches < pp:
        return
    rounds: Iterable[int] = [
        v
        for v in ROUNDS
        if v == 1 or (pp > 1 and micro_batches % pp == 0 and model.layers % (pp * v) == 0)
    ]
    policies = [p for p in POLICIES.values() if pp > 1 or p != Recompute.STAGE]
    streams = [(0, 0)]
    hides = pp == 1 and base["cp"] == 1 and not model.experts
    if base["tp"] == 1:
        streams += [(0, 1)] * (hides and base["zero"] == 3)
    else:
        splits = model.seq % math.lcm(base["tp"] * base["cp"], 2 * base["cp"]) == 0
        streams += [(1, 0)] * splits
        streams += [(0, 1)] * (hides and interleaves and base["micro_batch"] % 2 == 0)
    for v, policy, (sequence_parallel, interleaved) in itertools.product(rounds, policies, streams):
        yield {
            **base,
            "rounds": v,
            "recompute": int(policy),
            "sequence_parallel": sequence_parallel,
            "interleaved": interleaved,
        }


def sharding(data: int, along: int = 1) -> Iterator[tuple[int, int]]:
    """(fsdp, zero) for so many data-parallel devices, and so many along cp and ep."""
    yield 1, 0
    # Without fsdp a config shards over its replicas: `jaxtp.config.batch_sizes.resolve`.
    sizes = divisors(data) if data == 1 and along > 1 else divisors(data)[1:]
    yield from itertools.product(sizes, (1, 2, 3))


def divisors(number: int) -> Sequence[int]:
    """All divisors of a number, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def complexity(s: Strategy) -> np.ndarray:
    """How much there is to understand in each strategy: axes in use, then everything else in use.

    Args:
        s: Strategies as arrays.
    """
    axes = sum(
        (np.asarray(getattr(s, name)) > 1).astype(int)
        for name in (Axis.DP, Axis.FSDP, Axis.CP, Axis.EP, Axis.TP)
    )
    stages = 2 * (np.asarray(s.pp) > 1) + (np.asarray(s.rounds) > 1)
    extras = np.asarray(s.sequence_parallel).astype(int) + np.asarray(s.interleaved).astype(int)
    recomputes = (np.asarray(s.recompute) != Recompute.NONE).astype(int)
    return 10 * (axes + stages) + 3 * extras + recomputes + (np.asarray(s.micro_batches) > 1)


def describe_fields(s: Strategy, index: int) -> dict[str, int]:
    """One strategy of an array of them, as plain numbers."""
    return {
        field.name: int(np.asarray(getattr(s, field.name))[index])
        for field in dataclasses.fields(s)
        if np.shape(getattr(s, field.name))
    }
