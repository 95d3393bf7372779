"""Sizes and options of the Llama family."""

import dataclasses
import math
from typing import Literal

from jaxtp.errors import BadConfig, SizeMismatch
from jaxtp.models.bounds import (
    Coefficient,
    Depth,
    Epsilon,
    Experts,
    Positive,
    Share,
    Tokens,
    Width,
    check_bounds,
)
from jaxtp.models.layers import DecoderConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 and later stretch rotary frequencies to longer contexts."""

    factor: Positive
    """By how much the lowest frequencies are divided."""

    low_freq_factor: Positive
    """Frequencies with fewer turns than this in the original context are divided in full."""

    high_freq_factor: Positive
    """Frequencies with more turns than this in the original context are kept."""

    original_max_position_embeddings: Tokens
    """Context length before stretching, in tokens."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.low_freq_factor >= self.high_freq_factor:
            raise SizeMismatch(
                f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor "
                f"{self.high_freq_factor}",
                where="rope_scaling",
                fix="1 and 4 are those of Llama 3.1",
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinearRopeScaling:
    """Rotary frequencies divided by one factor: position interpolation (Chen et al. 2023)."""

    factor: Positive
    """By how much all frequencies are divided."""

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class YarnRopeScaling:
    """Low frequencies divided, high ones kept, and scores made larger (Peng et al. 2023)."""

    factor: Positive
    """By how much the lowest frequencies are divided."""

    original_max_position_embeddings: Tokens
    """Context length before stretching, in tokens."""

    beta_fast: Positive = 32.0
    """Frequencies with more turns than this in the original context are kept."""

    beta_slow: Positive = 1.0
    """Frequencies with fewer turns than this in the original context are divided in full."""

    attention_factor: Positive | None = None
    """What rotated queries and keys are multiplied by; None: what `magnitude` says."""

    mscale: Coefficient = 0.0
    """See `magnitude`; 0 is not given."""

    mscale_all_dim: Coefficient = 0.0
    """See `magnitude`; 0 is not given."""

    truncate: bool = True
    """Begin and end the ramp at a pair, as the paper's code does, and not, as in gpt-oss, between
    two."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.beta_slow >= self.beta_fast:
            raise SizeMismatch(
                f"beta_slow {self.beta_slow} is not below beta_fast {self.beta_fast}",
                where="rope_scaling",
                fix="1 and 32 are those of the paper",
            )

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by: section 3.4 of the paper.

        With both `mscale` of DeepSeek-V2 the ratio of the two, since its scores are scaled by the
        second one already, see `score_factor`.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_factor(self) -> float:
        """What the scores of latent attention are multiplied by, rotated or not."""
        return self._growth(self.mscale_all_dim) ** 2

    def _growth(self, scale: float) -> float:
        return 0.1 * scale * math.log(max(self.factor, 1.0)) + 1.0


LayerType = Literal["full_attention", "sliding_attention"]
"""What a layer attends to, as Hugging Face spells it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes and options of one Llama-like model.

    Raises:
        SizeMismatch: TP003, if query heads do not divide by kv heads, the head width is odd, or not
            between one and all of the experts are chosen.
        BadConfig: TP020, if a number is out of its bounds.
    """

    num_key_value_heads: Depth
    """Number of key/value heads; query heads share them in equal groups."""

    head_dim: Depth
    """Width of one head; heads times width need not be the hidden size."""

    intermediate_size: Width
    """Width of the MLP."""

    rms_norm_eps: Epsilon = 1e-5
    """Added to the mean square before its root."""

    rope_theta: Positive = 10_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | LinearRopeScaling | YarnRopeScaling | None = None
    """Stretching of the rotary frequencies; None keeps them."""

    rope_local_theta: Positive | None = None
    """Base of the rotary frequencies of sliding layers, which are then not stretched, as in Gemma
    3; None: those of the other layers."""

    rotary_share: Share = 1.0
    """Leading part of a head that is rotated, as in Phi-4-mini."""

    rotary_layers: tuple[bool, ...] | None = None
    """Which layers rotate queries and keys; None: all. Those of SmolLM3 that do not see no
    positions."""

    rope_interleave: bool = False
    """Rotate neighbours of a head, as DeepSeek-V2 does, and not its halves."""

    kv_lora_rank: Width | None = None
    """Width of the latent that keys and values of all heads are made of, as in DeepSeek-V2; None:
    they are made of the residual stream."""

    q_lora_rank: Width | None = None
    """The same for queries."""

    qk_rope_head_dim: Depth | None = None
    """With latents: the last part of a head, which is rotated; one for the keys of all heads."""

    v_head_dim: Depth | None = None
    """With latents: width of a head's values."""

    qk_norm: bool = False
    """Normalise queries and keys before rotation, as Qwen3 does."""

    qk_norm_all_heads: bool = False
    """Normalise all heads of a token together, as OLMo 2 does, not each one apart."""

    norms: Literal["before", "after", "both"] = "before"
    """Where a block has its norms: at its input; at its output, as in OLMo 2; or both, as in Gemma
    2."""

    query_pre_attn_scalar: Positive | None = None
    """Scores are divided by the root of this; None: of the head's width."""

    attn_logit_softcapping: Positive | None = None
    """Scores are bent to stay below this: cap x tanh(score / cap); None: left alone."""

    final_logit_softcapping: Positive | None = None
    """The same for the logits."""

    tie_word_embeddings: bool = False
    """Use the embedding as the head."""

    qkv_bias: bool = False
    """Biases on queries, keys and values, as Qwen2 has them."""

    o_bias: bool = False
    """A bias on what attention puts out, as in gpt-oss."""

    attention_sinks: bool = False
    """A learned score of each head that takes a part of the weights and has no value, as in
    gpt-oss."""

    sliding_window: Tokens | None = None
    """How many tokens a token sees, itself included, as in Mistral; None: all before it."""

    layer_types: tuple[LayerType, ...] | None = None
    """Which layers have the window; None: all, if there is one."""

    hidden_act: Literal["silu", "gelu_pytorch_tanh", "clamped_swiglu"] = "silu"
    """What the MLP's gate goes through; or, of gpt-oss, what becomes of gate and up."""

    norm_offset: bool = False
    """Norms multiply by one plus their scale, as Gemma's do."""

    scale_embedding: bool = False
    """Multiply embeddings by the root of the hidden size, as Gemma does."""

    num_experts: Experts = 0
    """Number of MLPs that a layer chooses from for each token, as Mixtral does; 0: one MLP."""

    num_experts_per_tok: Experts = 0
    """Number of experts chosen for each token."""

    moe_intermediate_size: Width | None = None
    """Width of one expert; None: `intermediate_size`."""

    first_k_dense_replace: Experts = 0
    """Leading layers that have one MLP in place of experts, as in DeepSeek-V2."""

    n_shared_experts: Experts = 0
    """Experts that every token has, as one MLP of their widths together."""

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    """What makes weights of the router's scores: over all experts, or for each alone."""

    norm_topk_prob: bool = True
    """Let the weights of a token's experts sum to one."""

    routed_scaling_factor: Positive = 1.0
    """What these weights are multiplied by."""

    n_group: Depth = 1
    """Groups of experts; a token chooses within the best `topk_group` of them."""

    topk_group: Depth = 1
    """Groups that a token may choose from."""

    expert_bias: bool = False
    """Biases on the router and on all that an expert multiplies, as in gpt-oss."""

    router_correction: bool = False
    """A bias for each expert that counts for the choice alone, as in DeepSeek-V3."""

    capacity_factor: Positive = 1.25
    """Room for tokens that every expert has, over what it needs where all have as many."""

    drop_tokens: bool = False
    """Drop what finds no room; otherwise it is worked on in further rounds, and nothing is lost."""

    router_aux_loss_coef: Coefficient = 0.0
    """What the loss for balanced experts is multiplied by, before it is added to a token's."""

    router_z_loss_coef: Coefficient = 0.0
    """The same for the loss that keeps the router's scores small."""

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
        if self.rotary_width % 2 or not self.rotary_width:
            raise SizeMismatch(
                f"rotary positions turn pairs, and rotary_share of head_dim is {self.rotary_width}",
                where="head_dim",
                fix="use an even head_dim",
            )
        chosen, experts = self.num_experts_per_tok, self.num_experts
        if not min(experts, 1) <= chosen <= experts:
            raise SizeMismatch(
                f"{chosen} experts per token of {experts}",
                where="num_experts_per_tok",
                fix="choose at least one and at most all experts; both 0 for a plain MLP",
            )
        if experts:
            self._check_groups()
        self._check_layers()
        self._check_latents()
        if self.attn_logit_softcapping and self.attention_implementation != "xla":
            raise BadConfig(
                f"{self.attention_implementation} attention has no soft cap",
                where="attention_implementation",
                fix='"xla", or attn_logit_softcapping=None, which changes the model a little',
            )
        if self.attention_sinks and self.attention_implementation != "xla":
            raise BadConfig(
                f"{self.attention_implementation} attention has no sinks",
                where="attention_implementation",
                fix='"xla"',
            )

    def _check_groups(self) -> None:
        experts, groups, chosen = self.num_experts, self.n_group, self.topk_group
        if experts % groups or (groups > 1 and experts // groups < 2):
            raise SizeMismatch(
                f"{experts} experts in {groups} groups",
                where="n_group",
                fix="a divisor of num_experts that leaves a group two experts or more",
            )
        if not chosen <= groups or chosen * (experts // groups) < self.num_experts_per_tok:
            raise SizeMismatch(
                f"{self.num_experts_per_tok} experts of {chosen} of {groups} groups of "
                f"{experts // groups}",
                where="topk_group",
                fix="at most n_group, and groups that have num_experts_per_tok experts together",
            )

    def _check_layers(self) -> None:
        for name in ("layer_types", "rotary_layers"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != self.num_hidden_layers:
                raise SizeMismatch(
                    f"{len(rows)} entries for {self.num_hidden_layers} layers",
                    where=name,
                    fix="one entry for each layer, or None",
                )
        if self.layer_types is not None and self.sliding_window is None:
            raise SizeMismatch(
                "some layers have a window, and no window is given",
                where="sliding_window",
                fix="a window in tokens, or layer_types=None",
            )
        dense = self.first_k_dense_replace
        if dense and not (self.num_experts and dense < self.num_hidden_layers):
            raise SizeMismatch(
                f"{dense} layers without experts in front, of {self.num_hidden_layers} layers with "
                f"{self.num_experts} experts",
                where="first_k_dense_replace",
                fix="fewer than num_hidden_layers; 0 in a model without experts",
            )
        if isinstance(self.rope_scaling, YarnRopeScaling):
            self._check_yarn()

    def _check_yarn(self) -> None:
        if self.rope_local_theta is not None or self.rotary_layers is not None:
            raise BadConfig(
                "yarn makes all rotated queries and keys larger, and layers differ in rotation",
                where="rope_scaling",
                fix="another rope_scaling, or rope_local_theta=None and rotary_layers=None",
            )
        if self.rope_theta <= 1:
            raise BadConfig(
                f"frequencies of base {self.rope_theta} do not fall",
                where="rope_theta",
                fix="more than 1; 10,000 is usual",
            )

    def _check_latents(self) -> None:
        sizes = (self.q_lora_rank, self.qk_rope_head_dim, self.v_head_dim)
        if self.kv_lora_rank is None:
            if sizes != (None, None, None):
                raise BadConfig(
                    "sizes of latent attention in a model without",
                    where="kv_lora_rank",
                    fix="q_lora_rank, qk_rope_head_dim and v_head_dim go with kv_lora_rank",
                )
            return
        rotated, values = self.qk_rope_head_dim or 0, self.v_head_dim or 0
        if not (0 < rotated < self.head_dim and 0 < values <= self.head_dim):
            raise SizeMismatch(
                f"{self.qk_rope_head_dim} rotated elements and {self.v_head_dim} of values for "
                f"heads of {self.head_dim}",
                where="head_dim",
                fix="qk_rope_head_dim below head_dim, and v_head_dim at most head_dim",
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise SizeMismatch(
                f"{self.num_key_value_heads} kv heads of latent attention",
                where="num_key_value_heads",
                fix=f"as many as query heads: {self.num_attention_heads}",
            )
        others = (self.qk_norm, self.qkv_bias, self.o_bias, self.attention_sinks)
        if any(others) or self.rotary_share != 1:
            raise BadConfig(
                "latent attention has no qk_norm, qkv_bias, o_bias, attention_sinks or "
                "rotary_share",
                where="kv_lora_rank",
                fix="leave these out",
            )

    @property
    def num_staged_layers(self) -> int:
        """Layers that pipeline stages share: those with experts, where others have none."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def caches_latents(self) -> bool:
        """Whether the cache has one latent a token, of which keys and values are made."""
        return self.kv_lora_rank is not None

    @property
    def cached_heads(self) -> tuple[int, int]:
        """Heads that the cache has of a token, and the width of each; a latent counts as one."""
        if self.kv_lora_rank is not None:
            return 1, self.kv_lora_rank + self.rotary_width
        return self.num_key_value_heads, self.head_dim

    @property
    def rotary_width(self) -> int:
        """Elements of a head that are rotated."""
        return self.qk_rope_head_dim or int(self.head_dim * self.rotary_share)

    @property
    def score_scale(self) -> float | None:
        """What scores are multiplied by; None: the inverse root of the head's width."""
        if self.query_pre_attn_scalar is not None:
            return self.query_pre_attn_scalar**-0.5
        if self.kv_lora_rank is None or not isinstance(self.rope_scaling, YarnRopeScaling):
            return None
        return self.head_dim**-0.5 * self.rope_scaling.score_factor

    @property
    def rotary_magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        scaling = self.rope_scaling
        return scaling.magnitude if isinstance(scaling, YarnRopeScaling) else 1.0
