"""Attention and rotary positions of every family; shape suffixes as in `jaxtp.models.layers`."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxtp.activations.by_name import constrain
from jaxtp.activations.context.attention import attend_shared
from jaxtp.activations.context.blocks import Scores, soft_capped
from jaxtp.activations.context.dealing import sharing
from jaxtp.activations.context.one_device import on_each_device
from jaxtp.activations.context.tiles import LEAST_TOKENS, attend_in_tiles

WIDEST_HEAD = 128
"""cuDNN's limit in elements before Hopper (256 from there on), in multiples of 8. JAX asks the GPU
that is there, so that a compiler without one gets the smaller limit."""


def cudnn_obstacle(model: Any, dtype: str, tp: int) -> str:
    """Why cuDNN cannot compute a model's attention on any GPU; "" if it can.

    Args:
        model: Its config, of any architecture.
        dtype: Type of activations.
        tp: Devices along the tensor axis.
    """
    kv_heads = getattr(model, "num_key_value_heads", model.num_attention_heads)
    if dtype == "float32":
        return "cuDNN takes 16-bit types, not float32"
    if model.head_dim > WIDEST_HEAD or model.head_dim % 8:
        return f"cuDNN takes heads of up to {WIDEST_HEAD} in multiples of 8, not {model.head_dim}"
    if getattr(model, "attn_logit_softcapping", None):
        return "cuDNN's attention has no soft cap"
    if getattr(model, "attention_sinks", False):
        return "cuDNN's attention has no sinks"
    if kv_heads % tp:
        return f"cuDNN needs every kv head on one device, and {kv_heads} do not divide by {tp}"
    return ""


def attend(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    implementation: Literal["xla", "cudnn"],
    window: int | None = None,
    *,
    has_window: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Causal attention with grouped key/value heads, (batch, tokens, query heads, head width).

    A token sees itself and earlier tokens of its own segment, the last `window` of them if there is
    a window. Query head n uses kv head n // (N / K).

    Args:
        q_BTNH: Queries.
        k_BTKH: Keys.
        v_BTKH: Values; their heads may be narrower, and the result's are as wide.
        segment_ids_BT: Which segment each token belongs to; None: one.
        implementation: Kernel of `jax.nn.dot_product_attention`.
        window: How many tokens a token sees, itself included; None: all before it.
        has_window: Whether this layer has the window, a bool scalar, where layers differ.
        scale: What scores are multiplied by; None: 1 / sqrt(head width).
        softcap: Scores become softcap x tanh(score / softcap) before the mask; None: they do not.
        sinks_N: A score of each query head beside those of its keys, without a value; None: none.
    """
    if (narrower := k_BTKH.shape[-1] - v_BTKH.shape[-1]) > 0:
        # No kernel takes values of another width than that of keys.
        v_BTKH = jnp.pad(v_BTKH, ((0, 0), (0, 0), (0, 0), (0, narrower)))
        options = {"has_window": has_window, "scale": scale, "softcap": softcap, "sinks_N": sinks_N}
        heads = (q_BTNH, k_BTKH, v_BTKH)
        return attend(*heads, segment_ids_BT, implementation, window, **options)[..., :-narrower]
    num_heads, num_kv_heads = q_BTNH.shape[2], k_BTKH.shape[2]
    units = (num_kv_heads, num_heads // num_kv_heads)
    q_BTNH = constrain(q_BTNH, "heads", units)
    k_BTKH, v_BTKH = constrain(k_BTKH, "kv_heads"), constrain(v_BTKH, "kv_heads")
    is_long = implementation == "xla" and q_BTNH.shape[1] >= LEAST_TOKENS
    if (active := sharing()) is not None or is_long:
        reach = None if window is None else jnp.int32(window)
        if reach is not None and has_window is not None:
            reach = jnp.where(has_window, reach, q_BTNH.shape[1])
        scores = Scores(scale or q_BTNH.shape[-1] ** -0.5, softcap, implementation)
        operands = (q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, reach, sinks_N, scores)
        out_BTNH = (
            attend_in_tiles(*operands) if active is None else attend_shared(*operands, active)
        )
        return constrain(out_BTNH, "heads", units)
    mask_B1TT = None
    if segment_ids_BT is not None:
        mask_B1TT = segment_ids_BT[:, None, :, None] == segment_ids_BT[:, None, None, :]
    options: dict[str, Any] = {"is_causal": True, "scale": scale}
    if softcap is not None or sinks_N is not None:
        options |= {"softcap": softcap, "sinks_N": sinks_N, "mask": mask_B1TT}
        run = functools.partial(capped_attention, **options)
    else:
        run = functools.partial(
            jax.nn.dot_product_attention, implementation=implementation, **options
        )
        by_device = implementation == "cudnn"
        run = (
            on_each_device(run, mask_B1TT) if by_device else functools.partial(run, mask=mask_B1TT)
        )
    sliding = functools.partial(run, local_window_size=None if window is None else (window - 1, 0))
    if has_window is None:
        out_BTNH = sliding(q_BTNH, k_BTKH, v_BTKH)
    else:
        # Two kernels rather than one with a mask that is an array: a fused kernel skips what a
        # causal window leaves out.
        out_BTNH = jax.lax.cond(has_window, sliding, run, q_BTNH, k_BTKH, v_BTKH)
    return constrain(out_BTNH, "heads", units)


def capped_attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    *,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
    mask: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    local_window_size: tuple[int, int] | None = None,
) -> jax.Array:
    """`jax.nn.dot_product_attention` with a soft cap on the scores and sinks; scores are in fp32.

    Args:
        q_BTNH: Queries.
        k_BSKH: Keys; S may differ from T if it is not causal.
        v_BSKH: Values.
        softcap: Scores become softcap x tanh(score / softcap), as in Gemma 2; None: they do not.
        sinks_N: As for `attend`.
        mask: True where a query sees a key, (batch, 1, T, S).
        is_causal: Whether a token sees itself and earlier ones only.
        scale: What scores are multiplied by; None: 1 / sqrt(head width).
        local_window_size: How many earlier and later tokens a token sees.
    """
    num_kv_heads, width = k_BSKH.shape[2:]
    q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], num_kv_heads, -1, width)
    scores = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=jnp.float32)
    scores *= width**-0.5 if scale is None else scale
    scores = soft_capped(scores, softcap)
    behind_TS = jnp.arange(scores.shape[-2])[:, None] - jnp.arange(scores.shape[-1])[None, :]
    seen_TS = behind_TS >= 0 if is_causal else jnp.ones_like(behind_TS, bool)
    if local_window_size is not None:
        before, after = local_window_size
        seen_TS &= (behind_TS <= before) & (behind_TS >= -after)
    seen = seen_TS[None, None, None]
    if mask is not None:
        seen &= mask[:, :, None]  # one for all groups of heads
    scores = jnp.where(seen, scores, jnp.finfo(jnp.float32).min)
    weights = softmax_with(sinks_N, scores, num_kv_heads)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_BSKH.dtype), v_BSKH)
    return out_BTKGH.reshape(*q_BTNH.shape[:-1], -1)


def softmax_with(sinks_N: jax.Array | None, scores: jax.Array, num_kv_heads: int) -> jax.Array:
    """Weights of the keys, like `scores`; with sinks they sum to less than one.

    Args:
        sinks_N: As for `attend`.
        scores: Float32, (batch, kv heads, query heads of each, ..., keys).
        num_kv_heads: Heads of keys.
    """
    if sinks_N is None:
        return jax.nn.softmax(scores, axis=-1)
    sinks = sinks_N.astype(jnp.float32).reshape(num_kv_heads, -1)
    sinks = jnp.expand_dims(sinks, (0, *range(3, scores.ndim)))
    # Not one more key: that would leave the keys' dim without a power of two.
    top = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), sinks))
    weights = jnp.exp(scores - top)
    return weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top))


def rotary(
    x_BTNH: jax.Array,
    angles_BTH: jax.Array,
    *,
    neighbours: bool = False,
    magnitude: float = 1.0,
) -> jax.Array:
    """Rotates pairs of each head's elements by their token's angles, in fp32; like `x`.

    Of a head wider than R the rest is left as it is.

    Args:
        x_BTNH: Queries or keys.
        angles_BTH: Radians, (batch or 1, tokens, R / 2).
        neighbours: Whether pair i is (2i, 2i + 1), and not (i, i + R/2) as in most Hugging Face
            checkpoints. Either way the result has first elements of all pairs, then second ones:
            the products of queries and keys do not depend on their order.
        magnitude: What rotated elements are multiplied by.
    """
    cos, sin = (f(angles_BTH)[:, :, None, :] * magnitude for f in (jnp.cos, jnp.sin))
    width = 2 * angles_BTH.shape[-1]
    turning = x_BTNH[..., :width].astype(jnp.float32)
    if neighbours:
        a, b = turning[..., 0::2], turning[..., 1::2]
    else:
        a, b = jnp.split(turning, 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
    if width == x_BTNH.shape[-1]:
        return turned
    return jnp.concatenate([turned, x_BTNH[..., width:]], axis=-1)
