"""Activation constraints: what they say, where they work, nothing without a plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtp.activations.by_name import ACTIVATIONS, constrain, spread, use_plan
from jaxtp.errors import SizeMismatch, UnknownActivation
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.plan.decisions import Plan

FREE = PartitionSpec.UNCONSTRAINED
FACTORED = MeshShape.of({"dp": 2, "tp": 4}).factored((2, 2))


def plan_on(shape, **options):
    """A plan about activations only, and its jax mesh."""
    whole = make_mesh(**dict(shape.whole))
    return Plan(mesh=shape, decisions=(), **options), plan_mesh(whole, shape)


def placed(plan, x, name, units=None):
    """The PartitionSpec that `constrain` asks for, with FREE where it asks for nothing."""
    with use_plan(*plan):
        jaxpr = jax.make_jaxpr(lambda x: constrain(x, name, units))(x)
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "sharding_constraint"]
    spec = tuple(eqn.params["sharding"].spec)
    return tuple(
        FREE if d in eqn.params["unconstrained_dims"] else spec[d] if d < len(spec) else None
        for d in range(x.ndim)
    )


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_without_a_plan_nothing_happens(name):
    x = jnp.ones((2,) * len(ACTIVATIONS[name]))
    assert constrain(x, name) is x


TP = ("tp_0", "tp_1")


@pytest.mark.parametrize(
    ("name", "shape", "units", "want"),
    [
        ("tokens", (4, 8), None, ("dp", None)),
        ("residual", (4, 8, 16), None, ("dp", None, None)),
        ("block_input", (4, 8, 16), None, ("dp", None, None)),
        ("mlp", (4, 8, 16), None, ("dp", None, TP)),
        ("logits", (4, 8, 51), None, ("dp", None, None)),  # 51 columns: no prefix of tp divides
        ("logits", (4, 8, 50), None, ("dp", None, "tp_0")),  # 50: the outer factor does
        ("heads", (4, 8, 8, 16), (2, 4), ("dp", None, TP, None)),
        ("heads", (4, 8, 6, 16), (6, 1), ("dp", None, "tp_0", None)),
        ("heads", (4, 8, 40, 16), (10, 4), ("dp", None, "tp_0", None)),  # replicated kv heads
        ("heads", (4, 8, 5, 16), (5, 1), ("dp", None, None, None)),
        ("kv_heads", (4, 8, 2, 16), None, ("dp", None, "tp_0", None)),
        ("residual", (3, 8, 16), None, (FREE, None, None)),  # uneven batch: no constraint
    ],
)
def test_where_each_activation_goes(name, shape, units, want):
    assert placed(plan_on(FACTORED), jnp.ones(shape), name, units) == want


@pytest.mark.parametrize(
    ("name", "shape", "want"),
    [
        ("residual", (4, 8, 16), ("dp", TP, None)),
        ("residual", (4, 6, 16), ("dp", FREE, None)),
        ("block_input", (4, 8, 16), ("dp", None, None)),
        ("mlp", (4, 8, 16), ("dp", None, TP)),
    ],
)
def test_sequence_parallel_cuts_the_residual_stream_only(name, shape, want):
    assert placed(plan_on(FACTORED, sequence_parallel=True), jnp.ones(shape), name) == want


def test_batch_goes_over_all_data_axes():
    shape = MeshShape.of({"dp": 2, "fsdp": 2, "tp": 2})
    assert placed(plan_on(shape), jnp.ones((4, 8)), "tokens") == (("dp", "fsdp"), None)


@pytest.mark.parametrize("active", [False, True])
def test_unknown_name_is_an_error_with_and_without_a_plan(active):
    x = jnp.ones((2, 4, 8))

    def call():
        with pytest.raises(UnknownActivation, match=r"TP072: .*'residul'\n  fix: .*residual"):
            constrain(x, "residul")

    if active:
        with use_plan(*plan_on(FACTORED)):
            call()
    else:
        call()


def test_wrong_rank_is_an_error():
    with pytest.raises(SizeMismatch, match=r"TP003 at heads: 3 dims \(2, 4, 8\)"):
        constrain(jnp.ones((2, 4, 8)), "heads")


def test_plan_and_mesh_must_agree():
    plan, _ = plan_on(FACTORED)
    with (
        pytest.raises(SizeMismatch, match=r"TP003: .*tp_0=2 x tp_1=2.*tp=8"),
        use_plan(plan, make_mesh(tp=8)),
    ):
        pass


def doubled(x):
    return constrain(2 * x, "mlp")


TRANSFORMS = {
    "jit": lambda x: doubled(x),
    "grad": lambda x: jax.grad(lambda x: jnp.sum(doubled(x) ** 2))(x),
    "remat": lambda x: jax.grad(lambda x: jnp.sum(jax.checkpoint(doubled)(x) ** 2))(x),
    "scan": lambda x: jax.lax.scan(lambda x, _: (doubled(x), None), x, length=3)[0],
    "vmap": lambda x: jax.vmap(doubled)(jnp.stack([x, x + 1])),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_constraints_hold_inside_transforms(transform):
    x = jnp.arange(4 * 8 * 16, dtype=jnp.float32).reshape(4, 8, 16)
    f = TRANSFORMS[transform]
    plan, mesh = plan_on(FACTORED)
    with use_plan(plan, mesh):
        got = jax.jit(f)(x)
    np.testing.assert_allclose(got, f(x), rtol=1e-6)
    entries = ("dp", None, TP)
    spec = PartitionSpec(*((None,) if got.ndim == 4 else ()), *entries)
    assert got.sharding.is_equivalent_to(NamedSharding(mesh, spec), got.ndim)


def test_jit_sees_the_plan_change():
    traces = []

    @jax.jit
    def f(x):
        traces.append(1)
        return constrain(x, "mlp")

    x = jnp.ones((4, 8, 16))
    assert f(x).sharding.num_devices == 1
    with use_plan(*plan_on(FACTORED)):
        assert f(x).sharding.num_devices == 8  # not the program cached without a plan
    with use_plan(*plan_on(FACTORED)):
        f(x)  # an equal plan: from the cache
    assert f(x).sharding.num_devices == 1
    assert len(traces) == 2


def test_plans_nest_and_end_with_their_block():
    x = jnp.ones((4, 8, 16))
    outer, inner = plan_on(FACTORED, sequence_parallel=True), plan_on(FACTORED)
    with use_plan(*outer):
        assert placed(inner, x, "residual") == ("dp", None, None)
        jaxpr = jax.make_jaxpr(lambda x: constrain(x, "residual"))(x)
        assert jaxpr.eqns[0].params["sharding"].spec == PartitionSpec("dp", TP, None)
    with pytest.raises(RuntimeError), use_plan(*outer):
        raise RuntimeError
    assert constrain(x, "residual") is x


@pytest.mark.parametrize(
    ("axes", "want"), [({"dp"}, (None, None, TP)), ({"dp", *TP}, None)], ids=["dp", "all"]
)
def test_inside_a_shard_map_the_other_axes_are_left_to_say(axes, want):
    plan, mesh = plan_on(FACTORED)
    x = jnp.arange(4 * 8 * 16.0).reshape(4, 8, 16)
    spec = PartitionSpec("dp")
    specs = {"in_specs": spec, "out_specs": spec, "axis_names": axes, "check_vma": False}
    seen = jax.shard_map(lambda x: constrain(2 * x, "mlp"), mesh=mesh, **specs)
    with use_plan(plan, mesh):
        (inner,) = [e.params["jaxpr"] for e in jax.make_jaxpr(seen)(x).eqns]
        np.testing.assert_array_equal(jax.jit(seen)(x), 2 * x)
    found = [tuple(e.params["sharding"].spec) for e in inner.eqns if "sharding" in e.params]
    assert found == ([] if want is None else [want])


def test_constraints_hold_inside_a_shard_map_over_stages():
    shape = MeshShape.of({"pp": 2, "tp": 4})
    plan, mesh = plan_on(shape)
    x = jnp.arange(2 * 2 * 4 * 8, dtype=jnp.float32).reshape(2, 2, 4, 8)

    def stage(x):
        return doubled(x[0])[None]

    spec = PartitionSpec("pp")
    f = jax.shard_map(stage, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"pp"})
    with use_plan(plan, mesh):
        got = jax.jit(f)(x)
    np.testing.assert_array_equal(got, 2 * x)
    want = NamedSharding(mesh, PartitionSpec("pp", None, None, "tp"))
    assert got.sharding.is_equivalent_to(want, 4)


@pytest.mark.parametrize(
    ("factors", "units", "copies"),
    [
        ((4, 2), (4, 4), 2),  # each kv head on two devices
        ((2, 4), (4, 4), 2),  # the same on another factoring: only as many copies as needed
        ((8,), (8, 2), 1),
        ((8,), (16, 1), 1),
        ((8,), (1, 8), 8),  # one kv head for all
        ((8,), (5, 5), 1),  # nothing divides: nothing is split, nothing copied
    ],
)
def test_spread_gives_each_device_its_own_copy(factors, units, copies):
    plan, mesh = plan_on(MeshShape((("tp", 8),)).factored(factors))
    w = jnp.arange(3 * units[0] * 2, dtype=jnp.float32).reshape(3, units[0], 2)
    assert spread(w, "kv_kernel", units) is w
    with use_plan(plan, mesh):
        got = jax.jit(lambda w: spread(w, "kv_kernel", units))(w)
        slopes = jax.jit(jax.grad(lambda w: jnp.sum(spread(w, "kv_kernel", units))))(w)
    np.testing.assert_array_equal(got, np.repeat(w, copies, axis=1))
    np.testing.assert_array_equal(slopes, np.full(w.shape, copies))
    if copies > 1:
        assert got.sharding.shard_shape(got.shape)[1] == 1
