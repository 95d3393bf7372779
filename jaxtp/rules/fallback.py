"""Claims and their shares -> decisions, with a price wherever one is narrower than the tensor axis.

docs/design.md#what-is-not-divisible.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jaxtp.errors import BadConfig, HeadsNotDivisible, Problems, SizeMismatch, join
from jaxtp.mesh.axes import MeshShape, Widths, legal_ways, splits
from jaxtp.plan.decisions import ParamDecision
from jaxtp.plan.stored_form import Blocks, Padding
from jaxtp.plan.trees import Param
from jaxtp.rules.factoring import TensorShare
from jaxtp.rules.resolve import Claim
from jaxtp.rules.roles import Placement, Role, Source


def fit(
    claims: Sequence[Claim],
    shares: Sequence[TensorShare],
    mesh: MeshShape,
    policy: str = "factor",
    *,
    pad_vocab: bool = False,
) -> tuple[ParamDecision, ...]:
    """The decisions, in the order of the claims.

    Args:
        claims: One per parameter.
        shares: What each gets of the tensor axis.
        mesh: The plan's mesh shape.
        policy: For units that do not divide: "error" refuses them.
        pad_vocab: Whether a vocabulary that does not divide is padded instead of replicated.

    Raises:
        HeadsNotDivisible: TP041, under the policy "error".
        SizeMismatch: TP003, if a given spec does not divide its array.
    """
    widths = mesh.widths
    problems = Problems()
    decisions: list[ParamDecision] = []
    for claim, share in zip(claims, shares, strict=True):
        if claim.vote.spec is not None:
            decisions.append(_given(claim, share, mesh, problems))
            continue
        decision = _decision(claim, share, widths, pads=pad_vocab and share.of_vocab)
        if decision.fallback and decision.units and policy == "error":
            problems.add(
                HeadsNotDivisible(
                    decision.fallback,
                    where=claim.param.path,
                    fix=f"tp of {join(_near(share.placement, max(widths)))}, or policy='factor'",
                )
            )
        decisions.append(decision)
    problems.raise_any()
    return tuple(decisions)


def check_masked(
    decisions: Iterable[ParamDecision],
    pad_vocab: bool | str,
    config: Any,
    masked: Collection[int],
    unmasked: Mapping[int, Sequence[str]],
) -> None:
    """Refuses padded vocabularies of which nobody has said or seen that the model masks them.

    Padded logits are zeros, which take part in an ordinary softmax: loss and gradients would differ
    from those of the model, and nothing would say so.

    Args:
        decisions: Of all parameters.
        pad_vocab: As given to `make_plan`; "masked" says that the model does it.
        config: The model's; those of `jaxtp.models` say so of themselves.
        masked: Vocabulary sizes, in elements, that the traced function masks to.
        unmasked: Of those, what it reads in front of the mask.

    Raises:
        BadConfig: TP020, for the first such parameter.
    """
    if pad_vocab == "masked" or getattr(config, "masks_padding", False):
        return
    for decision in decisions:
        for blocks in decision.padding:
            if blocks.logical not in masked:
                raise BadConfig(
                    f"{decision.path} would be padded from {blocks.logical} to {blocks.stored}, "
                    "and the logits of the padding would take part in the model's softmax",
                    where="pad_vocab",
                    fix=f"logits = jaxtp.mask_padding(logits, {blocks.logical}) in the model, and "
                    'fn= and inputs= to show it, or pad_vocab="masked" if it does so already',
                )
            if read := unmasked.get(blocks.logical):
                raise BadConfig(
                    f"{decision.path} would be padded from {blocks.logical} to {blocks.stored}, "
                    f"and beside the mask the model reads the logits of the padding: {join(read)}",
                    where="pad_vocab",
                    fix="mask the logits once and use nothing but the masked ones",
                )


def _decision(claim: Claim, share: TensorShare, widths: Widths, *, pads: bool) -> ParamDecision:
    param, vote, tp = claim.param, claim.vote, max(widths)
    placement, ways = share.placement, share.ways
    padding: Padding = ()
    fallback, reasons, axes = "", claim.reasons, widths[ways]
    if placement is None and vote.role is Role.FUSED and tp > 1:
        fallback = f"{vote.reason}: replicated; {_costs(param, 1, tp)}; sharded if stored apart"
    if placement is not None and ways < tp:
        if pads:
            size, axes = param.shape[placement.dim], widths[tp]
            blocks = Blocks(dim=placement.dim, pieces=((0, size),), block=-(-size // tp) * tp)
            padding = (blocks,)
            reasons = (*reasons, f"padded from {size} to {blocks.block} so that tp={tp} divides")
        else:
            fallback = price(claim, placement, ways, tp)
    if placement is not None and vote.source is Source.ANNOTATION and not fallback:
        fallback = _price_of_given(claim, ways, share.forgone)
    dim = None if placement is None else placement.dim
    return ParamDecision(
        path=param.path,
        shape=param.shape,
        dtype=param.dtype,
        spec=tuple(axes if d == dim else () for d in range(len(param.shape))),
        role=vote.role,
        reasons=reasons,
        units=() if placement is None else placement.units,
        group=vote.group,
        fallback=fallback,
        padding=padding,
    )


def price(claim: Claim, placement: Placement, ways: int, tp: int) -> str:
    """What a narrower split costs against an even one, per device: bytes, and FLOPs per token.

    A matrix product takes 2 FLOPs per element and token, forward.
    """
    units = " x ".join(map(str, placement.units)) + (
        " unit" if placement.units == (1,) else " units"
    )
    if claim.vote.assumed:
        units = f"head count unknown (give heads=), {units} assumed"
    how = "replicated" if ways == 1 else f"{ways}-way"
    pad = ", or pad_vocab=True" if claim.vote.role is Role.VOCAB else ""
    return (
        f"{units} on tp={tp}: {how}; {_costs(claim.param, ways, tp)}; "
        f"divides: tp {join(_near(placement, tp), 12)}{pad}"
    )


def _costs(param: Param, ways: int, tp: int) -> str:
    extra = 1 / ways - 1 / tp
    return (
        f"costs {param.num_bytes * extra / 1e6:,.2f} MB and "
        f"{2 * param.size * extra / 1e6:,.2f} MFLOP a token per device"
    )


def _near(placement: Placement | None, tp: int) -> list[int]:
    """Tensor sizes that divide the units: all of them, or for wide dims those up to 4 x tp."""
    if placement is None:
        return [1]
    if math.prod(placement.units) <= 512:
        return legal_ways(placement.units)
    return [w for w in range(1, 4 * tp + 1) if splits(placement.units, w)]


def _given(claim: Claim, share: TensorShare, mesh: MeshShape, problems: Problems) -> ParamDecision:
    """An override or annotation, taken as it is if it divides."""
    param, spec = claim.param, claim.vote.spec
    assert spec is not None
    full = tuple(mesh.expand(axes) for axes in spec)
    all_ways, over_tp = [mesh.ways(axes) for axes in full], mesh.tp_ways(full)
    for dim, (size, axes, ways) in enumerate(zip(param.shape, full, all_ways, strict=True)):
        if size % ways:
            legal = [w for w in range(1, 4 * ways) if size % w == 0]
            problems.add(
                SizeMismatch(
                    f"{claim.reasons[-1]}: dim {dim} of size {size} does not divide {ways} ways "
                    f"({join(axes)})",
                    where=param.path,
                    fix=f"ways that divide: {join(legal, 12)}",
                )
            )
    return ParamDecision(
        path=param.path,
        shape=param.shape,
        dtype=param.dtype,
        spec=full,
        role=claim.vote.role,
        reasons=claim.reasons,
        group=claim.vote.group,
        fallback=_price_of_given(claim, over_tp, share.forgone),
    )


def _price_of_given(claim: Claim, given: int, forgone: int) -> str:
    """What a given spec costs against the placement it overrules; "" if it costs nothing.

    A device that needs the other piece fetches it: a ring all-gather of the array sends (w - 1) / w
    of its bytes, where w is the number of pieces, `given`; `forgone` are those of the placement.
    """
    if claim.forgone is None:
        return ""
    extra = claim.param.num_bytes * (1 / given - 1 / forgone)
    wire = claim.param.num_bytes * (given - 1) / given
    return (
        f"given instead of dim {claim.forgone.dim} {forgone}-way: "
        f"costs {extra / 1e6:,.2f} MB per device"
        + (f" and up to {wire / 1e6:,.2f} MB sent at each use" if given > 1 else "")
    )
