"""Models as a stranger gives them to `jaxtp search`: functions that return (fn, params, inputs)."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp import models

PRESET, REMAT, SEQ = "llama3.2-1b", "block_outputs", 2048
PERCEPTRON = (64, 256)


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def of(module, *inputs):
    variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return module, variables["params"], inputs


def decoder():
    """A preset, of which nothing is told but its function."""
    config = dataclasses.replace(models.PRESETS[PRESET], remat=REMAT)
    return None, models.abstract(config), (struct(1, SEQ, dtype=jnp.int32),)


class Block(nn.Module):
    heads: int = 4

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=jnp.bfloat16)(h)
        h = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
        return x + nn.Dense(x.shape[-1])(h)


class Vision(nn.Module):
    heads: int = 4

    @nn.compact
    def __call__(self, images):
        x = nn.Conv(96, (8, 8), (8, 8))(images)
        x = x.reshape(x.shape[0], -1, 96)
        for _ in range(2):
            x = Block(self.heads)(x)
        return nn.Dense(10)(x.mean(1))


def vision():
    return of(Vision(), struct(2, 32, 32, 3))


def three_heads():
    return of(Vision(heads=3), struct(2, 32, 32, 3))


class Convolutions(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (16, 32):
            x = nn.relu(nn.GroupNorm(num_groups=4)(nn.Conv(width, (3, 3), (2, 2))(x)))
        return nn.Dense(10)(x.mean((1, 2)))


def convolutions():
    return of(Convolutions(), struct(2, 32, 32, 3))


class Perceptron(nnx.Module):
    def __init__(self, rngs, rate=0.0):
        width, inner = PERCEPTRON
        self.up = nnx.Linear(width, inner, rngs=rngs)
        self.down = nnx.Linear(inner, width, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.up(x))))


def perceptron():
    module = nnx.eval_shape(lambda: Perceptron(nnx.Rngs(0)))
    return None, module, (struct(2, PERCEPTRON[0], dtype=jnp.float32),)


def with_dropout():
    """Its state holds keys of random numbers beside parameters."""
    module = nnx.eval_shape(lambda: Perceptron(nnx.Rngs(0), rate=0.5))
    return None, module, (struct(2, PERCEPTRON[0], dtype=jnp.float32),)


def positions_first():
    """Its first input has no batch, though it leads with more than the batch."""

    def h(p, positions, x):
        return jnp.tanh((x + positions[None, :, None]) @ p["up"]) @ p["down"]

    width, inner = PERCEPTRON
    params = {"up": struct(width, inner), "down": struct(inner, width)}
    return h, params, (struct(32), struct(4, 32, width))


def convolutions_back():
    """A kernel that widens, and one that leads back to the stream."""

    def h(p, x):
        def convolve(x, w):
            return jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )

        return x + convolve(nn.relu(convolve(x, p["up"])), p["down"])

    params = {"up": struct(3, 3, 16, 64), "down": struct(3, 3, 64, 16)}
    return h, params, (struct(2, 8, 8, 16),)


def ragged():
    """Experts whose rows follow each other."""

    def h(p, x, sizes):
        return x + jax.lax.ragged_dot(
            nn.relu(jax.lax.ragged_dot(x, p["up"], sizes)), p["down"], sizes
        )

    params = {"up": struct(4, 16, 64), "down": struct(4, 64, 16)}
    return h, params, (struct(8, 16), struct(4, dtype=jnp.int32))


def frozen():
    """Most of it is integers; a loop that runs as often as the data says."""

    def h(p, x):
        x = jax.lax.stop_gradient(jax.lax.while_loop(lambda x: x.sum() > 9, lambda x: x / 2, x))
        return x @ p["codes"].astype(jnp.bfloat16) @ p["w"]

    params = {"codes": struct(64, 256, dtype=jnp.int8), "w": struct(256, 64)}
    return h, params, (struct(2, 64),)


def with_a_number_and_a_key():
    """Of its inputs only the first is an array with a batch."""

    def fn(params, x, scale, key):
        return scale * (x @ params["up"] + jax.random.normal(key, (len(x), PERCEPTRON[1])))

    key = jax.eval_shape(lambda: jax.random.key(0))
    x = struct(2, PERCEPTRON[0], dtype=jnp.float32)
    return fn, {"up": struct(*PERCEPTRON, dtype=jnp.float32)}, (x, 0.5, key)
