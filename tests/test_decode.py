"""Anybody's decode step: its cache in the plan, in place, and equal to the plain function."""

import functools
import inspect
import re
from collections import Counter

import cache_models
import compiled_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding

import jaxtp
from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse
from jaxtp.compile.options import PREFLIGHT
from jaxtp.errors import BadMesh, BadStep, PlanMismatch, SizeMismatch
from jaxtp.plan.inputs import INPUT, STATE

every_cache = pytest.mark.parametrize("name", cache_models.CASES)
# 24 positions or 12 ranks divide by no tensor-parallel size; dataflow overrules their names.
pytestmark = pytest.mark.filterwarnings("ignore:.*dataflow overrules names", "ignore:TP043")


@pytest.fixture(autouse=True)
def ranks_as_strangers_write_them():
    with jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def case(name):
    return cache_models.CASES[name]()


def inputs_of(one):
    """The state, a token of each row, and the position where the function takes it."""
    takes_position = len(inspect.signature(one.fn).parameters) == 4
    tokens = (jnp.arange(cache_models.BATCH) * 37 + 1).astype(jnp.int32)
    return (one.state, tokens, *([jnp.int32(0)] if takes_position else []))


def structs(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def planned(one, mesh, **options):
    return jaxtp.make_plan(one.params, mesh, fn=one.fn, inputs=inputs_of(one), **options)


@every_cache
def test_the_plan_is_what_an_expert_writes(name):
    one = case(name)
    plan = planned(one, {"dp": 2, "tp": 4})
    for decision in plan.inputs:
        if decision.argument in ("tok", "at"):
            assert decision.role == INPUT
            continue
        assert decision.role == STATE
        (want,) = (axes for path, axes in one.want.items() if re.search(path, decision.path))
        got = tuple(
            "kv" if set(axes) & set(plan.mesh.tp) else "".join(axes) for axes in decision.spec
        )
        assert got == want, plan.explain(decision.path)
        assert len(decision.reasons) == max(1, sum(size > 1 for size in decision.shape))
    assert jaxtp.Plan.from_json(plan.to_json()) == plan


@every_cache
def test_sixteen_steps_are_those_of_the_plain_function(name):
    one, mesh = case(name), jaxtp.make_mesh(dp=2, tp=4)
    plan = planned(one, mesh)
    params = jaxtp.shard(one.params, mesh, plan=plan)
    state, tokens, *position = inputs_of(one)
    placed = jaxtp.shard_inputs(state, plan, mesh)
    want_places = [x.sharding for x in jax.tree.leaves(placed)]
    step, plain = jaxtp.jit_decode(one.fn, plan, mesh), jax.jit(one.fn)
    for number in range(cache_models.STEPS):
        at = [jnp.int32(number)] if position else []
        want, state = plain(one.params, state, tokens, *at)
        got, placed = step(params, placed, tokens, *at)
        rounding.assert_close(got, want, terms=cache_models.MLP * cache_models.LAYERS)
        tokens = jnp.argmax(want, axis=-1).astype(jnp.int32)
        places = [x.sharding for x in jax.tree.leaves(placed)]
        assert all(map(jax.sharding.Sharding.is_equivalent_to, places, want_places, ranks(placed)))
    assert step.jitted._cache_size() == 1


def ranks(tree):
    return [x.ndim for x in jax.tree.leaves(tree)]


@every_cache
def test_the_gpu_program_sends_two_messages_a_layer(name):
    one, mesh = case(name), compiled_programs.gpu_mesh(1, 8)
    plan = planned(one, mesh)
    params = jaxtp.shard(structs(one.params), mesh, plan=plan)
    step = jaxtp.jit_decode(one.fn, plan, mesh)
    compiled = step.lower(params, *structs(inputs_of(one))).compile(dict(PREFLIGHT))
    found = find(parse(compiled.as_text()), dict(plan.mesh.sizes))
    sent = Counter({one.kind: 0 for one in found})
    for message in found:
        sent[message.kind] += message.count
    row = cache_models.BATCH * cache_models.WIDTH * 4
    # One all-reduce for the embedding; a fused qkv stored as published is put apart by a gather.
    want = {"all-reduce": 1 + one.per_layer * one.num_layers}
    if one.fused:
        want["all-gather"] = one.num_layers
    assert sent == want
    assert all(message.num_bytes <= row for message in found if message.kind == "all-reduce")
    kept = [d for d in plan.inputs if d.role == STATE]
    shapes = sum(d.bytes_per_device(plan.mesh) for d in kept)
    assert compiled.memory_analysis().alias_size_in_bytes == shapes


@pytest.mark.parametrize("sizes", [(1, 8), (4, 2)])
def test_a_single_row_is_looked_up_without_its_table(sizes, monkeypatch):
    monkeypatch.setattr(cache_models, "BATCH", sizes[0])
    one, mesh = cache_models.CASES["slices"](), compiled_programs.gpu_mesh(*sizes)
    plan = planned(one, mesh)
    params = jaxtp.shard(structs(one.params), mesh, plan=plan)
    step = jaxtp.jit_decode(one.fn, plan, mesh)
    compiled = step.lower(params, *structs(inputs_of(one))).compile(dict(PREFLIGHT))
    found = find(parse(compiled.as_text()), dict(plan.mesh.sizes))
    assert {message.kind for message in found} == {"all-reduce"}
    assert sum(message.count for message in found) == 1 + one.per_layer * one.num_layers


def test_fewer_kv_heads_than_devices_are_copied_never_divided():
    one = case("fewer kv heads")
    plan = planned(one, {"tp": 8})
    assert str(plan.mesh) == "tp_0=2 x tp_1=4"
    text = plan.explain("xs/0/zz")
    assert "P(-, -, tp_0, -)" in text
    assert "2 units, 2-way over tp_0 like `m/0/" in text
    assert "4 copies of each over tp_1, since a unit is never divided" in text
    assert "dim 3: not sharded, summed in a product of two activations" in text
    assert "xs/*/zz (x2)" in str(plan)
    assert "xs/*/zz (x2)" in plan._repr_html_()


def test_a_plan_that_replicates_heads_replicates_their_cache():
    plan = planned(case("fewer kv heads"), {"tp": 8}, policy="replicate")
    assert all(not any(d.spec) for d in plan.inputs)
    assert "2 units, of which the parameters of their group are replicated" in plan.explain(
        "xs/0/zz"
    )
    other = planned(case("fewer kv heads"), {"tp": 8})
    assert "xs/0/zz: P() -> P(-, -, tp_0, -)" in plan.diff(other)


def test_rows_that_do_not_divide_stay_together():
    one = case("slices")
    state, *rest = structs(inputs_of(one))
    plan = jaxtp.make_plan(one.params, {"dp": 8, "tp": 2}, fn=one.fn, inputs=(state, *rest))
    assert plan.inputs[0].spec == ((), (), ("tp",), ())
    assert "4 rows of the batch do not divide over dp" in plan.explain("xs/0/qp")


def test_inputs_of_other_sizes_and_all_at_once():
    one, mesh = case("slices"), jaxtp.make_mesh(dp=2, tp=4)
    plan = planned(one, mesh)
    longer = [{n: jnp.zeros((6, 40, 4, 16)) for n in ("zz", "qp")} for _ in range(2)]
    placed = jaxtp.shard_inputs(longer, plan, mesh)
    assert placed[1]["qp"].sharding.shard_shape((6, 40, 4, 16)) == (3, 40, 1, 16)
    cache, tokens, position = jaxtp.shard_inputs(inputs_of(one), plan)
    assert cache[0]["zz"].sharding.spec == placed[0]["zz"].sharding.spec
    assert tokens.sharding.shard_shape(tokens.shape) == (2,)
    assert position.sharding.is_fully_replicated
    shapes = jaxtp.shard_inputs(structs(one.state), plan, mesh)
    assert shapes[0]["zz"].sharding == cache[0]["zz"].sharding


def test_what_does_not_fit_the_plan_is_refused():
    one, mesh = case("slices"), jaxtp.make_mesh(dp=2, tp=4)
    plan = planned(one, mesh)
    state, tokens, position = inputs_of(one)
    without = jaxtp.make_plan(one.params, mesh)
    with pytest.raises(
        PlanMismatch, match=r"TP045 at plan.inputs: the plan was made without inputs"
    ):
        jaxtp.shard_inputs(state, without, mesh)
    with pytest.raises(PlanMismatch, match="no argument looks like this: zz"):
        jaxtp.shard_inputs({"zz": tokens}, plan, mesh)
    with pytest.raises(SizeMismatch, match=r"TP003 at xs/0/qp: dim 0 of \(3, 24, 4, 16\)"):
        jaxtp.shard_inputs(jax.tree.map(lambda x: x[:3], state), plan, mesh)
    with pytest.raises(BadMesh, match="TP010"):
        jaxtp.shard_inputs(state, planned(one, {"tp": 4}))
    step = jaxtp.jit_decode(one.fn, plan, mesh)
    params = jaxtp.shard(one.params, mesh, plan=plan)
    with pytest.raises(PlanMismatch, match="2 inputs, the plan was made for 3"):
        step(params, state, tokens)
    placed = jaxtp.shard_inputs(state, plan, mesh)
    step(params, placed, tokens, position)
    with pytest.raises(BadStep, match="TP133 at xs: it was given to an earlier call"):
        step(params, placed, tokens, position)
    lost = jaxtp.jit_decode(lambda *args: one.fn(*args)[0], plan, mesh)
    with pytest.raises(BadStep, match="no result is float32"):
        lost(params, state, tokens, position)
    assert not state[0]["zz"].is_deleted()
    np.testing.assert_array_equal(state[0]["zz"], 0)


def test_a_typed_random_key_goes_where_its_argument_goes():
    def step(params, x, once, key):
        noise = jax.random.normal(jax.random.fold_in(once, 1), x.shape)
        return (x + noise) @ params["w"], jax.random.split(key)[0]

    params, x = {"w": jnp.zeros((8, 16))}, jnp.zeros((2, 8))
    inputs = (x, jax.random.key(0), jax.random.key(1))
    plan = jaxtp.make_plan(params, {"tp": 4}, fn=step, inputs=inputs, strict=False)
    assert [(d.argument, d.spec) for d in plan.inputs[1:]] == [("once", ()), ("key", ())]
    assert jaxtp.Plan.from_json(plan.to_json()) == plan
