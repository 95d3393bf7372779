"""Anybody's model on two halves of the batch in turns: the numbers of the plain function."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rounding import assert_close
from test_by_dataflow import INNER, LARGE, WIDTH, Block, Model, compiled

import jaxtp
from jaxtp.activations.by_dataflow import parallelize
from jaxtp.errors import BadOption

BATCH, TOKENS = 8, 6


def barriers(fn, *args):
    return str(jax.make_jaxpr(fn)(*args)).count("optimization_barrier")


def three_updates(step, params, *batch):
    """The loss and gradients of three steps of plain descent."""
    found = []
    for _ in range(3):
        found.append(step(params, *batch))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, found[-1][1])
    return found


def with_loss(model, params, ids):
    logits = model.apply(params, ids)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits, -1), ids[..., None], -1)
    return -picked.mean()


def test_scanned_with_a_loss_inside():
    model = Model(Block(fused=True), remat=True)
    ids = jax.random.randint(jax.random.key(1), (BATCH, TOKENS), 0, 1024)
    params = model.init(jax.random.key(0), ids)
    loss = functools.partial(with_loss, model)
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=model.apply, inputs=(ids,))
    placed = parallelize(loss, plan, mesh, overlap="aggressive")
    assert barriers(placed, params, ids) > 4
    want = three_updates(jax.jit(jax.value_and_grad(loss)), params, ids)
    given = jaxtp.shard(params, mesh, plan=plan), jaxtp.shard_batch(ids, mesh)
    got = three_updates(jax.jit(jax.value_and_grad(placed)), *given)
    for one, other in zip(got, want, strict=True):
        assert_close(jax.tree.leaves(one), jax.tree.leaves(other), BATCH * TOKENS * INNER)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(WIDTH, INNER, rngs=rngs),
            nnx.Linear(INNER, WIDTH, rngs=rngs),
        )

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Unrolled(nnx.Module):
    """Layers one after the other; what a child does between them is its own."""

    def __init__(self, rngs, num_layers=3):
        self.layers = nnx.List([Layer(rngs) for _ in range(num_layers)])

    def between(self, x):
        return x

    def __call__(self, x):
        for layer in self.layers:
            x = self.between(layer(x))
        return x


class Recomputed(Unrolled):
    def __call__(self, x):
        for layer in self.layers:
            x = nnx.remat(Layer.__call__)(layer, x)
        return x


class Centred(Unrolled):
    def between(self, x):
        return x - x.mean(0, keepdims=True)


class Numbered(Unrolled):
    def between(self, x):
        return x + jnp.arange(x.shape[0], dtype=x.dtype)[:, None, None] / WIDTH


class Scaled(Unrolled):
    def between(self, x):
        return x / x.shape[0]


class Turned(Unrolled):
    def between(self, x):
        return jnp.roll(x, 1, axis=0)


class Noisy(Unrolled):
    def between(self, x):
        return x + jax.random.normal(jax.random.key(0), x.shape)


class Shifted(Unrolled):
    def between(self, x):
        rows = x.shape[0]
        return x.at[..., :4].add(jax.lax.slice_in_dim(x, rows, rows + 4, axis=2))


def apply(model, x):
    return model(x)


def traced(model, x, **sizes):
    """A model in halves, its plan, how many barriers stand in it, and what was said."""
    mesh = jaxtp.make_mesh(**sizes)
    plan = jaxtp.make_plan(model, mesh, inputs=(x,))
    graph, params = nnx.split(model)
    placed = parallelize(apply, plan, mesh, overlap="aggressive")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        number = barriers(lambda p, x: placed(nnx.merge(graph, p), x), params, x)
    return placed, number, [str(one.message) for one in said if "TP073" in str(one.message)]


def check_numbers(model, x, placed):
    """Three updates are those of the plain model."""
    graph, params = nnx.split(model)

    def step(fn):
        return jax.jit(jax.value_and_grad(lambda p, x: (fn(nnx.merge(graph, p), x) ** 2).mean()))

    pairs = zip(*[three_updates(step(fn), params, x) for fn in (placed, apply)], strict=True)
    for got, want in pairs:
        assert_close(jax.tree.leaves(got), jax.tree.leaves(want), BATCH * TOKENS * INNER)


def inputs(rows=BATCH):
    return jax.random.normal(jax.random.key(3), (rows, TOKENS, WIDTH))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Unrolled, {"tp": 8}),
        (Unrolled, {"dp": 2, "tp": 4}),
        (Recomputed, {"dp": 2, "fsdp": 2, "tp": 2}),
    ],
    ids=["tp8", "dp2-tp4", "weights ahead"],
)
def test_unrolled_with_the_loss_outside(kind, sizes):
    model, x = kind(nnx.Rngs(0)), inputs()
    placed, number, said = traced(model, x, **sizes)
    assert number >= 6
    assert not said
    check_numbers(model, x, placed)


@pytest.mark.parametrize("kind", [Centred, Numbered, Scaled, Turned, Noisy, Shifted])
def test_what_mixes_the_batch_runs_on_all_of_it(kind):
    model, x = kind(nnx.Rngs(0)), inputs()
    placed, number, said = traced(model, x, tp=8)
    assert number < 6
    assert f"({kind.__name__}.between)" in said[0]
    if kind in (Centred, Noisy):  # the others differ in what is said alone
        check_numbers(model, x, placed)  # without saying it again


@pytest.mark.parametrize(
    ("rows", "sizes", "why"),
    [
        (6, {"dp": 2, "tp": 4}, "6 sequences on 2 replicas"),
        (1, {"tp": 8}, "no input leads with rows of the batch (shapes (1, 6, 32))"),
    ],
)
def test_what_cannot_be_halved_is_said(rows, sizes, why):
    _, number, said = traced(Unrolled(nnx.Rngs(0)), inputs(rows), **sizes)
    assert number == 0
    assert why in said[0]


def test_outputs_come_back_in_order():
    """Rows merged with tokens, rows not first, and what has no rows."""
    params = {"up": jnp.ones((WIDTH, INNER)), "down": jnp.ones((INNER, WIDTH)) / INNER}

    def fn(params, x):
        y = x + jax.nn.relu(x @ params["up"]) @ params["down"]
        return y.reshape(-1, WIDTH), y.swapaxes(0, 1), params["up"].sum(), (y**2).sum(0)

    x = inputs()
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))
    placed = jax.jit(parallelize(fn, plan, mesh, overlap="aggressive"))
    assert_close(placed(params, x), fn(params, x), INNER)
    assert barriers(placed, params, x)


def halved(fn, params, *inputs, **keywords):
    """How many barriers a function has in halves on tp 4, its results, and what was said."""
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=functools.partial(fn, **keywords), inputs=inputs)
    placed = parallelize(fn, plan, mesh, overlap="aggressive")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call = functools.partial(placed, **keywords)
        number, results = barriers(call, params, *inputs), jax.jit(call)(params, *inputs)
    assert {one.filename for one in said} <= {__file__}
    assert_close(results, fn(params, *inputs, **keywords), INNER * WIDTH)
    return number, [str(one.message) for one in said]


def weights(**shapes):
    keys = jax.random.split(jax.random.key(5), len(shapes))
    pairs = zip(shapes.items(), keys, strict=True)
    return {name: jax.random.normal(key, shape) / shape[0] for (name, shape), key in pairs}


MLP = {"up": (WIDTH, INNER), "down": (INNER, WIDTH)}


def mlp(params, x):
    return x + jax.nn.relu(x @ params["up"]) @ params["down"]


def test_a_fused_projection_leaves_a_checkpoint():
    def fn(params, x):
        q, k, v = jnp.split(jax.checkpoint(lambda w, x: x @ w)(params["qkv"], x), 3, -1)
        q, k, v = (a.reshape(*a.shape[:2], 8, -1) for a in (q, k, v))
        y = jax.nn.dot_product_attention(q, k, v).reshape(x.shape)
        return mlp(params, x + y @ params["out"])

    params = weights(qkv=(WIDTH, 3 * WIDTH), out=(WIDTH, WIDTH), **MLP)
    number, said = halved(fn, params, inputs())
    assert number > 2
    assert not said


@jax.custom_vjp
def ruled(w, x):
    return mlp(w, x)


ruled.defvjp(lambda w, x: (mlp(w, x), (w, x)), lambda kept, g: jax.vjp(mlp, *kept)[1](g))


def few_heads(params, x):
    q = (x @ params["q"]).reshape(*x.shape[:2], 2, -1)
    y = jax.nn.dot_product_attention(q, q, q).reshape(x.shape)
    return x + y @ params["out"]


def test_what_is_not_taken_apart_is_said_once():
    heads = {"q": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    number, said = halved(ruled, weights(**MLP), inputs())
    assert number == 0
    assert ["no sum over tp can be taken apart: `custom_vjp_call`" in one for one in said] == [True]
    number, said = halved(few_heads, weights(**heads), inputs())
    assert number == 0
    assert len(said) == 1
    assert "can be taken apart: `dot_general` at test_half_batches.py" in said[0]
    both = weights(**heads, **MLP)
    number, said = halved(lambda p, x: mlp(p, few_heads(p, x)), both, inputs())
    assert number > 0
    assert len(said) == 1
    assert "cannot be taken apart: `dot_general` at test_half_batches.py" in said[0]


def test_rows_in_a_keyword_and_arrays_without_elements():
    def masked(params, x, *, mask):
        return mlp(params, x) * mask

    number, said = halved(masked, weights(**MLP), inputs(), mask=jnp.ones((BATCH, 1, 1)))
    assert number == 0
    assert "`mask` came as a keyword: pass it in order" in said[0]

    def empty(params, x):
        return mlp(params, x) + x[..., :0].reshape(len(x), 0).sum()

    assert halved(empty, weights(**MLP), inputs())[0] > 0


def test_halves_compose_with_what_jax_offers():
    model, x = Unrolled(nnx.Rngs(0)), inputs()
    mesh = jaxtp.make_mesh(tp=8)
    plan = jaxtp.make_plan(model, mesh, inputs=(x,))
    graph, params = nnx.split(model)

    def plain(params, x):
        return nnx.merge(graph, params)(x)

    placed = parallelize(plain, plan, mesh, overlap="aggressive")
    want = jax.jit(plain)(params, x)
    assert_close(jax.jit(jax.checkpoint(placed))(params, x), want, INNER)
    pairs = jax.jit(jax.vmap(placed, in_axes=(None, 0)))(params, x.reshape(2, 4, TOKENS, WIDTH))
    assert_close(pairs.reshape(x.shape), want, INNER)
    pushed = [
        jax.jit(lambda x, f=f: jax.jvp(f, (params, x), (params, x)))(x) for f in (placed, plain)
    ]
    assert_close(*pushed, INNER)


def test_the_gpu_program_moves_the_floor_beside_products():
    model = Model(Block(**LARGE), layers=3)
    report = compiled(model, overlap="aggressive")
    assert report.ratio < 1.02
    large = [row for row in report.collectives if row.num_bytes >= 2**17]
    assert {row.dtype for row in large} == {"bf16"}
    # Four messages a layer and pass, of which the last one of a layer may have nobody beside it.
    in_layers = [row for row in large if row.count >= 3]
    beside = sum(row.count - row.synchronous for row in in_layers if row.products)
    assert beside >= 0.75 * sum(row.count for row in in_layers)


def test_overlap_has_two_values():
    plan = jaxtp.make_plan({"up": {"kernel": np.zeros((8, 32))}}, {"tp": 2})
    with pytest.raises(BadOption, match="TP110"):
        parallelize(lambda p, x: x, plan, overlap="on")
