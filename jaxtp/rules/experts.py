"""Experts over the ep axis: whole ones, on top of what the tensor axis does with them.

Everything else takes the axis for one of data. What ep leaves of the experts on a device the tensor
axis shards further, by expert where that divides, else inside each one.
"""

import dataclasses
from collections.abc import Sequence

from jaxtp.errors import Problems, SizeMismatch, join
from jaxtp.mesh.axes import Axis, MeshShape
from jaxtp.plan.decisions import ParamDecision
from jaxtp.rules.resolve import Claim
from jaxtp.rules.roles import Placement, Role


def _stack(claim: Claim) -> Placement | None:
    """The dim of experts of a parameter that has one."""
    vote = claim.vote
    is_known = vote.role is Role.EXPERT and vote.spec is None
    return vote.placements[0] if is_known and vote.placements else None


def local_share(claims: Sequence[Claim], mesh: MeshShape) -> list[Claim]:
    """The claims as one device along ep sees them: with its part of the experts.

    Raises:
        SizeMismatch: TP003, if the axis does not divide the experts.
    """
    ways = mesh.size_of(Axis.EP)
    problems, found = Problems(), list[Claim]()
    for claim in claims:
        stack = _stack(claim)
        if ways == 1 or stack is None:
            found.append(claim)
            continue
        first, *rest = stack.units
        if first % ways:
            problems.add(
                SizeMismatch(
                    f"{first} experts do not divide over {mesh.name_of(Axis.EP)}={ways}",
                    where=claim.param.path,
                    fix=f"ep of {join(n for n in range(1, first + 1) if first % n == 0)}",
                )
            )
        part = Placement(stack.dim, (max(first // ways, 1), *rest))
        placements = (part, *claim.vote.placements[1:])
        found.append(
            dataclasses.replace(claim, vote=dataclasses.replace(claim.vote, placements=placements))
        )
    problems.raise_any()
    return found


def assign(
    claims: Sequence[Claim], decisions: Sequence[ParamDecision], mesh: MeshShape
) -> tuple[ParamDecision, ...]:
    """The decisions with the ep axis on the dims of experts, inside the tensor axis' shards.

    Args:
        claims: One per parameter, as they were before `local_share`.
        decisions: One per claim, on the plan's mesh.
        mesh: The plan's mesh shape; without an ep axis nothing changes.
    """
    name = mesh.name_of(Axis.EP)
    if not name or mesh[name] == 1:
        return tuple(decisions)
    return tuple(
        decision if (stack := _stack(claim)) is None else _placed(decision, stack, mesh)
        for claim, decision in zip(claims, decisions, strict=True)
    )


def _placed(decision: ParamDecision, stack: Placement, mesh: MeshShape) -> ParamDecision:
    name = mesh.name_of(Axis.EP)
    here = decision.spec[stack.dim]
    spec = tuple((*axes, name) if d == stack.dim else axes for d, axes in enumerate(decision.spec))
    each = stack.units[0] // mesh.ways((*here, name))
    why = f"{name}={mesh[name]} on dim {stack.dim}, {each} experts on each device"
    units = stack.units if here else decision.units
    return decision.explained(why, spec=spec, units=units)
