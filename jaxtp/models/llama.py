"""The Llama family: grouped-query attention, rotary, RMSNorm, gated MLP or experts.

The architecture and the names of its activations, nothing else: see `jaxtp.models.layers` for the
shape suffixes.

Mistral, Qwen2, Qwen3, Gemma and Mixtral are this decoder with other options of the config.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtp.activations.by_name import constrain, spread
from jaxtp.errors import SizeMismatch
from jaxtp.models.layers import (
    Branch,
    DecoderConfig,
    Layer,
    attend,
    default_positions,
    normed,
    residual_init,
    rotary,
    scan_layers,
    stack_layers,
)
from jaxtp.models.moe import GatedMLP, MoE
from jaxtp.models.projections import Linear, TokenTable
from jaxtp.plan.stored_form import mask_padding

ACTIVATION: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
"""Name, as Hugging Face configs spell it -> function of the gate."""


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
        SizeMismatch: TP003, if query heads do not divide by kv heads, the head width is odd, the
            window is empty, or not between one and all of the experts are chosen.
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

    qkv_bias: bool = False
    """Biases on queries, keys and values, as Qwen2 has them."""

    sliding_window: int | None = None
    """How many tokens a token sees, itself included, as in Mistral; None: all before it."""

    hidden_act: Literal["silu", "gelu_pytorch_tanh"] = "silu"
    """What the MLP's gate goes through."""

    norm_offset: bool = False
    """Norms multiply by one plus their scale, as Gemma's do."""

    scale_embedding: bool = False
    """Multiply embeddings by the root of the hidden size, as Gemma does."""

    num_experts: int = 0
    """Number of MLPs that a layer chooses from for each token, as Mixtral does; 0: one MLP."""

    num_experts_per_tok: int = 0
    """Number of experts chosen for each token."""

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
        if self.sliding_window is not None and self.sliding_window < 1:
            raise SizeMismatch(
                f"a window of {self.sliding_window} tokens",
                where="sliding_window",
                fix="a token sees at least itself; None for no window",
            )
        chosen, experts = self.num_experts_per_tok, self.num_experts
        if not min(experts, 1) <= chosen <= experts:
            raise SizeMismatch(
                f"{chosen} experts per token of {experts}",
                where="num_experts_per_tok",
                fix="choose at least one and at most all experts; both 0 for a plain MLP",
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


class OffsetRMSNorm(nnx.RMSNorm):
    """RMSNorm that multiplies by one plus its scale, in fp32."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The normed array, like `x`."""
        shifted = jax.tree.map(lambda scale: 1 + scale.astype(jnp.float32), self)
        return nnx.RMSNorm.__call__(shifted, x, mask=mask)


class Attention(nnx.Module):
    """Grouped-query attention; kernels (embed, heads, head_dim) and (heads, head_dim, embed)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, norm = _parts(config, rngs)
        heads = (config.num_attention_heads, config.head_dim)
        kv_heads = (config.num_key_value_heads, config.head_dim)
        self.config = config
        self.q_proj = linear(config.hidden_size, heads, use_bias=config.qkv_bias)
        self.k_proj = linear(config.hidden_size, kv_heads, use_bias=config.qkv_bias)
        self.v_proj = linear(config.hidden_size, kv_heads, use_bias=config.qkv_bias)
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
        # Under a plan that splits queries further than keys, K below counts a kv head once for
        # each device that needs it.
        k_proj, v_proj = self._spread(self.k_proj), self._spread(self.v_proj)
        q_BTNH, k_BTKH, v_BTKH = self.q_proj(h_BTD), k_proj(h_BTD), v_proj(h_BTD)
        if config.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        q_BTNH, k_BTKH = rotary(q_BTNH, angles_BTH), rotary(k_BTKH, angles_BTH)
        out_BTNH = attend(
            q_BTNH,
            k_BTKH,
            v_BTKH,
            segment_ids_BT,
            config.attention_implementation,
            config.sliding_window,
        )
        return self.o_proj(out_BTNH)

    def _spread(self, proj: Linear) -> Linear:
        """A key or value projection with a copy of each kv head per device that needs it."""
        config = self.config
        num_kv_heads = config.num_key_value_heads
        units = (num_kv_heads, config.num_attention_heads // num_kv_heads)

        def copies(w: jax.Array) -> jax.Array:
            w_DKH = w.astype(config.dtype).reshape(-1, *w.shape[-2:])  # a bias has no D
            w_DKH = spread(w_DKH, "kv_kernel", units)
            return w_DKH.reshape(*w.shape[:-2], *w_DKH.shape[1:])

        return jax.tree.map(copies, proj)


class MLP(GatedMLP):
    """A gated MLP, with silu SwiGLU: down(act(gate(h)) * up(h))."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, _ = _parts(config, rngs)
        self.act = ACTIVATION[config.hidden_act]
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
        return self.down_proj(self.act(gate_BTF) * up_BTF)


class LlamaLayer(Layer):
    """Attention and MLP or experts, each behind its norm and added to the residual stream."""

    branches = (
        Branch(norm="input_layernorm", block="self_attn", takes=("angles_BTH", "segment_ids_BT")),
        Branch(norm="post_attention_layernorm", block="mlp", tokenwise=True),
    )

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, norm = _parts(config, rngs)
        self.input_layernorm = norm(config.hidden_size)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = norm(config.hidden_size)
        if config.num_experts:
            router = linear(config.hidden_size, config.num_experts)
            make_expert = functools.partial(MLP, config)
            chosen = config.num_experts_per_tok
            self.mlp = MoE(router, make_expert, config.num_experts, chosen, rngs)
        else:
            self.mlp = MLP(config, rngs)


class Llama(nnx.Module):
    """A decoder of stacked `LlamaLayer`s; `model(tokens)` gives logits.

    Parameters are in `config.param_dtype`, activations and logits in `config.dtype`; take losses
    with `cross_entropy`, which sums in fp32.
    """

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs) -> None:
        linear, norm = _parts(config, rngs)
        self.config = config
        self.embed_tokens = TokenTable(
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
        x_BTD = self.embed_tokens(tokens_BT)
        if config.scale_embedding:
            x_BTD = x_BTD * math.sqrt(config.hidden_size)  # rounded to the type of x, as there
        context = {"angles_BTH": angles_BTH, "segment_ids_BT": segment_ids_BT}
        x_BTD = scan_layers(self.layers, x_BTD, context, config.remat)
        return normed(self.norm, x_BTD)

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Scores over the vocab from final hidden states, (batch, tokens, vocab)."""
        tied = self.config.tie_word_embeddings
        logits_BTV = self.embed_tokens.attend(h_BTD) if tied else self.lm_head(h_BTD)
        return mask_padding(constrain(logits_BTV, "logits"), self.config.vocab_size)


def _parts(
    config: LlamaConfig, rngs: nnx.Rngs
) -> tuple["functools.partial[Linear]", "functools.partial[nnx.RMSNorm]"]:
    """Constructors of the family's linear maps and norms, with the config's types filled in."""
    types = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
    linear = functools.partial(Linear, use_bias=False, rngs=rngs, **types)
    kind, scale_init = nnx.RMSNorm, jax.nn.initializers.ones
    if config.norm_offset:
        kind, scale_init = OffsetRMSNorm, jax.nn.initializers.zeros
    norm = functools.partial(
        kind, epsilon=config.rms_norm_eps, scale_init=scale_init, rngs=rngs, **types
    )
    return linear, norm
