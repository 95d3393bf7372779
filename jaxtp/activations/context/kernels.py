"""The parts of attention by the kernel that a model asks for: cuDNN's, or tiles in XLA.

`jax.nn.dot_product_attention` has cuDNN's kernel, but rounds the `lse` to 16 bits and knows no
gradient of attention of which a call sees a part of the keys. The two equations that it is traced
to have both: the forward one gives the `lse` in float32, and the backward one takes a result and an
`lse`, which may be those over all keys.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.activations.context import blocks
from jaxtp.activations.context.blocks import AttentionPart, Scores, View
from jaxtp.rules.jaxpr.reentry import bind, read

FORWARD = "dot_product_attention_fwd_wrapper"
"""JAX's name of the forward equation."""


def is_fused(view: View, scores: Scores) -> bool:
    """Whether cuDNN's kernel computes a part.

    It has neither segments, nor a window that ends elsewhere than its keys do, nor a soft cap.
    """
    plain = view.queries.segment_ids_BT is None and view.window is None
    return scores.kernel == "cudnn" and plain and scores.softcap is None


def part_of(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, view: View, scores: Scores
) -> AttentionPart:
    """As `blocks.part_of`."""
    if not is_fused(view, scores):
        return blocks.part_of(q_BTNH, k_BSKH, v_BSKH, view, scores)
    out, lse = _fused(q_BTNH, k_BSKH, v_BSKH, scores, diagonal=view.diagonal)
    return AttentionPart(out.astype(jnp.float32), lse)


def gradients_of(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    whole: AttentionPart,
    d_out_BTNH: jax.Array,
    view: View,
    scores: Scores,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `blocks.gradients_of`."""
    operands = q_BTNH, k_BSKH, v_BSKH
    if not is_fused(view, scores):
        return blocks.gradients_of(*operands, whole, d_out_BTNH, view, scores)
    backward = whole, d_out_BTNH
    dq, dk, dv = _fused(*operands, scores, diagonal=view.diagonal, backward=backward)
    return dq.astype(jnp.float32), dk.astype(jnp.float32), dv.astype(jnp.float32)


def _fused(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scores: Scores,
    *,
    diagonal: bool,
    backward: tuple[AttentionPart, jax.Array] | None = None,
) -> tuple[jax.Array, ...]:
    """The result of cuDNN and `lse`; or, given those over all keys, its gradients."""
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=scores.scale,
        is_causal=diagonal,
        implementation="cudnn",
    )

    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array) -> Any:
        return jax.vjp(attend, q, k, v)[1](d_out)

    closed = jax.make_jaxpr(both)(q, k, v, q)
    d_out = q if backward is None else backward[1].astype(q.dtype)
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(closed.jaxpr.invars, (q, k, v, d_out), strict=True))
    for equation in closed.jaxpr.eqns:
        operands = [read(var, known) for var in equation.invars]
        if equation.primitive.name != FORWARD:
            results = bind(equation, operands)
        elif backward is None:
            return tuple(bind(equation, operands))
        else:
            whole, _ = backward
            results = [whole.out_BTNH.astype(q.dtype), whole.lse_BNT]
        known |= dict(zip(equation.outvars, results, strict=True))
    return tuple(known[var] for var in closed.jaxpr.outvars)
