"""The jitted step: same places, same memory, one compile, numbers of one device; rows S4 to S6."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from optimizers import OPTIMIZERS, fresh_params
from small_models import BATCH, LLAMA, MODELS, make, mesh, tokens
from test_train_state import small_plan, specs_of

from jaxtp import errors
from jaxtp.io.checkpoints import Checkpoints
from jaxtp.models.llama import Llama
from jaxtp.placement.arrays import shard
from jaxtp.placement.init import init_optimizer, init_sharded
from jaxtp.plan.trees import leaves
from jaxtp.rules.planner import make_plan
from jaxtp.train.step import jit_step

P = PartitionSpec

COMPILED: list[str] = []
"""One entry per program that XLA has compiled in this process."""


def _count(event, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(event)


jax.monitoring.register_event_duration_secs_listener(_count)


@contextlib.contextmanager
def nothing_compiles():
    before = len(COMPILED)
    yield
    assert len(COMPILED) == before


def sum_of_squares(params, batch):
    """A loss that compiles in no time; the models below have real ones."""
    squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return squares * jnp.mean(batch.astype(jnp.float32))


def small_state(tx, target=None, dp=2, tp=4):
    params = shard(fresh_params(), target or mesh(dp, tp), plan=small_plan(dp, tp))
    return {"params": params, "opt_state": init_optimizer(tx, params), "step": 0}


def train(tx):
    """A step on `{"params", "opt_state", "step"}`."""

    def step(state, batch):
        loss, grads = jax.value_and_grad(sum_of_squares)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        new = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return new, {"loss": loss, "grad_norm": optax.tree.norm(grads)}

    return step


def counted(step_fn, traces):
    """The same step; every trace of it leaves a mark."""

    def step(state, batch):
        traces.append(None)
        return step_fn(state, batch)

    return step


def batches(steps, size=16):
    random = np.random.default_rng(0)
    return [random.integers(0, size, BATCH, dtype=np.int32) for _ in range(steps)]


def addresses(tree):
    return {
        path: [piece.data.unsafe_buffer_pointer() for piece in leaf.addressable_shards]
        for path, leaf in leaves(tree)
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_keeps_places_and_memory_and_compiles_once(name):
    tx, calls = OPTIMIZERS[name], []
    state = small_state(tx)
    step = jit_step(counted(train(tx), calls), state, mesh(2, 4))
    alone = {"params": jax.tree.map(jnp.asarray, fresh_params())}
    alone |= {"opt_state": tx.init(alone["params"]), "step": 0}
    alone_step = jax.jit(train(tx))
    state, _ = step(state, batches(1)[0])
    alone, _ = alone_step(alone, batches(1)[0])
    before, memory = specs_of(state), addresses(state)
    for batch in batches(3)[1:]:
        old = state
        with nothing_compiles():
            state, metrics = step(state, batch)
        alone, want = alone_step(alone, batch)
        np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-5)
        np.testing.assert_allclose(metrics["grad_norm"], want["grad_norm"], rtol=1e-5)  # S6
        assert all(leaf.is_deleted() for _, leaf in leaves(old))
    assert addresses(state) == memory
    assert specs_of(state) == before  # S5
    assert len(calls) == 1
    # Optimizers that divide by small statistics amplify the order of a sum; 1e-4 is a hundredth of
    # one step's update.
    for (path, leaf), (_, host) in zip(leaves(state), leaves(alone), strict=True):
        np.testing.assert_allclose(leaf, host, rtol=1e-3, atol=1e-4, err_msg=f"{name} {path}")


def cross_entropy(logits, tokens):
    targets = jnp.roll(tokens, -1, axis=1)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def linen_step(state, batch):
    def loss_fn(params):
        return cross_entropy(state.apply_fn(params, batch), batch)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def nnx_step(state, batch):
    model, optimizer = state
    loss, grads = nnx.value_and_grad(lambda m: cross_entropy(m(batch), batch))(model)
    optimizer.update(model, grads)
    return state, loss


def train_state(name, target):
    """A placed train state of a model, and its step."""
    tx = optax.adamw(1e-2)
    params = shard(make(name), target)
    if name in ("nnx", "llama"):
        return (params, init_optimizer(tx, params)), nnx_step
    state = TrainState(
        step=0,
        apply_fn=MODELS[name].apply,
        params=params,
        tx=tx,
        opt_state=init_optimizer(tx, params),
    )
    return state, linen_step


_alone: dict[str, list[float]] = {}


def alone(name):
    """Losses of three steps on one device."""
    if name not in _alone:
        state, step_fn = train_state(name, mesh(1, 1))
        step = jit_step(step_fn, state, mesh(1, 1))
        losses = []
        for i in range(3):
            state, loss = step(state, tokens(i))
            losses.append(float(loss))
        _alone[name] = losses
    return _alone[name]


# Every model, every mesh, and the pairs in which heads, layers or biases are not whole on a device;
# where the leaves of all pairs lie is in test_arrays.py.
TRAINED = [
    ("linen", (8, 1)), ("linen_12_heads", (1, 8)), ("linen_12_heads", (2, 4)),
    ("linen_scan", (4, 2)), ("linen_scan", (1, 8)), ("nnx", (1, 8)), ("nnx", (4, 2)),
    ("llama", (2, 4)), ("llama", (1, 8)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "sizes"), TRAINED, ids=[f"{n}-{s}" for n, s in TRAINED])
def test_models_train_as_on_one_device(name, sizes):
    state, step_fn = train_state(name, mesh(*sizes))
    before = specs_of(state if isinstance(state, tuple) else state.params)
    step = jit_step(step_fn, state, mesh(*sizes))
    for i, want in enumerate(alone(name)):
        with nothing_compiles() if i else contextlib.nullcontext():
            state, loss = step(state, tokens(i))
        np.testing.assert_allclose(loss, want, rtol=2e-5)
    assert specs_of(state if isinstance(state, tuple) else state.params) == before


def test_the_plans_constraints_hold_inside_the_step():
    target = mesh(2, 4)

    def init():
        return Llama(LLAMA, nnx.Rngs(0))

    state = init_sharded(init, optax.adamw(1e-2), target)
    plan = make_plan(state, target)
    texts = {
        name: jit_step(nnx_step, state, target, plan=given).lower(state, tokens()).as_text()
        for name, given in {"with": plan, "without": None}.items()
    }
    count = {name: text.count("sharding_constraint") for name, text in texts.items()}
    assert count["with"] > count["without"]


@pytest.mark.parametrize("ambient", [None, AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("name", ["linen_12_heads", "nnx"])
def test_any_mesh_and_any_context_will_do(name, kind, ambient):
    target = mesh(2, 4, kind)

    def run():
        state, step_fn = train_state(name, target)
        step = jit_step(step_fn, state, target)
        for i, want in enumerate(alone(name)[:2]):
            with nothing_compiles() if i else contextlib.nullcontext():
                state, loss = step(state, tokens(i))
            np.testing.assert_allclose(loss, want, rtol=2e-5)

    if ambient is None:
        run()
    else:
        with jax.set_mesh(mesh(2, 4, ambient)):
            run()


def test_a_state_that_the_user_placed_on_explicit_axes():
    target = mesh(2, 4, AxisType.Explicit)
    params = jax.tree.map(
        lambda x, spec: jax.device_put(np.asarray(x), NamedSharding(target, spec)),
        make("linen"),
        make_plan(make("linen"), target).partition_specs(make("linen")),
    )
    state = TrainState.create(apply_fn=MODELS["linen"].apply, params=params, tx=optax.adamw(1e-2))
    step = jit_step(linen_step, state, target)
    for i, want in enumerate(alone("linen")[:2]):
        with nothing_compiles() if i else contextlib.nullcontext():
            state, loss = step(state, tokens(i))
        np.testing.assert_allclose(loss, want, rtol=2e-5)


def test_axes_by_other_names():
    target = mesh(2, 4, names=("data", "model"))
    names = {"tp": "model", "dp": "data"}
    params = shard(make("linen"), target, axis_names=names)
    state = TrainState.create(apply_fn=MODELS["linen"].apply, params=params, tx=optax.sgd(1e-2))
    with pytest.raises(errors.NoTensorAxis, match="TP013"):
        jit_step(linen_step, state, target)
    step = jit_step(linen_step, state, target, axis_names=names)
    batch = step.lower(state, tokens()).compile().input_shardings[0][1]
    assert batch.spec == P("data")
    state, loss = step(state, tokens())
    np.testing.assert_allclose(loss, alone("linen")[0], rtol=2e-5)


def test_batches_may_come_from_the_host_or_the_mesh():
    state, step_fn = train_state("linen", mesh(2, 4))
    placed = jax.device_put(tokens(), NamedSharding(mesh(2, 4), P(None, "dp")))
    traces = []
    step = jit_step(counted(step_fn, traces), state, mesh(2, 4), donate=False)
    losses = [step(state, batch)[1] for batch in (tokens(), jnp.asarray(tokens()), placed)]
    np.testing.assert_allclose(losses, alone("linen")[0], rtol=2e-5)
    assert len(traces) == 1
    assert not any(leaf.is_deleted() for _, leaf in leaves(state.params))
    with pytest.raises(errors.SizeMismatch, match="TP003 at batch: dim 0"):
        step(state, tokens()[:3])


def test_arrays_that_share_memory_are_not_donated_twice():
    """Donating one buffer twice is an error, and ends the process on jax 0.10."""
    explicit = {
        path: jax.device_put(leaf, NamedSharding(mesh(2, 4, AxisType.Explicit), P()))
        for path, leaf in leaves(fresh_params())
    }
    w = explicit["square/kernel"]  # becomes two arrays in the same memory
    copies = [jax.device_put(w, NamedSharding(mesh(2, 4), P())) for _ in range(2)]
    state = {"a": copies[0], "b": copies[1], "c": copies[0], "key": jax.random.key(0)}
    state["same_key"] = state["key"]

    def body(state, batch):
        return jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + 1, state
        )

    step = jit_step(body, state, mesh(2, 4))
    want = np.asarray(w) + np.float32(1) + np.float32(1)
    for _ in range(2):
        state = step(state, np.zeros(2, np.float32))
    for name in "abc":
        np.testing.assert_allclose(state[name], want)
    assert len({addresses({"x": state[name]})["x"][0] for name in "abc"}) == 3


def test_a_state_changed_between_steps_is_put_in_place():
    state = small_state(optax.adam(1e-2))
    traces = []
    step = jit_step(counted(train(optax.adam(1e-2)), traces), state, mesh(2, 4))
    state, _ = step(state, batches(1)[0])
    state["params"]["embed"]["table"] = np.ones((16, 8), np.float32)
    state["step"] = 7
    places = specs_of(step(state, batches(1)[0])[0])
    assert places["params/embed/table"] == (("tp",), ())
    assert len(traces) == 1


def test_restored_states_go_on_in_place(tmp_path):
    tx = optax.adamw(1e-2)
    state = small_state(tx)
    traces = []
    step = jit_step(counted(train(tx), traces), state, mesh(2, 4))
    state, _ = step(state, batches(1)[0])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        restored = checkpoints.restore(state).state
    want, _ = step(state, batches(2)[1])
    restored, _ = step(restored, batches(2)[1])
    memory = addresses(restored)
    for (path, leaf), (_, other) in zip(leaves(restored), leaves(want), strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=path)
    restored, _ = step(restored, batches(3)[2])
    assert addresses(restored) == memory
    assert len(traces) == 1


def test_lowering_needs_structs_only():
    state, step_fn = train_state("linen", mesh(2, 4))
    structs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            jnp.shape(x), jnp.result_type(x), sharding=getattr(x, "sharding", None)
        ),
        state,
    )
    step = jit_step(step_fn, structs, mesh(2, 4))
    compiled = step.lower(structs, jax.ShapeDtypeStruct((BATCH, 6), jnp.int32)).compile()
    inputs, batch, _ = compiled.input_shardings[0]
    outputs = compiled.output_shardings[0]
    for (path, leaf), given, returned in zip(leaves(structs), inputs, outputs, strict=True):
        assert given.is_equivalent_to(returned, len(leaf.shape)), path
    assert batch.is_equivalent_to(NamedSharding(mesh(2, 4), P("dp")), 2)
    assert compiled.memory_analysis().alias_size_in_bytes > 0


def bad(change):
    """A step over `{"w", "n"}` that returns what `change` makes of the new state."""
    state = {"w": shard_one(np.ones((8, 8), np.float32)), "n": shard_one(np.int32(0))}
    return jit_step(lambda state, batch: change(state), state, mesh(2, 4)), state


def shard_one(x):
    return jax.device_put(x, NamedSharding(mesh(2, 4), P()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: ({**s, "w": s["w"].astype(jnp.bfloat16)}, 0.0),
            r"TP133 at w: float32\[8, 8\] .*bf",
        ),
        (lambda s: {**s, "n": s["w"][0]}, r"TP133 at n: int32\[\] comes back as float32\[8\]"),
        (lambda s: ({"w": s["w"]}, 0.0), "missing: n, new: nothing"),
        (lambda s: {**s, "ema": s["w"]}, "missing: nothing, new: ema"),
        (lambda s: None, "NoneType that is not the state"),
    ],
)
def test_a_step_that_loses_its_state_is_refused(change, message):
    step, state = bad(change)
    with pytest.raises(errors.BadStep, match=message):
        step(state, np.zeros(8, np.float32))


def test_a_number_in_place_of_an_array_does_not_compile_twice():
    step, state = bad(lambda s: {**s, "n": 1})
    state = step(state, np.zeros(8, np.float32))
    with nothing_compiles():
        state = step(state, np.zeros(8, np.float32))
    assert state["n"].dtype == jnp.int32


def test_nnx_static_fields_count():
    model = shard(make("nnx"), mesh(2, 4))

    def turns_dropout_on(state, batch):
        state.dropout.deterministic = False
        return state

    with pytest.raises(errors.BadStep, match="static fields"):
        jit_step(turns_dropout_on, model, mesh(2, 4))(model, tokens())
    # A change outside of the step is obeyed: another graph is another program.
    step = jit_step(lambda m, batch: (m, m(batch)), model, mesh(2, 4), donate=False)
    _, still = step(model, tokens())
    model.dropout.deterministic = False
    _, dropped = step(model, tokens())
    assert not np.allclose(still, dropped)


def test_states_that_are_not_on_the_mesh_are_refused():
    with pytest.raises(errors.StateNotPlaced, match=r"TP070.*no array on the mesh"):
        jit_step(lambda s, b: s, {"w": jnp.ones((8, 8))}, mesh(2, 4))
    state = {"w": shard_one(np.ones(8, np.float32)), "m": jnp.ones((1024, 1025))}
    with pytest.raises(errors.StateNotPlaced, match=r"TP070 at m: .*SingleDevice"):
        jit_step(lambda s, b: s, state, mesh(2, 4))
    with pytest.raises(errors.BadMesh, match="TP010 at w"):
        jit_step(lambda s, b: s, {"w": state["w"]}, mesh(1, 4))
    step = jit_step(lambda s, b: s, {"w": state["w"]}, mesh(2, 4))
    with pytest.raises(errors.PlanMismatch, match="TP045: the state has 2 arrays"):
        step(state, np.zeros(8))


def double(state, *args, **named):
    return jax.tree.map(lambda x: x * 2, state)


def scalar_state(value=1.0):
    return shard({"w": np.full((16, 8), value, np.float32)}, mesh(2, 4), plan=hand_plan())


def hand_plan():
    return make_plan({"w": np.ones((16, 8))}, {"dp": 2, "tp": 4}, overrides={"w": P("tp")})


def test_a_step_takes_whatever_its_function_takes():
    traces = []

    def body(state, batch, key, train, *, rate=1.0, schedule=None, mode="sum", more=None):
        traces.append(mode)
        noise = jax.random.uniform(key, batch["x"].shape) if train else 0.0
        x = batch["x"] * batch["positions"] + noise
        value = {"sum": jnp.sum, "max": jnp.max}[mode](x) * rate
        value = value + jnp.sum(more) if more is not None else value
        return state, schedule(value) if schedule else value

    state = scalar_state()
    step = jit_step(body, state, mesh(2, 4), donate=False)
    batch = {"x": np.ones((4, 6), np.float32), "positions": np.arange(6, dtype=np.float32)[None]}
    key = jax.random.key(0)
    assert float(step(state, batch, key, False)[1]) == 60
    assert float(step(state, batch, key, train=False, rate=0.5)[1]) == 30
    assert float(step(state, batch, key, train=False, rate=0.25)[1]) == 15
    assert len(traces) == 2  # by position and by name; numbers are traced
    assert float(step(state, batch, key, train=True, mode="max")[1]) > 5
    assert float(step(state, batch, jax.random.PRNGKey(0), False, more=np.ones((8, 2)))[1]) == 76
    assert float(step(state, batch, key, False, schedule=jnp.negative)[1]) == -60
    for wrong in ((), (batch,), (batch, key, False, 1, 2)):
        with pytest.raises(errors.BadStep, match=r"TP133: .*after the state it was given"):
            step(state, *wrong)
    with pytest.raises(errors.BadTree, match="TP046 at batch/name"):
        step(state, {**batch, "name": "train"}, key, False)


def test_arguments_are_static_where_they_are_named():
    def body(state, batch, depth, width=1):
        return state, jnp.sum(batch) * sum(range(depth)) * width

    state = scalar_state()
    step = jit_step(
        body, state, mesh(2, 4), donate=False, static_argnums=2, static_argnames=["width"]
    )
    assert float(step(state, np.ones((4, 2), np.float32), 4, width=2)[1]) == 96
    for bad in ({"static_argnums": 0}, {"static_argnums": 9}, {"static_argnames": "depht"}):
        with pytest.raises(errors.BadStep, match="TP133: static arguments"):
            jit_step(body, state, mesh(2, 4), **bad)


def test_nnx_objects_beside_the_state_are_updated_in_place():
    def body(state, batch, rngs):
        return state, jax.random.uniform(rngs.dropout(), ()) + 0 * jnp.sum(batch)

    state, rngs, alone = scalar_state(), nnx.Rngs(dropout=1), nnx.Rngs(dropout=1)
    step = jit_step(body, state, mesh(2, 4), donate=False)
    for _ in range(2):
        want = jax.random.uniform(alone.dropout(), ())
        np.testing.assert_array_equal(step(state, np.ones((4, 2)), rngs)[1], want)


def test_a_donated_state_cannot_be_used_again():
    state = scalar_state()
    step = jit_step(double, state, mesh(2, 4))
    step(state, np.ones(4))
    with pytest.raises(errors.BadStep, match="TP133: the state was given to an earlier call"):
        step(state, np.ones(4))


@dataclasses.dataclass
class Settings:
    """Not frozen, so not hashable."""

    width: int = 16


class Unhashable(nnx.Module):
    def __init__(self):
        self.config, self.names = Settings(), nnx.static(["a", "b"])
        self.up = nnx.Linear(16, 64, rngs=nnx.Rngs(0))
        self.down = nnx.Linear(64, 16, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def squares_step(state, x):
    model, optimizer = state
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return state, loss


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.sm3(0.1)], ids=["sgd", "sm3"])
def test_modules_with_attributes_that_cannot_be_hashed(tx):
    state = init_sharded(Unhashable, tx, mesh(2, 4))
    step = jit_step(squares_step, state, mesh(2, 4))
    model = Unhashable()
    alone = (model, nnx.Optimizer(model, tx, wrt=nnx.Param))
    x = np.ones((4, 16), np.float32)
    for _ in range(3):
        state, loss = step(state, x)
        alone, want = squares_step(alone, x)
        np.testing.assert_allclose(loss, want, rtol=2e-5)
    assert step.jitted._cache_size() == 1


def test_compiler_options_reach_the_compiler():
    state = {"w": shard_one(np.ones(8, np.float32))}
    options = {"xla_embed_ir_in_executable": True}
    step = jit_step(lambda s, b: s, state, mesh(2, 4), compiler_options=options)
    assert step(state, np.zeros(8, np.float32))["w"].shape == (8,)
    state = {"w": shard_one(np.ones(8, np.float32))}
    step = jit_step(lambda s, b: s, state, mesh(2, 4), compiler_options={"xla_no_such": True})
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such"):
        step(state, np.zeros(8, np.float32))
