"""How many ways each group goes, and the tensor axis factored so that every group finds its own.

Units are never divided; a group that is not divisible takes a prefix of the axis:
docs/design.md#what-is-not-divisible.
"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from jaxtp.errors import BadConfig, join
from jaxtp.mesh.axes import MeshShape, splits
from jaxtp.plan.decisions import POLICIES
from jaxtp.rules.resolve import Claim
from jaxtp.rules.roles import Placement, Role


@dataclasses.dataclass(frozen=True, slots=True)
class TensorShare:
    """What one parameter gets of the tensor axis.

    Attributes:
        placement: The dim that is sharded, with units that suit the whole group; None where the
            parameter is replicated, or its spec is given.
        ways: Into how many shards; of several projections in one array, which is replicated so
            far, into how many each of them can go.
        of_vocab: Whether what is sharded is the vocabulary: of a table or head, or what follows it.
        forgone: Into how many shards the evidence that is overruled would have put it.
    """

    placement: Placement | None = None
    ways: int = 1
    of_vocab: bool = False
    forgone: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """A claim inside its group: its choices, with units that suit the whole group.

    Attributes:
        claim: Of one parameter.
        choices: Where it may be sharded, one for each choice of the group.
        num_bytes: Global.
        of_vocab: As in `TensorShare`.
    """

    claim: Claim
    choices: tuple[Placement | None, ...]
    num_bytes: int
    of_vocab: bool

    def share(self, choice: int, prefixes: Sequence[int]) -> TensorShare:
        """What this member gets when the group takes a choice.

        Args:
            choice: Index into the group's choices.
            prefixes: Sizes of the tensor axis' prefixes, the widest first, 1 last.
        """
        placement = self.choices[choice] if self.choices else None
        if placement is None:
            return TensorShare(None, 1, self.of_vocab)
        if self.of_vocab:
            # A table sharded over part of the axis would save little and cost a factor of the
            # mesh to every group: all of the axis, or replicated.
            prefixes = (prefixes[0], 1)
        return TensorShare(placement, _widest(placement.units, prefixes), self.of_vocab)

    def held(self, choice: int, prefixes: Sequence[int]) -> float:
        """Bytes of it on one device when the group takes a choice."""
        return self.num_bytes / self.share(choice, prefixes).ways


_Group = list[_Member]


def factor(
    claims: Sequence[Claim], mesh: MeshShape, policy: str = "factor"
) -> tuple[MeshShape, tuple[TensorShare, ...]]:
    """The plan's mesh shape, and what each claim gets of its tensor axis, in their order.

    Args:
        claims: One per parameter.
        mesh: The user's mesh shape, its tensor axis in one piece.
        policy: For units that do not divide: "factor" takes the widest prefix of the tensor axis,
            the others take all of it or nothing.

    Raises:
        BadConfig: TP020, if there is no such policy.
    """
    if policy not in POLICIES:
        raise BadConfig(
            f"unknown policy {policy!r}", where="policy", fix=f"one of {join(POLICIES)}"
        )
    groups = _groups(claims)
    tp = mesh.tp_size
    prefixes = _best_prefixes(groups, tp) if POLICIES[policy] else (tp, 1)
    taken = {
        member.claim.param.path: member.share(choice, prefixes)
        for group in groups
        for choice in (_choice(group, prefixes),)
        for member in group
    }
    for claim in claims:
        if claim.vote.fused is not None and claim.vote.spec is None:
            ways = _widest(claim.vote.fused.units, prefixes)
            taken[claim.param.path] = TensorShare(None, ways, taken[claim.param.path].of_vocab)
    shares = tuple(taken.get(claim.param.path, TensorShare()) for claim in claims)
    used = sorted({share.ways for share in shares} | {1, tp})
    mesh = mesh.factored([b // a for a, b in itertools.pairwise(used)] or [1])
    widths = mesh.widths
    return mesh, tuple(
        dataclasses.replace(share, forgone=_widest(claim.forgone.units, widths))
        if claim.forgone is not None
        else share
        for claim, share in zip(claims, shares, strict=True)
    )


def _widest(units: Sequence[int], prefixes: Iterable[int]) -> int:
    """The first of these ways that leaves every unit on one device."""
    return next(ways for ways in prefixes if splits(units, ways))


def _groups(claims: Iterable[Claim]) -> list[_Group]:
    """Claims that are decided together, with units that all of them can be sharded between."""
    by_name: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        if claim.vote.spec is None:
            by_name[claim.vote.group or f"alone: {claim.param.path}"].append(claim)
    return [_shared_units(group) for group in by_name.values()]


def _shared_units(claims: list[Claim]) -> _Group:
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
    members: _Group = []
    for claim in claims:
        choices = tuple(
            p if p is None or len(leads[i]) == 1 else Placement(p.dim, (math.gcd(*leads[i]),))
            for i, p in enumerate(claim.vote.placements)
        )
        choices += (None,) * (width - len(choices))
        members.append(_Member(claim, choices, claim.param.num_bytes, of_vocab))
    return members


def _choice(group: _Group, prefixes: Sequence[int]) -> int:
    """The choice that leaves the fewest bytes on a device; the first of equals."""
    count = max(1, *(len(m.choices) for m in group)) if group else 1
    return min(range(count), key=lambda i: sum(m.held(i, prefixes) for m in group))


def _best_prefixes(groups: Sequence[_Group], tp: int) -> tuple[int, ...]:
    """Prefix sizes, widest first, of the order of tp's prime factors that fits the groups best.

    A power of two has one order. For tp=12 groups of 4 and of 6 units cannot both have their way.
    """

    def bytes_left(prefixes: tuple[int, ...]) -> float:
        return sum(
            sum(m.held(i, prefixes) for m in g) for g in groups for i in (_choice(g, prefixes),)
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
