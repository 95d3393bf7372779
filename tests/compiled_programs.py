"""A Llama-like train step in plain JAX, and a way to compile it for GPUs that are not there."""

import functools
import math
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxtp.compile.options import PREFLIGHT
from jaxtp.hardware.gpus import Target

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, VOCAB = 4, 512, 16, 8, 32, 2048, 1024
BATCH, TOKENS = 4, 256
AUTO = jax.sharding.AxisType.Auto

SPECS = {
    "embed": ((VOCAB, WIDTH), P("tp")),
    "q": ((LAYERS, WIDTH, HEADS, HEAD_DIM), P(None, None, "tp")),
    "k": ((LAYERS, WIDTH, KV_HEADS, HEAD_DIM), P(None, None, "tp")),
    "v": ((LAYERS, WIDTH, KV_HEADS, HEAD_DIM), P(None, None, "tp")),
    "o": ((LAYERS, HEADS, HEAD_DIM, WIDTH), P(None, "tp")),
    "gate": ((LAYERS, WIDTH, HIDDEN), P(None, None, "tp")),
    "up": ((LAYERS, WIDTH, HIDDEN), P(None, None, "tp")),
    "down": ((LAYERS, HIDDEN, WIDTH), P(None, "tp")),
    "norm1": ((LAYERS, WIDTH), P()),
    "norm2": ((LAYERS, WIDTH), P()),
    "head": ((WIDTH, VOCAB), P(None, "tp")),
}


def norm(x, scale):
    y = x.astype(jnp.float32)
    y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-6)
    return (y * scale[None, None]).astype(x.dtype)


def make_step(mesh, *, constrain=True):
    """A train step (params, tokens) -> (params, loss) whose constraints name `mesh`."""

    def keep(x, *spec):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec))) if constrain else x

    def layer(x, w):
        w = jax.tree.map(lambda one: one.astype(jnp.bfloat16), w)
        h = norm(x, w["norm1"])
        q, k, v = (
            keep(jnp.einsum("btd,dnh->btnh", h, w[name]), "dp", None, "tp") for name in "qkv"
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + keep(jnp.einsum("btnh,nhd->btd", mixed, w["o"]), "dp")
        h = norm(x, w["norm2"])
        gate = keep(jnp.einsum("btd,df->btf", h, w["gate"]), "dp", None, "tp")
        up = keep(jnp.einsum("btd,df->btf", h, w["up"]), "dp", None, "tp")
        return x + keep(jnp.einsum("btf,fd->btd", jax.nn.silu(gate) * up, w["down"]), "dp"), None

    def loss(params, tokens):
        layers = {name: w for name, w in params.items() if name not in ("embed", "head")}
        x = keep(params["embed"].astype(jnp.bfloat16)[tokens], "dp")
        x, _ = lax.scan(layer, x, layers)
        head = params["head"].astype(jnp.bfloat16)
        logits = keep(jnp.einsum("btd,dv->btv", x, head).astype(jnp.float32), "dp", None, "tp")
        targets = jnp.roll(tokens, -1, 1)[..., None]
        picked = jnp.take_along_axis(logits, targets, -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)

    def step(params, tokens):
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value

    return step


def arguments(mesh):
    """Abstract arguments of the step, with their shardings."""
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for name, (shape, spec) in SPECS.items()
    }
    tokens = jax.ShapeDtypeStruct((BATCH, TOKENS), jnp.int32, sharding=NamedSharding(mesh, P("dp")))
    return params, tokens


def abstract_mesh(dp, tp):
    return jax.sharding.AbstractMesh((dp, tp), ("dp", "tp"), axis_types=(AUTO, AUTO))


def gpu_mesh(dp, tp, kind="h100"):
    """A mesh of GPUs that are not there."""
    return mesh_of_gpus({"dp": dp, "tp": tp}, kind)


def mesh_of_gpus(sizes, kind="h100"):
    """The same with any axes."""
    target = Target.parse(f"{kind}:1x{math.prod(sizes.values())}")
    topology = topologies.get_topology_desc(
        platform="cuda", topology=target.topology, target_config=target.device.config
    )
    devices = np.array(topology.devices).reshape(tuple(sizes.values()))
    return jax.sharding.Mesh(devices, tuple(sizes), axis_types=(AUTO,) * len(sizes))


@functools.cache
def compile_here(dp, tp):
    """The step compiled in this process, for tests that need the compiler's own objects."""
    mesh = gpu_mesh(dp, tp)
    step = jax.jit(make_step(mesh), donate_argnums=0)
    return step.lower(*arguments(mesh)).compile(dict(PREFLIGHT))


def entry_step(mesh, *, split_down="out"):
    """For `module:function`: the step with one weight stored along the wrong dim, not donated."""
    params, tokens = arguments(mesh)
    wrong = P(None, None, "tp") if split_down == "out" else P(None, "tp")
    params["down"] = jax.ShapeDtypeStruct(
        params["down"].shape, jnp.float32, sharding=NamedSharding(mesh, wrong)
    )
    return jax.jit(make_step(mesh)), (params, tokens)


def entry_abort(mesh):
    """What XLA does when an internal check fails."""
    sys.stderr.write("F0000 hlo_thing.cc:42] Check failed: a cycle is detected\n")
    sys.stderr.flush()
    os.abort()


def entry_sleep(mesh):
    """A compiler that does not come back."""
    time.sleep(60)


def entry_error(mesh):
    """A step that cannot be traced."""
    raise ValueError("the model has no such layer")
