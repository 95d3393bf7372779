"""Loops over layers of anybody's model, weights one turn ahead: numbers, and what is refused."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from rounding import assert_close
from test_by_dataflow import INNER, WIDTH, Block, Model
from test_half_batches import BATCH, TOKENS, barriers, three_updates, with_loss

import jaxtp
from jaxtp.activations.ahead.beside import with_arrived
from jaxtp.activations.by_dataflow import parallelize


def placed_on(fn, params, *inputs, **sizes):
    """The function with weights ahead, its arguments on the mesh, and what was said."""
    mesh = jaxtp.make_mesh(**sizes)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs, zero=3)
    placed = parallelize(fn, plan, mesh, overlap="aggressive")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        number = barriers(placed, params, *inputs)
    given = jaxtp.shard(params, mesh, plan=plan), *(jaxtp.shard_batch(x, mesh) for x in inputs)
    return placed, given, number, [str(one.message) for one in said]


def test_halves_and_gathers_of_a_scanned_model():
    model = Model(Block(kv_heads=2), layers=3, remat=True)
    ids = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, 1024)
    params = model.init(jax.random.key(0), ids)
    loss = functools.partial(with_loss, model)
    placed, given, number, said = placed_on(loss, params, ids, dp=2, fsdp=2, tp=2)
    assert number > 10
    assert not said
    want = three_updates(jax.jit(jax.value_and_grad(loss)), params, ids)
    got = three_updates(jax.jit(jax.value_and_grad(placed)), *given)
    for one, other in zip(got, want, strict=True):
        assert_close(jax.tree.leaves(one), jax.tree.leaves(other), BATCH * TOKENS * INNER)


LAYERS = 3


def everything(params, x, memory):
    """A scan that carries a count, stacks rows, and reads an input, a shared weight and a table."""
    table = jnp.cos(jnp.arange(TOKENS))[None, :, None]

    def layer(carry, row):
        x, count = carry
        kernel, gain, number = row
        h = (jnp.tanh(x @ kernel) + table) * gain
        x = x + h @ params["shared"] + memory * count / (number + 1)
        return (x, count + 1), x.mean(-1)

    rows = jnp.moveaxis(params["stack"], -1, 0), params["gains"], jnp.arange(LAYERS)
    (x, count), means = jax.lax.scan(layer, (x * params["scale"], 0), rows)
    return (x**2).mean() + means.mean() + count


def test_constants_counts_and_stacked_results_of_a_scan():
    keys = jax.random.split(jax.random.key(2), 4)
    params = {
        "stack": jax.random.normal(keys[0], (WIDTH, WIDTH, LAYERS)) / WIDTH,
        "shared": jax.random.normal(keys[1], (WIDTH, WIDTH)) / WIDTH,
        "gains": jnp.ones((LAYERS, 1, 1, WIDTH)),
        "scale": jnp.ones((1, 1, WIDTH)),
    }
    x, memory = (jax.random.normal(key, (BATCH, TOKENS, WIDTH)) for key in keys[2:])
    placed, given, number, said = placed_on(everything, params, x, memory, fsdp=8, tp=1)
    assert number > 3
    assert len(said) == 1
    assert "no loop gathers them ahead: shared\n" in said[0]
    steps = [jax.jit(jax.value_and_grad(fn, (0, 1, 2))) for fn in (placed, everything)]
    got, want = steps[0](*given), steps[1](params, x, memory)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), BATCH * TOKENS * WIDTH)


class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(WIDTH)(nn.relu(nn.Dense(INNER)(x)))
        return x + nn.Dropout(0.5, deterministic=False)(y), None


class Reading(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(INNER)(x))) - x.mean(0, keepdims=True), None


def looped(layer):
    """A model of these layers, and its parameters."""
    split = {"params": True, "dropout": True}
    loop = nn.scan(layer, variable_axes={"params": 0}, split_rngs=split, length=LAYERS)()
    params = loop.init(jax.random.key(0), jnp.ones((BATCH, TOKENS, WIDTH)), None)
    return lambda p, x: loop.apply(p, x, None, rngs={"dropout": jax.random.key(1)})[0], params


@pytest.mark.parametrize(
    ("layer", "why"), [(Dropping, "`random_bits` at"), (Reading, "(Reading.__call__)")]
)
def test_what_mixes_rows_in_a_loop_leaves_it_as_it_was(layer, why):
    fn, params = looped(layer)
    x = jax.random.normal(jax.random.key(3), (BATCH, TOKENS, WIDTH))
    _, _, number, said = placed_on(fn, params, x, fsdp=2, tp=4)
    assert number == 0
    assert "TP073" in said[0]
    assert why in said[0]


def two_products(params, x):
    """Two weights of one shape, and a pullback whose leaves JAX orders as it was traced."""

    def layer(x, w):
        return x + jnp.sin(x @ w["a"]) @ w["b"], None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


@jax.custom_vjp
def rounded(x, w):
    return x @ w.astype(jnp.bfloat16).astype(jnp.float32)


def rounded_backward(saved, g):
    return g @ saved[1].T, saved[0].T @ g


rounded.defvjp(lambda x, w: (x @ w, (x, w)), rounded_backward)


def custom_rule(params, x):
    """A derivative rule that takes in full precision, both ways, what its function rounds."""

    def layer(x, w):
        return x + rounded(jnp.sin(rounded(x, w["a"])), w["b"]), None

    return (jax.lax.scan(layer, x, params)[0] ** 2).mean()


@pytest.mark.parametrize("fn", [two_products, custom_rule])
def test_gradients_without_jit_and_of_custom_rules(fn):
    *keys, last = jax.random.split(jax.random.key(4), 3)
    params = {n: jax.random.normal(key, (3, 16, 16)) / 4 for n, key in zip("ab", keys, strict=True)}
    x = jax.random.normal(last, (64, 16))
    placed, given, number, said = placed_on(fn, params, x, fsdp=4, dp=2, tp=1)
    assert number > 3
    assert not said
    want = jax.grad(fn, (0, 1))(params, x)
    assert_close(placed(*given), fn(params, x), 64 * 16)
    for transform in (lambda g: g, jax.jit):
        got = transform(jax.grad(placed, (0, 1)))(*given)
        assert_close(jax.tree.leaves(got), jax.tree.leaves(want), 64 * 16)


def mlp(x, w):
    return x + jax.nn.relu(x @ w["up"]) @ w["down"], None


@pytest.mark.parametrize("again", [False, True])
def test_what_moves_beside_a_layer_has_arrived_at_its_last_product_but_gradients(again):
    def layer(x, w):
        return mlp(x, w)[0]

    def backward(x, w):
        return jax.vjp(jax.checkpoint(layer) if again else layer, x, w)[1](x)

    args = jnp.ones((8, 16)), {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 16))}
    traced = jax.make_jaxpr(functools.partial(with_arrived, backward))(args, jnp.ones(3))
    names = [one.primitive.name for one in traced.eqns]
    assert names.count("optimization_barrier") == (not again)
    if not again:
        before = names[: names.index("optimization_barrier")]
        assert before.count("dot_general") == names.count("dot_general") - 1
    got, beside = with_arrived(backward, args, jnp.ones(3))
    assert_close(jax.tree.leaves(got), jax.tree.leaves(backward(*args)), 64)
    assert (beside == 1).all()


def column(x, w):
    return x + jnp.sin(x @ w["up"]).mean(-1, keepdims=True), None


def in_pairs_of_rows(params, x):
    if x.shape[0] < 2:
        raise ValueError("needs pairs")
    return jax.lax.scan(mlp, x, params)[0]


def shared_by_all_turns(params, x):
    return jax.lax.scan(lambda x, _: mlp(x, jax.tree.map(lambda w: w[0], params)), x, length=3)[0]


def beside_others(params, x):
    x, rest = jax.lax.scan(mlp, x, params["loop"])[0], params["rest"]
    x = jax.lax.cond(x.sum() > 0, lambda x: jax.lax.scan(mlp, x, rest)[0], lambda x: x, x)
    return jax.lax.scan(column, x, params["column"])[0]


STACKS = {"up": jnp.ones((3, 16, 64)) / 16, "down": jnp.ones((3, 64, 16)) / 16}
MIXED = {"loop": STACKS, "rest": STACKS, "column": {"up": STACKS["up"]}}
HALVES, WHOLE = 10, 4
"""Barriers of one loop over `mlp`."""


@pytest.mark.parametrize(
    ("fn", "params", "rows", "barred", "notes"),
    [
        (in_pairs_of_rows, STACKS, 16, HALVES, []),
        (in_pairs_of_rows, STACKS, 8, WHOLE, ["on half of one replica's part of the batch: nee"]),
        (in_pairs_of_rows, STACKS, 12, WHOLE, ["3 rows on each replica are not divisible"]),
        (shared_by_all_turns, STACKS, 8, 0, ["no loop gathers them ahead: down, up"]),
        (
            beside_others,
            MIXED,
            16,
            HALVES + WHOLE,
            ["no loop gathers them ahead: rest/down, rest/up\n", "no sum over tp can be taken"],
        ),
    ],
)
def test_what_is_said_of_loops_that_stay_or_do_not_halve(fn, params, rows, barred, notes):
    _, _, number, said = placed_on(fn, params, jnp.ones((rows, 4, 16)), fsdp=4, tp=2)
    assert number == barred
    assert len(said) == len(notes)
    assert all(note in text for note, text in zip(notes, said, strict=True))


@pytest.mark.parametrize(("tokens", "is_gathered"), [(1, False), (32, True)])
def test_a_table_is_gathered_where_as_much_is_taken_from_it(tokens, is_gathered):
    def fn(params, ids):
        return jax.lax.scan(mlp, params["table"][ids], params["loop"])[0]

    params, ids = {"table": jnp.ones((256, 16)), "loop": STACKS}, jnp.zeros((8, tokens), int)
    placed, given, number, said = placed_on(fn, params, ids, fsdp=8, tp=1)
    assert number == WHOLE
    assert not said
    compiled = jax.jit(placed).lower(*given).compile().as_text()
    assert ("f32[256,16]" in compiled) is is_gathered


def in_a_row(params, ids, memory):
    """Unequal layers one after the other, that share a gain and an input, and a tied table."""
    x = params["table"][ids] + params["positions"]
    for n, w in enumerate(params["layers"]):

        def layer(x, w):
            return mlp(x * params["gain"], w)[0] + memory @ w["read"]

        x = jax.checkpoint(layer)(x, w) if n else layer(x, w)
    return ((x @ params["table"].T) ** 2).mean()


def test_layers_in_a_row_have_the_next_ones_weights_ahead():
    shapes = {"up": (16, 64), "down": (64, 16), "read": (16, 16)}
    key = iter(jax.random.split(jax.random.key(5), 16))

    def normal(*shape):
        return jax.random.normal(next(key), shape) / 8

    params = {
        "table": normal(256, 16),
        "positions": normal(1, 4, 16),
        "gain": normal(1, 1, 16) + 1,
        "layers": [{name: normal(*shape) for name, shape in shapes.items()} for _ in range(3)],
    }
    ids, memory = jax.random.randint(next(key), (16, 4), 0, 256), normal(16, 4, 16)
    placed, given, number, said = placed_on(in_a_row, params, ids, memory, fsdp=8, tp=1)
    assert not said
    assert number == 12
    want = jax.value_and_grad(in_a_row, (0, 2))(params, ids, memory)
    got = jax.jit(jax.value_and_grad(placed, (0, 2)))(*given)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), 16 * 4 * 256)
    assert_close(jax.jit(placed)(*given), want[0], 16 * 4 * 256)


def one(x, w):
    return mlp(x, w)[0]


def through(x, params):
    for w in params:
        x = one(x, w)
    return x


def centred(params, x):
    """Rows meet in the middle."""
    x = through(x, params[:2])
    x = one(x - x.mean(0, keepdims=True), params[2])
    return through(x, params[3:])


def in_two_parts(params, x):
    """Layers that all read what others before them made, but the last."""
    memory = y = through(x, params[:2])
    for w in params[2:5]:
        y = y + jax.nn.relu((y + memory) @ w["up"]) @ w["down"]
    return one(y, params[5])


def jitted(params, x):
    return jax.jit(through)(x, params)


def kept_by_all(params, x):
    """Every layer reads all before it."""
    seen = [x]
    for w in params:
        seen.append(one(sum(seen), w))
    return sum(seen)


def over_a_skip(params, x):
    """Layers in front of a skip, under it, and behind it."""
    first = one(x, params[0])
    return through(through(first, params[1:4]) + first, params[4:])


def in_vain(params, x):
    """Nobody takes what the last layers make."""
    x = through(x, params[:3])
    through(x, params[3:])
    return x


@pytest.mark.parametrize(
    ("fn", "barred", "notes"),
    [
        (jitted, 12, []),
        (over_a_skip, 10, ["no loop gathers them ahead: 0/down, 0/up"]),
        (in_vain, 10, ["no loop gathers them ahead: 5/down, 5/up"]),
        (centred, 8, ["(centred)"]),
        (in_two_parts, 12, []),
        (kept_by_all, 0, ["no loop gathers them ahead: 0/down, 0/up, 1/down"]),
    ],
)
def test_which_layers_in_a_row_are_found(fn, barred, notes):
    params = [jax.tree.map(lambda w: w[0], STACKS)] * 6
    _, _, number, said = placed_on(fn, params, jnp.ones((16, 4, 16)), fsdp=8, tp=1)
    assert number == barred
    assert len(said) == len(notes)
    assert all(note in text for note, text in zip(notes, said, strict=True))
