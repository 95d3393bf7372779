"""Small models in plain JAX, each with the findings an expert writes down by hand.

A model is a function of `Sizes` that returns a `Case`. `expected` names the parameters that carry
the tensor axis, with the dim and its units, major to minor; every other one is replicated. Sizes
vary from the distinct ones to all equal and to a batch and a sequence of one, and the findings must
not change.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes in elements. `kv` divides `heads`."""

    batch: int = 2
    seq: int = 12
    width: int = 48
    heads: int = 8
    kv: int = 2
    head: int = 10
    ffn: int = 112
    vocab: int = 2048
    experts: int = 6
    layers: int = 3

    @property
    def inner(self) -> int:
        return self.heads * self.head


DISTINCT = Sizes()
SINGLE = Sizes(batch=1, seq=1)
EQUAL = Sizes(
    batch=8, seq=8, width=64, heads=8, kv=8, head=8, ffn=64, vocab=64, experts=8, layers=8
)


@dataclasses.dataclass
class Case:
    """A model and what is right.

    Attributes:
        fn: The forward function.
        params: Tree of shapes.
        inputs: Structs.
        expected: Path -> (dim, units), or (dim, units, pieces) for contiguous fused dims.
    """

    fn: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    expected: dict[str, tuple[Any, ...]]


MODELS: dict[str, Callable[[Sizes], Case]] = {}


def model(build: Callable[[Sizes], Case]) -> Callable[[Sizes], Case]:
    """Puts a model in the table under its function's name."""
    MODELS[build.__name__] = build
    return build


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def tokens(s: Sizes) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((s.batch, s.seq), jnp.int32)


def stream(s: Sizes) -> jax.ShapeDtypeStruct:
    return f32(s.batch, s.seq, s.width)


# ---- pieces ----------------------------------------------------------------------------------


def rms(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def layer_norm(x, p):
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(var + 1e-6) * p["scale"] + p["bias"]


def rotary(x):
    """Rotary positions in the halves form, on (batch, seq, heads, width)."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * 1.0 / (1 + jnp.arange(half))[None]
    cos, sin = (jnp.concatenate([f(angle)] * 2, -1)[None, :, None] for f in (jnp.cos, jnp.sin))
    left, right = x[..., :half], x[..., half:]
    return x * cos + jnp.concatenate([-right, left], -1) * sin


def attend(q, k, v, bias=None):
    """Softmax attention on (batch, seq, heads, width), causal."""
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if bias is not None:
        scores = scores + bias
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool), scores.shape[-1] - scores.shape[-2])
    probs = jax.nn.softmax(jnp.where(mask[None, None], scores, -1e9), -1)
    return jnp.einsum("bhts,bshd->bthd", probs, v)


def heads(x, n):
    return x.reshape(*x.shape[:-1], n, x.shape[-1] // n)


def merge(x):
    return x.reshape(*x.shape[:-2], -1)


def swiglu(p, x):
    return (jax.nn.silu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]


def swiglu_params(s: Sizes):
    return {"gate": f32(s.width, s.ffn), "up": f32(s.width, s.ffn), "down": f32(s.ffn, s.width)}


def swiglu_expected(s: Sizes, at: str):
    return {f"{at}gate": (1, (s.ffn,)), f"{at}up": (1, (s.ffn,)), f"{at}down": (0, (s.ffn,))}


def qkvo_params(s: Sizes, kv: int | None = None):
    wide = (kv or s.heads) * s.head
    return {
        "q": f32(s.width, s.inner),
        "k": f32(s.width, wide),
        "v": f32(s.width, wide),
        "o": f32(s.inner, s.width),
    }


def qkvo_expected(s: Sizes, at: str, kv: int | None = None):
    """Units of query heads are (kv, group); trivial factors are left out."""
    if kv is None:
        return {f"{at}{n}": (d, (s.heads,)) for n, d in (("q", 1), ("k", 1), ("v", 1), ("o", 0))}
    query = tuple(n for n in (kv, s.heads // kv) if n > 1)
    both = {f"{at}q": (1, query), f"{at}o": (0, query)}
    return both | ({f"{at}k": (1, (kv,)), f"{at}v": (1, (kv,))} if kv > 1 else {})


def self_attention(p, x, s: Sizes, kv: int | None = None, repeat="repeat"):
    q, k, v = (
        heads(x @ p["q"], s.heads),
        heads(x @ p["k"], kv or s.heads),
        heads(x @ p["v"], kv or s.heads),
    )
    q, k = rotary(q), rotary(k)
    group = s.heads // k.shape[2]
    if repeat == "grouped":  # with rotary as one concatenation of the rotated halves
        q, k = (jnp.concatenate([a[..., 5:], a[..., :5]], -1) for a in (q, k))
        q = q.reshape(*q.shape[:2], k.shape[2], group, s.head)
        probs = jax.nn.softmax(jnp.einsum("btkgd,bskd->bkgts", q, k), -1)
        return jnp.einsum("bkgts,bskd->btkgd", probs, v).reshape(*x.shape[:2], -1) @ p["o"]
    if repeat == "tile":
        k, v = (jnp.tile(a, (1, 1, group, 1)) for a in (k, v))
    elif group > 1:
        k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    return merge(attend(q, k, v)) @ p["o"]


def prefixed(table: dict[str, Any], *prefixes: str) -> dict[str, Any]:
    return {f"{prefix}{path}": value for prefix in prefixes for path, value in table.items()}


# ---- decoders --------------------------------------------------------------------------------


def decoder(
    s: Sizes, kv: int | None, repeat: str = "repeat", tied: bool = False, num_layers: int = 2
) -> Case:
    """Llama: token table, pre-norm blocks with rotary grouped-query attention and SwiGLU, head."""

    def fn(p, ids):
        x = p["embed"][ids]
        for block in p["blocks"]:
            x = x + self_attention(block["attn"], rms(x, block["norm1"]), s, kv, repeat)
            x = x + swiglu(block["mlp"], rms(x, block["norm2"]))
        x = rms(x, p["norm"])
        return x @ p["embed"].T if tied else x @ p["head"]

    block = {
        "attn": qkvo_params(s, kv),
        "mlp": swiglu_params(s),
        "norm1": f32(s.width),
        "norm2": f32(s.width),
    }
    params = {"embed": f32(s.vocab, s.width), "norm": f32(s.width), "blocks": [block] * num_layers}
    expected = {"embed": (0, (s.vocab,))}
    if not tied:
        params["head"] = f32(s.width, s.vocab)
        expected["head"] = (1, (s.vocab,))
    for i in range(num_layers):
        expected |= qkvo_expected(s, f"blocks/{i}/attn/", kv)
        expected |= swiglu_expected(s, f"blocks/{i}/mlp/")
    return Case(fn, params, (tokens(s),), expected)


@model
def llama(s: Sizes) -> Case:
    return decoder(s, s.kv)


@model
def llama_tied(s: Sizes) -> Case:
    return decoder(s, s.kv, tied=True)


@model
def multi_query(s: Sizes) -> Case:
    """H8: one kv head is replicated."""
    return decoder(s, 1)


@model
def multi_query_positions(s: Sizes) -> Case:
    """Gemma: angles from positions that are an input, the rotated halves joined; one kv head."""

    def rotate(x, at):
        left, right = jnp.split(x, 2, -1)
        angle = (at[..., None] / jnp.arange(1, 1 + s.head // 2)[None, None])[:, :, None]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def fn(p, x, at):
        q = rotate(heads(x @ p["q"], s.heads), at)
        k, v = jnp.einsum("bsd,ckde->cbske", x, p["kv"])
        q = q.reshape(*q.shape[:2], 1, s.heads, s.head)
        probs = jax.nn.softmax(jnp.einsum("btkge,bske->btkgs", q, rotate(k, at)), -1)
        mixed = jnp.einsum("btkgs,bske->btkge", probs, v)
        return x + mixed.reshape(*x.shape[:2], -1) @ p["o"]

    params = {
        "q": f32(s.width, s.inner),
        "kv": f32(2, 1, s.width, s.head),
        "o": f32(s.inner, s.width),
    }
    expected = {"q": (1, (s.heads,)), "o": (0, (s.heads,))}
    return Case(fn, params, (stream(s), tokens(s)), expected)


@model
def grouped_by_reshape(s: Sizes) -> Case:
    return decoder(s, s.kv, "grouped")


@model
def gqa_28_4(s: Sizes) -> Case:
    """H4."""
    return decoder(dataclasses.replace(s, heads=28), 4)


@model
def heads_25(s: Sizes) -> Case:
    """H6: whatever the number, heads are the units."""
    return decoder(dataclasses.replace(s, heads=25), None)


@model
def grouped_by_tile(s: Sizes) -> Case:
    """Tiled kv heads are the minor factor of the query heads."""
    s = dataclasses.replace(s, heads=8, kv=2, head=10)
    case = decoder(s, s.kv, "tile")
    for path, (dim, units) in case.expected.items():
        if path.endswith(("/q", "/o")):
            case.expected[path] = (dim, units[::-1])
    return case


@model
def layers_differ(s: Sizes) -> Case:
    """H10: kv heads decided per layer."""

    def fn(p, ids):
        x = p["embed"][ids]
        for block, kv in zip(p["blocks"], (4, 8), strict=True):
            x = x + self_attention(block, x, s, kv)
        return x @ p["embed"].T

    s = dataclasses.replace(s, heads=8)
    params = {"embed": f32(s.vocab, s.width), "blocks": [qkvo_params(s, 4), qkvo_params(s, 8)]}
    expected = {"embed": (0, (s.vocab,))} | qkvo_expected(s, "blocks/0/", 4)
    return Case(fn, params, (tokens(s),), expected | qkvo_expected(s, "blocks/1/", 8))


@model
def parallel_block(s: Sizes) -> Case:
    """GPT-J: attention and MLP read the same norm; biases; interleaved rotary."""

    def rotate(x):
        even, odd = x[..., ::2], x[..., 1::2]
        return x * 0.5 + jnp.stack([-odd, even], -1).reshape(x.shape)

    def fn(p, ids):
        x = p["embed"][ids]
        y = layer_norm(x, p["norm"])
        q, k, v = (heads(y @ p[n], s.heads) for n in "qkv")
        out = merge(attend(rotate(q), rotate(k), v)) @ p["o"]
        mlp = jax.nn.gelu(y @ p["in"] + p["in_bias"]) @ p["out"] + p["out_bias"]
        return (out + mlp + x) @ p["head"] + p["head_bias"]

    params = qkvo_params(s) | {
        "embed": f32(s.vocab, s.width),
        "norm": {"scale": f32(s.width), "bias": f32(s.width)},
        "in": f32(s.width, s.ffn),
        "in_bias": f32(s.ffn),
        "out": f32(s.ffn, s.width),
        "out_bias": f32(s.width),
        "head": f32(s.width, s.vocab),
        "head_bias": f32(s.vocab),
    }
    expected = qkvo_expected(s, "") | {
        "embed": (0, (s.vocab,)),
        "in": (1, (s.ffn,)),
        "in_bias": (0, (s.ffn,)),
        "out": (0, (s.ffn,)),
        "head": (1, (s.vocab,)),
        "head_bias": (0, (s.vocab,)),
    }
    return Case(fn, params, (tokens(s),), expected)


@model
def qk_norms(s: Sizes) -> Case:
    """H11: a scale as wide as all heads follows them, one as wide as a head is replicated."""

    def fn(p, x):
        q = heads(rms(x @ p["q"], p["wide"]), s.heads)
        k = rms(heads(x @ p["k"], s.heads), p["narrow"])
        return x + merge(attend(q, k, heads(x @ p["v"], s.heads))) @ p["o"]

    params = qkvo_params(s) | {"wide": f32(s.inner), "narrow": f32(s.head)}
    return Case(fn, params, (stream(s),), qkvo_expected(s, "") | {"wide": (0, (s.heads,))})


@model
def kv_cache(s: Sizes) -> Case:
    """One decoding step with a cache, and positions passed in."""

    def fn(p, ids, at, cache):
        x = p["embed"][ids] + p["positions"][at]
        q, k, v = (heads(x @ p[n], s.heads) for n in "qkv")
        k = jax.lax.dynamic_update_slice(cache["k"], k, (0, at[0, 0], 0, 0))
        v = jax.lax.dynamic_update_slice(cache["v"], v, (0, at[0, 0], 0, 0))
        x = x + merge(attend(q, k, v)) @ p["o"]
        return x @ p["embed"].T, k, v

    rows = max(s.vocab // 16, 2)
    params = qkvo_params(s) | {"embed": f32(s.vocab, s.width), "positions": f32(rows, s.width)}
    ids = jax.ShapeDtypeStruct((s.batch, 1), jnp.int32)
    slots = f32(s.batch, 64, s.heads, s.head)
    expected = qkvo_expected(s, "") | {"embed": (0, (s.vocab,))}
    return Case(fn, params, (ids, ids, {"k": slots, "v": slots}), expected)
