"""Stacked layers over the pp axis: which arrays it shards, and in what form they are stored."""

from collections import Counter
from collections.abc import Sequence

from jaxtp.errors import BadSpec, BadStages, join
from jaxtp.mesh.axes import Axis, MeshShape
from jaxtp.plan.decisions import ParamDecision
from jaxtp.plan.stages import Stages
from jaxtp.plan.stored_form import Blocks
from jaxtp.rules.resolve import Claim


def assign_layers(
    claims: Sequence[Claim],
    decisions: Sequence[ParamDecision],
    mesh: MeshShape,
    stages: Stages | None,
) -> tuple[Stages | None, tuple[ParamDecision, ...]]:
    """How layers are assigned to stages, and the decisions with the pp axis in them.

    Args:
        claims: One per parameter; they know the dims that count layers.
        decisions: One per claim, on the plan's mesh.
        mesh: The plan's mesh shape; without a pp axis of several devices nothing changes.
        stages: How the user wants layers assigned; None for evenly, one round, as many
            micro-batches as stages.

    Raises:
        BadStages: TP074, if no parameter is a stack of layers, or `stages` is for another number of
            stages or of layers.
        BadSpec: TP044, if an override puts the pp axis elsewhere.
    """
    num_stages = mesh.size_of(Axis.PP)
    if not isinstance(stages, Stages | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadStages(
            f"stages is a {type(stages).__name__}: {stages!r:.40}",
            where="stages",
            fix="jaxtp.plan.stages.Stages.even(layers, stages, micro_batches=...)",
        )
    if stages is not None and stages.num_stages != num_stages:
        raise BadStages(
            f"layers are assigned to {stages.num_stages} stages, the mesh {mesh} has {num_stages}",
            where="stages",
            fix=f"stages for {num_stages}, or a mesh with pp={stages.num_stages}",
        )
    if num_stages == 1:
        return stages, tuple(decisions)
    depths: Counter[int] = Counter()
    for claim in claims:
        for dim in claim.stacked_dims:
            depths[claim.param.shape[dim]] += claim.param.size
    if not depths:
        raise BadStages(
            f"pp={num_stages}, and no parameter is a stack of layers",
            where="pp",
            fix="scan over layers, so that each kind of weight is one stacked array; give config= "
            "where no norm shows that it is one; or use pp=1",
        )
    if stages is None:
        # Of an encoder and a decoder of different depths, the one with more parameters.
        num_layers = depths.most_common(1)[0][0]
        stages = Stages.even(num_layers, num_stages, micro_batches=num_stages)
    if stages.num_layers not in depths:
        raise BadStages(
            f"stages for {stages.num_layers} layers, the model has stacks of {join(depths)}",
            where="stages",
            fix=f"stages of {join(depths)} layers",
        )
    assigned = (
        _assigned(decision, claim.stacked_dims, mesh, stages)
        for claim, decision in zip(claims, decisions, strict=True)
    )
    return stages, tuple(assigned)


def _assigned(
    decision: ParamDecision, stacked: Sequence[int], mesh: MeshShape, stages: Stages
) -> ParamDecision:
    # Other sizes count the layers of a stack beside the one that the stages share.
    dim = next((d for d in stacked if decision.shape[d] == stages.num_layers), None)
    axis = mesh.name_of(Axis.PP)
    if any(axis in axes for d, axes in enumerate(decision.spec) if d != dim):
        raise BadSpec(
            f"the axis {axis} shards another dim than the layers",
            where=decision.path,
            fix="leave it to jaxtp; fsdp is the axis that shards any dim",
        )
    if dim is None:
        return decision
    axes = decision.spec[dim]
    kept = axes if axis in axes else (axis, *axes)
    spec = (*decision.spec[:dim], kept, *decision.spec[dim + 1 :])
    pieces = Blocks(dim=dim, pieces=stages.pieces, block=stages.block)
    return decision.explained(
        f"{axis}={stages.num_stages} on layer dim {dim}",
        spec=spec,
        padding=(*decision.padding, *(() if pieces.is_plain else (pieces,))),
    )
