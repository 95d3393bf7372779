"""Small models in plain JAX, each with the findings an expert writes down by hand.

A model is a function of `Sizes` that returns a `Case`. `expected` names the parameters that carry
the tensor axis, with the dim and its units, major to minor; every other parameter is whole. Sizes
vary from the distinct ones to all equal and to a batch and a sequence of one, and the findings must
not change.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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
    """H8: one kv head stays whole."""
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
    """H11: a scale as wide as all heads follows them, one as wide as a head is whole."""

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


# ---- fused and unusual projections -------------------------------------------------------------


def thirds(n: int, *, width: int = 1) -> tuple[tuple[int, int], ...]:
    return tuple((i * n * width, (i + 1) * n * width) for i in range(3))


def fused(
    s: Sizes, take: Callable[..., Any], qkv: tuple[Any, ...], expected: tuple[Any, ...]
) -> Case:
    """Attention whose q, k, v come from one kernel: `take(p, x)` returns them as heads."""

    def fn(p, x):
        return x + merge(attend(*take(p, x))) @ p["o"]

    params = {"qkv": qkv, "o": f32(s.inner, s.width)}
    return Case(fn, params, (stream(s),), {"qkv": expected, "o": (0, (s.heads,))})


@model
def fused_split(s: Sizes) -> Case:
    """F1 by `split`, as GPT-2 does."""

    def take(p, x):
        return [heads(part, s.heads) for part in jnp.split(x @ p["qkv"], 3, -1)]

    return fused(s, take, f32(s.width, 3 * s.inner), (1, (s.heads,), thirds(s.inner)))


@model
def fused_slices(s: Sizes) -> Case:
    """F1 by slices, and of the weight."""

    def take(p, x):
        n = s.inner
        parts = x @ p["qkv"][:, :n], x @ p["qkv"][:, n : 2 * n], x @ p["qkv"][:, 2 * n :]
        return [heads(part, s.heads) for part in parts]

    return fused(s, take, f32(s.width, 3 * s.inner), (1, (s.heads,), thirds(s.inner)))


@model
def fused_reshape(s: Sizes) -> Case:
    """F1 by a reshape to (3, heads, width)."""

    def take(p, x):
        parts = (x @ p["qkv"]).reshape(*x.shape[:2], 3, s.heads, s.head)
        return [parts[:, :, i] for i in range(3)]

    return fused(s, take, f32(s.width, 3 * s.inner), (1, (s.heads,), thirds(s.inner)))


@model
def fused_per_head(s: Sizes) -> Case:
    """F2: BLOOM keeps q, k, v of one head together, so a plain split is right."""

    def take(p, x):
        return jnp.split(heads(x @ p["qkv"], s.heads), 3, -1)

    return fused(s, take, f32(s.width, 3 * s.inner), (1, (s.heads,)))


@model
def fused_stacked(s: Sizes) -> Case:
    """Stored as (3, width, heads, head width): an ordinary dim of heads."""

    def take(p, x):
        return list(jnp.einsum("btd,cdhe->cbthe", x, p["qkv"]))

    return fused(s, take, f32(3, s.width, s.heads, s.head), (2, (s.heads,)))


@model
def fused_grouped(s: Sizes) -> Case:
    """F3: 4 kv heads beside 8 query heads; the sizes are read from the slices."""

    def take(p, x):
        wide, narrow = 8 * s.head, 4 * s.head
        q, k, v = jnp.split(x @ p["qkv"], [wide, wide + narrow], -1)
        k, v = (jnp.repeat(heads(a, 4), 2, 2) for a in (k, v))
        return heads(q, 8), k, v

    s = dataclasses.replace(s, heads=8)
    cuts = ((0, 8 * s.head), (8 * s.head, 12 * s.head), (12 * s.head, 16 * s.head))
    case = fused(s, take, f32(s.width, 16 * s.head), (1, (4,), cuts))
    case.expected["o"] = (0, (4, 2))
    return case


@model
def fused_multi_query(s: Sizes) -> Case:
    """Falcon-7B: [query heads | k | v] with one kv head has no safe cut; `o` goes by head."""

    def take(p, x):
        parts = heads(x @ p["qkv"], s.heads + 2)
        k, v = parts[:, :, s.heads, None], parts[:, :, s.heads + 1, None]
        return parts[:, :, : s.heads], *(
            jnp.broadcast_to(a, (*a.shape[:2], s.heads, s.head)) for a in (k, v)
        )

    case = fused(s, take, f32(s.width, (s.heads + 2) * s.head), ())
    del case.expected["qkv"]
    return case


@model
def gate_up_halves(s: Sizes) -> Case:
    """F4, and beside it the same stored as (width, 2, ffn), which is an ordinary column."""

    def fn(p, x):
        gate, up = jnp.split(x @ p["gate_up"], 2, -1)
        x = x + (jax.nn.silu(gate) * up) @ p["down"]
        pair = jnp.einsum("btd,dcf->btcf", x, p["pair"])
        return x + (jax.nn.gelu(pair[..., 0, :]) * pair[..., 1, :]) @ p["down2"]

    params = {
        "gate_up": f32(s.width, 2 * s.ffn),
        "down": f32(s.ffn, s.width),
        "pair": f32(s.width, 2, s.ffn),
        "down2": f32(s.ffn, s.width),
    }
    expected = {
        "gate_up": (1, (s.ffn,), ((0, s.ffn), (s.ffn, 2 * s.ffn))),
        "down": (0, (s.ffn,)),
        "pair": (2, (s.ffn,)),
        "down2": (0, (s.ffn,)),
    }
    return Case(fn, params, (stream(s),), expected)


@model
def fused_row(s: Sizes) -> Case:
    """Attention and MLP leave through one kernel: [heads | ffn] are summed over together."""

    def fn(p, x):
        mixed = merge(attend(*(heads(x @ p[n], s.heads) for n in "qkv")))
        return x + jnp.concatenate([mixed, jax.nn.gelu(x @ p["up"])], -1) @ p["out"]

    params = qkvo_params(s) | {"up": f32(s.width, s.ffn), "out": f32(s.inner + s.ffn, s.width)}
    del params["o"]
    expected = qkvo_expected(s, "") | {
        "up": (1, (s.ffn,)),
        "out": (0, (np.gcd(s.heads, s.ffn),), ((0, s.inner), (s.inner, s.inner + s.ffn))),
    }
    del expected["o"]
    return Case(fn, params, (stream(s),), expected)


@model
def heads_first(s: Sizes) -> Case:
    """H9: gemma's (heads, in, width) kernels, k and v stacked, grouped by reshape."""

    def fn(p, x):
        q = jnp.einsum("btd,hde->bthe", x, p["q"])
        k, v = jnp.einsum("btd,ckde->cbtke", x, p["kv"])
        q = q.reshape(*q.shape[:2], s.kv, s.heads // s.kv, s.head)
        probs = jax.nn.softmax(jnp.einsum("btkge,bske->btkgs", q, k), -1)
        mixed = jnp.einsum("btkgs,bske->btkge", probs, v).reshape(*x.shape[:2], s.heads, s.head)
        return x + jnp.einsum("bthe,hed->btd", mixed, p["o"])

    params = {
        "q": f32(s.heads, s.width, s.head),
        "kv": f32(2, s.kv, s.width, s.head),
        "o": f32(s.heads, s.head, s.width),
    }
    query = tuple(n for n in (s.kv, s.heads // s.kv) if n > 1)
    return Case(fn, params, (stream(s),), {"q": (0, query), "o": (0, query), "kv": (1, (s.kv,))})


@model
def latent_attention(s: Sizes) -> Case:
    """F11, DeepSeek: low-rank downs whole, ups by head, one rotary key head shared by all."""
    rope, rank = 4, 20

    def fn(p, x):
        q = heads(rms(x @ p["q_down"], p["q_norm"]) @ p["q_up"], s.heads)
        latent = x @ p["kv_down"]
        kv = heads(rms(latent[..., :rank], p["kv_norm"]) @ p["kv_up"], s.heads)
        shared = rotary(latent[..., None, rank:])
        k = jnp.concatenate(
            [kv[..., : s.head], jnp.broadcast_to(shared, (*kv.shape[:3], rope))], -1
        )
        q = jnp.concatenate([q[..., : s.head], rotary(q[..., s.head :])], -1)
        return x + merge(attend(q, k, kv[..., s.head :])) @ p["o"]

    params = {
        "q_down": f32(s.width, rank + 2),
        "q_norm": f32(rank + 2),
        "q_up": f32(rank + 2, s.heads * (s.head + rope)),
        "kv_down": f32(s.width, rank + rope),
        "kv_norm": f32(rank),
        "kv_up": f32(rank, s.heads * 2 * s.head),
        "o": f32(s.inner, s.width),
    }
    expected = {"q_up": (1, (s.heads,)), "kv_up": (1, (s.heads,)), "o": (0, (s.heads,))}
    return Case(fn, params, (stream(s),), expected)


@model
def relative_bias(s: Sizes) -> Case:
    """H7, T5: the table of buckets follows the heads, also when its dims are swapped."""

    def fn(p, x):
        at = jnp.arange(s.seq)
        buckets = jnp.clip(jnp.abs(at[:, None] - at[None]), 0, 31)
        bias = jnp.transpose(p["table"][buckets], (2, 0, 1))[None] + p["swapped"][:, buckets][None]
        return x + merge(attend(*(heads(x @ p[n], s.heads) for n in "qkv"), bias)) @ p["o"]

    params = qkvo_params(s) | {"table": f32(32, s.heads), "swapped": f32(s.heads, 32)}
    expected = qkvo_expected(s, "") | {"table": (1, (s.heads,)), "swapped": (0, (s.heads,))}
    return Case(fn, params, (stream(s),), expected)


@model
def low_rank_adapters(s: Sizes) -> Case:
    """LoRA beside and merged into the kernels: the rank is never split, the wide sides follow."""
    rank = 4

    def fn(p, x):
        h = x @ p["up"] + (x @ p["up_a"]) @ p["up_b"]
        return x + jax.nn.relu(h) @ (p["down"] + p["down_a"] @ p["down_b"])

    params = {
        "up": f32(s.width, s.ffn),
        "up_a": f32(s.width, rank),
        "up_b": f32(rank, s.ffn),
        "down": f32(s.ffn, s.width),
        "down_a": f32(s.ffn, rank),
        "down_b": f32(rank, s.width),
    }
    expected = {
        "up": (1, (s.ffn,)),
        "up_b": (1, (s.ffn,)),
        "down": (0, (s.ffn,)),
        "down_a": (0, (s.ffn,)),
    }
    return Case(fn, params, (stream(s),), expected)


# ---- without attention -------------------------------------------------------------------------


@model
def plain_mlp(s: Sizes) -> Case:
    """F9: the widest inner dim wins, whichever is cheaper on the wire."""

    def fn(p, x):
        h = jax.nn.relu(x @ p["fc1"])
        return jax.nn.relu(h @ p["fc2"]) @ p["fc3"]

    params = {"fc1": f32(s.width, s.ffn), "fc2": f32(s.ffn, s.ffn // 2), "fc3": f32(s.ffn // 2, 10)}
    expected = {"fc1": (1, (s.ffn,)), "fc2": (0, (s.ffn,))}
    return Case(fn, params, (f32(s.batch, s.width),), expected)


@model
def square_chain(s: Sizes) -> Case:
    """Four square kernels without a residual: two column/row pairs cover all of them."""

    def fn(p, x):
        for kernel in p["kernels"]:
            x = jnp.tanh(x @ kernel)
        return x

    n = s.ffn
    expected = {f"kernels/{i}": ((1, 0)[i % 2], (n,)) for i in range(4)}
    return Case(fn, {"kernels": [f32(n, n)] * 4}, (f32(s.batch, n),), expected)


@model
def mixer(s: Sizes) -> Case:
    """MLPs over positions and over channels in turn."""

    def fn(p, x):
        y = jnp.swapaxes(x, 1, 2)
        x = x + jnp.swapaxes(jax.nn.gelu(y @ p["a"]) @ p["b"], 1, 2)
        return x + jax.nn.gelu(x @ p["c"]) @ p["d"]

    patches = max(s.seq, 2)
    params = {
        "a": f32(patches, s.ffn),
        "b": f32(s.ffn, patches),
        "c": f32(s.width, s.ffn),
        "d": f32(s.ffn, s.width),
    }
    expected = {"a": (1, (s.ffn,)), "b": (0, (s.ffn,)), "c": (1, (s.ffn,)), "d": (0, (s.ffn,))}
    return Case(fn, params, (f32(s.batch, patches, s.width),), expected)


@model
def convolutions(s: Sizes) -> Case:
    """F10: convolutions and a classifier of ten: nothing to split."""

    def conv(x, kernel, stride=1):
        return jax.lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def fn(p, x):
        x = jax.nn.relu(conv(x, p["stem"], 2))
        y = jax.nn.relu(conv(x, p["narrow"]))
        y = jax.nn.relu(conv(y, p["middle"]))
        x = x + conv(y, p["wide"])
        return x.mean((1, 2)) @ p["head"] + p["bias"]

    params = {
        "stem": f32(3, 3, 3, s.width),
        "narrow": f32(1, 1, s.width, s.ffn),
        "middle": f32(3, 3, s.ffn, s.ffn),
        "wide": f32(1, 1, s.ffn, s.width),
        "head": f32(s.width, 10),
        "bias": f32(10),
    }
    return Case(fn, params, (f32(s.batch, 16, 16, 3),), {})


def selective_scan(u, dt, a, b, c):
    """A diagonal state space: u, dt are (batch, seq, inner), b, c are (batch, seq, state)."""

    def step(h, now):
        u, dt, b, c = now
        h = jnp.exp(dt[..., None] * a) * h + (dt * u)[..., None] * b[:, None]
        return h, jnp.einsum("bdn,bn->bd", h, c)

    start = jnp.zeros((u.shape[0], u.shape[2], a.shape[1]))
    rows = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (u, dt, b, c))
    return jnp.swapaxes(jax.lax.scan(step, start, rows)[1], 0, 1)


@model
def mamba(s: Sizes) -> Case:
    """A selective state space mixer: the inner width is split, though D * x looks residual."""
    inner, state, rank = s.ffn, 4, 3

    def fn(p, x):
        u, z = jnp.split(rms(x, p["norm"]) @ p["in"], 2, -1)
        u = jax.lax.conv_general_dilated(
            u,
            p["conv"],
            (1,),
            [(3, 0)],
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=inner,
        )
        u = jax.nn.silu(u + p["conv_bias"])
        dt, b, c = jnp.split(u @ p["x"], [rank, rank + state], -1)
        dt = jax.nn.softplus(dt @ p["dt"] + p["dt_bias"])
        y = selective_scan(u, dt, -jnp.exp(p["a"]), b, c) + p["d"] * u
        return x + (y * jax.nn.silu(z)) @ p["out"]

    params = {
        "norm": f32(s.width),
        "in": f32(s.width, 2 * inner),
        "conv": f32(4, 1, inner),
        "conv_bias": f32(inner),
        "x": f32(inner, rank + 2 * state),
        "dt": f32(rank, inner),
        "dt_bias": f32(inner),
        "a": f32(inner, state),
        "d": f32(inner),
        "out": f32(inner, s.width),
    }
    unit = (inner,)
    expected = {
        "in": (1, unit, ((0, inner), (inner, 2 * inner))),
        "conv": (2, unit),
        "conv_bias": (0, unit),
        "x": (0, unit),
        "dt": (1, unit),
        "dt_bias": (0, unit),
        "a": (0, unit),
        "d": (0, unit),
        "out": (0, unit),
    }
    return Case(fn, params, (stream(s),), expected)


@model
def recurrence(s: Sizes) -> Case:
    """A GRU and an LSTM: what a kernel both contracts and produces is whole."""

    def fn(p, x):
        def gru(h, u):
            z, r = (
                jax.nn.sigmoid(u @ p["wz"] + h @ p["uz"]),
                jax.nn.sigmoid(u @ p["wr"] + h @ p["ur"]),
            )
            h = (1 - z) * h + z * jnp.tanh(u @ p["wh"] + (r * h) @ p["uh"])
            return h, h

        def lstm(carry, u):
            h, c = carry
            i, f, g, o = jnp.split(u @ p["w"] + h @ p["u"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        start = jnp.zeros((s.batch, s.ffn))
        rows = jax.lax.scan(gru, start, jnp.swapaxes(x, 0, 1))[1]
        return jax.lax.scan(lstm, (start, start), rows)[1]

    params = {n: f32(s.width, s.ffn) for n in ("wz", "wr", "wh")}
    params |= {n: f32(s.ffn, s.ffn) for n in ("uz", "ur", "uh")}
    params |= {"w": f32(s.ffn, 4 * s.ffn), "u": f32(s.ffn, 4 * s.ffn)}
    return Case(fn, params, (stream(s),), {})
