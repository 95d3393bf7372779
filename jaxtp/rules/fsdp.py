"""ZeRO over fsdp, cp and ep: which dim of each array they shard, on top of tensor parallelism.

Devices along any of them have other tokens. What is replicated along them, of ep all but experts,
is sharded over all of these axes together: 64 devices along ep would otherwise each hold all of
attention.

One rule serves all stages, since a moment, a gradient and its parameter have the same shape. The
axes never shard a dim that counts layers: a loop over layers would then fetch each layer from the
one group that holds it, instead of a piece from everybody.
"""

import itertools
import math
from collections.abc import Sequence

from jaxtp.errors import BadConfig, join
from jaxtp.errors.arguments import is_whole
from jaxtp.mesh.axes import Axis, MeshShape
from jaxtp.plan.decisions import ParamDecision
from jaxtp.rules.resolve import Claim
from jaxtp.rules.roles import Role

STAGES = (0, 1, 2, 3)

SMALL_SHARE = 256
"""An array with fewer than 1/256 of the elements of the largest one, per layer and expert, is
replicated: norm scales, biases, routers. Each would cost a collective of its own for next to no
memory."""


def spread(
    claims: Sequence[Claim],
    decisions: Sequence[ParamDecision],
    mesh: MeshShape,
    stage: int | None,
) -> tuple[int, tuple[ParamDecision, ...]]:
    """The stage of ZeRO, and the decisions with its axes where the stage wants them.

    Args:
        claims: One per parameter; they know the dims that count layers.
        decisions: One per claim, on the plan's mesh.
        mesh: The plan's mesh shape; without an axis of ZeRO nothing changes, which is stage 0.
        stage: 0 nothing, 1 optimizer state, 2 also gradients, 3 also parameters; None for 3 where
            there is an fsdp axis, else 0.

    Raises:
        BadConfig: TP020, if there is no such stage.
    """
    if stage is None:
        stage = 3 if mesh.name_of(Axis.FSDP) else 0
    if not is_whole(stage) or stage not in STAGES:
        raise BadConfig(f"there is no ZeRO stage {stage!r}", where="zero", fix="0, 1, 2 or 3")
    if not mesh.zero or stage == 0:
        return 0, tuple(decisions)
    inside = [frozenset(range(len(c.param.shape))) - {*c.stacked_dims} for c in claims]
    sizes = [math.prod(d.shape[i] for i in core) for d, core in zip(decisions, inside, strict=True)]
    each = [_one(claim, size) for claim, size in zip(claims, sizes, strict=True)]
    least = max(each, default=0) / SMALL_SHARE
    return stage, tuple(
        _spread(d, core if size >= least else None, mesh, stage)
        for d, core, size in zip(decisions, inside, sizes, strict=True)
    )


def _one(claim: Claim, size: int) -> float:
    """Elements of a layer, or of one of its experts."""
    stack = next(iter(claim.vote.placements), None)
    return size / stack.units[0] if claim.vote.role is Role.EXPERT and stack is not None else size


def _spread(
    decision: ParamDecision, core: frozenset[int] | None, mesh: MeshShape, stage: int
) -> ParamDecision:
    """One decision; `core` are the dims that do not count layers, None for a small array."""
    held = {axis for axes in decision.spec for axis in axes}
    free = tuple(name for name in mesh.zero if name not in held)
    if not free or held & {*mesh.zero} - {mesh.name_of(Axis.EP)}:
        return decision  # the user or an annotation has put it there
    named = {name: f"{name}={mesh[name]}" for name in free}
    if core is None:
        return decision.explained(f"{' x '.join(named.values())}: replicated, small")
    found = ((axes, _best_dim(decision, core, mesh, axes)) for axes in _choices(mesh, free))
    over, dim = next((best for best in found if best[1] is not None), ((), None))
    if dim is None:
        return decision.explained(f"{' x '.join(named.values())}: not divisible")
    spec = tuple((*axes, *over) if d == dim else axes for d, axes in enumerate(decision.spec))
    kept = {1: " of optimizer state", 2: " of optimizer state and gradient", 3: ""}[stage]
    why = f"{' x '.join(named[name] for name in over)} on dim {dim}{kept}"
    if rest := [named[name] for name in free if name not in over]:
        why += f", not divisible over {join(rest)} as well"
    if stage == 3:
        return decision.explained(why, spec=spec)
    return decision.explained(why, state_spec=spec)


def _choices(mesh: MeshShape, free: Sequence[str]) -> list[tuple[str, ...]]:
    """Axes to shard an array over together, the most devices first, then in the mesh's order."""
    counts = range(len(free), 0, -1)
    found = [axes for count in counts for axes in itertools.combinations(free, count)]
    shards = [axes for axes in found if mesh.ways(axes) > 1] or found[:1]
    order = lambda axes: [free.index(name) for name in axes if mesh[name] > 1]  # noqa: E731
    return sorted(shards, key=lambda axes: (-mesh.ways(axes), order(axes)))


def _best_dim(
    decision: ParamDecision, core: frozenset[int], mesh: MeshShape, over: Sequence[str]
) -> int | None:
    """The dim for the axes of ZeRO: free of the tensor axis where possible, then the largest.

    A dim that carries both is sharded by fsdp inside the shard that tp leaves, so that gathering
    over fsdp gives back what tensor parallelism needs.
    """
    stored = decision.stored
    ways = mesh.ways(over)
    legal = [d for d in core if stored[d] % (mesh.ways(decision.spec[d]) * ways) == 0]
    return max(legal, key=lambda d: (not decision.spec[d], stored[d], -d), default=None)
