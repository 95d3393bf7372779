"""The GPT-2 family, GPT-3 included: learned positions, LayerNorm, GELU, biases, a tied head.

The architecture and the names of its activations, nothing else: see `jaxtp.models.layers` for the
shape suffixes. No dropout.

The fused query/key/value kernel is stored (embed, 3, heads, head_dim), not (embed, 3 x heads x
head_dim) as in the published checkpoints: a contiguous shard of the flat form gives one device all
of q and another all of v, and costs 9 to 14 permutes to undo, while here the heads dim is an
ordinary column. The numbers and their order are the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from numpy.typing import NDArray

from jaxtp.activations.by_name import constrain
from jaxtp.errors import SizeMismatch
from jaxtp.models.attention import attend
from jaxtp.models.cache import LayerCache
from jaxtp.models.decoder import Decoder
from jaxtp.models.gpt.config import GPTConfig
from jaxtp.models.layers import (
    Branch,
    Layer,
    residual_init,
    stack_layers,
)
from jaxtp.models.projections import Linear, TokenTable
from jaxtp.plan.stored_form import mask_padding


class Attention(nnx.Module):
    """Multi-head attention; kernels (embed, 3, heads, head_dim) and (heads, head_dim, embed)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        types = _types(config)
        heads = (config.num_attention_heads, config.head_dim)
        self.config = config
        self.c_attn = Linear(config.hidden_size, (3, *heads), rngs=rngs, **types)
        self.c_proj = Linear(
            heads,
            config.hidden_size,
            axis=(-2, -1),
            kernel_init=residual_init(config.num_hidden_layers),
            rngs=rngs,
            **types,
        )

    def __call__(
        self, h_BTD: jax.Array, segment_ids_BT: jax.Array | None, cache: LayerCache | None
    ) -> jax.Array:
        """Attention over earlier tokens of the same segment, (batch, tokens, hidden size)."""
        qkv_BT3NH = self.c_attn(h_BTD)
        q_BTNH, k_BTNH, v_BTNH = (qkv_BT3NH[:, :, i] for i in range(3))
        implementation = self.config.attention_implementation
        run = attend if cache is None else cache.attend
        return self.c_proj(run(q_BTNH, k_BTNH, v_BTNH, segment_ids_BT, implementation, None))


class MLP(nnx.Module):
    """proj(gelu(fc(h))), with the tanh form of GELU that GPT-2 was trained with."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        types = _types(config)
        self.c_fc = Linear(config.hidden_size, config.intermediate_size, rngs=rngs, **types)
        self.c_proj = Linear(
            config.intermediate_size,
            config.hidden_size,
            kernel_init=residual_init(config.num_hidden_layers),
            rngs=rngs,
            **types,
        )

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        """The MLP's result, (batch, tokens, hidden size)."""
        return self.c_proj(jax.nn.gelu(constrain(self.c_fc(h_BTD), "mlp"), approximate=True))


class GPTLayer(Layer):
    """Attention and MLP, each behind its norm and added to the residual stream."""

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Attention, then MLP."""
        return (
            Branch(norm="ln_1", block="attn", takes=("segment_ids_BT", "cache")),
            Branch(norm="ln_2", block="mlp", tokenwise=True),
        )

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.ln_1 = _norm(config, rngs)
        self.attn = Attention(config, rngs)
        self.ln_2 = _norm(config, rngs)
        self.mlp = MLP(config, rngs)


class GPT(Decoder):
    """A decoder of stacked `GPTLayer`s; `model(tokens)` gives logits."""

    config: GPTConfig

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        types = _types(config)
        self.config = config
        self.wte = TokenTable(config.vocab_size, config.hidden_size, rngs=rngs, **types)
        self.wpe = nnx.Embed(config.max_position_embeddings, config.hidden_size, rngs=rngs, **types)
        self.h = stack_layers(functools.partial(GPTLayer, config), config.num_hidden_layers, rngs)
        self.ln_f = _norm(config, rngs)

    def check_length(self, num_tokens: int) -> None:
        """Whether the position table has rows for so many tokens.

        Raises:
            SizeMismatch: TP003, if it has not.
        """
        # A lookup past the table gives NaN, three layers away from its cause.
        longest = self.config.max_position_embeddings
        if num_tokens > longest:
            raise SizeMismatch(
                f"{num_tokens} tokens, but the position table has {longest} rows",
                where="max_position_embeddings",
                fix=f"use at most {longest} tokens, or a longer table",
            )

    @property
    def stacks(self) -> tuple[GPTLayer]:
        """All layers as one module."""
        return (self.h,)

    @property
    def last_norm(self) -> nnx.LayerNorm:
        """The norm behind the last layer."""
        return self.ln_f

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """The residual stream in front of the first layer, (batch, tokens, hidden size)."""
        return constrain(self.wte(tokens_BT) + self.wpe(positions_BT), "residual")

    def context(
        self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
    ) -> tuple[dict[str, jax.Array | None], dict[str, NDArray[Any]]]:
        """What all layers take; they do not differ."""
        return {"segment_ids_BT": segment_ids_BT}, {}

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Scores over the vocab from final hidden states, (batch, tokens, vocab)."""
        logits_BTV = constrain(self.wte.attend(h_BTD), "logits")
        return mask_padding(logits_BTV, self.config.vocab_size)


def _types(config: GPTConfig) -> dict[str, Any]:
    return {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(
        config.hidden_size, epsilon=config.layer_norm_epsilon, rngs=rngs, **_types(config)
    )
