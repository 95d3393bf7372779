"""What is wrong with a plan altogether (docs/design.md#nothing-is-silent)."""

import itertools
from collections.abc import Sequence

from jaxtp.errors import (
    BadConfig,
    ConflictingDecisions,
    IdleDevices,
    JaxtpError,
    NothingSharded,
    Problems,
    ReplicatedTooMuch,
    join,
    warn,
)
from jaxtp.mesh.axes import Axis, MeshShape, Shards
from jaxtp.plan.decisions import ParamDecision
from jaxtp.rules.resolve import Claim, choice_of
from jaxtp.rules.roles import Role, Source

WHAT_TO_GIVE = "give heads= or config=, or fn= and inputs=; or add overrides="
"""What tells jaxtp more about a model of which it could not place enough."""


def review(
    claims: Sequence[Claim],
    decisions: Sequence[ParamDecision],
    shape: MeshShape,
    faults: Sequence[JaxtpError],
    *,
    strict: bool,
    budget: float,
) -> tuple[str, ...]:
    """Sentences about the plan altogether.

    Args:
        claims: What each parameter should have got.
        decisions: One per claim: what it gets.
        shape: The plan's mesh shape.
        faults: What is wrong with the user's mesh itself; see `jaxtp.mesh.build.faults_of`.
        strict: Whether to raise instead.
        budget: Share of all bytes that replicated matrices may take.

    Raises:
        NothingSharded, ReplicatedTooMuch, ConflictingDecisions, IdleDevices, BadMesh: under
            `strict`, all together.
    """
    check_budget(budget)
    useless = _useless_axes(decisions, shape)
    notes = (*_overruled_names(claims, decisions, shape), *_no_experts(decisions, shape))
    costly = _costly_annotations(decisions)
    found = [*useless, *faults]
    if shape.tp_size > 1:
        found[:0] = [
            *_nothing(decisions, shape),
            *_replicated_matrices(decisions, shape, budget),
            *_groups(decisions, shape),
        ]
    if strict:
        problems = Problems()
        for error in found:
            problems.add(error)
        problems.raise_any()
    if useless:
        warn(str(useless[0]))
    return (*notes, *map(note_of, found), *costly)


def note_of(error: JaxtpError) -> str:
    """An error as a note of a plan."""
    return f"{error.code}: {error.what}"


def check_budget(budget: float) -> None:
    """Refuses shares of the bytes that are none.

    Raises:
        BadConfig: TP020, unless 0 <= budget <= 1.
    """
    if isinstance(budget, bool | str) or not 0 <= budget <= 1:
        raise BadConfig(
            f"is {budget!r}", where="replicated_budget", fix="a share of all bytes, from 0 to 1"
        )


def _useless_axes(decisions: Sequence[ParamDecision], shape: MeshShape) -> list[JaxtpError]:
    """Axes of several devices along which every device does what the others do."""
    specs = [axes for d in decisions for spec in (d.spec, d.state_spec) for axes in spec]
    used = {*itertools.chain.from_iterable(specs), *shape.batch, *shape.sequence, *shape.tp}
    return [
        IdleDevices(
            f"the axis {name} shards nothing: its {size} groups of devices do the same work",
            where=name,
            fix=f"leave {name} out, and give its devices to "
            + join(axis for axis in Axis if axis is Axis.TP or _for_any_model(axis)),
        )
        for name, size in shape.sizes
        if size > 1 and name not in used
    ]


def _overruled_names(
    claims: Sequence[Claim], decisions: Sequence[ParamDecision], shape: MeshShape
) -> list[str]:
    """Where the dataflow overruled the names: one sentence a parameter, with both reasons.

    Not where the dim that was split in the end is the one that the names chose as well: experts
    that do not divide are split inside, which is what their names may have said at once.

    Warns once for all of them: names that lie are worth a look, though the plan is right.
    """
    found = [
        f"{claim.param.path}: dataflow overrules names ({'; '.join(claim.reasons)})"
        for claim, decision in zip(claims, decisions, strict=True)
        if claim.vote.source is Source.DATAFLOW
        and any(choice_of(vote) != decision.dim_on(shape.tp) for vote in claim.overruled)
    ]
    if found:
        more = f" (and {len(found) - 1} more in plan.notes)" if len(found) > 1 else ""
        warn(f"{found[0]}{more}")
    return found


def _no_experts(decisions: Sequence[ParamDecision], shape: MeshShape) -> list[str]:
    """An axis of experts where there are none: it shards the batch alone."""
    name, size = shape.name_of(Axis.EP), shape.size_of(Axis.EP)
    if size == 1 or any(d.dim_on([name]) is not None for d in decisions):
        return []
    return [
        f"{name}={size}: no parameter has experts that it could shard, so the axis is one of data"
    ]


def _for_any_model(axis: Axis) -> bool:
    """Whether an axis shards the batch and needs no experts."""
    return Shards.BATCH in axis.shards and Shards.EXPERTS not in axis.shards


def _costly_annotations(decisions: Sequence[ParamDecision]) -> list[str]:
    """Annotations that cost something against what the other evidence wants."""
    costly = [
        d for d in decisions if d.role is Role.GIVEN and d.fallback and "annot" in d.reasons[-1]
    ]
    return [f"{d.path}: {d.reasons[-1]}, {d.fallback}" for d in costly]


def _nothing(decisions: Sequence[ParamDecision], shape: MeshShape) -> list[JaxtpError]:
    if any(d.dim_on(shape.tp) is not None for d in decisions):
        return []
    matrices = [d for d in decisions if len(d.shape) > 1]
    why = join((f"{d.path} ({d.fallback or d.reasons[-1]})" for d in matrices), 3)
    return [
        NothingSharded(
            f"nothing to shard: none of {len(decisions)} parameters is on the tensor axis "
            f"(tp={shape.tp_size}); {why or 'there are no matrices'}",
            fix=f"{WHAT_TO_GIVE}; or use tp=1 with dp or fsdp",
        )
    ]


def _replicated_matrices(
    decisions: Sequence[ParamDecision], shape: MeshShape, budget: float
) -> list[JaxtpError]:
    matrices = [d for d in decisions if len(d.shape) > 1 and d.dim_on(shape.tp) is None]
    total = sum(d.num_bytes for d in decisions)
    num_bytes = sum(d.num_bytes for d in matrices)
    if num_bytes <= budget * total:
        return []
    largest = sorted(matrices, key=lambda d: -d.num_bytes)
    listed = (f"{d.path} {list(d.shape)} ({d.fallback or d.reasons[-1]})" for d in largest)
    return [
        ReplicatedTooMuch(
            f"replicated matrices take {num_bytes / 1e6:,.1f} MB on every device, "
            f"{num_bytes / total:.0%} of {total / 1e6:,.1f} MB; the largest: {join(listed, 3)}",
            where=largest[0].path,
            fix=f"{WHAT_TO_GIVE}; or raise replicated_budget={budget}",
        )
    ]


def _groups(decisions: Sequence[ParamDecision], shape: MeshShape) -> list[JaxtpError]:
    """Overrides that give one member of a group another number of ways than the rest has."""
    members: dict[str, list[ParamDecision]] = {}
    for d in decisions:
        if d.group:
            members.setdefault(d.group, []).append(d)
    found: list[JaxtpError] = []
    for group in members.values():
        ways = [shape.tp_ways(d.spec) for d in group]
        rest = {n for d, n in zip(group, ways, strict=True) if d.role is not Role.GIVEN and d.units}
        for d, given in zip(group, ways, strict=True):
            if d.role is Role.GIVEN and rest and given not in rest:
                found.append(
                    ConflictingDecisions(
                        f"given {given}-way, its group is sharded {join(rest)} ways",
                        where=d.path,
                        fix="give all members of the group the same number of ways",
                    )
                )
    return found
