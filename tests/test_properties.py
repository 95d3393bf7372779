"""Properties of every plan, over generated models and over junk."""

import cProfile
import json
import math
import pstats
import re

import jax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from planning import llama, mlp, structs

import jaxtp
from jaxtp.errors import HeadsNotDivisible, SizeMismatch
from jaxtp.mesh.axes import MeshShape, legal_ways, splits
from jaxtp.plan.trees import itemsize

TENSOR = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32])
HEAD_DIMS = st.sampled_from([8, 16, 32, 64, 80, 128])
STYLES = st.sampled_from(
    [
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        ("query", "key", "value", "out", "wi_0", "wi_1", "wo"),
        ("wq", "wk", "wv", "wo", "w1", "w3", "w2"),
        ("q", "k", "v", "o", "fc_in", "fc_gate", "fc_out"),
    ]
)


@st.composite
def blocks(draw):
    """One transformer block with its heads, widths, names and layout drawn, and its units."""
    kv = draw(st.sampled_from([1, 2, 3, 4, 5, 8, 12]))
    heads = kv * draw(st.sampled_from([1, 2, 3, 4, 7]))
    width = draw(HEAD_DIMS)
    hidden = draw(st.sampled_from([96, 160, 256, 384, 1024]))
    inner = draw(st.sampled_from([hidden * 4, hidden * 3, 8 * hidden // 3, 1000]))
    num_experts = draw(st.sampled_from([0, 0, 4, 6, 8]))
    flat, bias = draw(st.booleans()), draw(st.booleans())
    q, k, v, o, gate, up, down = draw(STYLES)
    into = {q: heads, k: kv, v: kv}
    shapes, units = {}, {}
    for name, count in into.items():
        size = (count * width,) if flat else (count, width)
        shapes[f"attn/{name}/kernel"] = (hidden, *size)
        if bias:
            shapes[f"attn/{name}/bias"] = size
    shapes[f"attn/{o}/kernel"] = (heads * width, hidden) if flat else (heads, width, hidden)
    if draw(st.booleans()):
        shapes |= {"attn/query_norm/scale": (width,), "attn/key_norm/scale": (width,)}
    stack = (num_experts,) if num_experts else ()
    place = "mlp/experts" if num_experts else "mlp"
    shapes |= {f"{place}/{n}/kernel": (*stack, hidden, inner) for n in (gate, up)}
    shapes[f"{place}/{down}/kernel"] = (*stack, inner, hidden)
    if num_experts:
        shapes["mlp/router/kernel"] = (hidden, num_experts)
    shapes |= {"norm1/scale": (hidden,), "norm2/scale": (hidden,)}
    for name, count in (*into.items(), (o, heads)):
        units[f"attn/{name}"] = count
    return shapes, units, {"heads": heads, "kv_heads": kv, "head_dim": width}


@st.composite
def models(draw):
    """A model of such blocks, unrolled or scanned (layers at dim 0 or 1), and its head counts."""
    shapes, units, sizes = draw(blocks())
    tokens = draw(st.sampled_from([1024, 50257, 32000, 49152]))
    hidden = shapes["norm1/scale"][0]
    assume(tokens != hidden)
    num_layers = draw(st.integers(2, 5))
    scan = draw(st.sampled_from([None, 0, 1]))
    tree = {"embed/embedding": (tokens, hidden), "lm_head/kernel": (hidden, tokens)}
    for i in range(num_layers) if scan is None else ():
        tree |= {f"layers/{i}/{path}": shape for path, shape in shapes.items()}
    if scan is not None:
        assume(num_layers not in (sizes["kv_heads"], sizes["heads"]))
        tree |= {
            f"layers/{path}": (*shape[:scan], num_layers, *shape[scan:])
            for path, shape in shapes.items()
        }
    return tree, units, sizes


PARTS = "a 0 1 attn q k v o qkv mlp experts moe router gate up down wi wo embed norm kernel bias"
JUNK_SHAPES = st.one_of(
    st.sampled_from(
        [(8, 64), (64, 8), (64, 64), (3, 8, 64), (3, 64, 8), (64, 3), (2, 8, 64), (64,)]
    ),
    st.lists(st.sampled_from([1, 2, 3, 5, 8, 12, 64, 96]), max_size=5).map(tuple),
)
JUNK = st.dictionaries(
    st.lists(st.sampled_from(PARTS.split()), min_size=1, max_size=4).map("/".join),
    JUNK_SHAPES,
    min_size=1,
    max_size=14,
)

TREES = st.one_of(models().map(lambda m: m[0]), JUNK)


def check_legal(plan, shapes):
    """One decision per leaf in order, with a reason; axes exist, once, and divide."""
    sizes = dict(plan.mesh.sizes)
    assert [d.path for d in plan.decisions] == list(shapes)
    for d in plan.decisions:
        assert d.shape == shapes[d.path]
        assert len(d.spec) == len(d.shape)
        assert d.reasons
        assert all(d.reasons)
        used = [axis for axes in d.spec for axis in axes]
        assert len(used) == len(set(used))
        assert set(used) <= set(plan.mesh.tp)
        for size, axes in zip(d.stored, d.spec, strict=True):
            assert size % math.prod(sizes[a] for a in axes) == 0


def ways(plan, decision):
    return plan.mesh.ways(axis for axes in decision.spec for axis in axes)


@given(shapes=TREES, tp=TENSOR)
def test_every_plan_is_legal(shapes, tp):
    plan = jaxtp.make_plan(structs(shapes), {"dp": 2, "tp": tp})
    check_legal(plan, dict(sorted(shapes.items())))
    assert plan.mesh.tp_size == tp
    assert plan.mesh["dp"] == 2


@given(model=models(), tp=TENSOR, known=st.booleans())
def test_heads_are_never_cut(model, tp, known):
    shapes, units, sizes = model
    plan = jaxtp.make_plan(structs(shapes), {"tp": tp}, **(sizes if known else {}))
    for d in plan.decisions:
        place = re.sub(r"^layers/(\d+/)?|/(kernel|bias)$", "", d.path)
        if place in units and known:
            assert units[place] % ways(plan, d) == 0, (d, sizes)
        if d.units and not d.padding:
            assert splits(d.units, ways(plan, d))
            assert d.shape[d.dim_on(plan.mesh.tp) or 0] % ways(plan, d) == 0


@given(model=models(), tp=TENSOR)
def test_layers_are_never_cut_and_norms_are_whole(model, tp):
    shapes, _, sizes = model
    plan = jaxtp.make_plan(structs(shapes), {"tp": tp}, **sizes)
    for d in plan.decisions:
        if re.search(r"norm\d?/scale$|router", d.path):
            assert ways(plan, d) == 1, d
        if d.path.startswith("layers/attn") and d.path.endswith("kernel"):
            # A scanned block's layer dim is where its norms have it.
            norm = shapes["layers/norm1/scale"]
            hidden = shapes["embed/embedding"][1]
            assert d.dim_on(plan.mesh.tp) != (0 if norm[0] != hidden else 1)


@given(model=models(), tp=TENSOR)
def test_a_group_is_cut_together(model, tp):
    shapes, _, sizes = model
    plan = jaxtp.make_plan(structs(shapes), {"tp": tp}, **sizes)
    groups = {}
    for d in plan.decisions:
        if d.group and d.units:
            groups.setdefault(d.group, []).append(d)
    for members in groups.values():
        # Within a group, equal units are cut alike; coarser units are cut at most as often.
        for a in members:
            for b in members:
                if a.units == b.units:
                    assert ways(plan, a) == ways(plan, b)
                elif len(a.units) < len(b.units):
                    assert ways(plan, b) % ways(plan, a) == 0


@given(model=models(), tp=TENSOR)
def test_key_heads_are_where_their_queries_are(model, tp):
    """Keys take the outer axes of what queries take, so that no device lacks a key it needs."""
    shapes, units, sizes = model
    plan = jaxtp.make_plan(structs(shapes), {"tp": tp}, **sizes)
    axes = {}
    for d in plan.decisions:
        block, _, place = d.path.rpartition("attn/")
        name = f"attn/{place.split('/')[0]}"
        if name in units and d.path.endswith("kernel"):
            found = axes.setdefault((block, units[name]), set())
            found.add(tuple(a for used in d.spec for a in used if plan.mesh[a] > 1))
    for (block, count), found in axes.items():
        assert len(found) == 1, "all with as many heads are cut alike"
        (mine,), (queries,) = found, axes[block, sizes["heads"]]
        assert queries[: len(mine)] == mine
        if mine != queries and count > 1:
            assert splits((count, sizes["heads"] // count), plan.mesh.ways(queries))


@given(shapes=TREES, tp=TENSOR)
def test_bytes_are_the_sum_of_the_shards(shapes, tp):
    plan = jaxtp.make_plan(structs(shapes), {"tp": tp})
    total = 0
    for d in plan.decisions:
        shard = [n // plan.mesh.ways(axes) for n, axes in zip(d.shape, d.spec, strict=True)]
        total += math.prod(shard) * itemsize(d.dtype)
    assert plan.bytes_per_device == total
    assert plan.num_bytes == sum(math.prod(s) * 2 for s in shapes.values())
    assert plan.num_bytes / tp <= plan.bytes_per_device <= plan.num_bytes


@given(shapes=TREES, tp=TENSOR)
def test_a_plan_is_its_json(shapes, tp):
    plan = jaxtp.make_plan(structs(shapes), {"tp": tp})
    text = plan.to_json()
    again = jaxtp.Plan.from_json(text)
    assert again == plan
    assert again.to_json() == text
    assert json.loads(text)["format"] == 1
    assert plan.diff(again) == ""


@given(shapes=TREES, tp=TENSOR, random=st.randoms(use_true_random=False))
def test_planning_does_not_depend_on_order(shapes, tp, random):
    names = list(shapes)
    random.shuffle(names)
    first = jaxtp.make_plan(structs(shapes), {"tp": tp})
    second = jaxtp.make_plan(structs({n: shapes[n] for n in names}), {"tp": tp})
    assert first.specs() == second.specs()
    assert first == second


@given(model=models(), tp=TENSOR)
def test_nesting_makes_no_difference(model, tp):
    """The tree may be nested or flat, or wrapped once more: paths get a prefix, specs stay."""
    shapes, _, sizes = model
    flat = structs(shapes)
    nested = {}
    for path, leaf in flat.items():
        node = nested
        *parts, last = path.split("/")
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = leaf
    wrapped = jaxtp.make_plan({"params": nested}, {"tp": tp}, **sizes).specs()
    assert jaxtp.make_plan(nested, {"tp": tp}, **sizes).specs() == {
        path.removeprefix("params/"): spec for path, spec in wrapped.items()
    }


@given(model=models(), tp=TENSOR)
def test_policies(model, tp):
    shapes, _, sizes = model
    tree = structs(shapes)
    factor = jaxtp.make_plan(tree, {"tp": tp}, **sizes)
    replicate = jaxtp.make_plan(tree, {"tp": tp}, policy="replicate", **sizes)
    check_legal(replicate, dict(sorted(shapes.items())))
    assert replicate.mesh.tp == ("tp",)
    assert factor.bytes_per_device <= replicate.bytes_per_device
    narrow = [d for d in factor.fallbacks if d.units]
    if not narrow:
        assert jaxtp.make_plan(tree, {"tp": tp}, policy="error", **sizes).specs() == factor.specs()
        return
    with pytest.raises(HeadsNotDivisible, match=re.escape(narrow[0].path)):
        jaxtp.make_plan(tree, {"tp": tp}, policy="error", **sizes)


@given(model=models(), tp=TENSOR)
def test_padding_touches_nothing_but_the_vocabulary(model, tp):
    shapes, _, sizes = model
    tree = structs(shapes)
    plain = jaxtp.make_plan(tree, {"tp": tp}, **sizes)
    padded = jaxtp.make_plan(tree, {"tp": tp}, pad_vocab="masked", **sizes)
    check_legal(padded, dict(sorted(shapes.items())))
    for a, b in zip(plain.decisions, padded.decisions, strict=True):
        if b.padding:
            assert b.role == "vocab"
            assert 0 < max(b.stored) - max(b.shape) < tp
            assert max(b.stored) % tp == 0
        else:
            assert a.spec == b.spec


@given(model=models(), wrong=st.sampled_from([7, 11, 13]))
def test_heads_that_fit_no_kernel_are_refused(model, wrong):
    shapes, units, sizes = model
    widths = {n * sizes["head_dim"] for n in units.values()}
    assume(all(w % wrong for w in widths) and wrong not in units.values())
    with pytest.raises(SizeMismatch, match=f"{wrong} heads"):
        jaxtp.make_plan(structs(shapes), {"tp": 2}, heads=wrong)


UNITS = st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple)


@given(units=UNITS, cut=st.integers(1, 64))
def test_splits_keeps_units_whole(units, cut):
    """A piece is some of one factor's units with everything minor to them, or it divides a unit."""
    total = math.prod(units)
    piece = total // cut
    tails = [math.prod(units[k + 1 :]) for k in range(len(units))]
    whole = total % cut == 0 and any(
        piece % tail == 0 and count % (piece // tail) == 0
        for count, tail in zip(units, tails, strict=True)
        if piece >= tail
    )
    assert splits(units, cut) == whole
    assert (cut in legal_ways(units)) == whole


@given(units=UNITS)
def test_legal_ways_are_closed_downwards_for_one_factor(units):
    legal = legal_ways(units)
    assert legal[0] == 1
    assert legal[-1] == math.prod(units)
    assert legal == sorted(set(legal))
    if len(units) == 1:
        assert legal == [n for n in range(1, units[0] + 1) if units[0] % n == 0]


@given(
    factors=st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3),
    dp=st.integers(1, 4),
    units=UNITS,
)
def test_factored_meshes(factors, dp, units):
    tp = math.prod(factors)
    shape = MeshShape.of({"dp": dp, "tp": tp})
    factored = shape.factored(factors)
    assert factored.tp_size == shape.tp_size == tp
    assert factored.num_devices == dp * tp
    assert factored.expand(["tp"]) == factored.tp
    assert factored.ways(factored.prefixes()[0]) == tp
    fit = factored.fit(units)
    assert fit == factored.tp[: len(fit)]
    assert splits(units, factored.ways(fit))
    assert MeshShape.of(factored) == factored


@pytest.mark.parametrize("listed", [0, 16], ids=["dense", "experts"])
def test_planning_is_linear_in_leaves(listed):
    """Counted in function calls, which unlike seconds do not depend on what else runs."""

    def calls(num_layers):
        shapes = llama(num_layers=num_layers)
        for i in range(num_layers):
            for e in range(listed):
                shapes |= mlp(64, 128, f"layers/{i}/moe/experts/{e}")
        tree = structs(shapes)
        with cProfile.Profile() as profile:
            jaxtp.make_plan(tree, {"tp": 8})
        return pstats.Stats(profile).total_calls

    calls(2)  # fills the caches
    assert calls(80) < 2.05 * calls(40)


def test_junk_dtypes_and_scalars():
    tree = {
        "step": jax.ShapeDtypeStruct((), "int32"),
        "empty": jax.ShapeDtypeStruct((0, 8), "float32"),
        "attn": {"q": {"kernel": jax.ShapeDtypeStruct((8, 8), "int8")}},
    }
    plan = jaxtp.make_plan(tree, {"tp": 4})
    check_legal(plan, {"attn/q/kernel": (8, 8), "empty": (0, 8), "step": ()})
