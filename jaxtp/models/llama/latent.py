"""Multi-head latent attention, section 2.1 of the DeepSeek-V2 report (2024).

Shape suffixes as in `jaxtp.models.layers`, and C the latent of keys and values, P the rotated part
of a head, O the rest of it.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.models.attention import attend
from jaxtp.models.cache import LayerCache
from jaxtp.models.llama.config import LlamaConfig
from jaxtp.models.llama.parts import parts_of
from jaxtp.models.llama.rotary import rotary_of
from jaxtp.models.projections import kernels_of, products

LATENT_EPSILON = 1e-6
"""Of the norms of latents in all published models, whatever that of the other norms is."""


class LatentAttention(nnx.Module):
    """Keys and values of all heads are made of one narrow latent of the token.

    Maps down to the latents are as small as a router, and replicated; those up are by heads.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, row, norm = parts_of(config, rngs)
        norm = functools.partial(norm, epsilon=LATENT_EPSILON)
        assert config.kv_lora_rank is not None
        assert config.qk_rope_head_dim is not None
        assert config.v_head_dim is not None
        self.config, self.rank = config, config.kv_lora_rank
        self.plain_dim = config.head_dim - config.qk_rope_head_dim
        num_heads, query_rank = config.num_attention_heads, config.q_lora_rank
        if query_rank is None:
            self.q_proj = linear(config.hidden_size, (num_heads, config.head_dim))
        else:
            self.q_a_proj = linear(config.hidden_size, query_rank)
            self.q_a_layernorm = norm(query_rank)
            self.q_b_proj = linear(query_rank, (num_heads, config.head_dim))
        down = self.rank + config.qk_rope_head_dim
        self.kv_a_proj_with_mqa = linear(config.hidden_size, down)
        self.kv_a_layernorm = norm(self.rank)
        self.kv_b_proj = linear(self.rank, (num_heads, self.plain_dim + config.v_head_dim))
        self.o_proj = row((num_heads, config.v_head_dim), config.hidden_size, axis=(-2, -1))

    def __call__(
        self,
        h_BTD: jax.Array,
        angles_BTH: jax.Array,
        segment_ids_BT: jax.Array | None,
        has_window: jax.Array | None,
        cache: LayerCache | None,
    ) -> jax.Array:
        """Attention over earlier tokens of the same segment, (batch, tokens, hidden size)."""
        config, turned = self.config, rotary_of(self.config)
        has_rank = config.q_lora_rank is not None
        first = self.q_a_proj if has_rank else self.q_proj
        q_BTNH, down_BTC = products(h_BTD, first, self.kv_a_proj_with_mqa)
        if has_rank:
            q_BTNH = self.q_b_proj(self.q_a_layernorm(q_BTNH))
        q_BTNO, q_BTNP = jnp.split(q_BTNH, [self.plain_dim], axis=-1)
        q_BTNP = turned(q_BTNP, angles_BTH)
        latent_BTC, k_BTP = jnp.split(down_BTC, [self.rank], axis=-1)
        latent_BTC = self.kv_a_layernorm(latent_BTC)
        k_BT1P = turned(k_BTP[:, :, None], angles_BTH)
        run = functools.partial(
            attend if cache is None else cache.attend,
            segment_ids_BT=segment_ids_BT,
            implementation=config.attention_implementation,
            window=config.sliding_window,
            has_window=has_window,
            scale=config.score_scale or config.head_dim**-0.5,
            softcap=config.attn_logit_softcapping,
        )
        if cache is not None:
            stored_BT1C = jnp.concatenate([latent_BTC[:, :, None], k_BT1P], axis=-1)
            if h_BTD.shape[1] == 1:
                out_BTNH = self._over_latents(q_BTNO, q_BTNP, stored_BT1C, run)
                return self.o_proj(out_BTNH)
            run = functools.partial(run, stored_BTKH=stored_BT1C)
        k_BTNO, v_BTNH = jnp.split(self.kv_b_proj(latent_BTC), [self.plain_dim], axis=-1)
        k_BTNP = jnp.broadcast_to(k_BT1P, (*k_BTNO.shape[:-1], k_BT1P.shape[-1]))
        q_BTNH = jnp.concatenate([q_BTNO, q_BTNP], axis=-1)
        k_BTNH = jnp.concatenate([k_BTNO, k_BTNP], axis=-1)
        return self.o_proj(run(q_BTNH, k_BTNH, v_BTNH))

    def _over_latents(
        self,
        q_BTNO: jax.Array,
        q_BTNP: jax.Array,
        k_BT1C: jax.Array,
        run: Callable[..., jax.Array],
    ) -> jax.Array:
        """The same of one new token a row, without keys and values of those before it.

        With the map up in front of the scores a query meets latents, and with that behind the
        weights their sum becomes values: section 2.1.2 of the report. All heads share one key.
        """
        dtype, cut = q_BTNO.dtype, [self.plain_dim]
        parts = [
            (*jnp.split(kernel_CNH, cut, axis=-1), *_split_scale(scale_NH, cut))
            for kernel_CNH, scale_NH in kernels_of(self.kv_b_proj)
        ]
        q_BTNC = _sum(
            jnp.einsum("btno,cno->btnc", _scaled(q_BTNO, scale_NO), keys_CNO.astype(dtype))
            for keys_CNO, _, scale_NO, _ in parts
        )
        q_BTNC = jnp.concatenate([q_BTNC, q_BTNP], axis=-1)
        out_BTNC = run(q_BTNC, k_BT1C, None)[..., : self.rank]
        return _sum(
            _scaled(jnp.einsum("btnc,cnh->btnh", out_BTNC, values_CNH.astype(dtype)), scale_NH)
            for _, values_CNH, _, scale_NH in parts
        )


def _split_scale(scale: jax.Array | None, cut: list[int]) -> list[Any]:
    return [None, None] if scale is None else jnp.split(scale, cut, axis=-1)


def _sum(terms: Iterable[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, terms)


def _scaled(x: jax.Array, scale: jax.Array | None) -> jax.Array:
    return x if scale is None else (x.astype(jnp.float32) * scale[None, None]).astype(x.dtype)
