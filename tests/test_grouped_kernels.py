"""Gradients of kernels of grouped convolutions, which XLA sums over too many devices."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxtp
from jaxtp.plan.trees import leaves

TAPS, WIDTH, INNER = 4, 16, 32


def convolve(x, kernel):
    """Causal, along tokens, in as many groups as the kernel leaves."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (1,),
        [(len(kernel) - 1, 0)],
        dimension_numbers=("NTC", "TIO", "NTC"),
        feature_group_count=x.shape[-1] // kernel.shape[1],
    )


def block(x, p):
    """Mixes tokens on the residual stream, whose channels no device splits, in front of an MLP."""
    return x + jax.nn.gelu(convolve(x, p["conv"]) @ p["up"]) @ p["down"]


def scanned(params, x):
    layer = jax.checkpoint(block)
    return jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]


def single(params, x):
    return block(x, params)


def make(taps=TAPS, per_group=1, layers=(), dtype="float32"):
    shapes = {"conv": (taps, per_group, WIDTH), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        name: jax.random.normal(key, (*layers, *shape), dtype) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=False)
    }
    return params, jax.random.normal(keys[3], (4, 8, WIDTH), dtype)


def loss(fn, params, x):
    return (fn(params, x) ** 2).mean()


def gradients(fn, params, x):
    return jax.jit(jax.grad(functools.partial(loss, fn)))(params, x)


def assert_same(got, want, rtol=1e-5):
    for (path, a), (_, b) in zip(leaves(got), leaves(want), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max(), err_msg=path)


def test_a_step_sums_them_over_rows_alone():
    params, x = make(layers=(2,))
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    plan = jaxtp.make_plan(params, mesh, fn=scanned, inputs=(x,))
    assert re.match(
        r"grouped convolutions at test_grouped_kernels.py:\d+ .*4 times", plan.notes[-1]
    )
    alone = jaxtp.make_plan(params, {"dp": 1, "tp": 4}, fn=scanned, inputs=(x,))
    assert not any("grouped" in note for note in alone.notes)

    def step(params, x):
        grads = jax.grad(functools.partial(loss, scanned))(params, x)
        return jax.tree.map(jnp.subtract, params, grads), grads

    placed = jaxtp.shard(params, mesh, plan=plan)
    run = jaxtp.jit_step(step, placed, mesh, plan=plan, donate=False)
    assert_same(run(placed, x)[1], gradients(scanned, params, x))
    # Layers are still computed again in the backward pass, and not kept.
    assert "optimization_barrier" in run.lower(placed, x).as_text()


@pytest.mark.parametrize(
    ("taps", "per_group", "dtype"),
    [(TAPS, 1, "float32"), (7, 4, "float32"), (TAPS, 1, "bfloat16")],
    ids=["edges", "gathered", "bfloat16"],
)
@pytest.mark.filterwarnings("ignore:parallelize leaves to XLA")
def test_so_does_a_function_whose_tokens_devices_share_as_well(taps, per_group, dtype):
    """Four tokens a device: seven taps reach further than to its neighbour's."""
    params, x = make(taps, per_group, dtype=dtype)
    mesh = jaxtp.make_mesh(dp=2, cp=2, tp=2)
    plan = jaxtp.make_plan(params, mesh, fn=single, inputs=(x,))
    fn = jaxtp.parallelize(single, plan, mesh)
    placed = jaxtp.shard(params, mesh, plan=plan), jaxtp.shard_batch(x, mesh)
    rtol = 0.03 if dtype == "bfloat16" else 1e-5
    assert_same(gradients(fn, *placed), gradients(single, params, x), rtol)


def test_verify_computes_as_a_step_does():
    params, x = make()
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4])
    assert jaxtp.verify(single, params, (x,), mesh).rows
