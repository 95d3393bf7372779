"""Causal attention of long sequences that no axis shares, without an array of tokens x tokens.

XLA's own attention keeps scores of all pairs of tokens, several times: DeepSeek-V3's 128 heads have
24 GiB of them at 4,096 tokens. Tiles of `blocks` have those of 1,024 x 1,024 at a time, skip what
no query sees, and are computed again in the backward pass.
"""

import functools
from typing import Any

import jax

from jaxtp.activations.by_name import ActivePlan, active_plan, in_force
from jaxtp.activations.context.attention import Specs, in_pieces
from jaxtp.activations.context.blocks import (
    LARGEST,
    Part,
    Scores,
    Side,
    View,
    gradients_of,
    part_of,
    sinks_gradient,
    with_sinks,
)

LEAST_TOKENS = 2 * LARGEST
"""From here on there is a tile that is skipped."""

How = tuple[Scores, ActivePlan | None]


def attend_in_tiles(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    window: jax.Array | None,
    sinks_N: jax.Array | None,
    scores: Scores,
) -> jax.Array:
    """Attention like the queries; arguments as for `attention.attend_shared`, without its plan."""
    how = (scores, active_plan())
    return _attend(how, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, window, sinks_N)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: How, q: Any, k: Any, v: Any, ids: Any, window: Any, sinks: Any) -> Any:
    return _forward(how, q, k, v, ids, window, sinks)[0]


def _forward(
    how: How, q: Any, k: Any, v: Any, ids: Any, window: Any, sinks: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
    scores, active = how

    def local(q: Any, k: Any, v: Any, ids: Any, window: Any) -> tuple[jax.Array, jax.Array]:
        part = part_of(q, k, v, _view(ids, window), scores)
        return part.out_BTNH.astype(q.dtype), part.lse_BNT

    run: Any = local
    if active is not None:
        specs = Specs.of(active, q, k, ids)
        run = in_pieces(local, active, specs.inputs, (specs.heads, specs.lse))
    out, lse = run(q, k, v, ids, window)
    if sinks is not None:
        whole = with_sinks(Part(out, lse), sinks)
        out, lse = whole.out_BTNH.astype(q.dtype), whole.lse_BNT
    return out, (q, k, v, ids, window, sinks, out, lse)


def _backward(how: How, kept: tuple[Any, ...], d_out: jax.Array) -> Any:
    scores, active = how
    q, k, v, ids, window, sinks, out, lse = kept

    def local(
        q: Any, k: Any, v: Any, ids: Any, window: Any, out: Any, lse: Any, d_out: Any
    ) -> tuple[jax.Array, ...]:
        whole = Part(out, lse)
        sums = gradients_of(q, k, v, whole, d_out, _view(ids, window), scores)
        return tuple(x.astype(like.dtype) for x, like in zip(sums, (q, k, v), strict=True))

    operands = (q, k, v, ids, window, out, lse, d_out)
    if active is None:
        dq, dk, dv = local(*operands)
    else:
        specs = Specs.of(active, q, k, ids)
        inputs = (*specs.inputs, specs.heads, specs.lse, specs.heads)
        with in_force(active):
            dq, dk, dv = in_pieces(local, active, inputs, (specs.heads,) * 3)(*operands)
    d_sinks = None if sinks is None else sinks_gradient(Part(out, lse), d_out, sinks)
    return dq, dk, dv, None, None, d_sinks


_attend.defvjp(_forward, _backward)


def _view(ids: Any, window: Any) -> View:
    side = Side(jax.numpy.int32(0), ids)
    return View(side, side, window, diagonal=True)
