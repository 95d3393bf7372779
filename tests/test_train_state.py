"""Optimizer state follows its parameters; rows S2 to S4 of the case table."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optimizers import OPTIMIZERS, SPECS, fresh_params
from small_models import MODELS, abstract, make, mesh
from test_arrays import assert_same, hand_plan

from jaxtp import errors
from jaxtp.mesh.axes import MeshShape
from jaxtp.placement.arrays import shard, unshard
from jaxtp.placement.init import init_optimizer, init_sharded
from jaxtp.placement.train_state import state_specs
from jaxtp.plan.specs import canonical
from jaxtp.plan.trees import as_pytree, leaves
from jaxtp.rules.planner import make_plan

P = PartitionSpec


def small_plan(dp=2, tp=4):
    shape = MeshShape.of({"dp": dp, "tp": tp})
    sizes = {path: (leaf.shape, SPECS[path]) for path, leaf in leaves(fresh_params())}
    return hand_plan(shape, **sizes)


def specs_of(tree):
    return {p: canonical(x.sharding.spec, x.ndim) for p, x in leaves(tree)}


def owner(path):
    """The parameter whose path a path ends in, found without the code under test."""
    return next((name for name in SPECS if path == name or path.endswith("/" + name)), None)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_leaf_of_every_optimizer_is_placed(name):
    tx, plan = OPTIMIZERS[name], small_plan()
    params = shard(fresh_params(), mesh(2, 4), plan=plan)
    state = init_optimizer(tx, params)
    want = jax.jit(tx.init)(fresh_params())
    assert jax.tree.structure(state) == jax.tree.structure(want)
    for (path, leaf), (_, host) in zip(leaves(state), leaves(want), strict=True):
        np.testing.assert_array_equal(leaf, host, err_msg=path)
        assert leaf.sharding.mesh == mesh(2, 4), path
        name = owner(path)
        if name and leaf.shape == plan[name].shape:
            assert canonical(leaf.sharding.spec, leaf.ndim) == plan[name].spec, path
        if leaf.ndim == 0:
            assert leaf.sharding.spec == P()
    # Three ways to the same places: from the arrays, from the plan, by moving a state that exists.
    by_plan = state_specs(jax.eval_shape(tx.init, params), plan)
    ranks = {path: leaf.ndim for path, leaf in leaves(state)}
    assert specs_of(state) == {p: canonical(spec, ranks[p]) for p, spec in leaves(by_plan)}
    assert specs_of(shard(want, mesh(2, 4), plan=plan)) == specs_of(state)


def test_the_bug_that_init_optimizer_is_for():
    """S3: jit alone puts Adam's moments on one device."""
    params = shard(fresh_params(), mesh(2, 4), plan=small_plan())
    alone = jax.jit(optax.adam(1e-3).init)(params)
    assert len(alone[0].mu["embed"]["table"].sharding.device_set) == 1
    state = init_optimizer(optax.adam(1e-3), params)
    assert state[0].mu["embed"]["table"].sharding == params["embed"]["table"].sharding
    moved = shard(alone, mesh(2, 4), plan=small_plan())
    assert specs_of(moved) == specs_of(state)


def test_adafactor_moments_lose_the_axes_of_the_reduced_dim():
    """S2, and stacked layers, and a square matrix whose factors look alike."""
    plan = hand_plan(
        MeshShape.of({"tp": 4}),
        w=((256, 512), P(None, "tp")),
        stack=((2, 256, 512), P(None, None, "tp")),
        square=((256, 256), P(None, "tp")),
        square_stack=((4, 256, 256), P(None, None, "tp")),
    )
    params = {d.path: jax.ShapeDtypeStruct(d.shape, jnp.float32) for d in plan.decisions}
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    specs = {p: s for p, s in leaves(state_specs(state, plan)) if p.startswith("0/v")}
    assert specs["0/v_row/w"] == P()  # (256,)
    assert specs["0/v_col/w"] == P("tp")  # (512,)
    assert specs["0/v/w"] == P()  # (1,)
    assert specs["0/v_row/stack"] == P()  # (2, 256)
    assert specs["0/v_col/stack"] == P(None, "tp")  # (2, 512)
    # Nothing tells the two apart by shape, so both are replicated: one vector.
    assert specs["0/v_row/square"] == specs["0/v_col/square"] == P()
    assert specs["0/v_row/square_stack"] == specs["0/v_col/square_stack"] == P()


def test_accumulators_per_dim_and_histories():
    plan = small_plan()
    params = jax.eval_shape(fresh_params)
    sm3 = dict(leaves(state_specs(jax.eval_shape(OPTIMIZERS["sm3"].init, params), plan)))
    assert sm3["0/mu/layers/up/kernel/0"] == P()
    assert sm3["0/mu/layers/up/kernel/2"] == P("tp")
    assert sm3["0/mu/embed/table/0"] == P("tp")
    lbfgs = dict(leaves(state_specs(jax.eval_shape(OPTIMIZERS["lbfgs"].init, params), plan)))
    assert lbfgs["0/diff_params_memory/embed/table"] == P(None, "tp")
    assert lbfgs["0/weights_memory"] == P()


def test_large_leaves_that_follow_nothing_are_refused():
    plan = small_plan()
    big = jax.ShapeDtypeStruct((1024, 1025), jnp.float32)
    state = {
        "shampoo": {"embed": {"table": {"left": jax.ShapeDtypeStruct((16, 16), jnp.float32)}}},
        "buffer": big,
        "statistics": jax.ShapeDtypeStruct((2, 1000), jnp.float32),
        "count": jax.ShapeDtypeStruct((), jnp.int32),
    }
    with pytest.raises(errors.StateNotPlaced) as caught:
        state_specs(state, plan)
    text = str(caught.value)
    assert "TP070 at shampoo/embed/table/left: shape (16, 16) belongs to the parameter" in text
    assert "TP070 at buffer: shape (1024, 1025) (4.2 MB) belongs to no parameter" in text
    assert 'state_overrides={"buffer": PartitionSpec(...)}' in text
    overrides = {r"table/left$": P("tp"), r"^buffer$": P("dp")}
    specs = state_specs(state, plan, state_overrides=overrides)
    assert specs["buffer"] == P("dp")
    assert specs["shampoo"]["embed"]["table"]["left"] == P("tp")
    assert specs["statistics"] == specs["count"] == P()


def test_overrides_are_checked_like_everything_else():
    plan = small_plan()
    state = jax.eval_shape(optax.adam(1e-3).init, fresh_params())

    def refuse(error, pattern, overrides):
        with pytest.raises(error, match=pattern):
            state_specs(state, plan, state_overrides=overrides)

    refuse(errors.UnusedOverride, r"TP040.*'0/mv'(.|\n)*0/mu", {"0/mv": P()})
    both = {"0/mu/embed": P(), "mu/embed/table": P("tp")}
    refuse(errors.ConflictingDecisions, "TP001 at 0/mu/embed/table", both)
    refuse(errors.SizeMismatch, r"TP003 at 0/mu/layers/up/bias.*4 ways", {"mu/.*bias": P("tp")})
    refuse(errors.BadSpec, "TP044 at 0/mu/norm/scale", {"mu/norm": P(None, "tp")})
    refuse(errors.BadSpec, "TP044 at 0/mu/norm/scale", {"mu/norm": P("model")})
    same = {"0/mu/embed": P("dp"), "mu/embed/table": P("dp", None)}
    assert state_specs(state, plan, state_overrides=same)[0].mu["embed"]["table"] == P("dp")


def test_overrides_may_name_the_whole_tensor_axis_of_a_factored_mesh():
    plan = make_plan(make("linen_12_heads"), mesh(1, 8))
    assert plan.mesh.tp == ("tp_0", "tp_1")
    state = jax.eval_shape(optax.adam(1e-3).init, make("linen_12_heads"))
    specs = state_specs(state, plan, state_overrides={"0/mu/final_norm": P("tp")})
    assert specs[0].mu["final_norm"]["scale"] == P(("tp_0", "tp_1"))


def test_the_state_of_another_model_is_refused():
    state = jax.eval_shape(optax.adam(1e-3).init, {**fresh_params(), "extra": np.ones((4, 4))})
    with pytest.raises(errors.PlanMismatch, match=r"TP045 at 0/mu/extra(.|\n)*0/nu/extra"):
        state_specs(state, small_plan())


def test_hyperparameters_may_have_the_names_of_parameters():
    """`inject_hyperparams(adam)` keeps scalars called b1 and b2 where toy models keep vectors."""
    params = {"b1": np.ones(8, np.float32), "w1": np.ones((8, 8), np.float32)}
    plan = hand_plan(MeshShape.of({"tp": 8}), b1=((8,), P("tp")), w1=((8, 8), P(None, "tp")))
    state = jax.eval_shape(optax.inject_hyperparams(optax.adam)(1e-3).init, params)
    specs = dict(leaves(state_specs(state, plan)))
    assert specs["hyperparams/b1"] == specs["hyperparams/learning_rate"] == P()
    assert specs["inner_state/0/mu/b1"] == P("tp")


def test_a_bare_array_is_a_tree_too():
    plan = hand_plan(MeshShape.of({"dp": 1, "tp": 8}), **{"": ((8, 4), P("tp"))})
    params = shard(np.ones((8, 4), np.float32), mesh(1, 8), plan=plan)
    state = init_optimizer(optax.adam(1e-3), params)
    assert state[0].mu.sharding.spec == P("tp")
    assert state[0].count.sharding.spec == P()


@pytest.mark.parametrize("name", ["linen", "linen_12_heads", "llama"])
def test_a_train_state_follows_the_plan_of_its_parameters(name):
    params, tx = make(name), optax.adamw(1e-3)
    if name == "llama":
        state = (params, nnx.Optimizer(params, tx, wrt=nnx.Param))
    else:
        state = TrainState.create(apply_fn=MODELS[name].apply, params=params, tx=tx)
    plan = make_plan(state, mesh(2, 4))
    assert plan == make_plan(params, mesh(2, 4))
    placed = shard(state, mesh(2, 4))
    for path, leaf in leaves(placed):
        found = [d for d in plan.decisions if path == d.path or path.endswith("/" + d.path)]
        want = found[0].spec if found else ()
        assert canonical(leaf.sharding.spec, leaf.ndim) == want, path
    assert_same(unshard(placed), state)


class Averaged(NamedTuple):
    """A train state of a user's own, whose fields Flax would call otherwise."""

    weights: Any
    optimizer: Any
    average: Any


OWN_STATES = {
    "tuple": lambda params, state: (params, state, np.zeros(())),
    "dict": lambda params, state: {"optimizer": state, "model": params},
    "fields": lambda params, state: Averaged(params, state, params),
}


@pytest.mark.parametrize("name", OWN_STATES)
@pytest.mark.parametrize("tx", [optax.sgd(1e-3), optax.adafactor(1e-3)], ids=["sgd", "adafactor"])
def test_a_state_of_ones_own_has_the_plan_of_its_parameters(name, tx):
    params = abstract("linen")
    state = OWN_STATES[name](params, jax.eval_shape(tx.init, params))
    assert make_plan(state, {"tp": 4}) == make_plan(params, {"tp": 4})


def test_what_is_no_train_state_is_planned_whole():
    """Parameters beside the optimizer of others, and two models beside an optimizer of one."""
    params, other = ({name: {"kernel": np.ones((8, 32))}} for name in ("up", "other"))
    state = jax.eval_shape(optax.adam(1e-3).init, params)
    for tree in ((other, state), (params, other, state)):
        assert len(make_plan(tree, {"tp": 4}).decisions) == len(leaves(tree))


def test_parameters_and_moments_of_a_state_of_ones_own_lie_apart():
    params, tx = fresh_params(), optax.adam(1e-3)
    plan = make_plan(params, {"fsdp": 2, "tp": 4}, zero=1)
    specs = state_specs(Averaged(params, tx.init(params), params), plan)
    assert specs.weights == specs.average == state_specs(params, plan)
    assert specs.optimizer[0].mu != specs.weights
    part = dict(list(params.items())[:1])
    with pytest.raises(errors.PlanMismatch, match="TP045 at weights: the tree has 1 of"):
        shard(Averaged(part, tx.init(part), part), jax.make_mesh((2, 4), ("fsdp", "tp")), plan=plan)


@pytest.mark.parametrize("name", MODELS)
def test_init_sharded_gives_the_numbers_of_one_device(name):
    want = jax.jit(lambda: as_pytree(MODELS[name].init())[0])()
    state = init_sharded(MODELS[name].init, optax.adamw(1e-3), mesh(2, 4))
    params = state[0] if isinstance(state, tuple) else state.params
    plan = make_plan(abstract(name), mesh(2, 4))
    assert specs_of(params) == {d.path: d.spec for d in plan.decisions}
    for (path, leaf), (_, host) in zip(leaves(params), leaves(want), strict=True):
        if "key" not in str(leaf.dtype):
            np.testing.assert_allclose(leaf, host, rtol=2e-5, atol=1e-6, err_msg=path)
    moments = [(p, x) for p, x in leaves(state) if "/mu/" in p or "/nu/" in p]
    assert moments
    for path, leaf in moments:
        name = re.split("/[mn]u/", path)[1]
        assert canonical(leaf.sharding.spec, leaf.ndim) == plan[name].spec
    assert {len(x.sharding.device_set) for _, x in leaves(state)} == {8}


def test_init_sharded_never_holds_the_tree_on_one_device(monkeypatch):
    """Outputs and temporaries of every compiled function stay far below the whole tree."""
    width, compiled, jit = 512, [], jax.jit

    def recording(fn, **options):
        jitted = jit(fn, **options)

        def call(*args):
            compiled.append(jitted.lower(*args).compile().memory_analysis())
            return jitted(*args)

        return call

    def init():
        keys = jax.random.split(jax.random.key(0), 4)
        up, down = ({"kernel": (width, 4 * width)}, {"kernel": (4 * width, width)})
        return {
            f"layers_{i}": {
                "up_proj": {"kernel": jax.random.normal(keys[2 * i], up["kernel"])},
                "down_proj": {"kernel": jax.random.normal(keys[2 * i + 1], down["kernel"])},
            }
            for i in range(2)
        }

    monkeypatch.setattr(jax, "jit", recording)
    state = init_sharded(init, optax.adam(1e-3), mesh(1, 8))
    monkeypatch.undo()
    whole = 4 * width * 4 * width * 4
    for memory, times in zip(compiled, (1, 2), strict=True):  # parameters, then two moments
        assert memory.output_size_in_bytes <= times * whole // 8 + 1024
        assert memory.temp_size_in_bytes <= whole // 4
    for path, leaf in leaves(state):
        if leaf.ndim:
            assert leaf.addressable_shards[0].data.nbytes == leaf.nbytes // 8, path


def test_init_sharded_takes_a_whole_train_state_and_explicit_meshes():
    def init():
        return TrainState.create(
            apply_fn=MODELS["linen"].apply, params=MODELS["linen"].init(), tx=optax.adam(1e-3)
        )

    target = mesh(2, 4, AxisType.Explicit)
    with jax.set_mesh(target):
        state = init_sharded(init, None, target)
    assert isinstance(state, TrainState)
    want = shard(init(), target)
    assert specs_of(state) == specs_of(want)


def test_init_sharded_pads_before_the_optimizer_looks():
    def init():
        return {"embed": {"embedding": jnp.ones((10, 8))}, "lm_head": {"kernel": jnp.ones((8, 10))}}

    state = init_sharded(init, optax.adagrad(1e-3), mesh(1, 4), pad_vocab="masked")
    assert state.params["embed"]["embedding"].shape == (12, 8)
    np.testing.assert_array_equal(state.params["embed"]["embedding"][10:], 0)
    moment = state.opt_state[0].sum_of_squares["embed"]["embedding"]
    assert moment.shape == (12, 8)
    np.testing.assert_allclose(moment, 0.1)  # the optimizer's own first value, padding included
    plan = make_plan(init(), mesh(1, 4), pad_vocab="masked")
    assert unshard(state, plan).opt_state[0].sum_of_squares["embed"]["embedding"].shape == (10, 8)


def test_init_optimizer_needs_placed_parameters():
    with pytest.raises(errors.StateNotPlaced, match=r"TP070 at embed/table.*not on a mesh"):
        init_optimizer(optax.adam(1e-3), jax.tree.map(jnp.asarray, fresh_params()))
    params = shard(fresh_params(), mesh(2, 4), plan=small_plan())
    other = NamedSharding(mesh(1, 8), P())
    params["norm"]["scale"] = jax.device_put(np.ones(8, np.float32), other)
    with pytest.raises(errors.BadMesh, match=r"TP010.* 2 meshes.*norm/scale"):
        init_optimizer(optax.adam(1e-3), params)
