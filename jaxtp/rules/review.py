"""What is wrong with a plan altogether (docs/design.md#nothing-is-silent)."""

from collections.abc import Sequence
from typing import Any

from jaxtp.errors import (
    BadMesh,
    ConflictingDecisions,
    IdleDevices,
    JaxtpError,
    NothingSharded,
    Problems,
    ReplicatedTooMuch,
    join,
)
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import hosts_along, idle_devices
from jaxtp.plan.decisions import ParamDecision
from jaxtp.rules.roles import Role


def review(
    decisions: Sequence[ParamDecision], shape: MeshShape, mesh: Any, *, strict: bool, budget: float
) -> tuple[str, ...]:
    """Sentences about the plan altogether.

    Args:
        decisions: All of them.
        shape: The plan's mesh shape.
        mesh: The user's mesh, for what a shape cannot tell: idle devices and hosts.
        strict: Whether to raise instead.
        budget: Share of all bytes that replicated matrices may take.

    Raises:
        NothingSharded, ReplicatedTooMuch, ConflictingDecisions, IdleDevices, BadMesh: under
            `strict`, all together.
    """
    if shape.tp_size == 1:
        return ()
    found = [
        *_nothing(decisions, shape),
        *_whole(decisions, shape, budget),
        *_groups(decisions, shape),
        *_mesh(shape, mesh),
    ]
    if strict:
        problems = Problems()
        for error in found:
            problems.add(error)
        problems.raise_any()
    return tuple(f"{e.code}: {e.what}" for e in found)


def _nothing(decisions: Sequence[ParamDecision], shape: MeshShape) -> list[JaxtpError]:
    if any(d.dim_on(shape.tp) is not None for d in decisions):
        return []
    matrices = [d for d in decisions if len(d.shape) > 1]
    why = join((f"{d.path} ({d.fallback or d.reasons[-1]})" for d in matrices), 3)
    return [
        NothingSharded(
            f"nothing to shard: none of {len(decisions)} parameters is on the tensor axis "
            f"(tp={shape.tp_size}); {why or 'there are no matrices'}",
            fix="give heads= or config=, add overrides=, or use tp=1 with dp or fsdp",
        )
    ]


def _whole(decisions: Sequence[ParamDecision], shape: MeshShape, budget: float) -> list[JaxtpError]:
    whole = [d for d in decisions if len(d.shape) > 1 and d.dim_on(shape.tp) is None]
    total = sum(d.num_bytes for d in decisions)
    held = sum(d.num_bytes for d in whole)
    if held <= budget * total:
        return []
    largest = sorted(whole, key=lambda d: -d.num_bytes)
    listed = (f"{d.path} {list(d.shape)} ({d.fallback or d.reasons[-1]})" for d in largest)
    return [
        ReplicatedTooMuch(
            f"replicated matrices take {held / 1e6:,.1f} MB on every device, {held / total:.0%} of "
            f"{total / 1e6:,.1f} MB; the largest: {join(listed, 3)}",
            where=largest[0].path,
            fix=f"give heads= or config=, add overrides=, or raise replicated_budget={budget}",
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
        rest = {_ways(d, shape) for d in group if d.role is not Role.GIVEN and d.units}
        for d in group:
            if d.role is Role.GIVEN and rest and _ways(d, shape) not in rest:
                found.append(
                    ConflictingDecisions(
                        f"given {_ways(d, shape)}-way, its group is sharded {join(rest)} ways",
                        where=d.path,
                        fix="give all members of the group the same number of ways",
                    )
                )
    return found


def _ways(decision: ParamDecision, shape: MeshShape) -> int:
    return shape.ways(a for axes in decision.spec for a in axes if a in shape.tp)


def _mesh(shape: MeshShape, mesh: Any) -> list[JaxtpError]:
    found: list[JaxtpError] = []
    if (idle := idle_devices(mesh)) > 0:
        found.append(
            IdleDevices(
                f"the mesh {shape} leaves {idle} of {idle + shape.num_devices} devices idle",
                fix="use all devices: jaxtp.make_mesh(tp=..., dp=-1)",
            )
        )
    if (hosts := hosts_along(mesh, shape)) > 1:
        found.append(
            BadMesh(
                f"one tensor-parallel group spans {hosts} hosts, outside the NVLink domain",
                fix="make tp the innermost axis and at most the GPUs of one host",
            )
        )
    return found
