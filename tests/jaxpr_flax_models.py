"""Stock Flax modules and jaxtp's own models with expert findings; see `jaxpr_models`."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jaxpr_models import Case, Sizes, model, prefixed, stream, tokens

from jaxtp import models

# ---- Linen -------------------------------------------------------------------------------------


def linen(module, s: Sizes, inputs, expected) -> Case:
    """Parameters by `eval_shape` of `init`; the paths start with the collection."""
    params = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return Case(module.apply, params, inputs, prefixed(expected, "params/"))


def linen_attention(s: Sizes, at: str):
    """Flax attention: kernels (in, heads, width), (heads, width, out), biases (heads, width)."""
    kernels = {f"{at}{name}/kernel": (1, (s.heads,)) for name in ("query", "key", "value")}
    biases = {f"{at}{name}/bias": (0, (s.heads,)) for name in ("query", "key", "value")}
    return kernels | biases | {f"{at}out/kernel": (0, (s.heads,))}


def linen_mlp(s: Sizes, at: str, up: str = "Dense_1", down: str = "Dense_0"):
    """In `Dense(width)(gelu(Dense(ffn)(x)))` the outer module is created, and named, first: F7."""
    unit = (s.ffn,)
    return {
        f"{at}{up}/kernel": (1, unit),
        f"{at}{up}/bias": (0, unit),
        f"{at}{down}/kernel": (0, unit),
    }


class EncoderBlock(nn.Module):
    sizes: Sizes
    decode: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        s = self.sizes
        mask = nn.make_causal_mask(x[..., 0]) if self.decode else None
        y = nn.MultiHeadDotProductAttention(s.heads, qkv_features=s.inner)(
            nn.LayerNorm()(x), mask=mask
        )
        x = x + nn.Dropout(0.1, deterministic=True)(y)
        y = nn.Dense(s.width)(nn.gelu(nn.Dense(s.ffn)(nn.LayerNorm()(x))))
        x = x + y
        return (x, None) if _ is not None else x


class Language(nn.Module):
    """Embedding, blocks (looped, or scanned with the layer dim anywhere), tied head."""

    sizes: Sizes
    layer_dim: int | None = None

    @nn.compact
    def __call__(self, ids):
        s = self.sizes
        embed = nn.Embed(s.vocab, s.width)
        x = embed(ids)
        if self.layer_dim is None:
            for _ in range(2):
                x = EncoderBlock(s, decode=True)(x)
        else:
            block = nn.scan(
                nn.remat(EncoderBlock, prevent_cse=False),
                variable_axes={"params": self.layer_dim},
                split_rngs={"params": True},
                length=s.layers,
                in_axes=nn.broadcast,
            )
            x, _ = block(s)(x, 0)
        return embed.attend(nn.LayerNorm()(x))


@model
def linen_decoder(s: Sizes) -> Case:
    expected = {"Embed_0/embedding": (0, (s.vocab,))}
    for i in range(2):
        at = f"EncoderBlock_{i}/"
        expected |= linen_attention(s, f"{at}MultiHeadDotProductAttention_0/") | linen_mlp(s, at)
    return linen(Language(s), s, (tokens(s),), expected)


def linen_scanned(s: Sizes, dim: int) -> Case:
    at = "ScanCheckpointEncoderBlock_0/"
    block = linen_attention(s, f"{at}MultiHeadDotProductAttention_0/") | linen_mlp(s, at)
    moved = {path: (d + (dim <= d), units) for path, (d, units) in block.items()}
    return linen(Language(s, dim), s, (tokens(s),), {"Embed_0/embedding": (0, (s.vocab,))} | moved)


@model
def linen_scan_first(s: Sizes) -> Case:
    return linen_scanned(s, 0)


@model
def linen_scan_second(s: Sizes) -> Case:
    return linen_scanned(s, 1)


@model
def linen_encoder(s: Sizes) -> Case:
    expected = linen_attention(s, "MultiHeadDotProductAttention_0/") | linen_mlp(s, "")
    return linen(EncoderBlock(s), s, (stream(s),), expected)


class Nested(nn.Module):
    """F7: `Dense_0` is created first and called second."""

    sizes: Sizes

    @nn.compact
    def __call__(self, x):
        s = self.sizes
        return nn.Dense(s.width)(nn.relu(nn.Dense(s.ffn)(x)))


@model
def linen_compact(s: Sizes) -> Case:
    return linen(Nested(s), s, (stream(s),), linen_mlp(s, ""))


@model
def linen_lstm(s: Sizes) -> Case:
    return linen(nn.RNN(nn.OptimizedLSTMCell(s.ffn)), s, (stream(s),), {})


class Vision(nn.Module):
    """A patch convolution, a class token, learned positions, a block, ten classes."""

    sizes: Sizes

    @nn.compact
    def __call__(self, image):
        s = self.sizes
        x = nn.Conv(s.width, (4, 4), (4, 4), padding="VALID")(image)
        x = x.reshape(x.shape[0], -1, s.width)
        first = jnp.broadcast_to(
            self.param("cls", nn.zeros, (1, 1, s.width)), (x.shape[0], 1, s.width)
        )
        x = jnp.concatenate([first, x], 1)
        x = x + self.param("positions", nn.zeros, (1, *x.shape[1:]))
        return nn.Dense(10)(EncoderBlock(s)(x)[:, 0])


@model
def linen_vision(s: Sizes) -> Case:
    at = "EncoderBlock_0/"
    expected = linen_attention(s, f"{at}MultiHeadDotProductAttention_0/") | linen_mlp(s, at)
    image = jax.ShapeDtypeStruct((s.batch, 16, 16, 3), jnp.float32)
    return linen(Vision(s), s, (image,), expected)


# ---- NNX ---------------------------------------------------------------------------------------


class Block(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(s.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            s.heads, s.width, qkv_features=s.inner, decode=False, rngs=rngs
        )
        self.up = nnx.Linear(s.width, s.ffn, rngs=rngs)
        self.down = nnx.Linear(s.ffn, s.width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.down(jax.nn.gelu(self.up(x)))


class Decoder(nnx.Module):
    def __init__(self, s: Sizes, rngs: nnx.Rngs):
        self.embed = nnx.Embed(s.vocab, s.width, rngs=rngs)
        self.blocks = nnx.List([Block(s, rngs) for _ in range(2)])
        self.head = nnx.Linear(s.width, s.vocab, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_block(s: Sizes, at: str):
    expected = linen_attention(s, f"{at}attention/") | linen_mlp(s, at, "up", "down")
    return expected


@model
def nnx_decoder(s: Sizes) -> Case:
    module = nnx.eval_shape(lambda: Decoder(s, nnx.Rngs(0)))
    expected = nnx_block(s, "blocks/0/") | nnx_block(s, "blocks/1/")
    expected |= {"embed/embedding": (0, (s.vocab,)), "head/kernel": (1, (s.vocab,))}
    return Case(lambda m, ids: m(ids), module, (tokens(s),), expected)


@model
def nnx_scanned(s: Sizes) -> Case:
    @nnx.split_rngs(splits=s.layers)
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs: nnx.Rngs):
        return Block(s, rngs)

    def apply(blocks, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def step(x, block):
            return block(x)

        return step(x, blocks)

    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    moved = {path: (dim + 1, units) for path, (dim, units) in nnx_block(s, "").items()}
    return Case(apply, module, (stream(s),), moved)


# ---- jaxtp's own -------------------------------------------------------------------------------


@model
def own_llama(s: Sizes) -> Case:
    config = models.LlamaConfig(
        vocab_size=s.vocab,
        hidden_size=s.width,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv,
        head_dim=s.head,
        intermediate_size=s.ffn,
        remat="full",
        qk_norm=True,
    )
    query = tuple(n for n in (s.kv, s.heads // s.kv) if n > 1)
    attention, mlp = "layers/self_attn/", "layers/mlp/"
    expected = {
        "embed_tokens/embedding": (0, (s.vocab,)),
        "lm_head/kernel": (1, (s.vocab,)),
        f"{attention}q_proj/kernel": (2, query),
        f"{attention}k_proj/kernel": (2, (s.kv,)),
        f"{attention}v_proj/kernel": (2, (s.kv,)),
        f"{attention}o_proj/kernel": (1, query),
        f"{mlp}gate_proj/kernel": (2, (s.ffn,)),
        f"{mlp}up_proj/kernel": (2, (s.ffn,)),
        f"{mlp}down_proj/kernel": (1, (s.ffn,)),
    }
    return Case(lambda m, ids: m(ids), models.abstract(config), (tokens(s),), expected)


@model
def own_gpt(s: Sizes) -> Case:
    s = dataclasses.replace(s, width=64, heads=8)
    config = models.GPTConfig(
        vocab_size=s.vocab,
        hidden_size=s.width,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        max_position_embeddings=max(32, s.seq),
    )
    ffn = (4 * s.width,)
    expected = {
        "wte/embedding": (0, (s.vocab,)),
        "h/attn/c_attn/kernel": (3, (s.heads,)),
        "h/attn/c_attn/bias": (2, (s.heads,)),
        "h/attn/c_proj/kernel": (1, (s.heads,)),
        "h/mlp/c_fc/kernel": (2, ffn),
        "h/mlp/c_fc/bias": (1, ffn),
        "h/mlp/c_proj/kernel": (1, ffn),
    }
    return Case(lambda m, ids: m(ids), models.abstract(config), (tokens(s),), expected)
