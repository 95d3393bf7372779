"""A stranger's model whose attention JAX computes, by cuDNN or not, and its step on a mesh."""

import functools

import jax
import jax.numpy as jnp

import jaxtp

# What JAX calls is bound before a test replaces it.
ATTEND = jax.nn.dot_product_attention
WIDTH, HEAD = 512, 64


def attention(params, x, *, kernel, causal=True, mask=None):
    """As many blocks as there are weights for."""
    for layer in params:
        h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        names = "ask", "offer", "content"
        q, k, v = ((h @ layer[name]).reshape(*x.shape[:2], -1, HEAD) for name in names)
        y = ATTEND(q, k, v, is_causal=causal, mask=mask, implementation=kernel)
        x = x + y.reshape(x.shape) @ layer["answer"]
        x = x + jax.nn.gelu(x @ layer["one"]) @ layer["two"]
    return x


def loss(params, x, mask=None, **how):
    return (attention(params, x, mask=mask, **how) ** 2).mean(dtype=jnp.float32)


def weights(make, width=WIDTH, kv_width=WIDTH, blocks=2):
    """`make(shape)` for each weight of each block."""
    shapes = {"ask": (width, width), "offer": (width, kv_width), "content": (width, kv_width)}
    shapes |= {"answer": (width, width), "one": (width, 4 * width), "two": (4 * width, width)}
    return [{name: make(shape) for name, shape in shapes.items()} for _ in range(blocks)]


def entry_step(mesh, *, kernel, tokens):
    """For `module:function`: loss and gradients of one sequence."""
    params = weights(functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16))
    x = jax.ShapeDtypeStruct((1, tokens, WIDTH), jnp.bfloat16)
    fn = functools.partial(loss, kernel=kernel)
    plan = jaxtp.make_plan(params, mesh, fn=fn, inputs=(x,))
    placed = jaxtp.shard(params, mesh, plan=plan)
    places = jax.tree.map(lambda leaf: leaf.sharding, placed)
    step = jax.value_and_grad(jaxtp.parallelize(fn, plan, mesh))
    return jax.jit(step, out_shardings=(None, places)), (
        placed,
        jaxtp.shard_inputs(x, plan, mesh),
    )
