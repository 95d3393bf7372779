"""The Llama family: grouped-query attention, rotary, RMSNorm, gated MLP or experts.

The architecture and the names of its activations, nothing else: see `jaxtp.models.layers` for the
shape suffixes. `published.py` lists the families that are this decoder with other options.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from jaxtp.activations.by_name import constrain, spread
from jaxtp.activations.context.blocks import soft_capped
from jaxtp.layers.experts import Capacity, Gate
from jaxtp.models.attention import attend
from jaxtp.models.cache import LayerCache
from jaxtp.models.decoder import Decoder
from jaxtp.models.layers import (
    TALLY,
    Branch,
    Layer,
    stack_layers,
)
from jaxtp.models.llama.config import LlamaConfig
from jaxtp.models.llama.latent import LatentAttention
from jaxtp.models.llama.parts import parts_of
from jaxtp.models.llama.rotary import angles, layer_frequencies, rotary_of, sliding_layers
from jaxtp.models.moe import GatedMLP, MoE, Routing
from jaxtp.models.projections import Linear, TokenTable, products
from jaxtp.models.quantized import is_quantized
from jaxtp.plan.stored_form import mask_padding


def _silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def _gelu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.gelu(gate, approximate=True) * up


ALPHA, LIMIT = 1.702, 7.0
"""Of `_clamped_swiglu`, as in gpt-oss's reference code (OpenAI 2025)."""


def _clamped_swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    gate, up = jnp.minimum(gate, LIMIT), jnp.clip(up, -LIMIT, LIMIT)
    return gate * jax.nn.sigmoid(ALPHA * gate) * (up + 1)


GATES: dict[str, Gate] = {
    "silu": _silu,
    "gelu_pytorch_tanh": _gelu,
    "clamped_swiglu": _clamped_swiglu,
}
"""`LlamaConfig.hidden_act` -> what becomes of gate and up."""


class Attention(nnx.Module):
    """Grouped-query attention; kernels (embed, heads, head_dim) and (heads, head_dim, embed)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, row, norm = parts_of(config, rngs)
        heads = (config.num_attention_heads, config.head_dim)
        kv_heads = (config.num_key_value_heads, config.head_dim)
        self.config = config
        self.q_proj = linear(config.hidden_size, heads, use_bias=config.qkv_bias)
        self.k_proj = linear(config.hidden_size, kv_heads, use_bias=config.qkv_bias)
        self.v_proj = linear(config.hidden_size, kv_heads, use_bias=config.qkv_bias)
        self.o_proj = row(heads, config.hidden_size, axis=(-2, -1), use_bias=config.o_bias)
        if config.attention_sinks:
            self.sinks = nnx.Param(jnp.zeros(heads[0], jnp.dtype(config.param_dtype)))
        if config.qk_norm:
            together = config.qk_norm_all_heads
            self.q_norm = norm(config.head_dim * (heads[0] if together else 1))
            self.k_norm = norm(config.head_dim * (kv_heads[0] if together else 1))

    def __call__(
        self,
        h_BTD: jax.Array,
        angles_BTH: jax.Array,
        segment_ids_BT: jax.Array | None,
        has_window: jax.Array | None,
        cache: LayerCache | None,
    ) -> jax.Array:
        """Attention over earlier tokens of the same segment, (batch, tokens, hidden size)."""
        config = self.config
        k_proj, v_proj = self.k_proj, self.v_proj
        if cache is None and not is_quantized(config):
            # Under a plan that splits queries further than keys, K below counts a kv head once for
            # each device that needs it: that makes gradients cheaper, and a cache larger.
            k_proj, v_proj = self._spread(k_proj), self._spread(v_proj)
        q_BTNH, k_BTKH, v_BTKH = products(h_BTD, self.q_proj, k_proj, v_proj)
        if config.qk_norm:
            q_BTNH, k_BTKH = self._normed(self.q_norm, q_BTNH), self._normed(self.k_norm, k_BTKH)
        turned = rotary_of(config)
        q_BTNH, k_BTKH = turned(q_BTNH, angles_BTH), turned(k_BTKH, angles_BTH)
        out_BTNH = (attend if cache is None else cache.attend)(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            segment_ids_BT,
            config.attention_implementation,
            config.sliding_window,
            has_window=has_window,
            scale=config.score_scale,
            softcap=config.attn_logit_softcapping,
            sinks_N=self.sinks[...] if config.attention_sinks else None,
        )
        return self.o_proj(out_BTNH)

    def _normed(self, norm: nnx.RMSNorm, x_BTNH: jax.Array) -> jax.Array:
        if not self.config.qk_norm_all_heads:
            return norm(x_BTNH)
        # Copies of heads (see `_spread`) leave the mean square as it is; the scale follows them.
        num_heads, width = x_BTNH.shape[2:]
        copies = num_heads * width // norm.num_features

        def spread_scale(scale: jax.Array) -> jax.Array:
            return jnp.repeat(scale.reshape(-1, width), copies, axis=0).reshape(-1)

        norm = jax.tree.map(spread_scale, norm)
        return norm(x_BTNH.reshape(*x_BTNH.shape[:2], -1)).reshape(x_BTNH.shape)

    def _spread(self, proj: Linear) -> Linear:
        """A key or value projection with a copy of each kv head per device that needs it."""
        config = self.config
        num_kv_heads = config.num_key_value_heads
        units = (num_kv_heads, config.num_attention_heads // num_kv_heads)

        def copies(path: tuple[Any, ...], w: jax.Array) -> jax.Array:
            if "lora_a" in jax.tree_util.keystr(path):
                return w  # (hidden size, rank): no heads
            w_DKH = w.astype(config.dtype).reshape(-1, *w.shape[-2:])  # a bias has no D
            w_DKH = spread(w_DKH, "kv_kernel", units)
            return w_DKH.reshape(*w.shape[:-2], *w_DKH.shape[1:])

        return jax.tree_util.tree_map_with_path(copies, proj)


class MLP(GatedMLP):
    """A gated MLP, with silu SwiGLU: down(silu(gate(h)) * up(h))."""

    def __init__(
        self,
        config: LlamaConfig,
        rngs: nnx.Rngs,
        width: int | None = None,
        *,
        use_bias: bool = False,
    ) -> None:
        linear, row, _ = parts_of(config, rngs)
        width = width or config.intermediate_size
        self.gated = GATES[config.hidden_act]
        self.gate_proj = linear(config.hidden_size, width, use_bias=use_bias)
        self.up_proj = linear(config.hidden_size, width, use_bias=use_bias)
        self.down_proj = row(width, config.hidden_size, use_bias=use_bias)

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        """The MLP's result, (batch, tokens, hidden size)."""
        gate_BTF, up_BTF = products(h_BTD, self.gate_proj, self.up_proj)
        return self.down_proj(self.gated(constrain(gate_BTF, "mlp"), constrain(up_BTF, "mlp")))


NORMS = {
    "before": (("input_layernorm", "post_attention_layernorm"), ("", "")),
    "after": (("", ""), ("post_attention_layernorm", "post_feedforward_layernorm")),
    "both": (
        ("input_layernorm", "pre_feedforward_layernorm"),
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
}
"""`LlamaConfig.norms` -> the norms in front of attention and MLP, and those behind; by the names of
Hugging Face, where post_attention_layernorm is one or the other."""


class LlamaLayer(Layer):
    """Attention and MLP or experts, each behind its norm and added to the residual stream."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Attention, then MLP."""
        takes = ("angles_BTH", "segment_ids_BT", "has_window", "cache")
        counts = (TALLY,) if isinstance(self.mlp, MoE) else ()
        before, after = NORMS[self.self_attn.config.norms]
        return (
            Branch(norm=before[0], post_norm=after[0], block="self_attn", takes=takes),
            Branch(norm=before[1], post_norm=after[1], block="mlp", takes=counts, tokenwise=True),
        )

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs, *, has_experts: bool) -> None:
        _, _, norm = parts_of(config, rngs)
        self.self_attn = (LatentAttention if config.caches_latents else Attention)(config, rngs)
        for name in filter(None, itertools.chain(*NORMS[config.norms])):
            setattr(self, name, norm(config.hidden_size))
        self.mlp = _experts(config, rngs) if has_experts else MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, context: Mapping[str, jax.Array | None]) -> jax.Array:
        """The residual stream after this layer, (batch, tokens, hidden size)."""
        frequencies_H, positions_BT = context.get("frequencies_H"), context.get("positions_BT")
        if frequencies_H is not None and positions_BT is not None:
            turned = angles(positions_BT, frequencies_H)
            context = {**context, "angles_BTH": turned}
        return Layer.__call__(self, x_BTD, context)


class Llama(Decoder):
    """A decoder of stacked `LlamaLayer`s; `model(tokens)` gives logits."""

    config: LlamaConfig

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, _, norm = parts_of(config, rngs)
        self.config = config
        self.embed_tokens = TokenTable(
            config.vocab_size,
            config.hidden_size,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        dense = config.first_k_dense_replace
        if dense:
            make = functools.partial(LlamaLayer, config, has_experts=False)
            self.dense_layers = stack_layers(make, dense, rngs)
        make = functools.partial(LlamaLayer, config, has_experts=config.num_experts > 0)
        self.layers = stack_layers(make, config.num_hidden_layers - dense, rngs)
        self.norm = norm(config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)

    @property
    def stacks(self) -> tuple[LlamaLayer, ...]:
        """All layers, those that are alike as one module; with experts behind those without."""
        front = (self.dense_layers,) if self.config.first_k_dense_replace else ()
        return (*front, self.layers)

    @property
    def last_norm(self) -> nnx.RMSNorm:
        """The norm behind the last layer."""
        return self.norm

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """The residual stream in front of the first layer, (batch, tokens, hidden size)."""
        x_BTD = self.embed_tokens(tokens_BT)
        if self.config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(self.config.hidden_size)  # rounded to the type of x, as there
        return x_BTD

    def context(
        self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
    ) -> tuple[dict[str, jax.Array | None], dict[str, NDArray[Any]]]:
        """What all layers take, and what each of them takes where they differ."""
        frequencies_LH = layer_frequencies(self.config).astype(np.float32)
        rows: dict[str, NDArray[Any]] = {}
        if self.config.layer_types is not None:
            rows["has_window"] = sliding_layers(self.config)
        if (frequencies_LH != frequencies_LH[0]).any():
            rows["frequencies_H"] = frequencies_LH
            return {"segment_ids_BT": segment_ids_BT, "positions_BT": positions_BT}, rows
        turned = angles(positions_BT, frequencies_LH[0])
        return {"segment_ids_BT": segment_ids_BT, "angles_BTH": turned}, rows

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Scores over the vocab from final hidden states, (batch, tokens, vocab)."""
        tied = self.config.tie_word_embeddings
        logits_BTV = self.embed_tokens.attend(h_BTD) if tied else self.lm_head(h_BTD)
        logits_BTV = soft_capped(logits_BTV, self.config.final_logit_softcapping)
        return mask_padding(constrain(logits_BTV, "logits"), self.config.vocab_size)


def _experts(config: LlamaConfig, rngs: nnx.Rngs) -> MoE:
    linear, *_ = parts_of(config, rngs)
    width = config.moe_intermediate_size or config.intermediate_size
    shared = config.n_shared_experts
    return MoE(
        linear(config.hidden_size, config.num_experts, use_bias=config.expert_bias),
        functools.partial(MLP, config, width=width, use_bias=config.expert_bias),
        config.num_experts,
        Routing(
            num_chosen=config.num_experts_per_tok,
            scoring=config.scoring_func,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            num_groups=config.n_group,
            num_groups_chosen=config.topk_group,
            group_rank=2 if config.router_correction else 1,
        ),
        Capacity(config.capacity_factor, config.drop_tokens),
        rngs,
        shared=MLP(config, rngs, width=shared * width) if shared else None,
        has_correction=config.router_correction,
    )
