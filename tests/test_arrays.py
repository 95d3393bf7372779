"""`shard`, `unshard`, `shard_batch`: right place, right numbers, errors before the first byte."""

import dataclasses
import warnings

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from rounding import bound
from small_models import MESHES, MODELS, NNXModel, abstract, make, mesh, tokens

from jaxtp import errors
from jaxtp.mesh.axes import MeshShape
from jaxtp.placement.arrays import shard, shard_batch, unshard
from jaxtp.placement.init import init_sharded
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.plan.specs import canonical
from jaxtp.plan.stored_form import Blocks, mask_padding
from jaxtp.plan.trees import leaves
from jaxtp.rules.planner import make_plan

P = PartitionSpec


def hand_plan(shape: MeshShape, **specs: tuple[tuple[int, ...], PartitionSpec]) -> Plan:
    """A plan written by hand: path -> (shape, spec)."""
    return Plan(
        mesh=shape,
        decisions=tuple(
            ParamDecision(
                path=path,
                shape=dims,
                dtype="float32",
                spec=canonical(spec, len(dims)),
                role="given",
                reasons=("test",),
            )
            for path, (dims, spec) in specs.items()
        ),
    )


def data(leaf):
    """The numbers of a leaf; random keys as their data."""
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


def assert_same(tree, other):
    assert type(tree) is type(other)
    assert jax.tree.structure(tree) == jax.tree.structure(other)
    for (path, leaf), (_, want) in zip(leaves(tree), leaves(other), strict=True):
        np.testing.assert_array_equal(data(leaf), data(want), err_msg=path)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_shard_places_every_leaf_as_planned_and_unshard_brings_it_back(name, sizes):
    params, target = make(name), mesh(*sizes)
    plan = make_plan(params, target)
    placed = shard(params, target)
    for path, leaf in leaves(placed):
        assert canonical(leaf.sharding.spec, leaf.ndim) == plan[path].spec, path
        assert tuple(leaf.sharding.mesh.shape.items()) == plan.mesh.sizes
        assert set(leaf.sharding.mesh.axis_types) == {AxisType.Auto}
        assert leaf.committed
        held = leaf.addressable_shards[0].data.nbytes if plan[path].shape else 0
        assert held in (0, plan[path].bytes_per_device(plan.mesh))
    host = unshard(placed)
    assert_same(host, params)
    assert all(isinstance(x, np.ndarray | np.generic) or "key" in p for p, x in leaves(host))


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
ENTRIES = st.sampled_from([None, "dp", "tp_0", "tp_1", ("tp_0", "tp_1"), ("dp", "tp_1")])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SIZES, ENTRIES), max_size=3))
def test_any_legal_spec_is_obeyed_and_any_other_is_refused(dims):
    shape = MeshShape.of({"dp": 2, "tp": 4}).factored((2, 2))
    sizes, spec = tuple(n for n, _ in dims), P(*(entry for _, entry in dims))
    x = np.arange(np.prod(sizes, initial=1), dtype=np.float32).reshape(sizes)
    used = [a for e in spec if e for a in ((e,) if isinstance(e, str) else e)]
    if len(used) != len(set(used)):
        with pytest.raises(errors.BadSpec, match="TP044"):
            canonical(spec, len(sizes))
        return
    plan = hand_plan(shape, w=(sizes, spec))
    if any(n % shape.ways(axes) for n, axes in zip(sizes, plan["w"].spec, strict=True)):
        with pytest.raises(errors.SizeMismatch, match="TP003 at w"):
            shard({"w": x}, mesh(2, 4), plan=plan)
        return
    placed = shard({"w": x}, mesh(2, 4), plan=plan)["w"]
    want = NamedSharding(placed.sharding.mesh, spec)
    assert placed.sharding.is_equivalent_to(want, placed.ndim)
    for piece in placed.addressable_shards:
        np.testing.assert_array_equal(piece.data, x[piece.index])
    np.testing.assert_array_equal(unshard({"w": placed}, plan)["w"], x)


def test_containers_and_boxes_are_kept():
    params = make("linen")
    frozen = flax.core.freeze(params)
    assert_same(unshard(shard(frozen, mesh(1, 8))), frozen)
    boxed = jax.tree.map(lambda x: nn.LogicallyPartitioned(x, names=("embed",) * x.ndim), params)
    placed = shard(boxed, mesh(1, 8))
    assert isinstance(placed["embed"]["embedding"], nn.LogicallyPartitioned)
    assert canonical(placed["embed"]["embedding"].value.sharding.spec, 2) == (("tp",), ())
    assert_same(unshard(placed), boxed)


def test_an_nnx_module_stays_a_module_and_tied_variables_stay_tied():
    model = make("nnx")
    placed = shard(model, mesh(2, 4))
    assert isinstance(placed, NNXModel)
    assert placed.head is placed.embed
    assert placed is not model
    assert isinstance(shard(nnx.state(model), mesh(2, 4)), nnx.State)


@pytest.mark.parametrize("name", MODELS)
def test_structs_come_back_with_shardings(name):
    plan = make_plan(make(name), mesh(2, 4))
    for target in (mesh(2, 4), mesh(2, 4).abstract_mesh, {"dp": 2, "tp": 4}):
        for path, leaf in leaves(shard(abstract(name), target)):
            assert isinstance(leaf, jax.ShapeDtypeStruct)
            assert leaf.shape == plan[path].shape
            assert canonical(leaf.sharding.spec, len(leaf.shape)) == plan[path].spec
            assert tuple(leaf.sharding.mesh.shape.items()) == plan.mesh.sizes


def test_arrays_need_devices():
    with pytest.raises(errors.BadMesh, match="TP010"):
        shard(make("linen"), {"tp": 8})
    with pytest.raises(errors.BadMesh, match="TP010"):
        shard(make("linen"), AbstractMesh((8,), ("tp",)))


def test_host_arrays_are_sliced_and_copied():
    host = np.ones((16, 64), np.float32)
    plan = hand_plan(MeshShape.of({"dp": 1, "tp": 8}), w=((16, 64), P(None, "tp")))
    placed = shard({"w": host}, mesh(1, 8), plan=plan)["w"]
    host[:] = 7
    assert {s.data.shape for s in placed.addressable_shards} == {(16, 8)}
    assert float(placed.sum()) == 16 * 64


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("old", [P("tp"), P("dp", "tp"), P(), P(("dp", "tp"))], ids=str)
def test_resharding_never_passes_through_the_host(old, kind):
    x = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    plan = hand_plan(
        MeshShape.of({"dp": 2, "tp": 4}).factored((2, 2)), w=(x.shape, P(None, "tp_0"))
    )
    source = jax.device_put(x, NamedSharding(mesh(2, 4, kind), old))
    with jax.transfer_guard_device_to_host("disallow"):
        placed = shard({"w": source}, mesh(2, 4, kind), plan=plan)["w"]
    assert {s.data.shape for s in placed.addressable_shards} == {(64, 32)}
    np.testing.assert_array_equal(placed, x)
    np.testing.assert_array_equal(source, x)


@pytest.mark.parametrize(("spec", "rows"), [(P("tp"), 1), (P(), 8)], ids=str)
def test_arrays_from_one_device_and_from_fewer_devices(spec, rows):
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    plan = hand_plan(MeshShape.of({"dp": 1, "tp": 8}), w=(x.shape, spec))
    two = jax.device_put(x, NamedSharding(mesh(1, 2), P(None, "tp")))
    one = jax.device_put(x, jax.devices()[3])
    for source in (two, one, jnp.asarray(x)):
        placed = shard({"w": source}, mesh(1, 8), plan=plan)["w"]
        assert {s.data.shape for s in placed.addressable_shards} == {(rows, 8)}
        np.testing.assert_array_equal(placed, x)
        placed.delete()
        np.testing.assert_array_equal(source, x)  # it did not share its memory


def test_what_lies_right_is_not_copied():
    placed = shard(make("linen"), mesh(2, 4))
    again = shard(placed, mesh(2, 4))
    for (path, a), (_, b) in zip(leaves(placed), leaves(again), strict=True):
        assert a is b, path


def test_numbers_keys_and_integers():
    tree = {
        "w": jnp.ones((8, 8)),
        "step": 3,
        "rate": np.float64(0.5),
        "key": jax.random.key(1),
        "raw": jax.random.PRNGKey(1),
        "ids": np.arange(8),
        "flag": True,
    }
    shape = MeshShape.of({"dp": 1, "tp": 8})
    dims = {k: ((), P()) for k in ("step", "rate", "key", "flag")}
    plan = hand_plan(shape, w=((8, 8), P("tp")), raw=((2,), P()), ids=((8,), P("tp")), **dims)
    placed = shard(tree, mesh(1, 8), plan=plan)
    assert all(len(x.sharding.device_set) == 8 for _, x in leaves(placed))
    assert not placed["step"].weak_type
    assert placed["step"].dtype == jnp.int32
    assert placed["rate"].dtype == jnp.float32
    assert jax.random.key_impl(placed["key"]) == jax.random.key_impl(tree["key"])
    host = unshard(placed, plan)
    assert host["step"] == 3
    assert_same(host["key"], tree["key"])
    assert isinstance(host["ids"], np.ndarray)


def test_everything_is_checked_before_anything_moves(monkeypatch):
    plan = hand_plan(
        MeshShape.of({"dp": 1, "tp": 8}),
        a=((64, 32001), P(None, "tp")),
        b=((2, 128), P("tp")),
        c=((5,), P("model")),
        d=((8,), P("tp")),
    )
    tree = {d.path: np.zeros(d.shape, np.float32) for d in plan.decisions}
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *_: pytest.fail("moved"))
    with pytest.raises(errors.SizeMismatch) as caught:
        shard(tree, mesh(1, 8), plan=plan)
    text = str(caught.value)
    assert "TP003 at a: dim 1 of shape (64, 32001) has size 32001" in text
    assert "1, 3, 10667, 32001 ways; or make the size 32008" in text
    assert "TP003 at b: dim 0 of shape (2, 128) has size 2" in text
    assert "TP044 at c: the spec P(model) uses model" in text
    assert "at d" not in text


def test_the_plan_of_another_model_is_refused():
    plan = hand_plan(MeshShape.of({"tp": 8}), **{"a/w": ((8, 8), P("tp"))})
    good = np.ones((8, 8), np.float32)
    with pytest.raises(errors.PlanMismatch, match=r"TP045 at b/w: .*no such path"):
        shard({"a": {"w": good}, "b": {"w": good}}, mesh(1, 8), plan=plan)
    with pytest.raises(errors.PlanMismatch, match=r"TP045 at a/w: .*\(8,\).*\(8, 8\)"):
        shard({"a": {"w": good[0]}}, mesh(1, 8), plan=plan)


def test_options_beside_a_plan_are_refused():
    plan = make_plan(make("linen"), mesh(1, 8))
    with pytest.raises(errors.BadConfig, match=r"TP020.*heads"):
        shard(make("linen"), mesh(1, 8), plan=plan, heads=8)


def test_axes_by_other_names():
    target = mesh(2, 4, names=("data", "model"))
    with pytest.raises(errors.NoTensorAxis, match="TP013"):
        shard(make("linen"), target)
    placed = shard(make("linen"), target, axis_names={"tp": "model", "dp": "data"})
    assert placed["embed"]["embedding"].sharding.spec == P("model")


@pytest.mark.parametrize("ambient", [False, True])
@pytest.mark.parametrize("name", ["linen", "linen_12_heads", "nnx"])
def test_explicit_meshes_serve_unmodified_models(name, ambient):
    """M1: on arrays with Explicit axes the stock modules raise."""
    target = mesh(2, 4, AxisType.Explicit)
    want = MODELS[name].apply(make(name), jnp.asarray(tokens()))
    if ambient:
        with jax.set_mesh(target):
            params, batch = shard(make(name), target), shard_batch(tokens(), target)
    else:
        params, batch = shard(make(name), target), shard_batch(tokens(), target)
    got = jax.jit(MODELS[name].apply)(params, batch)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("source", ["host", "one device", "mesh"])
def test_a_padded_vocabulary_is_zero_behind_its_end_and_cut_off_again(source):
    table = np.arange(50.0, dtype=np.float32).reshape(10, 5) + 1
    plan = hand_plan(MeshShape.of({"dp": 2, "tp": 4}), **{"embed/table": ((10, 5), P("tp"))})
    blocks = Blocks(dim=0, pieces=((0, 10),), block=12)
    padded = dataclasses.replace(plan["embed/table"], padding=(blocks,))
    plan = dataclasses.replace(plan, decisions=(padded,))
    tree = {"host": table, "one device": jnp.asarray(table)}
    tree["mesh"] = jax.device_put(table, NamedSharding(mesh(2, 4), P("dp")))
    placed = shard({"embed": {"table": tree[source]}}, mesh(2, 4), plan=plan)
    stored = placed["embed"]["table"]
    assert stored.shape == (12, 5)
    assert {s.data.shape for s in stored.addressable_shards} == {(3, 5)}
    np.testing.assert_array_equal(stored[10:], 0)
    np.testing.assert_array_equal(unshard(placed, plan)["embed"]["table"], table)
    # What is stored already is not padded a second time.
    np.testing.assert_array_equal(shard(placed, mesh(2, 4), plan=plan)["embed"]["table"], stored)


def test_mask_padding_changes_no_probability_and_no_gradient():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 10))
    padded = jnp.pad(logits, ((0, 0), (0, 0), (0, 2)), constant_values=5.0)

    def loss(x):
        return -jax.nn.log_softmax(x)[..., 3].mean()

    masked = mask_padding(padded, 10)
    np.testing.assert_allclose(
        jax.nn.softmax(masked)[..., :10], jax.nn.softmax(logits), rtol=bound(10)
    )
    got = jax.grad(lambda x: loss(mask_padding(x, 10)))(padded)
    np.testing.assert_allclose(got[..., :10], jax.grad(loss)(logits), rtol=bound(10))
    np.testing.assert_array_equal(got[..., 10:], 0)
    for dtype in (jnp.bfloat16, jnp.float16):
        half = mask_padding(padded.astype(dtype), 10)
        assert half.dtype == dtype
        assert jnp.isfinite(half - half.max()).all()
    assert mask_padding(logits, 10) is logits
    with pytest.raises(errors.SizeMismatch, match="TP003"):
        mask_padding(logits, 11)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batches_are_never_cut_over_the_tensor_axis(kind):
    """M7: tokens, segment ids and masks, of any rank."""
    batch = {
        "tokens": tokens(),
        "segment_ids": jnp.asarray(tokens(1)),
        "mask": jax.device_put(tokens(2) > 0, NamedSharding(mesh(2, 4), P(None, "dp"))),
        "scale": 0.5,
        "shape": jax.ShapeDtypeStruct((8, 4, 4), jnp.float32),
    }
    placed = shard_batch(batch, mesh(2, 4, kind))
    for path, leaf in leaves(placed):
        want = (("dp",), (), ())[: len(leaf.shape)]
        assert canonical(leaf.sharding.spec, len(leaf.shape)) == want, path
    np.testing.assert_array_equal(placed["tokens"], batch["tokens"])
    np.testing.assert_array_equal(placed["mask"], batch["mask"])


def test_a_batch_that_does_not_divide_names_its_path():
    with pytest.raises(errors.SizeMismatch, match=r"TP003 at mask: dim 0 .* 3, .* 2 ways over dp"):
        shard_batch({"tokens": tokens()[:1], "mask": np.ones((3, 2))}, mesh(2, 4))
    with pytest.raises(errors.SizeMismatch, match="TP003 at batch"):
        shard_batch(np.ones((3, 2)), mesh(2, 4))


def test_what_is_no_batch_beside_a_batch_is_replicated():
    batch = {
        "tokens": tokens(),
        "positions": np.arange(6)[None],
        "mask": np.ones((5, 5)),
        "key": jax.random.key(0),
        "keys": jax.random.split(jax.random.key(0), 4),
        "raw_key": jax.random.PRNGKey(0),
        "scale": 2.0,
    }
    placed = shard_batch(batch, mesh(2, 4))
    sharded = {path for path, leaf in leaves(placed) if any(leaf.sharding.spec)}
    assert sharded == {"tokens"}


def test_local_rows_of_one_process_are_the_global_batch():
    batch = {"tokens": tokens(), "positions": np.arange(6)[None]}
    for (path, a), (_, b) in zip(
        leaves(shard_batch(batch, mesh(2, 4), local=True)),
        leaves(shard_batch(batch, mesh(2, 4))),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b, err_msg=path)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


def test_a_plan_is_applied_to_its_own_tree_and_mesh():
    tree = {"up": {"kernel": np.ones((32, 128))}, "down": {"kernel": np.ones((128, 32))}}
    plan = make_plan(tree, mesh(2, 4))
    for other in ({"x": np.ones((512, 512))}, {"up": tree["up"]}, {**tree, "x": np.ones((4, 4))}):
        with pytest.raises(errors.PlanMismatch, match="TP045"):
            shard(other, mesh(2, 4), plan=plan)
    for target in (mesh(4, 2), mesh(2, 4, names=("data", "tp")), mesh(1, 8)):
        with pytest.raises(errors.BadMesh, match=r"TP010: the mesh is .* the plan was made for"):
            shard(tree, target, plan=plan)
    assert shard(tree, mesh(2, 4), plan=plan)


def test_a_plan_that_nobody_has_seen_warns_once_where_nothing_is_sharded():
    def init():
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        return {name: {"kernel": jnp.ones((64, 64))} for name in names}

    with pytest.warns(errors.JaxtpWarning, match="TP042.*\n  fix: give heads=.* fn=") as seen:
        shard(init(), mesh(2, 4))
    assert len(seen) == 1
    assert shard(init(), mesh(2, 4), plan=make_plan(init(), mesh(2, 4)))


def test_explicit_axes_are_warned_of_once_with_the_line_that_makes_them_auto():
    target = mesh(2, 4, AxisType.Explicit)
    with pytest.warns(errors.JaxtpWarning, match="TP010: the mesh has Explicit axes") as seen:
        placed = shard(make("linen"), target)
    assert [warning.filename for warning in seen] == [__file__]
    line = str(seen[0].message).split("\n  fix: mesh = ")[1].split(", or ")[0]
    again = eval(line, {"jax": jax})
    assert again == leaves(placed)[0][1].sharding.mesh
    batch = jax.device_put(tokens(), NamedSharding(again, P("dp")))
    with warnings.catch_warnings(action="error"), jax.set_mesh(again):
        got = jax.jit(MODELS["linen"].apply)(shard(make("linen"), again), batch)
    want = MODELS["linen"].apply(make("linen"), jnp.asarray(tokens()))
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 8)], ids=str)
def test_boxes_that_name_no_axis_of_the_mesh_say_where_their_arrays_lie(sizes):
    """Under `jax.set_mesh` Flax constrains arrays by the names on their boxes."""

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.initializers.lecun_normal()
            up = nn.Dense(12, kernel_init=nn.with_partitioning(init, ("model", None)))
            return nn.Dense(8, kernel_init=nn.with_partitioning(init, ("tp", None)))(up(x))

    model, x, target = Model(), jnp.ones((8, 8)), mesh(*sizes)
    params = model.init(jax.random.key(0), x)["params"]
    with pytest.warns(errors.JaxtpWarning, match="1 annotations name 'model'"):
        placed = shard(params, target)
    names = placed["Dense_0"]["kernel"].names
    assert names == ((None, "tp") if sizes == (2, 4) else (None, P.UNCONSTRAINED))
    assert placed["Dense_1"]["kernel"].names == ("tp", None)
    with jax.set_mesh(target):
        got = jax.jit(lambda p: model.apply({"params": p}, x))(placed)
        with pytest.raises(errors.BadSpec, match=r"TP044: .*jax.set_mesh lacks: .*model"):
            init_sharded(lambda: model.init(jax.random.key(0), x)["params"], None, target)
    np.testing.assert_allclose(got, model.apply({"params": params}, x), rtol=bound(12))
