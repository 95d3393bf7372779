"""Every threshold of `scripts/bench_long.py`, and the meshes that the default tests leave out.

python -m pytest tests/legs/test_long.py

Four programs of the real width and depth for up to 128 GPUs; two minutes on two cores.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from hybrid_runs import check
from jax.sharding import AbstractMesh, AxisType

import jaxtp
from jaxtp.activations.context import kernels

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_long

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", bench_long.SECTIONS)
def test_thresholds_are_reached(name):
    section = bench_long.SECTIONS[name]()
    assert section.thresholds
    assert [text for text, reached in section.thresholds if not reached] == []


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("gpt2", {"cp": 4, "tp": 1, "dp": 2}, {"num_micro": 2}),
        ("llama", {"cp": 4, "tp": 2}, {"sequence_parallel": True}),
        ("llama", {"cp": 8, "tp": 1}, {}),
        ("llama", {"fsdp": 2, "cp": 4, "tp": 1}, {"zero": 1}),
    ],
    ids=str,
)
def test_three_updates_are_those_of_one_device(name, sizes, options):
    check(name, sizes, **options)


# Models of others, by `jaxtp.parallelize`: what JAX calls is bound before a test replaces it.
ATTEND = jax.nn.dot_product_attention
WIDTH, KV_WIDTH, HEAD = 512, 256, 64


def attention(params, x, *, kernel, causal=True, mask=None):
    """Two blocks of a stranger's model, in bfloat16."""
    for layer in params:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        q, k, v = ((h @ layer[name]).reshape(*x.shape[:2], -1, HEAD) for name in "qkv")
        y = ATTEND(q, k, v, is_causal=causal, mask=mask, implementation=kernel)
        x = x + y.reshape(x.shape) @ layer["o"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return x


def weights(width=WIDTH, kv_width=KV_WIDTH):
    shapes = {"q": (width, width), "k": (width, kv_width), "v": (width, kv_width)}
    shapes |= {"o": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    return [shapes, shapes]


def on_gpus(fn, sizes, *inputs):
    """The compiled step of a loss of another's model."""
    jax.devices()  # JAX finds cuDNN's library when it starts, and asks for it when it traces
    params = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16),
        weights(),
        is_leaf=lambda leaf: isinstance(leaf, tuple),
    )
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * 2)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs)
    placed = jaxtp.shard(params, mesh, plan=plan)
    places = jax.tree.map(lambda leaf: leaf.sharding, placed)
    step = jax.value_and_grad(jaxtp.parallelize(fn, plan, mesh))
    return jaxtp.preflight(
        jax.jit(step, out_shardings=(None, places)),
        (placed, *jaxtp.shard_inputs(inputs, plan, mesh)),
        target=f"h100:1x{sizes['cp'] * sizes['tp']}",
        tensor_axes=plan.mesh.tp,
    )


def loss(params, x, mask=None, **how):
    return (attention(params, x, mask=mask, **how) ** 2).mean(dtype=jnp.float32)


def along_cp(report, kind):
    return sum(
        row.num_bytes * row.count
        for row in report.collectives
        if row.kind == kind and row.axes == ("cp",)
    )


def test_keys_and_values_of_others_are_gathered_and_nothing_else():
    """Forward, backward, and their gradients: tokens x kv heads / tp x head width x 2 bytes x 2."""
    x = jax.ShapeDtypeStruct((1, 1024, WIDTH), jnp.bfloat16)
    report = on_gpus(functools.partial(loss, kernel=None), {"cp": 4, "tp": 2}, x)
    both = 2 * 1024 * KV_WIDTH // 2 * 2
    assert not report.unexpected
    assert along_cp(report, "all-gather") == 2 * 2 * both
    assert along_cp(report, "all-to-all") == along_cp(report, "collective-permute") == 0
    assert along_cp(report, "reduce-scatter") == 2 * both


def test_cudnn_of_others_goes_around_and_its_memory_is_flat():
    peaks = []
    for cp in (2, 4, 8):
        x = jax.ShapeDtypeStruct((1, 2048 * cp, WIDTH), jnp.bfloat16)
        report = on_gpus(functools.partial(loss, kernel="cudnn"), {"cp": cp, "tp": 1}, x)
        assert not report.unexpected
        assert along_cp(report, "all-gather") == along_cp(report, "all-to-all") == 0
        peaks.append(report.peak_bytes)
    assert max(peaks) <= 1.05 * min(peaks)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mask"])
def test_cudnn_of_others_has_the_numbers_of_one_device(causal, monkeypatch):
    """Read as cuDNN's call and shared as that; computed by XLA, for want of a GPU."""
    shapes = weights(128, 64)
    keys = iter(jax.random.split(jax.random.key(0), 16))
    params = [
        {n: jax.random.normal(next(keys), s, jnp.bfloat16) / s[0] ** 0.5 for n, s in layer.items()}
        for layer in shapes
    ]
    x = jax.random.normal(next(keys), (2, 32, 128), jnp.bfloat16)
    ids = jnp.repeat(jnp.asarray([[1, 1, 2, 3], [1, 2, 2, 2]]), 8, axis=1)
    mask = None if causal else (ids[:, :, None] == ids[:, None])[:, None]
    inputs = (x,) if causal else (x, mask)
    want = jax.value_and_grad(functools.partial(loss, kernel=None, causal=causal))(params, *inputs)
    mesh = jaxtp.make_mesh(fsdp=1, cp=4, tp=2)
    fn = functools.partial(loss, kernel="cudnn", causal=causal)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=inputs)
    placed = jaxtp.shard(params, mesh, plan=plan)
    monkeypatch.setattr(kernels, "is_fused", lambda view, scores: False)
    plain = lambda *args, implementation, **rest: ATTEND(*args, **rest)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    got = jax.jit(jax.value_and_grad(jaxtp.parallelize(fn, plan, mesh)))(placed, *inputs)
    # Both round to bfloat16 after every product: an epsilon of 2^-8 for each of 2 x 8 of them.
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(two).max())
        assert float(jnp.abs(one - two).max()) <= 4 * 2**-8 * scale
