"""Fused, stacked and unusual projections with expert findings; see `jaxpr_models`."""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxpr_models import (
    Case,
    Sizes,
    attend,
    f32,
    heads,
    merge,
    model,
    qkvo_expected,
    qkvo_params,
    rms,
    rotary,
    stream,
)


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
    """Falcon-7B, [query heads | k | v]: query heads are split, the one k and v are for all."""

    def take(p, x):
        parts = heads(x @ p["qkv"], s.heads + 2)
        k, v = parts[:, :, s.heads, None], parts[:, :, s.heads + 1, None]
        return parts[:, :, : s.heads], *(
            jnp.broadcast_to(a, (*a.shape[:2], s.heads, s.head)) for a in (k, v)
        )

    edges = (0, s.heads * s.head, (s.heads + 1) * s.head, (s.heads + 2) * s.head)
    cuts = tuple(itertools.pairwise(edges))
    return fused(s, take, f32(s.width, edges[-1]), (1, (s.heads,), cuts))


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
def gate_up_interleaved(s: Sizes) -> Case:
    """Gate and up are every other column, as in gpt-oss: an ordinary column of pairs."""

    def fn(p, x):
        h = x @ p["gate_up"] + p["bias"]
        return x + (jax.nn.silu(h[..., ::2]) * h[..., 1::2]) @ p["down"]

    params = {
        "gate_up": f32(s.width, 2 * s.ffn),
        "bias": f32(2 * s.ffn),
        "down": f32(s.ffn, s.width),
    }
    expected = {"gate_up": (1, (s.ffn,)), "bias": (0, (s.ffn,)), "down": (0, (s.ffn,))}
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
    """F11, DeepSeek: low-rank downs replicated, ups by head, one rotary key head shared by all."""
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


@model
def gathered_heads(s: Sizes) -> Case:
    """kv heads repeated by a constant index: the link to the query heads is lost."""

    def fn(p, x):
        index = jnp.arange(8) // 4
        k, v = (heads(x @ p[n], 2)[:, :, index] for n in "kv")
        return x + merge(attend(heads(x @ p["q"], 8), k, v)) @ p["o"]

    s = dataclasses.replace(s, heads=8)
    return Case(fn, qkvo_params(s, 2), (stream(s),), {"q": (1, (8,)), "o": (0, (8,))})


@model
def rotated_by_matrix(s: Sizes) -> Case:
    """Queries and the one key head turned by a constant matrix."""

    def fn(p, x):
        turn = jnp.eye(s.head)[::-1]
        q, k, v = heads(x @ p["q"], s.heads) @ turn, x @ p["k"] @ turn, x @ p["v"]
        probs = jax.nn.softmax(jnp.einsum("bthd,bsd->bhts", q, k), -1)
        return x + merge(jnp.einsum("bhts,bsd->bthd", probs, v)) @ p["o"]

    expected = {"q": (1, (s.heads,)), "o": (0, (s.heads,))}
    return Case(fn, qkvo_params(s, 1), (stream(s),), expected)
