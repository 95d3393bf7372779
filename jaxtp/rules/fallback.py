"""Claims -> decisions that fit the mesh, whose tensor axis is factored where units do not divide.

Units are never divided; a group that is not divisible takes a prefix of the axis, with its price:
docs/design.md#what-is-not-divisible.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jaxtp.errors import BadConfig, HeadsNotDivisible, Problems, SizeMismatch, join
from jaxtp.mesh.axes import MeshShape, legal_ways, splits
from jaxtp.plan.decisions import POLICIES, ParamDecision
from jaxtp.plan.stored_form import Blocks, Padding
from jaxtp.plan.trees import Param
from jaxtp.rules.resolve import Claim
from jaxtp.rules.roles import Placement, Role, Source


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A claim inside its group: its choices, with units that suit the whole group.

    Attributes:
        claim: Of one parameter.
        choices: Where it may be sharded, one for each choice of the group.
        num_bytes: Global.
        of_vocab: Whether what is sharded is the vocabulary: of a table or head, or what follows it.
    """

    claim: Claim
    choices: tuple[Placement | None, ...]
    num_bytes: int
    of_vocab: bool

    def ways(self, choice: int, prefixes: Sequence[int]) -> int:
        """Into how many shards this member goes when the group takes a choice.

        Args:
            choice: Index into the group's choices.
            prefixes: Sizes of the tensor axis' prefixes, the widest first, 1 last.
        """
        placement = self.choices[choice] if self.choices else None
        if placement is None:
            return 1
        if self.of_vocab:
            # A table sharded over part of the axis would save little and cost a factor of the
            # mesh to every group: all of the axis, or replicated.
            prefixes = (prefixes[0], 1)
        return next(w for w in prefixes if splits(placement.units, w))


Group = list[Member]

Widths = Mapping[int, tuple[str, ...]]
"""Ways that the plan's tensor axis offers, the widest first -> the axes that they are along."""


def fit(
    claims: Sequence[Claim], mesh: MeshShape, policy: str = "factor", *, pad_vocab: bool = False
) -> tuple[MeshShape, tuple[ParamDecision, ...]]:
    """The plan's mesh shape and its decisions, in the order of the claims.

    Args:
        claims: One per parameter.
        mesh: The user's mesh shape, its tensor axis in one piece.
        policy: For units that do not divide: "factor" takes the widest prefix of the tensor axis,
            "replicate" replicates the group, "error" refuses.
        pad_vocab: Whether a vocabulary that does not divide is padded instead of replicated.

    Raises:
        BadConfig: TP020, if there is no such policy.
        HeadsNotDivisible: TP041, under the policy "error".
        SizeMismatch: TP003, if a given spec does not divide its array.
    """
    if policy not in POLICIES:
        raise BadConfig(
            f"unknown policy {policy!r}", where="policy", fix=f"one of {join(POLICIES)}"
        )
    groups = _groups(claims)
    tp = mesh.tp_size
    prefixes = _best_prefixes(groups, tp) if POLICIES[policy] else (tp, 1)
    choice = {id(g): _choice(g, prefixes) for g in groups}
    cut = {
        m.claim.param.path: (m, choice[id(g)], m.ways(choice[id(g)], prefixes))
        for g in groups
        for m in g
    }
    # Fused arrays are replicated so far, but `rules.fused` shards their pieces.
    pieces = {
        next(w for w in prefixes if splits(c.vote.fused.units, w)) for c in claims if c.vote.fused
    }
    used = sorted({w for _, _, w in cut.values()} | pieces | {1, tp})
    mesh = mesh.factored([b // a for a, b in itertools.pairwise(used)] or [1])
    widths = {mesh.ways(axes): axes for axes in mesh.prefixes()}
    problems = Problems()
    decisions: list[ParamDecision] = []
    for claim in claims:
        if claim.vote.spec is not None:
            decisions.append(_given(claim, mesh, widths, problems))
            continue
        member, index, ways = cut[claim.param.path]
        placement = member.choices[index] if member.choices else None
        decision = _decision(claim, placement, ways, widths, pad_vocab and member.of_vocab)
        if decision.fallback and decision.units and policy == "error":
            problems.add(
                HeadsNotDivisible(
                    decision.fallback,
                    where=claim.param.path,
                    fix=f"tp of {join(_near(placement, tp))}, or policy='factor'",
                )
            )
        decisions.append(decision)
    problems.raise_any()
    return mesh, tuple(decisions)


def check_masked(
    decisions: Iterable[ParamDecision], pad_vocab: bool | str, config: Any, masked: Collection[int]
) -> None:
    """Refuses padded vocabularies of which nobody has said or seen that the model masks them.

    Padded logits are zeros, which take part in an ordinary softmax: loss and gradients would differ
    from those of the model, and nothing would say so.

    Args:
        decisions: Of all parameters.
        pad_vocab: As given to `make_plan`; "masked" says that the model does it.
        config: The model's; those of `jaxtp.models` say so of themselves.
        masked: Vocabulary sizes, in elements, that the traced function masks to.

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


def _groups(claims: Iterable[Claim]) -> list[Group]:
    """Claims that are decided together, with units that all of them can be sharded between."""
    by_name: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.vote.spec is None:
            by_name[claim.vote.group or f"alone: {claim.param.path}"].append(claim)
    return [_shared_units(group) for group in by_name.values()]


def _shared_units(claims: list[Claim]) -> Group:
    """Members whose leading unit counts agree; where they do not, all take the common divisor.

    Query heads as (kv, per kv) and keys as (kv,) agree. 12 query heads beside 5 kv heads do not:
    only ways that divide both counts will do.
    """
    width = max(len(c.vote.placements) for c in claims)
    leads = [
        {p.units[0] for c in claims for p in c.vote.placements[i : i + 1] if p is not None}
        for i in range(width)
    ]
    of_vocab = any(claim.vote.role is Role.VOCAB for claim in claims)
    members: Group = []
    for claim in claims:
        choices = tuple(
            p if p is None or len(leads[i]) == 1 else Placement(p.dim, (math.gcd(*leads[i]),))
            for i, p in enumerate(claim.vote.placements)
        )
        choices += (None,) * (width - len(choices))
        members.append(Member(claim, choices, claim.param.num_bytes, of_vocab))
    return members


def _choice(group: Group, prefixes: Sequence[int]) -> int:
    """The choice that leaves the fewest bytes on a device; the first of equals."""
    count = max(1, *(len(m.choices) for m in group)) if group else 1
    return min(range(count), key=lambda i: sum(m.num_bytes / m.ways(i, prefixes) for m in group))


def _best_prefixes(groups: Sequence[Group], tp: int) -> tuple[int, ...]:
    """Prefix sizes, widest first, of the order of tp's prime factors that fits the groups best.

    A power of two has one order. For tp=12 groups of 4 and of 6 units cannot both have their way.
    """

    def bytes_left(prefixes: tuple[int, ...]) -> float:
        return sum(
            sum(m.num_bytes / m.ways(i, prefixes) for m in g)
            for g in groups
            for i in (_choice(g, prefixes),)
        )

    orders = [tuple(itertools.accumulate((1, *o), lambda a, b: a * b))[::-1] for o in _orders(tp)]
    return min(orders, key=bytes_left) if len(orders) > 1 else orders[0]


def _orders(n: int) -> Iterator[tuple[int, ...]]:
    """Distinct orders of the prime factors of n, larger factors first.

    >>> list(_orders(12))
    [(3, 2, 2), (2, 3, 2), (2, 2, 3)]
    """
    primes = [p for p in range(n, 1, -1) if n % p == 0 and all(p % q for q in range(2, p))]
    if not primes:
        yield ()
    for p in primes:
        yield from ((p, *rest) for rest in _orders(n // p))


def _decision(
    claim: Claim, placement: Placement | None, ways: int, widths: Widths, pads: bool
) -> ParamDecision:
    param, vote, tp = claim.param, claim.vote, max(widths)
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
        fallback = _price_of_given(claim, ways, widths)
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


def _given(claim: Claim, mesh: MeshShape, widths: Widths, problems: Problems) -> ParamDecision:
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
        fallback=_price_of_given(claim, over_tp, widths),
    )


def _price_of_given(claim: Claim, given: int, widths: Widths) -> str:
    """What a given spec costs against the placement it overrules; "" if it costs nothing.

    A device that needs the other piece fetches it: a ring all-gather of the array sends (w - 1) / w
    of its bytes, where w is the number of pieces, `given`.
    """
    wanted = next((p for v in claim.overruled for p in v.placements if p is not None), None)
    if wanted is None:
        return ""
    better = max(ways for ways in widths if splits(wanted.units, ways))
    extra = claim.param.num_bytes * (1 / given - 1 / better)
    wire = claim.param.num_bytes * (given - 1) / given
    return (
        f"given instead of dim {wanted.dim} {better}-way: costs {extra / 1e6:,.2f} MB per device"
        + (f" and up to {wire / 1e6:,.2f} MB sent at each use" if given > 1 else "")
    )
