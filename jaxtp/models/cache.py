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
from jaxtp.models.attention import attend


class Cache(NamedTuple):
    """Keys and values of all tokens so far.

    Heads come before slots: the products of a step are then one batched product over (row, head),
    and the cache is read as it lies.

    Attributes:
        keys: (layers, batch, kv heads, slots, head width), in the type of activations.
        values: The same.
    """

    keys: jax.Array
    values: jax.Array

    @property
    def num_slots(self) -> int:
        """Tokens that a row can have, padding included."""
        return self.keys.shape[3]


class LayerCache:
    """One layer's view of the cache while a step runs; `cache` is what the step leaves behind."""

    def __init__(self, cache: Cache, layer: jax.Array, slot: jax.Array, first_B: jax.Array) -> None:
        self.cache = cache
        self.layer, self.slot, self.first_B = layer, slot, first_B

    def attend(
        self,
        q_BTNH: jax.Array,
        k_BTKH: jax.Array,
        v_BTKH: jax.Array,
        segment_ids_BT: jax.Array | None,
        implementation: Any,
        window: int | None,
        *,
        has_window: jax.Array | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> jax.Array:
        """As `jaxtp.models.attention.attend`, over all slots; writes the new keys and values.

        Several tokens are a prompt, in front of which there is nothing: they see each other.
        """
        self.cache = Cache(
            *(self._written(*pair) for pair in zip(self.cache, (k_BTKH, v_BTKH), strict=True))
        )
        if q_BTNH.shape[1] > 1:
            return attend(
                q_BTNH,
                k_BTKH,
                v_BTKH,
                segment_ids_BT,
                implementation,
                window,
                has_window=has_window,
                scale=scale,
                softcap=softcap,
            )
        return self._step(q_BTNH, window, has_window, scale, softcap)

    def _written(self, all_LBKSH: jax.Array, new_BTKH: jax.Array) -> jax.Array:
        new_LBKSH = new_BTKH.astype(all_LBKSH.dtype).transpose(0, 2, 1, 3)[None]
        start = (self.layer, 0, 0, self.slot, 0)
        return constrain(jax.lax.dynamic_update_slice(all_LBKSH, new_LBKSH, start), "caches")

    def _step(
        self,
        q_BTNH: jax.Array,
        window: int | None,
        has_window: jax.Array | None,
        scale: float | None,
        softcap: float | None,
    ) -> jax.Array:
        """Attention of one token a row."""
        keys_BKSH, values_BKSH = (
            constrain(jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False), "cache")
            for x in self.cache
        )
        num_kv_heads, num_slots, width = keys_BKSH.shape[1:]
        units = (num_kv_heads, q_BTNH.shape[2] // num_kv_heads)
        q_BTNH = constrain(q_BTNH, "heads", units)
        q_BKGH = q_BTNH.reshape(q_BTNH.shape[0], *units, width)
        slots_S = jnp.arange(num_slots)
        seen_BS = (slots_S[None] >= self.first_B[:, None]) & (slots_S <= self.slot)[None]
        if window is not None:
            near_S = slots_S > self.slot - window
            seen_BS &= (near_S if has_window is None else near_S | ~has_window)[None]
        scores = jnp.einsum(
            "bkgh,bksh->bkgs", q_BKGH, keys_BKSH, preferred_element_type=jnp.float32
        )
        scores *= width**-0.5 if scale is None else scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(seen_BS[:, None, None], scores, jnp.finfo(jnp.float32).min)
        weights = jax.nn.softmax(scores, axis=-1).astype(values_BKSH.dtype)
        out_BKGH = jnp.einsum("bkgs,bksh->bkgh", weights, values_BKSH)
        return constrain(out_BKGH.reshape(q_BTNH.shape), "heads", units)


def scan_cached(
    layers: nnx.Module,
    x_BTD: jax.Array,
    context: Mapping[str, jax.Array | None],
    rows: Mapping[str, Any],
    cache: Cache,
    slot: jax.Array,
    first_B: jax.Array,
) -> tuple[jax.Array, Cache]:
    """Runs stacked layers on new tokens; the residual stream behind them, and the cache.

    Args:
        layers: Result of `jaxtp.models.layers.stack_layers`.
        x_BTD: The residual stream in front of the first layer.
        context: See `jaxtp.models.layers.scan_layers`.
        rows: See there.
        cache: What the tokens before left behind. Carried, not scanned over: it stays where it is
            and each layer writes one slice.
        slot: Where the first new token goes.
        first_B: The slot of each row's first token.
    """
    graph, params = nnx.split(layers)

    def step(carry: tuple[jax.Array, Cache], row: Any) -> tuple[tuple[jax.Array, Cache], None]:
        x_BTD, cache = carry
        here = LayerCache(cache, row["layer"], slot, first_B)
        x_BTD = nnx.merge(graph, row["params"])(x_BTD, {**context, **row["rows"], "cache": here})
        return (x_BTD, here.cache), None

    each = {
        "params": params,
        "rows": dict(rows),
        "layer": jnp.arange(cache.keys.shape[0], dtype=jnp.int32),
    }
    return jax.lax.scan(step, (x_BTD, cache), each)[0]
