"""The Llama family, Qwen3 included: grouped-query attention, rotary, RMSNorm, SwiGLU.

Stage in: `LlamaConfig` and random keys, then token ids. Stage out: logits. The architecture and the
names of its activations, nothing else: see `jaxtp.models.layers` for the shape suffixes.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtp.activations import constrain, spread
from jaxtp.errors import SizeMismatch
from jaxtp.models.layers import (
    DecoderConfig,
    add_block,
    attend,
    default_positions,
    mask_padding,
    normed,
    residual_init,
    rotary,
    scan_layers,
    stack_layers,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later stretch rotary frequencies to longer contexts."""

    factor: float
    """By how much the lowest frequencies are divided."""

    low_freq_factor: float
    """Frequencies with fewer turns than this in the original context are divided in full."""

    high_freq_factor: float
    """Frequencies with more turns than this in the original context are kept."""

    original_max_position_embeddings: int
    """Context length before stretching, in tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes and options of one Llama-like model.

    Raises:
        SizeMismatch: TP003, if query heads do not divide by kv heads, or the head width is odd.
    """

    num_key_value_heads: int
    """Number of key/value heads; query heads share them in equal groups."""

    head_dim: int
    """Width of one head; heads times width need not be the hidden size."""

    intermediate_size: int
    """Width of the MLP."""

    rms_norm_eps: float = 1e-5
    """Added to the mean square before its root."""

    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies; None keeps them."""

    qk_norm: bool = False
    """Normalise each query and key head before rotation, as Qwen3 does."""

    tie_word_embeddings: bool = False
    """Use the embedding as the head."""

    def __post_init__(self) -> None:
        # Not super(): a slotted dataclass is a second class object, and the closure cell names the
        # first one.
        DecoderConfig.__post_init__(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise SizeMismatch(
                f"{self.num_attention_heads} query heads for {self.num_key_value_heads} kv heads",
                where="num_key_value_heads",
                fix="use a divisor of num_attention_heads",
            )
        if self.head_dim % 2:
            raise SizeMismatch(
                f"rotary positions turn pairs, and head_dim is {self.head_dim}",
                where="head_dim",
                fix="use an even head_dim",
            )


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> np.ndarray:
    """Radians per token of each pair of a head, (head_dim / 2,), highest first.

    theta^(-2i/H), section 3.2.2 of Su et al. 2021. Scaling as in the Llama 3.1 reference code: a
    frequency keeps a share that grows linearly with its number of turns in the original context,
    from 0 at `low_freq_factor` to 1 at `high_freq_factor`; the rest is divided by `factor`.
    """
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


class Attention(nnx.Module):
    """Grouped-query attention; kernels (embed, heads, head_dim) and (heads, head_dim, embed)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, norm = _parts(config, rngs)
        heads = (config.num_attention_heads, config.head_dim)
        kv_heads = (config.num_key_value_heads, config.head_dim)
        self.config = config
        self.q_proj = linear(config.hidden_size, heads)
        self.k_proj = linear(config.hidden_size, kv_heads)
        self.v_proj = linear(config.hidden_size, kv_heads)
        self.o_proj = linear(
            heads,
            config.hidden_size,
            axis=(-2, -1),
            kernel_init=residual_init(config.num_hidden_layers),
        )
        if config.qk_norm:
            self.q_norm, self.k_norm = norm(config.head_dim), norm(config.head_dim)

    def __call__(
        self, h_BTD: jax.Array, angles_BTH: jax.Array, segment_ids_BT: jax.Array | None
    ) -> jax.Array:
        """Attention over earlier tokens of the same segment, (batch, tokens, hidden size)."""
        config = self.config
        num_kv_heads = config.num_key_value_heads
        units = (num_kv_heads, config.num_attention_heads // num_kv_heads)
        # Under a plan that splits queries further than keys, K below counts a kv head once for
        # each device that needs it.
        k_proj, v_proj = jax.tree.map(
            lambda w_DKH: spread(w_DKH.astype(config.dtype), "kv_kernel", units),
            (self.k_proj, self.v_proj),
        )
        q_BTNH, k_BTKH, v_BTKH = self.q_proj(h_BTD), k_proj(h_BTD), v_proj(h_BTD)
        if config.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rotary(q_BTNH, angles_BTH), rotary(k_BTKH, angles_BTH)
        implementation = config.attention_implementation
        return self.o_proj(attend(q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, implementation))


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate(h)) * up(h))."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, _ = _parts(config, rngs)
        self.gate_proj = linear(config.hidden_size, config.intermediate_size)
        self.up_proj = linear(config.hidden_size, config.intermediate_size)
        self.down_proj = linear(
            config.intermediate_size,
            config.hidden_size,
            kernel_init=residual_init(config.num_hidden_layers),
        )

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        """The MLP's result, (batch, tokens, hidden size)."""
        gate_BTF = constrain(self.gate_proj(h_BTD), "mlp")
        up_BTF = constrain(self.up_proj(h_BTD), "mlp")
        return self.down_proj(jax.nn.silu(gate_BTF) * up_BTF)


class LlamaLayer(nnx.Module):
    """Attention and MLP, each behind its norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        _, norm = _parts(config, rngs)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = norm(config.hidden_size)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x_BTD: jax.Array, angles_BTH: jax.Array, segment_ids_BT: jax.Array | None
    ) -> jax.Array:
        """The residual stream after this layer, (batch, tokens, hidden size)."""
        attention = functools.partial(
            self.self_attn, angles_BTH=angles_BTH, segment_ids_BT=segment_ids_BT
        )
        x_BTD = add_block(x_BTD, self.input_layernorm, attention, "attention_output")
        return add_block(x_BTD, self.post_attention_layernorm, self.mlp, "mlp_output")


class Llama(nnx.Module):
    """A decoder of stacked `LlamaLayer`s; `model(tokens)` gives logits.

    Parameters are in `config.param_dtype`, activations and logits in `config.dtype`; take losses
    with `cross_entropy`, which sums in fp32.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, norm = _parts(config, rngs)
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            rngs=rngs,
        )
        self.layers = stack_layers(
            functools.partial(LlamaLayer, config), config.num_hidden_layers, rngs
        )
        self.norm = norm(config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = linear(config.hidden_size, config.vocab_size)

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Scores of the next token at every position, (batch, tokens, vocab).

        Args:
            tokens_BT: Token ids.
            positions_BT: Position of each token, (batch or 1, tokens); default: 0, 1, ...
            segment_ids_BT: Which document each token belongs to; attention stays inside one.
                Default: one document.
        """
        return self.logits(self.hidden(tokens_BT, positions_BT, segment_ids_BT))

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Final normed hidden states, (batch, tokens, hidden size); arguments as for a call."""
        config = self.config
        if positions_BT is None:
            positions_BT = default_positions(tokens_BT)
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        # Angles in fp32: in bf16 the positions 256 and 257 are the same number.
        angles_BTH = positions_BT[:, :, None] * jnp.float32(frequencies)[None, None, :]
        x_BTD = constrain(self.embed_tokens(constrain(tokens_BT, "tokens")), "residual")
        x_BTD = scan_layers(
            self.layers,
            x_BTD,
            lambda layer, x_BTD: layer(x_BTD, angles_BTH, segment_ids_BT),
            config.remat,
        )
        return normed(self.norm, x_BTD)

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Scores over the vocab from final hidden states, (batch, tokens, vocab)."""
        tied = self.config.tie_word_embeddings
        logits_BTV = self.embed_tokens.attend(h_BTD) if tied else self.lm_head(h_BTD)
        return mask_padding(constrain(logits_BTV, "logits"), self.config.vocab_size)


def _parts(
    config: LlamaConfig, rngs: nnx.Rngs
) -> tuple["functools.partial[nnx.LinearGeneral]", "functools.partial[nnx.RMSNorm]"]:
    """Constructors of the family's linear maps and norms, with the config's types filled in."""
    types = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
    linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs, **types)
    norm = functools.partial(nnx.RMSNorm, epsilon=config.rms_norm_eps, rngs=rngs, **types)
    return linear, norm
