"""Experts of models that are not ours, written in ways that XLA does badly: planned, and named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxpr_models import f32
from rounding import assert_close

import jaxtp
from jaxtp.rules.jaxpr import analyse

WIDTH, INNER, EXPERTS, CHOSEN, ROWS, LENGTH = 64, 128, 4, 2, 8, 32
SIZES = {"dp": 2, "ep": 2, "tp": 2}
MATRIX = WIDTH * INNER // SIZES["tp"] * 4
"""Bytes of one expert's matrix on a device that has its part of the width."""

TOKENS = ROWS * LENGTH // (SIZES["dp"] * SIZES["ep"])
"""On one device."""


def picked(p, x):
    """Each token takes the matrices of its experts by index."""
    weights, index = jax.lax.top_k(jax.nn.softmax(x @ p["zr"]), CHOSEN)
    one = jnp.einsum("btd,btkdf->btkf", x, p["qa"][index])
    two = jnp.einsum("btd,btkdf->btkf", x, p["qb"][index])
    out = jnp.einsum("btkf,btkfd->btkd", jax.nn.silu(one) * two, p["qc"][index])
    return x + jnp.einsum("btkd,btk->btd", out, weights)


def in_order(p, x):
    """Tokens sorted by expert, ragged products."""
    flat = x.reshape(-1, WIDTH)
    weights, index = jax.lax.top_k(jax.nn.softmax(flat @ p["zr"]), CHOSEN)
    order = jnp.argsort(index.reshape(-1))
    counts = jnp.bincount(index.reshape(-1), length=EXPERTS).astype(jnp.int32)
    rows = jnp.repeat(flat, CHOSEN, axis=0)[order]
    one = jax.lax.ragged_dot(rows, p["qa"], counts)
    two = jax.lax.ragged_dot(rows, p["qb"], counts)
    out = jax.lax.ragged_dot(jax.nn.silu(one) * two, p["qc"], counts)[jnp.argsort(order)]
    return x + (out.reshape(-1, CHOSEN, WIDTH) * weights[..., None]).sum(1).reshape(x.shape)


def one_by_one(p, x):
    """A loop over experts with parameters of their own, zero times what was not chosen."""
    weights, index = jax.lax.top_k(jax.nn.softmax(x @ p["zr"]), CHOSEN)
    out = jnp.zeros_like(x)
    for number, own in enumerate(p["list"]):
        weight = jnp.where(index == number, weights, 0).sum(-1, keepdims=True)
        out += weight * ((jax.nn.silu(x @ own["qa"]) * (x @ own["qb"])) @ own["qc"])
    return x + out


def model(p, x):
    return one_by_one(p["k3"], in_order(p["k2"], picked(p["k1"], x)))


def shapes():
    own = {"qa": f32(WIDTH, INNER), "qb": f32(WIDTH, INNER), "qc": f32(INNER, WIDTH)}
    stacked = {name: f32(EXPERTS, *one.shape) for name, one in own.items()}
    router = {"zr": f32(WIDTH, EXPERTS)}
    return {
        "k1": router | stacked,
        "k2": router | stacked,
        "k3": router | {"list": [own] * EXPERTS},
    }


def gradients(fn):
    return jax.value_and_grad(lambda p, x: jnp.mean(fn(p, x) ** 2), argnums=(0, 1))


STREAM = f32(ROWS, LENGTH, WIDTH)


@functools.cache
def plan():
    return jaxtp.make_plan(shapes(), SIZES, fn=model, inputs=(STREAM,))


@functools.cache
def report():
    mesh = jaxtp.make_mesh(**SIZES)
    params, x = jaxtp.shard(shapes(), mesh, plan=plan()), jaxtp.shard_batch(STREAM, mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, (params, x))
    step = jax.jit(gradients(jaxtp.parallelize(model, plan(), mesh)), out_shardings=(None, places))
    return jaxtp.preflight(step, (params, x), target="h100:1x8")


def test_all_of_them_are_split_by_width():
    for path, dim in {"qa": -1, "qb": -1, "qc": -2}.items():
        for where in ("k1/", "k2/", "k3/list/3/"):
            decision = plan()[where + path]
            assert decision.dim_on(["tp"]) == len(decision.shape) + dim
    assert "experts, which an index picks" in plan().explain("k1/qa")


def test_picked_matrices_are_named_with_their_bytes():
    """Forward and backward pass read a set of matrices for every choice of every token."""
    notes = [note for note in report().notes if "picked by index" in note]
    assert len(notes) == 3
    num_bytes = 2 * TOKENS * CHOSEN * MATRIX
    for name, note in zip(("qa", "qb", "qc"), sorted(notes), strict=True):
        assert f"['k1']['{name}']" in note
        assert "test_others_experts.py" in note
        assert note.count("picked") == 2  # the function's name too
        assert f"{num_bytes:,} bytes of matrices a device and step, " in note
        assert f"{TOKENS * CHOSEN / EXPERTS:.3g} x what its experts have" in note


def test_split_by_expert_they_would_be_summed_over_the_devices():
    """Which is why they are not: tp moves the residual stream, as for a dense MLP."""
    matrices = TOKENS * CHOSEN * MATRIX
    moved = [row for row in report().collectives if row.axes == ("tp",)]
    assert moved
    assert all(row.num_bytes < matrices for row in moved)


def test_experts_that_work_on_every_token_are_named_with_their_flops():
    (note,) = [note for note in report().notes if "work on every token" in note]
    assert "all 4 experts" in note
    assert "one_by_one" in note
    assert "of which each chose 2" in note
    assert ", 2 x those needed" in note
    # Three products forward and six backward. Those of one operand may be merged, with the router
    # too, and then have one name: jax 0.10 gives gate and up the router's.
    flops = 9 * 2 * TOKENS * WIDTH * INNER // SIZES["tp"] * EXPERTS
    router = 3 * 2 * TOKENS * WIDTH * EXPERTS
    said = float(note.split(" FLOPs a device")[0].rsplit(" ", 1)[1])
    assert flops * 7 / 9 * 0.995 <= said <= (flops + router) * 1.005  # three digits are printed


def test_ragged_products_of_anybody_are_named():
    (note,) = [note for note in report().notes if "ragged_dot" in note]
    assert "in_order" in note
    assert "4 x the FLOPs needed" in note


def test_numbers_stay():
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda one: jnp.float32(random.normal(0, 0.2, one.shape)), shapes())
    x = jnp.float32(random.normal(0, 1, STREAM.shape))
    mesh = jaxtp.make_mesh(**SIZES)
    step = jax.jit(gradients(jaxtp.parallelize(model, plan(), mesh)))
    got = step(jaxtp.shard(params, mesh, plan=plan()), jaxtp.shard_batch(x, mesh))
    assert_close(got, jax.jit(gradients(model))(params, x), 3 * INNER * LENGTH * ROWS)


def test_a_product_by_all_experts_counts_too():
    def every_expert(p, x):
        weights, index = jax.lax.top_k(jax.nn.softmax(x @ p["zr"]), CHOSEN)
        dense = (jax.nn.one_hot(index, EXPERTS) * weights[..., None]).sum(-2)
        inner = jax.nn.silu(jnp.einsum("btd,edf->btef", x, p["qa"]))
        return x + jnp.einsum("btef,efd,bte->btd", inner, p["qc"], dense)

    params = {name: one for name, one in shapes()["k1"].items() if name != "qb"}
    assert sorted(analyse(every_expert, params, STREAM).unchosen.values()) == [(4, 2), (4, 2)]
    assert analyse(picked, shapes()["k1"], STREAM).unchosen == {}
