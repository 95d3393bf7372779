"""The key/value cache of every family: one array of keys, one of values, all layers stacked.

A slot is a place in the cache. All rows of a batch write the same slot at the same time, so that a
write is one slice in place and no scatter; prompts of several lengths end together, and what lies
in front of a row's first token is never seen. Shape suffixes as in `jaxtp.models.layers`, and L
layers, S slots, G query heads per kv head.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.activations.by_name import constrain
from jaxtp.activations.context.blocks import soft_capped
from jaxtp.models.attention import attend, capped_attention, softmax_with
from jaxtp.models.layers import run_alone
from jaxtp.models.quantized import is_quantized

LONGEST_AT_ONCE = 1024
"""Tokens of a prompt up to which all scores are computed at once."""

QUERY_BLOCK = 256
"""Queries at a time above that; prompts that long are padded to a multiple of it."""


class Cache(NamedTuple):
    """Keys and values of all tokens so far.

    Heads come before slots: the products of a step are then one batched product over (row, head),
    and the cache is read as it lies.

    Attributes:
        keys: (layers, batch, kv heads, slots, head width), in the type of activations; a tuple of
            such arrays of one layer each, where layers are not stacked.
        values: The same; None where keys are values too, as with the latents of DeepSeek-V2.
    """

    keys: Any
    values: Any


def cache_shape(config: Any, batch: int, num_slots: int) -> Cache:
    """Shapes and type of a model's cache.

    Args:
        config: Of any architecture.
        batch: Rows.
        num_slots: Tokens that each may have.
    """
    heads, width = config.cached_heads
    num_layers, dtype = config.num_hidden_layers, jnp.dtype(config.dtype)
    if is_quantized(config):
        one = (jax.ShapeDtypeStruct((1, batch, heads, num_slots, width), dtype),)
        return Cache(one * num_layers, None if config.caches_latents else one * num_layers)
    struct = jax.ShapeDtypeStruct((num_layers, batch, heads, num_slots, width), dtype)
    return Cache(struct, None if config.caches_latents else struct)


class LayerCache:
    """One layer's view of the cache while a step runs; `cache` is what the step leaves behind."""

    def __init__(self, cache: Cache, layer: jax.Array, slot: jax.Array, first_B: jax.Array) -> None:
        self.cache = cache
        copies = first_B.shape[0] // cache.keys.shape[1]
        self.layer, self.slot, self.first_B = layer, slot, first_B[::copies]

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        segment_ids_BT: jax.Array | None,
        implementation: Any,
        window: int | None,
        *,
        has_window: jax.Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks_N: jax.Array | None = None,
        stored_BTKH: jax.Array | None = None,
    ) -> jax.Array:
        """As `jaxtp.models.attention.attend`, over all slots; writes the new keys and values.

        Several tokens are a prompt, in front of which there is nothing: they see each other. Of one
        token there may be several copies a row, see `Decoder.extend`. Without values its keys are
        those too.

        `stored_BTKH` is written in place of a prompt's keys, and no values, where the cache holds
        what these are made of.
        """
        options: dict[str, Any] = {"has_window": has_window, "scale": scale, "softcap": softcap}
        options |= {"sinks_N": sinks_N}
        long = q_BTNH.shape[1] > LONGEST_AT_ONCE and implementation == "xla"
        if v_BTKH is None or q_BTNH.shape[1] == 1:
            copies = q_BTNH.shape[0] // self.cache.keys.shape[1]
            heads = (q_BTNH, k_BTKH, v_BTKH)
            q_BTNH, k_BTKH, v_BTKH = jax.tree.map(lambda x: x[::copies], heads)
            out_BTNH = self._step(q_BTNH, k_BTKH, v_BTKH, window, **options)
            # Read before it is written: what is written waits for what was read, so that XLA
            # needs no copy of the cache to write in place.
            out_BTNH, k_BTKH, v_BTKH = jax.lax.optimization_barrier((out_BTNH, k_BTKH, v_BTKH))
            out_BTNH = jnp.repeat(out_BTNH, copies, axis=0)
        elif long and segment_ids_BT is not None:
            out_BTNH = in_blocks(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, window, **options)
        else:
            out_BTNH = attend(
                q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, implementation, window, **options
            )
        new = Cache(k_BTKH, v_BTKH) if stored_BTKH is None else Cache(stored_BTKH, None)
        self.cache = jax.tree.map(self._written, self.cache, new)
        return out_BTNH

    def _written(self, all_LBKSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        new_LBKSH = new_BTKH.astype(all_LBKSH.dtype).transpose(0, 2, 1, 3)[None]
        start = (self.layer, 0, 0, self.slot, 0)
        return constrain(jax.lax.dynamic_update_slice(all_LBKSH, new_LBKSH, start), "caches")

    def _step(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array | None,
        window: int | None,
        *,
        has_window: jax.Array | None,
        scale: float | None,
        softcap: float | None,
        sinks_N: jax.Array | None,
    ) -> jax.Array:
        """Attention of one token a row: over what is in the cache, and over itself beside it.

        A slice of what a loop carries is read where it lies by the product that takes it; a slice
        of what has just been written would be copied first, three times its bytes.
        """
        here = jax.tree.map(lambda x: constrain(row_of(x, self.layer), "cache"), self.cache)
        keys_BKSH, values_BKSH = here
        if v_BTKH is None:
            values_BKSH, v_BTKH = keys_BKSH, k_BTKH
        num_kv_heads, num_slots, width = keys_BKSH.shape[1:]
        units = (num_kv_heads, q_BTNH.shape[2] // num_kv_heads)
        q_BTNH = constrain(q_BTNH, "heads", units)
        q_BKGH = q_BTNH.reshape(q_BTNH.shape[0], *units, width)
        own_BKH = constrain(k_BTKH, "kv_heads")[:, 0].astype(keys_BKSH.dtype)

        def scored(equation: str, keys: jax.Array) -> jax.Array:
            scores = jnp.einsum(equation, q_BKGH, keys, preferred_element_type=jnp.float32)
            scores *= width**-0.5 if scale is None else scale
            return soft_capped(scores, softcap)

        slots_S = jnp.arange(num_slots)
        seen_BS = (slots_S[None] >= self.first_B[:, None]) & (slots_S <= self.slot)[None]
        seen_BS &= _in_window(self.slot - slots_S, window, has_window)[None]
        scores_BKGS = scored("bkgh,bksh->bkgs", keys_BKSH)
        is_own_S = (slots_S == self.slot)[None, None, None]
        own_BKG1 = scored("bkgh,bkh->bkg", own_BKH)[..., None]
        scores_BKGS = jnp.where(is_own_S, own_BKG1, scores_BKGS)
        scores_BKGS = jnp.where(seen_BS[:, None, None], scores_BKGS, jnp.finfo(jnp.float32).min)
        weights_BKGS = softmax_with(sinks_N, scores_BKGS, num_kv_heads).astype(values_BKSH.dtype)
        out_BKGH = jnp.einsum(
            "bkgs,bksh->bkgh",
            weights_BKGS,
            values_BKSH,
            preferred_element_type=jnp.float32,
        )
        # What its slot holds has taken part, in place of its own values. Weights without that slot
        # would be another array as large as the scores.
        own_BKG1 = jax.lax.dynamic_slice_in_dim(weights_BKGS, self.slot, 1, axis=-1)
        old_BK1H = jax.lax.dynamic_slice_in_dim(values_BKSH, self.slot, 1, axis=2)
        own_BK1H = constrain(v_BTKH, "kv_heads").swapaxes(1, 2)
        change_BK1H = own_BK1H.astype(jnp.float32) - old_BK1H.astype(jnp.float32)
        out_BKGH += own_BKG1.astype(jnp.float32) * change_BK1H
        out_BTNH = out_BKGH.astype(values_BKSH.dtype).reshape(q_BTNH.shape)
        return constrain(out_BTNH, "heads", units)


def in_blocks(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array,
    window: int | None,
    *,
    has_window: jax.Array | None,
    scale: float | None,
    softcap: float | None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """As `jaxtp.models.attention.attend`, without gradients: scores of some queries at a time.

    Scores of a prompt with itself are fp32 (batch, heads, tokens, tokens): 16 prompts of 8,192
    tokens at 8 heads a device have 34 GB of them, and a block of queries 1 GB.
    """
    batch, num_tokens = q_BTNH.shape[:2]
    units = (k_BTKH.shape[2], q_BTNH.shape[2] // k_BTKH.shape[2])
    k_BTKH, v_BTKH = constrain(k_BTKH, "kv_heads"), constrain(v_BTKH, "kv_heads")
    q_BTNH = constrain(q_BTNH, "heads", units)

    def block(first: jax.Array) -> jax.Array:
        q_BCNH = jax.lax.dynamic_slice_in_dim(q_BTNH, first, QUERY_BLOCK, axis=1)
        own_BC = jax.lax.dynamic_slice_in_dim(segment_ids_BT, first, QUERY_BLOCK, axis=1)
        behind_CT = (first + jnp.arange(QUERY_BLOCK))[:, None] - jnp.arange(num_tokens)[None]
        seen_CT = (behind_CT >= 0) & _in_window(behind_CT, window, has_window)
        mask_BCT = (own_BC[:, :, None] == segment_ids_BT[:, None]) & seen_CT[None]
        q_BCNH = constrain(q_BCNH, "heads", units)
        options: dict[str, Any] = {"softcap": softcap, "scale": scale, "sinks_N": sinks_N}
        out_BCNH = capped_attention(q_BCNH, k_BTKH, v_BTKH, mask=mask_BCT[:, None], **options)
        return constrain(out_BCNH, "heads", units)

    blocks = jax.lax.map(block, jnp.arange(0, num_tokens, QUERY_BLOCK))
    heads = (q_BTNH.shape[2], v_BTKH.shape[-1])
    return blocks.swapaxes(0, 1).reshape(batch, num_tokens, *heads)


def _in_window(behind: jax.Array, window: int | None, has_window: jax.Array | None) -> jax.Array:
    """Whether the window shows a query the key so many tokens behind it; all without a window."""
    if window is None:
        return jnp.ones_like(behind, bool)
    near = behind < window
    return near if has_window is None else near | ~has_window


def scan_cached(
    layers: nnx.Module,
    x_BTD: jax.Array,
    context: Mapping[str, jax.Array | None],
    rows: Mapping[str, Any],
    cache: Cache,
    slot: jax.Array,
    first_B: jax.Array,
    span: tuple[int, int],
) -> tuple[jax.Array, Cache]:
    """Runs layers on new tokens; the residual stream behind them, and the cache.

    A loop over the layers' numbers and no scan: a scan would hide from XLA that the cache is
    sliced by the loop's counter, see `row_of`.

    Args:
        layers: Result of `jaxtp.models.layers.stack_layers`, or an `nnx.List` of layers.
        x_BTD: The residual stream in front of the first layer.
        context: See `jaxtp.models.layers.scan_layers`.
        rows: See there.
        cache: What the tokens before left behind. Carried, so that it stays where it is and each
            layer writes one slice.
        slot: Where the first new token goes.
        first_B: The slot of each row's first token.
        span: The cache's layers that these are: the first one, and the one behind the last.
    """
    if isinstance(layers, nnx.List):
        # An array a layer: the slice of a stack would be copied for products of Triton.
        here = [jax.tree.map(lambda x: x[i], cache, is_leaf=_is_layers) for i in range(*span)]  # noqa: B023
        held = [LayerCache(one, jnp.int32(0), slot, first_B) for one in here]
        x_BTD = run_alone(layers, x_BTD, context, {**rows, "cache": held})
        new = jax.tree.map(lambda *layer: layer, *(one.cache for one in held))
        first, last = span

        def placed(all_L: tuple[Any, ...], new_L: tuple[Any, ...]) -> tuple[Any, ...]:
            return (*all_L[:first], *new_L, *all_L[last:])

        return x_BTD, jax.tree.map(placed, cache, new, is_leaf=_is_layers)
    graph, params = nnx.split(layers)
    stacked = {"params": params, "rows": jax.tree.map(jnp.asarray, dict(rows))}

    def step(layer: jax.Array, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        x_BTD, cache = carry
        row = jax.tree.map(lambda x: row_of(x, layer), stacked)
        here = LayerCache(cache, layer + span[0] if span[0] else layer, slot, first_B)
        x_BTD = nnx.merge(graph, row["params"])(x_BTD, {**context, **row["rows"], "cache": here})
        return x_BTD, here.cache

    return jax.lax.fori_loop(0, span[1] - span[0], step, (x_BTD, cache))


def _is_layers(node: object) -> bool:
    return type(node) is tuple  # and no `Cache`


def row_of(x: jax.Array, layer: jax.Array) -> jax.Array:
    """One layer of what all layers are stacked in.

    The index is the loop's own counter and nothing computed from it: then XLA lets the product that
    takes the slice read it where it lies.
    """
    return jax.lax.dynamic_index_in_dim(x, layer, keepdims=False, allow_negative_indices=False)
