"""What follows a weight dim by dim: factors of low-rank adapters, and scales of quantised weights.

LoRA (Hu et al. 2021) adds `(x A) B` to `x W`. A has W's input dims and the rank, B the rank and W's
output dims. A is sharded along an input dim where W is, B along an output dim where W is, and the
rank is replicated: where W is sharded on its input, `x A` is a partial sum as `x W` is, and both
are summed by the same all-reduce; where W is sharded on its output, nothing is added.

A quantised weight has one scale (and zero point) for each block of its elements. A block is not
cut: the scales of a dim are its units.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

from jaxtp.rules.model_tree import Leaf, ModelTree
from jaxtp.rules.path_words import ADAPTER_A, ADAPTER_B, MAGNITUDE, SCALES
from jaxtp.rules.roles import Placement, Role, Source, Vote

DimMap = Mapping[int, int]
"""A dim of the weight -> the dim of the follower that lies along it."""


def votes(tree: ModelTree, found: Mapping[str, Vote]) -> Iterator[Vote]:
    """Votes for adapters and scales of weights that the other sources have decided.

    Args:
        tree: The tree's names and shapes.
        found: Votes by path, weights included.
    """
    followers = [leaf for leaf in tree.leaves.values() if leaf.name.follows]
    if not followers:
        return
    weights = _finder(tree)
    factors: defaultdict[str, dict[str, Leaf]] = defaultdict(dict)
    for leaf in followers:
        if leaf.name.follows != SCALES:
            factors[leaf.name.stem][leaf.name.follows] = leaf
    for leaf in followers:
        pair = factors.get(leaf.name.stem, {})
        fits = (
            (weight, dims)
            for weight in weights(leaf.name.stem)
            if (dims := _dim_map(leaf, weight, pair)) is not None
        )
        weight, dims = max(fits, key=lambda fit: fit[0].param.size, default=(None, {}))
        if weight is not None:
            yield _vote(leaf, weight, found.get(weight.param.path), dims)


def _finder(tree: ModelTree) -> Callable[[str], Sequence[Leaf]]:
    """Stem of a follower -> the matrices that it may lie along.

    Those of the same stem; else the only matrix in that module, which wraps it; else those of the
    same stem in another collection.
    """
    held: defaultdict[str, list[Leaf]] = defaultdict(list)
    wrapped: defaultdict[str, list[Leaf]] = defaultdict(list)
    elsewhere: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in tree.leaves.values():
        if not leaf.name.follows and not leaf.name.bias and len(leaf.sizes) > 1:
            stem = leaf.name.stem
            held[stem].append(leaf)
            wrapped[stem.rpartition("/")[0]].append(leaf)
            elsewhere[stem].append(leaf)
            elsewhere[stem.partition("/")[2]].append(leaf)

    def find(stem: str) -> Sequence[Leaf]:
        inside, own = wrapped.get(stem, ()), stem.partition("/")[2]
        alone = inside if len(inside) == 1 else ()
        return held.get(stem) or alone or (elsewhere.get(own, ()) if own else ())

    return find


def _dim_map(leaf: Leaf, weight: Leaf, pair: Mapping[str, Leaf]) -> DimMap | None:
    """Which dims of a follower lie along which of a weight; None if it does not fit."""
    if leaf.name.follows == SCALES:
        return _scale_map(leaf, weight)
    if not {ADAPTER_A, ADAPTER_B} <= pair.keys():
        return None
    a, b = pair[ADAPTER_A], pair[ADAPTER_B]
    for rank in sorted(set(a.sizes) & set(b.sizes)):
        for rank_last in (True, False):  # (in, rank) and (rank, out), or both turned
            maps = _factor_maps(a, b, weight, rank, rank_last)
            if maps is not None and leaf.name.follows == MAGNITUDE:
                return {w: leaf.core[0] for w in maps[1] if leaf.sizes == (weight.param.shape[w],)}
            if maps is not None:
                return maps[0] if leaf is a else maps[1]
    return None


def _factor_maps(
    a: Leaf, b: Leaf, weight: Leaf, rank: int, rank_last: bool
) -> tuple[DimMap, DimMap] | None:
    """Dim maps of both factors: stacks (experts) first, then each side's dims, maybe joined."""
    sizes = weight.sizes
    stacks = 0
    while min(len(sizes), len(a.sizes), len(b.sizes)) > stacks and (
        a.sizes[stacks] == b.sizes[stacks] == sizes[stacks]
        and len(a.sizes) > stacks + 2
        and len(b.sizes) > stacks + 2
    ):
        stacks += 1
    first, second = (a, b) if rank_last else (b, a)  # whose own dims come first in the weight
    if first.sizes[-1] != rank or len(second.sizes) <= stacks or second.sizes[stacks] != rank:
        return None
    one, other = first.sizes[stacks:-1], second.sizes[stacks + 1 :]
    dims = range(stacks, len(sizes))
    # The first's dims lead in a matrix, and lie between the heads and their width in an einsum's.
    for start, stop in itertools.combinations((*dims, len(sizes)), 2):
        mine, rest = (
            dims[start - stacks : stop - stacks],
            [d for d in dims if not start <= d < stop],
        )
        if (start > stacks and [sizes[d] for d in rest] != list(other)) or (
            math.prod(sizes[d] for d in mine) != math.prod(one)
            or math.prod(sizes[d] for d in rest) != math.prod(other)
        ):
            continue
        shared = {weight.core[d]: d for d in range(stacks)}
        first_map = _aligned(mine, range(stacks, len(first.sizes) - 1), weight)
        second_map = _aligned(rest, range(stacks + 1, len(second.sizes)), weight)
        maps = [
            {w: leaf.core[d] for w, d in {**shared, **own}.items()}
            for leaf, own in ((first, first_map), (second, second_map))
        ]
        return (maps[0], maps[1]) if rank_last else (maps[1], maps[0])
    return None


def _aligned(theirs: Sequence[int], ours: range, weight: Leaf) -> dict[int, int]:
    """Dims one by one where there are as many; joined into one, the first of them leads."""
    if len(theirs) == len(ours):
        return {weight.core[w]: d for w, d in zip(theirs, ours, strict=True)}
    return {weight.core[theirs[0]]: ours[0]} if theirs and ours else {}


def _scale_map(leaf: Leaf, weight: Leaf) -> DimMap | None:
    """One scale a block: as many dims as the weight, each a divisor; or one dim as its output."""
    ours, sizes = leaf.param.shape, weight.param.shape
    if len(ours) == len(sizes):
        fits = all(size % n == 0 for n, size in zip(ours, sizes, strict=True))
        return {d: d for d in range(len(sizes))} if fits else None
    if len(leaf.sizes) == 1:
        last = next((d for d in reversed(weight.core) if sizes[d] == leaf.sizes[0]), None)
        return None if last is None else {last: leaf.core[0]}
    return None


def _vote(leaf: Leaf, weight: Leaf, vote: Vote | None, dims: DimMap) -> Vote:
    """The weight's choices, each on the dim that lies along it, in units that suit both."""
    what = {ADAPTER_A: "input", ADAPTER_B: "output", MAGNITUDE: "output", SCALES: "blocks"}
    role = Role.SCALE if leaf.name.follows == SCALES else Role.ADAPTER
    reason = f"follows the {what[leaf.name.follows]} of {weight.param.path}"
    if role is Role.ADAPTER and leaf.name.follows != MAGNITUDE:
        reason += ", its rank replicated"
    if vote is None or vote.role is Role.UNKNOWN:  # absence of evidence is no opinion
        return Vote(leaf.param.path, Source.NAMES, Role.UNKNOWN, f"{reason}; no evidence on that")
    choices = tuple(_placement(leaf, p, dims) for p in (vote.placements if vote else ()))
    group = vote.group if vote and any(choices) else ""
    return Vote(leaf.param.path, Source.NAMES, role, reason, choices if group else (), group)


def _placement(leaf: Leaf, choice: Placement | None, dims: DimMap) -> Placement | None:
    dim = None if choice is None else dims.get(choice.dim)
    if choice is None or dim is None:
        return None
    size = leaf.param.shape[dim]
    if size % math.prod(choice.units) == 0:
        return Placement(dim, choice.units)
    blocks = math.gcd(size, math.prod(choice.units))
    return Placement(dim, (blocks,)) if blocks > 1 else None
