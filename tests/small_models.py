"""Tiny models for the applying half: stock Linen, stock NNX, scanned, factored, our own.

Each entry makes parameters from a seed and calls them on token ids `(batch, seq)`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh

from jaxtp.models.llama import Llama, LlamaConfig
from jaxtp.plan.trees import map_with_path

VOCAB, SEQ, BATCH = 48, 6, 8
MESHES = [(1, 8), (2, 4), (4, 2), (8, 1)]


class Block(nn.Module):
    """A pre-norm encoder block of stock Linen modules."""

    heads: int
    width: int

    @nn.compact
    def __call__(self, x, _=None):
        h = nn.LayerNorm(name="norm_1")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, name="attn")(h)
        h = nn.LayerNorm(name="norm_2")(x)
        h = nn.gelu(nn.Dense(4 * self.width, name="up_proj")(h))
        x = x + nn.Dense(self.width, name="down_proj")(h)
        return x, None


class LinenModel(nn.Module):
    """Token table, blocks (scanned or not), tied head."""

    heads: int = 8
    width: int = 32
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        table = nn.Embed(VOCAB, self.width, name="embed")
        x = table(tokens)
        if self.scanned:
            stack = nn.scan(
                nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2
            )
            x, _ = stack(self.heads, self.width, name="layers")(x, None)
        else:
            x, _ = Block(self.heads, self.width, name="layers_0")(x)
        return table.attend(nn.LayerNorm(name="final_norm")(x))


class NNXModel(nnx.Module):
    """Stock `nnx.MultiHeadAttention` with a tied head and dropout keys among its state."""

    def __init__(self, rngs: nnx.Rngs, width: int = 32):
        self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(8, width, decode=False, rngs=rngs)
        self.up_proj = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down_proj = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, deterministic=True, rngs=rngs)
        self.head = self.embed  # one variable under two names

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.attn(x)
        x = x + self.dropout(self.down_proj(nnx.gelu(self.up_proj(x))))
        return self.head.attend(x)


@dataclasses.dataclass(frozen=True)
class Case:
    """One model: `init()` gives parameters, `apply(params, tokens)` logits."""

    init: Callable[[], Any]
    apply: Callable[[Any, jax.Array], jax.Array]


def _linen(**sizes: Any) -> Case:
    model = LinenModel(**sizes)
    tokens = jnp.zeros((1, SEQ), jnp.int32)
    return Case(
        lambda: model.init(jax.random.key(0), tokens)["params"],
        lambda params, tokens: model.apply({"params": params}, tokens),
    )


LLAMA = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    intermediate_size=64,
    dtype="float32",
)

MODELS: dict[str, Case] = {
    "linen": _linen(),
    "linen_scan": _linen(scanned=True),
    "linen_12_heads": _linen(heads=12, width=48),
    "nnx": Case(lambda: NNXModel(nnx.Rngs(0)), lambda model, tokens: model(tokens)),
    "llama": Case(lambda: Llama(LLAMA, nnx.Rngs(0)), lambda model, tokens: model(tokens)),
}


@functools.cache
def make(name: str) -> Any:
    """Parameters of one model, made once; nobody may change or donate them."""
    return drawn(abstract(name))


def drawn(tree: Any, scale: float = 0.2) -> Any:
    """A tree of structs as arrays: normal around zero, norms around one, keys from zero.

    Drawn by NumPy: running the real initialisers eagerly takes five seconds a model.
    """
    random = np.random.default_rng(0)

    def fill(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            values = jax.random.key(0)
        else:
            center = 1.0 if path.endswith("scale") else 0.0
            values = random.normal(center, scale, leaf.shape).astype(leaf.dtype)
        # On one device, whatever mesh is ambient where the first caller is: what lies on a mesh
        # `shard` shares, and a step would donate it.
        return jax.device_put(values, jax.devices()[0])

    return map_with_path(fill, tree)


def abstract(name: str) -> Any:
    """The same parameters as `jax.ShapeDtypeStruct`s."""
    evaluate = jax.eval_shape if name.startswith("linen") else nnx.eval_shape
    return evaluate(MODELS[name].init)


def tokens(seed: int = 0) -> np.ndarray:
    """Token ids `(BATCH, SEQ)`."""
    return np.random.default_rng(seed).integers(0, VOCAB, (BATCH, SEQ), dtype=np.int32)


@functools.cache
def mesh(dp: int, tp: int, kind: AxisType = AxisType.Auto, names: tuple = ("dp", "tp")) -> Mesh:
    """A mesh over the first dp x tp devices."""
    devices = np.array(jax.devices()[: dp * tp]).reshape(dp, tp)
    return Mesh(devices, names, axis_types=(kind, kind))
