"""Weights gathered one layer ahead: the numbers of one device, what moves, what is refused."""

import dataclasses
import functools
import re
import warnings

import hybrid_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_interleaving import GPT, LLAMA, QWEN, close, loss_of

from jaxtp.activations.by_name import use_plan
from jaxtp.config.presets import preset
from jaxtp.errors import JaxtpWarning
from jaxtp.layers.stacked import scan_layers
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models import abstract
from jaxtp.placement.arrays import shard
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.rules.planner import make_plan
from jaxtp.rules.roles import Role
from jaxtp.train.preflight import preflight_config


def planned(config, zero, **sizes):
    mesh = make_mesh(**sizes)
    plan = make_plan(abstract(config), mesh, config=config, zero=zero)
    plan = dataclasses.replace(plan, overlap="aggressive")
    return plan, mesh, plan_mesh(mesh, plan.mesh)


ONE = {"num_hidden_layers": 1, "remat": "full"}
TWO = {"num_hidden_layers": 2, "remat": "dots"}
ROWS = {
    "llama, fsdp 4 x dp 2": (LLAMA, {"fsdp": 4, "dp": 2, "tp": 1}, 3, {}, True),
    "one layer, all run again": (LLAMA, {"fsdp": 8, "tp": 1}, 3, ONE, False),
    "two layers, products kept": (GPT, {"fsdp": 8, "tp": 1}, 3, TWO, True),
    "replicas": (QWEN, {"dp": 8, "tp": 1}, 0, {"num_hidden_layers": 4}, False),
    "halves, all axes": (GPT, {"dp": 2, "fsdp": 2, "tp": 2}, 3, {}, True),
    "halves of one layer, sequence": (
        QWEN,
        {"fsdp": 2, "tp": 4},
        3,
        {"num_hidden_layers": 1},
        False,
    ),
    "halves on replicas, sequence": (LLAMA, {"dp": 4, "tp": 2}, 0, {"num_hidden_layers": 2}, True),
}


@pytest.mark.parametrize("row", ROWS)
def test_layers_gathered_ahead_have_the_gradients_of_one_device(row):
    config, sizes, zero, changes, packed = ROWS[row]
    loss, params = loss_of(dataclasses.replace(config, **changes), 16, packed)
    want = jax.jit(jax.value_and_grad(loss))(params)
    plan, mesh, own_mesh = planned(dataclasses.replace(config, **changes), zero, **sizes)
    plan = dataclasses.replace(plan, sequence_parallel=row.endswith("sequence"))
    with use_plan(plan, own_mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        got = jax.jit(jax.value_and_grad(loss))(shard(params, mesh, plan=plan))
    close(jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize(
    ("sizes", "zero", "num_micro"),
    [({"fsdp": 8, "tp": 1}, 3, 1), ({"fsdp": 4, "tp": 2}, 3, 2), ({"fsdp": 2, "tp": 4}, 2, 1)],
)
def test_updates_of_layers_gathered_ahead_are_those_of_one_device(sizes, zero, num_micro):
    hybrid_runs.check("llama", sizes, zero=zero, num_micro=num_micro, overlap="aggressive")


# Layers of anybody

WIDTH, LAYERS = 8, 3


def toy_layer(x, params, context):
    return x + jnp.tanh(x @ params["w"]) * context["gain"]


def looped_layer(x, params, context):
    def turn(key, _):
        return key, jax.random.bernoulli(key, 0.5, x.shape)

    kept = jax.lax.scan(turn, jax.random.key(0), None, 2)[1][1]
    return x + jnp.where(kept, x @ params["w"], 0)


def dropping_layer(x, params, context):
    """Dropout of elements by a key of the layer, of whole rows of heads, of what all share."""
    key = jax.random.fold_in(jax.random.wrap_key_data(context["key"][0]), context["number"])
    by_element, by_token, shared = jax.random.split(key, 3)
    own = jax.vmap(jax.random.fold_in, (None, 0))(key, context["row"])
    h = x @ params["w"] * jax.random.bernoulli(by_element, 0.7, x.shape)
    h *= jnp.moveaxis(jax.random.bernoulli(by_token, 0.7, (x.shape[1], x.shape[0], 1)), 0, 1)
    h *= jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, x.shape[1:]))(own)
    return x + h * jax.random.bernoulli(shared, 0.7, (1, *x.shape[1:]))


def toy_plan(**sizes):
    shape = (LAYERS, WIDTH, WIDTH)
    one = ParamDecision(
        path="layers/w",
        shape=shape,
        dtype="float32",
        spec=((), ("fsdp",), ()),
        role=Role.UNKNOWN,
        reasons=("-",),
    )
    plan = Plan(mesh=MeshShape.of(sizes), decisions=(one,), zero=3, overlap="aggressive")
    return plan, plan_mesh(make_mesh(**sizes), plan.mesh)


def toy_run(layer, remat, batch=8):
    random = np.random.default_rng(0)
    params = {"w": jnp.float32(random.normal(0, 0.3, (LAYERS, WIDTH, WIDTH)))}
    x = jnp.float32(random.normal(size=(batch, 4, WIDTH)))
    context = {"gain": jnp.float32(random.normal(size=(batch, 1, 1)))}

    def total(params, x):
        return (scan_layers(layer, x, params, context=context, remat=remat) ** 2).sum()

    return jax.jit(jax.value_and_grad(total, (0, 1))), params, x


def test_layers_of_anybody_may_differ_between_sequences():
    run, params, x = toy_run(toy_layer, "full")
    want = run(params, x)
    plan, mesh = toy_plan(dp=2, fsdp=4, tp=1)
    with use_plan(plan, mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "optimization_barrier" in str(jax.make_jaxpr(run)(params, x))
        got = run(params, x)
    close(jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_layers_with_dropout_drop_what_one_device_drops(remat):
    random = np.random.default_rng(0)
    params = {"w": jnp.float32(random.normal(0, 0.3, (LAYERS, WIDTH, WIDTH)))}
    x = jnp.float32(random.normal(size=(16, 4, WIDTH)))
    rows = {"number": np.arange(LAYERS)}

    def total(params, x, key):
        context = {"key": key[None], "row": jnp.arange(16)}
        out = scan_layers(dropping_layer, x, params, context=context, remat=remat, rows=rows)
        return (out**2).sum()

    run, key = jax.jit(jax.value_and_grad(total, (0, 1))), jnp.array([1, 2], jnp.uint32)
    want, other = run(params, x, key), run(params, x, key + 1)
    assert abs(want[0] - other[0]) > 1
    plan, mesh = toy_plan(dp=2, fsdp=4, tp=1)
    with use_plan(plan, mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "optimization_barrier" in str(jax.make_jaxpr(run)(params, x, key))
        got = run(params, x, key)
    close(jax.device_get(got), jax.device_get(want))


@pytest.mark.parametrize(
    ("layer", "remat", "batch", "reason"),
    [
        (looped_layer, "full", 8, "draws random numbers inside scan"),
        (toy_layer, "none", 8, "would keep gathered weights"),
        (toy_layer, "full", 6, "6 sequences on 8 replicas"),
    ],
)
def test_what_cannot_be_gathered_ahead_says_why_and_has_the_same_numbers(
    layer, remat, batch, reason
):
    run, params, x = toy_run(layer, remat, batch)
    want = run(params, x)
    plan, mesh = toy_plan(fsdp=8, tp=1)
    with use_plan(plan, mesh), pytest.warns(JaxtpWarning, match=f"TP073.*{reason}"):
        got = run(params, x)
    close(jax.device_get(got), jax.device_get(want))


def test_weights_are_gathered_in_the_type_of_products():
    def layer(x, params, context):
        narrow = x.astype(jnp.bfloat16) @ params["w"].astype(jnp.bfloat16)
        return x + narrow.astype(jnp.float32)

    run, params, x = toy_run(layer, "full")
    plan, mesh = toy_plan(fsdp=8, tp=1)
    with use_plan(plan, mesh):
        program = run.lower(params, x).as_text()
    gathered = re.findall(rf"\[{{}}, {{}}\]> : tensor<{WIDTH}x{WIDTH}x(\w+)>", program)
    assert set(gathered) == {"bf16"}


# What the GPU compiler makes of it


@functools.cache
def preflighted(overlap):
    """Four layers of Llama-3-8B's widths under ZeRO 3 on two hosts."""
    config = preset(
        "llama3-8b",
        **{
            "layers": 4,
            "mesh.tp": 1,
            "mesh.fsdp": 16,
            "target": "h100:2x8",
            "batch.size": 16,
            "seq_len": 2048,
            "attention": "xla",
            "communication.overlap": overlap,
        },
    )
    return preflight_config(config)[1]


def test_each_layer_is_gathered_once_each_way_in_the_type_of_products():
    report = preflighted("aggressive")
    layer = 2 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    table = 2 * 128256 * 4096
    moved = {
        kind: sum(r.num_bytes * r.count for r in report.collectives if r.kind == kind)
        for kind in ("all-gather", "reduce-scatter")
    }
    assert moved["all-gather"] == 2 * 4 * layer + 2 * table
    assert moved["reduce-scatter"] == 4 * layer + 2 * table
    assert {r.dtype for r in report.collectives if r.num_bytes > 2**20} == {"bf16"}


def test_weights_of_one_more_layer_and_gradients_of_one_are_alive():
    # In a turn of the backward pass: the weights of the layer in front, the gradients of the last.
    layer = 2 * (4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    more = preflighted("aggressive").peak_bytes - preflighted("auto").peak_bytes
    assert more <= 2 * layer
