"""Attention of some queries over some keys, such that parts over other keys can be added to it.

A part is the attention over its own keys and the log of the sum of its weights' exponentials
(`lse`), from which `merge` makes the attention over both; Milakov and Gimelshein 2018. The backward
pass of a part takes the `lse` and the result over *all* keys, and gives this part's share of the
gradients: Dao et al. 2022, appendix B.4.

Shape suffixes as in `jaxtp.models.layers`, and S: tokens of the keys.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

NOTHING = -1e30
"""The `lse` of no keys: finite, so that differences of it are."""

LARGEST = 1024
"""Queries and keys of one tile, at most; scores exist of one tile at a time. Any length comes in
as few tiles as that allows."""


Sums = tuple[jax.Array, ...]
"""What tiles are added up in."""


class AttentionPart(NamedTuple):
    """Attention over some keys.

    Attributes:
        out_BTNH: Weighted mean of their values, float32; over all keys in the type of the queries.
        lse_BNT: Log of the sum of the exponentials of their scores, float32.
    """

    out_BTNH: jax.Array
    lse_BNT: jax.Array


class TokenSpan(NamedTuple):
    """Where a run of tokens lies in its sequence.

    Attributes:
        first: Position of its first token, a scalar.
        segment_ids_BT: Which segment each belongs to; None: one.
    """

    first: jax.Array
    segment_ids_BT: jax.Array | None


class View(NamedTuple):
    """Which keys the queries of a part see.

    Attributes:
        queries: Where the queries lie.
        keys: Where the keys lie: in front of all queries, unless `diagonal`.
        window: How many tokens a token sees, itself included, a scalar; None: all before it.
        diagonal: Whether keys and queries are of the same tokens.
    """

    queries: TokenSpan
    keys: TokenSpan
    window: jax.Array | None
    diagonal: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made from products.

    Attributes:
        scale: What they are multiplied by.
        softcap: They become softcap x tanh(score / softcap); None: they do not.
        kernel: What computes them, "xla" or "cudnn".
    """

    scale: float
    softcap: float | None
    kernel: str


def merge(a: AttentionPart, b: AttentionPart) -> AttentionPart:
    """Attention over the keys of both."""
    lse = jnp.logaddexp(a.lse_BNT, b.lse_BNT)
    shares = (jnp.exp(part.lse_BNT - lse).swapaxes(1, 2)[..., None] for part in (a, b))
    out = sum(part.out_BTNH * share for part, share in zip((a, b), shares, strict=True))
    return AttentionPart(jnp.asarray(out), lse)


def with_sinks(part: AttentionPart, sinks_N: jax.Array) -> AttentionPart:
    """The same with a score of each head that takes weight and has no value."""
    lse = jnp.logaddexp(part.lse_BNT, sinks_N.astype(jnp.float32)[None, :, None])
    share_BTN1 = jnp.exp(part.lse_BNT - lse).swapaxes(1, 2)[..., None]
    return AttentionPart(part.out_BTNH * share_BTN1, lse)


def sinks_gradient(whole: AttentionPart, d_out_BTNH: jax.Array, sinks_N: jax.Array) -> jax.Array:
    """The gradient of these scores, like them: that of a key whose value is zero.

    Args:
        whole: Attention with them.
        d_out_BTNH: Gradient of its result.
        sinks_N: The scores.
    """
    weight_BNT = jnp.exp(sinks_N.astype(jnp.float32)[None, :, None] - whole.lse_BNT)
    both = (x.astype(jnp.float32) for x in (whole.out_BTNH, d_out_BTNH))
    mean_BNT = jnp.einsum("btnh,btnh->bnt", *both)
    return -jnp.sum(weight_BNT * mean_BNT, axis=(0, 2)).astype(sinks_N.dtype)


def part_of(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    view: View,
    scores: Scores,
) -> AttentionPart:
    """Attention over these keys, tile by tile.

    Args:
        q_BTNH: Queries.
        k_BSKH: Keys; query head n uses head n // (N / K).
        v_BSKH: Values.
        view: Which of the keys each query sees.
        scores: How scores are made.
    """
    tiles = _Tiles(q_BTNH, k_BSKH, view, scores)
    q, k, v = tiles.cut_queries(q_BTNH), tiles.cut(k_BSKH), tiles.cut(v_BSKH)
    blocks, B, width, K, G, H = q.shape

    def add(sums: Sums, pair: jax.Array) -> tuple[Sums, None]:
        def run(sums: Sums) -> Sums:
            i, j = pair
            top, total, out = (x[i] for x in sums)
            score, seen = tiles.scores(q[i], k[j], i, j)
            new_top = jnp.maximum(top, score.max(-1))
            weight = _where(seen, jnp.exp(score - new_top[..., None]), 0)
            shrink = jnp.exp(top - new_top)
            more = _product("bkgts,bskh->bkgth", weight.astype(v.dtype), v[j])
            new = (new_top, total * shrink + weight.sum(-1), out * shrink[..., None] + more)
            return tuple(x.at[i].set(y) for x, y in zip(sums, new, strict=True))

        return tiles.where_seen(run, sums, pair), None

    none = jnp.full((blocks, B, K, G, width), NOTHING, jnp.float32)
    first = (none, jnp.zeros_like(none), jnp.zeros((*none.shape, H), jnp.float32))
    (top, total, out), _ = jax.lax.scan(add, first, tiles.pairs)
    is_any = total > 0
    total = jnp.where(is_any, total, 1)
    lse = jnp.where(is_any, top + jnp.log(total), NOTHING)
    out_BTNH = (out / total[..., None]).transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, K * G, H)
    lse_BNT = lse.transpose(1, 2, 3, 0, 4).reshape(B, K * G, -1)
    length = q_BTNH.shape[1]
    return AttentionPart(out_BTNH[:, :length], lse_BNT[..., :length])


def gradients_of(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    whole: AttentionPart,
    d_out_BTNH: jax.Array,
    view: View,
    scores: Scores,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What these keys add to the gradients of queries, keys and values, all float32.

    Args:
        q_BTNH: Queries.
        k_BSKH: Keys.
        v_BSKH: Values.
        whole: Attention of these queries over all their keys.
        d_out_BTNH: Gradient of its result.
        view: Which of the keys each query sees.
        scores: How scores are made.
    """
    tiles = _Tiles(q_BTNH, k_BSKH, view, scores)
    q, k, v = tiles.cut_queries(q_BTNH), tiles.cut(k_BSKH), tiles.cut(v_BSKH)
    d_out = tiles.cut_queries(d_out_BTNH)
    blocks, B, width, K, G, _ = q.shape
    lse_BNT = _padded(whole.lse_BNT, blocks * width, dim=2)
    lse = lse_BNT.reshape(B, K, G, blocks, width).transpose(3, 0, 1, 2, 4)
    # The part of each score's gradient that is the same for all keys.
    mean_BTN = jnp.einsum(
        "btnh,btnh->btn", *(x.astype(jnp.float32) for x in (whole.out_BTNH, d_out_BTNH))
    )
    mean_BTN = _padded(mean_BTN, blocks * width)
    mean = mean_BTN.reshape(B, blocks, width, K, G).transpose(1, 0, 3, 4, 2)

    def add(sums: Sums, pair: jax.Array) -> tuple[Sums, None]:
        def run(sums: Sums) -> Sums:
            i, j = pair
            score, seen = tiles.scores(q[i], k[j], i, j)
            weight = _where(seen, jnp.exp(score - lse[i][..., None]), 0)
            d_weight = _product("btkgh,bskh->bkgts", d_out[i], v[j])
            d_score = weight * (d_weight - mean[i][..., None]) * scores.scale
            if scores.softcap is not None:
                d_score *= 1 - jnp.square(_where(seen, score, 0) / scores.softcap)
            d_score = d_score.astype(q.dtype)
            dq, dk, dv = sums
            return (
                dq.at[i].add(_product("bkgts,bskh->btkgh", d_score, k[j])),
                dk.at[j].add(_product("bkgts,btkgh->bskh", d_score, q[i])),
                dv.at[j].add(_product("bkgts,btkgh->bskh", weight.astype(v.dtype), d_out[i])),
            )

        return tiles.where_seen(run, sums, pair), None

    first = tuple(jnp.zeros(x.shape, jnp.float32) for x in (q, k, v))
    (dq, dk, dv), _ = jax.lax.scan(add, first, tiles.pairs)
    joined = (x.swapaxes(0, 1) for x in (dq, dk, dv))
    shapes = (q_BTNH.shape, k_BSKH.shape, v_BSKH.shape)
    dq, dk, dv = (
        x.reshape(B, -1, *heads)[:, :length]
        for x, (_, length, *heads) in zip(joined, shapes, strict=True)
    )
    return dq, dk, dv


class _Tiles:
    """Queries and keys in tiles, and what every tile needs.

    Where the last tile is padded, its padded queries have no gradient, and no query sees its padded
    keys.
    """

    def __init__(self, q_BTNH: jax.Array, k_BSKH: jax.Array, view: View, scores: Scores) -> None:
        self._groups, self._view, self._scores = k_BSKH.shape[2], view, scores
        lengths = (q_BTNH.shape[1], k_BSKH.shape[1])
        counts, self._widths = zip(*map(_tiles, lengths), strict=True)
        self._padded = tuple(n * width for n, width in zip(counts, self._widths, strict=True))
        # On the diagonal padded keys lie behind all queries.
        is_padded = self._padded[1] > lengths[1] and not view.diagonal
        self._last = lengths[1] if is_padded else None
        pairs = np.argwhere(np.ones(counts, bool))
        # Above the diagonal no key is seen.
        self.pairs = jnp.asarray(pairs[pairs[:, 0] >= pairs[:, 1]] if view.diagonal else pairs)

    def cut_queries(self, x_BTNH: jax.Array) -> jax.Array:
        """(tiles, batch, queries of a tile, kv heads, query heads of each, width)."""
        B, _, N, H = x_BTNH.shape
        x_BTNH = _padded(x_BTNH, self._padded[0])
        cut = x_BTNH.reshape(B, -1, self._widths[0], self._groups, N // self._groups, H)
        return cut.swapaxes(0, 1)

    def cut(self, x_BSKH: jax.Array) -> jax.Array:
        """(tiles, batch, keys of a tile, kv heads, width)."""
        B, _, K, H = x_BSKH.shape
        cut = _padded(x_BSKH, self._padded[1]).reshape(B, -1, self._widths[1], K, H)
        return cut.swapaxes(0, 1)

    def where_seen(self, run: Callable[[Sums], Sums], sums: Sums, pair: jax.Array) -> Sums:
        """`run(sums)`, or `sums` where the window leaves no key of a tile to its queries."""
        if self._view.window is None:
            return run(sums)
        queries, keys = self._starts(*pair)
        nearest = queries - (keys + self._widths[1] - 1)
        return jax.lax.cond(nearest < self._view.window, run, lambda sums: sums, sums)

    def scores(
        self, q: jax.Array, k: jax.Array, i: jax.Array, j: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Scores of a tile, float32 (batch, kv heads, query heads, queries, keys); see `_seen`."""
        score = _product("btkgh,bskh->bkgts", q, k) * self._scores.scale
        score = soft_capped(score, self._scores.softcap)
        seen = self._seen(i, j)
        return _where(seen, score, NOTHING), seen

    def _starts(self, i: jax.Array, j: jax.Array) -> tuple[jax.Array, jax.Array]:
        queries, keys = self._view.queries, self._view.keys
        return queries.first + i * self._widths[0], keys.first + j * self._widths[1]

    def _seen(self, i: jax.Array, j: jax.Array) -> jax.Array | None:
        """Which keys of a tile its queries see, broadcast against its scores; None for all."""
        sides = (self._view.queries, self._view.keys)
        ids = [side.segment_ids_BT for side in sides if side.segment_ids_BT is not None]
        is_whole = self._last is None and self._view.window is None
        if is_whole and not (self._view.diagonal or ids):
            return None
        starts = self._starts(i, j)
        at_T, at_S = (s + jnp.arange(w) for s, w in zip(starts, self._widths, strict=True))
        behind_TS = at_T[:, None] - at_S[None, :]
        seen = (behind_TS >= 0) if self._view.diagonal else jnp.ones_like(behind_TS, bool)
        if self._view.window is not None:
            seen &= behind_TS < self._view.window
        if self._last is not None:
            seen &= (j * self._widths[1] + jnp.arange(self._widths[1]))[None, :] < self._last
        seen = seen[None, None, None]
        if ids:
            padded = map(_padded, ids, self._padded)
            own_BT, own_BS = (
                jax.lax.dynamic_slice_in_dim(x, n * w, w, axis=1)
                for x, n, w in zip(padded, (i, j), self._widths, strict=True)
            )
            seen &= (own_BT[:, :, None] == own_BS[:, None, :])[:, None, None]
        return seen


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Cap x tanh(x / cap), as Gemma 2 bends scores and logits; `x` itself without a cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _where(seen: jax.Array | None, x: jax.Array, other: float) -> jax.Array:
    return x if seen is None else jnp.where(seen, x, other)


def _tiles(length: int) -> tuple[int, int]:
    """The fewest tiles of so many tokens, and how wide they are; the last may be padded."""
    count = -(-length // LARGEST)
    width = -(-length // count)
    # Tensor cores take multiples of 8, so that what is padded anyway becomes one.
    return count, width if length % count == 0 else min(LARGEST, -(-width // 8) * 8)


def _padded(x: jax.Array, length: int, dim: int = 1) -> jax.Array:
    """`x` with zeros behind it along one dim, up to `length` elements."""
    more = length - x.shape[dim]
    return jnp.pad(x, [(0, more if d == dim else 0) for d in range(x.ndim)]) if more else x


def _product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)
