"""Every threshold of `scripts/bench_long.py`, and the meshes that the default tests leave out.

python -m pytest tests/legs/test_long.py

Four programs of the real width and depth for up to 128 GPUs; two minutes on two cores.
"""

import functools
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import others_attention
import pytest
from hybrid_runs import check

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
        ("llama", {"cp": 4, "tp": 2}, {"sequence_parallel": True, "zero": 3}),
        ("llama", {"cp": 8, "tp": 1}, {}),
        ("llama", {"fsdp": 2, "cp": 4, "tp": 1}, {"zero": 1}),
    ],
    ids=str,
)
def test_three_updates_are_those_of_one_device(name, sizes, options):
    check(name, sizes, **options)


def step_of_others(kernel, tokens, cp, tp):
    """The compiled step of another's model, by `jaxtp.parallelize`."""
    return jaxtp.preflight(
        "others_attention:entry_step",
        target=f"h100:1x{cp * tp}",
        mesh={"cp": cp, "tp": tp},
        keywords={"kernel": kernel, "tokens": tokens},
    )


def along_cp(report, kind):
    return sum(
        row.num_bytes * row.count
        for row in report.collectives
        if row.kind == kind and row.axes == ("cp",)
    )


def test_keys_and_values_of_others_are_gathered_and_nothing_else():
    """Two layers, forward and backward: tokens x heads / tp x head width x 2 x 2 bytes.

    JAX makes scores in float32, and so the gradients of keys; those of values are in bfloat16.
    """
    report = step_of_others("xla", 1024, 4, 2)
    both = 2 * 1024 * others_attention.WIDTH // 2 * 2
    assert not report.unexpected
    assert along_cp(report, "all-gather") == 2 * 2 * both
    assert along_cp(report, "reduce-scatter") == 2 * (2 + 1) * both // 2
    assert along_cp(report, "all-to-all") == along_cp(report, "collective-permute") == 0


def test_cudnn_of_others_goes_around():
    report = step_of_others("cudnn", 16_384, 8, 1)
    assert not report.unexpected
    assert along_cp(report, "all-gather") == along_cp(report, "all-to-all") == 0
    assert along_cp(report, "collective-permute") > 0


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "mask"])
def test_cudnn_of_others_has_the_numbers_of_one_device(causal, monkeypatch):
    """Read as cuDNN's call and shared as that; computed by XLA, for want of a GPU."""
    keys = iter(jax.random.split(jax.random.key(0), 16))
    params = others_attention.weights(
        lambda shape: jax.random.normal(next(keys), shape, jnp.bfloat16) / shape[0] ** 0.5,
        width=128,
        kv_width=128,
        blocks=1,
    )
    x = jax.random.normal(next(keys), (2, 32, 128), jnp.bfloat16)
    ids = jnp.repeat(jnp.asarray([[1, 1, 2, 3], [1, 2, 2, 2]]), 8, axis=1)
    mask = None if causal else (ids[:, :, None] == ids[:, None])[:, None]
    inputs = (x,) if causal else (x, mask)
    fn = functools.partial(others_attention.loss, causal=causal)
    want = jax.value_and_grad(functools.partial(fn, kernel=None))(params, *inputs)
    mesh = jaxtp.make_mesh(cp=4, tp=2)
    plan = jaxtp.make_plan(params, mesh, fn=functools.partial(fn, kernel="cudnn"), inputs=inputs)
    placed = jaxtp.shard(params, mesh, plan=plan)
    monkeypatch.setattr(kernels, "is_fused", lambda view, scores: False)
    plain = lambda *args, implementation, **rest: others_attention.ATTEND(*args, **rest)  # noqa: E731
    monkeypatch.setattr(jax.nn, "dot_product_attention", plain)
    shared = jaxtp.parallelize(functools.partial(fn, kernel="cudnn"), plan, mesh)
    got = jax.jit(jax.value_and_grad(shared))(placed, *inputs)
    # On the way to a gradient 12 values are rounded to bfloat16, and 12 on the way back, in
    # both programs: roundings add up as the root of their number, see `rounding`.
    most = math.sqrt(2 * 24) * float(jnp.finfo(jnp.bfloat16).eps)
    for one, two in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = float(jnp.abs(two).max())
        assert float(jnp.abs(one - two).max()) <= most * scale
