"""Projections that lie one after another in one dim (q|k|v, gate|up): where to keep the array.

Every device needs its share of every projection, and a plain shard of the dim is all of one.
So something moves at each use, by constraints that `jaxtp.parallelize` places, and in the backward
pass it moves back. The parameter keeps its published form in each of three ways:

- replicated: forward nothing moves, backward the pieces' gradients are gathered;
- on a dim that the product sums over: the weight is exchanged for shares of each piece;
- sharded as stored: the product is sharded the same way, and its result is exchanged.

Which is cheapest is a matter of tokens: a weight is as large for one as for a million.
"""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxtp.hardware.links import wire_bytes
from jaxtp.mesh.axes import MeshShape
from jaxtp.plan.decisions import ParamDecision
from jaxtp.plan.specs import Spec
from jaxtp.rules.factoring import TensorShare
from jaxtp.rules.fallback import price
from jaxtp.rules.resolve import Claim
from jaxtp.rules.roles import Fused, Placement


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """One way to store a fused array.

    Attributes:
        what: It, in words.
        spec: Where the array's dims go.
        wire: Bytes that one device sends for it in the forward and backward pass of one layer.
        stored: Bytes of the array on one device, all layers.
    """

    what: str
    spec: Spec
    wire: float
    stored: int

    def __str__(self) -> str:
        return f"{self.what} {self.wire / 1e6:,.2f} MB sent, {self.stored / 1e6:,.2f} MB stored"


def place(
    claims: Sequence[Claim],
    shares: Sequence[TensorShare],
    decisions: Sequence[ParamDecision],
    mesh: MeshShape,
) -> tuple[ParamDecision, ...]:
    """The decisions with every fused array in its cheapest way; among equals, the smallest.

    Args:
        claims: One per parameter.
        shares: One per claim: how many ways the pieces of a fused array can go.
        decisions: One per claim, fused arrays replicated.
        mesh: The plan's mesh shape.
    """
    widths, tp, replicas = mesh.widths, mesh.tp_size, mesh.batch_ways
    placed: list[ParamDecision] = []
    for claim, share, decision in zip(claims, shares, decisions, strict=True):
        fused, size = claim.vote.fused, share.ways
        if fused and size > 1:
            ways = list(_ways(decision, fused, widths[size], size, replicas))
            best = min(ways, key=lambda way: (way.wire, way.stored))
            reason = (
                f"{best.what}, the cheapest with `parallelize` for a layer forward and backward, "
                f"per device: {'; '.join(map(str, ways))}"
            )
            narrow = price(claim, Placement(fused.dim, fused.units), size, tp) if size < tp else ""
            kept = decision.fallback if best.what == "replicated" else narrow
            decision = decision.revise(best.spec, reason, fallback=kept)
        placed.append(decision)
    return tuple(placed)


def _ways(
    decision: ParamDecision, fused: Fused, axes: tuple[str, ...], size: int, replicas: int
) -> Iterator[Way]:
    """The ways there are, by the ring formulas of `wire_bytes`; each collective runs twice.

    Replicated, the forward pass is free. An exchange is an all-to-all of what one device
    stores. A result takes two, the second from a dim of the batch or of positions that both
    can do without; where no such dim divides it is gathered, which few tokens can afford.
    """
    shape, use = decision.shape, fused.use
    share = decision.num_bytes // size
    # What every device needs all of is gathered, and its gradient summed and scattered.
    kept = use.weight_bytes * fused.replicated / shape[fused.dim]
    dealt = use.weight_bytes - kept

    def on(dim: int) -> Spec:
        return tuple(axes if d == dim else () for d in range(len(shape)))

    yield Way("replicated", on(-1), wire_bytes("all-gather", dealt, size), decision.num_bytes)
    inputs = [dim for dim in use.inputs if shape[dim] % size == 0]
    if inputs:
        dim = max(inputs, key=shape.__getitem__)
        wire = 2 * wire_bytes("all-to-all", dealt / size, size)
        wire += 2 * wire_bytes("all-gather", kept, size)
        yield Way(f"on dim {dim}", on(dim), wire, share)
    if use.rows and not kept:
        batch, *others = use.rows
        result = use.result_bytes / replicas
        if batch % (replicas * size) == 0 or any(rows % size == 0 for rows in others):
            wire = 2 * 2 * wire_bytes("all-to-all", result / size, size)
        else:
            wire = 2 * wire_bytes("all-gather", result, size)
        yield Way("sharded as stored", on(fused.dim), wire, share)
