"""Dimension classes: alignment, refinement, splits, joins. And the choice between regions."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtp.rules.jaxpr.classes import Classes, classes_in, dim_size, find, resolve
from jaxtp.rules.jaxpr.regions import Region, best_regions

SIZES = st.integers(1, 24)


def sizes(dims):
    return [tuple(atom.size for atom in resolve(dim)) for dim in dims]


def test_a_split_refines_everywhere():
    """q (64, 4096) by (8, 4, 128): the kernel that shares the atom sees its heads."""
    classes = Classes()
    kernel, activation = classes.fresh_dims((64, 4096)), classes.fresh_dims((2, 24, 4096))
    classes.unify(kernel[1], activation[2])
    classes.align(activation, (2, 24, 8, 4, 128))
    assert sizes(kernel) == [(64,), (8, 4, 128)]


def test_repeated_heads_refine_the_query():
    """k repeated from 8 to 32 heads meets q with 32: both become 8 x 4, and k keeps its 8."""
    classes = Classes()
    (query,), (kv,) = classes.fresh_dims((32,)), classes.fresh_dims((8,))
    (repeated,) = classes.align((kv, classes.fresh(4)), (32,))
    classes.unify(query, repeated)
    assert sizes((query, kv)) == [(8, 4), (8,)]
    assert find(query[0]).parts is not None
    assert resolve(query)[0] is resolve(kv)[0]


def test_equal_sizes_stay_apart():
    classes = Classes()
    left, right = classes.fresh_dims((64, 64))
    classes.align((left,), (8, 8))
    assert sizes((left, right)) == [(8, 8), (64,)]


def test_size_one_links_nothing():
    classes = Classes()
    assert classes.fresh(1) == ()
    wide = classes.fresh(7)
    assert classes.meet((), wide) == wide
    classes.unify((), wide)
    assert sizes((wide,)) == [(7,)]


def test_sizes_that_do_not_nest_are_fresh_up_to_the_next_boundary():
    """(6, 4, 5) to (4, 6, 5): nothing is known about the first two dims, the last one passes."""
    classes = Classes()
    dims = classes.fresh_dims((6, 4, 5))
    result = classes.align(dims, (4, 6, 5))
    assert resolve(result[2]) == resolve(dims[2])
    before = {atom for dim in dims[:2] for atom in resolve(dim)}
    assert not before & {atom for dim in result[:2] for atom in resolve(dim)}


def test_equal_cuts_share_a_piece():
    classes = Classes()
    fused = classes.fresh(2304)
    first, again = classes.cut(fused, 0, 768), classes.cut(fused, 0, 768)
    assert first == again
    assert classes.cut(fused, 768, 1536) != first
    assert set(classes_in([fused])) >= {fused[0], first[0]}


def test_cuts_at_whole_steps_cut_the_major_factor():
    """Falcon's (73 heads, 64): a slice of 71 heads keeps the head width."""
    classes = Classes()
    fused = classes.fresh(73 * 64)
    heads = classes.align((fused,), (73, 64))
    piece = classes.cut(fused, 0, 71 * 64)
    assert sizes((piece,)) == [(71, 64)]
    assert resolve(piece)[1] is resolve(heads[1])[0]


def test_a_cut_inside_one_step_cuts_the_minor_factor():
    classes = Classes()
    fused = classes.fresh(3 * 10)
    classes.align((fused,), (3, 10))
    assert sizes((classes.cut(fused, 10, 14),)) == [(4,)]
    assert (1, 2) in find(fused[0]).parts[0].cuts


def test_a_cut_is_kept_when_its_atom_is_refined():
    classes = Classes()
    fused = classes.fresh(96)
    piece = classes.cut(fused, 32, 64)
    classes.align((fused,), (3, 4, 8))
    assert sizes((piece,)) == [(4, 8)]


def test_slicing_undoes_a_concatenation():
    classes = Classes()
    parts = classes.fresh_dims((5, 1, 7))
    joined = classes.join(parts, (5, 1, 7))
    assert classes.cut(joined, 6, 13) == parts[2]
    assert classes.cut(joined, 5, 6) == ()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_dims_always_multiply_to_their_size(data):
    """Whatever is unified, split, joined and reshaped: sizes stay, and equal classes stay equal."""
    classes = Classes()
    dims = [(classes.fresh(n), n) for n in data.draw(st.lists(SIZES, min_size=2, max_size=6))]
    same = []
    for _ in range(data.draw(st.integers(1, 12))):
        kind = data.draw(st.sampled_from(["unify", "cut", "join", "align"]))
        dim, size = data.draw(st.sampled_from(dims))
        if kind == "unify":
            other = data.draw(st.sampled_from([d for d in dims if d[1] == size]))[0]
            classes.unify(dim, other)
            same.append((dim, other))
        elif kind == "cut":
            start = data.draw(st.integers(0, size))
            stop = data.draw(st.integers(start, size))
            dims.append((classes.cut(dim, start, stop), max(stop - start, 1)))
        elif kind == "join":
            other = data.draw(st.sampled_from(dims))
            dims.append((classes.join((dim, other[0]), (size, other[1])), size + other[1]))
        else:
            shape = data.draw(st.sampled_from(factorings(size)))
            for part, n in zip(classes.align((dim,), shape), shape, strict=True):
                dims.append((part, n))
    for dim, size in dims:
        assert dim_size(resolve(dim)) == size
        assert set(resolve(dim)) <= set(classes_in([dim]))
    for one, two in same:
        # Equal up to a remainder whose factors share no divisor.
        pairs = zip(resolve(one), resolve(two), strict=False)
        rest = list(itertools.dropwhile(lambda pair: pair[0] is pair[1], pairs))
        assert not rest or math.gcd(rest[0][0].size, rest[0][1].size) == 1


def factorings(n):
    """Shapes of one to three dims with n elements."""
    shapes = [(n,)]
    for a in range(1, n + 1):
        if n % a == 0:
            shapes.append((a, n // a))
            shapes += [(a, b, n // a // b) for b in range(1, n // a + 1) if n // a % b == 0]
    return shapes


# ---- the choice between regions ------------------------------------------------------------------


def regions(weights):
    return [Region(str(i), "inner", [], {}, weight) for i, weight in enumerate(weights)]


def weight(chosen):
    return sum(region.weight for region in chosen)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_best_set_is_found(data):
    """Against every subset, on up to nine regions."""
    own = regions(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=9)))
    pairs = list(itertools.combinations(range(len(own)), 2))
    edges = data.draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    rivals = {region: [] for region in own}
    for a, b in edges:
        rivals[own[a]].append(own[b])
        rivals[own[b]].append(own[a])
    chosen = best_regions(own, rivals)
    assert not any(other in rivals[region] for region in chosen for other in chosen)
    free = [
        subset
        for n in range(len(own) + 1)
        for subset in itertools.combinations(own, n)
        if not any(two in rivals[one] for one, two in itertools.combinations(subset, 2))
    ]
    assert weight(chosen) == max(map(weight, free))


@pytest.mark.parametrize("count", [3, 10, 200])
def test_a_long_chain_is_covered_from_its_first_pair(count):
    """Square kernels in a row, far beyond exact search: every second class."""
    own = regions([2] * count)
    rivals = {region: [] for region in own}
    for one, two in itertools.pairwise(own):
        rivals[one].append(two)
        rivals[two].append(one)
    assert best_regions(own, rivals) == own[::2]
