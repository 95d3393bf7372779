"""The families at Hugging Face that are Llama with other options: fields of their config.json.

A family's defaults are those of its configuration class in `transformers`.
"""

from collections.abc import Sequence
from typing import Any

from jaxtp.models.llama import published_latent as latent
from jaxtp.models.llama.config import LayerType, LlamaConfig
from jaxtp.models.llama.names import (
    DEEPSEEK_NAMES,
    FUSED_NAMES,
    GPT_OSS_NAMES,
    MIXTURE_NAMES,
    NAMES,
)
from jaxtp.models.llama.published_rope import merge_rope, read_rope, write_rope
from jaxtp.models.published import Family, Fields, refuse, refuse_contradiction

SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size"),
)
OPTIONS = ("hidden_act", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
FIELDS = {name: name for name in SIZES + OPTIONS}
WINDOW = {"sliding_window": "sliding_window"}

DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
TYPES: dict[str, Any] = {
    "num_key_value_heads": int | None,
    "head_dim": int | None,
    "rope_scaling": dict[str, Any] | None,
    "layer_types": list[LayerType] | None,
    "use_sliding_window": bool,
    "max_window_layers": int,
    "sliding_window_pattern": int | None,
    "_sliding_window_pattern": int | None,
    "no_rope_layers": list[int] | None,
    "no_rope_layer_interval": int,
}
"""Of fields whose type is not that of ours."""


# ---- reading -------------------------------------------------------------------------------------


def _read(given: Fields, where: str) -> Fields:
    """Sizes that a null leaves to others, and the scaling of rotary frequencies."""
    heads, hidden = given["num_attention_heads"], given["hidden_size"]
    values = read_rope(given, where)
    if given["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if given["head_dim"] is None:
        values["head_dim"] = hidden // heads or 1
    return values


def _read_qwen(given: Fields, where: str) -> Fields:
    """Qwen says separately whether, and in which layers, its window is in use."""
    window = given["sliding_window"] if given["use_sliding_window"] else None
    num_layers, first = given["num_hidden_layers"], given["max_window_layers"]
    implied = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    types = given["layer_types"]
    if types is None and window is not None:
        types = implied
    return {**_read(given, where), **_kinds(types, window, num_layers, where)}


def _read_qwen_moe(given: Fields, where: str) -> Fields:
    """The window, if in use, is in all layers."""
    window = given["sliding_window"] if given["use_sliding_window"] else None
    return {**_read(given, where), "sliding_window": window}


def _read_gpt_oss(given: Fields, where: str) -> Fields:
    """Every second layer has the window, the first one too."""
    older, newer = given["experts_per_token"], given["num_experts_per_tok"]
    if older not in (None, newer):
        raise refuse_contradiction(
            where, f"experts_per_token = {older}", f"num_experts_per_tok = {newer}"
        )
    return _read_gemma2(given, where)


def _read_gemma2(given: Fields, where: str) -> Fields:
    """Every second layer has the window."""
    num_layers = given["num_hidden_layers"]
    types = _every(2, num_layers) if given["layer_types"] is None else given["layer_types"]
    kinds = _kinds(types, given["sliding_window"], num_layers, where)
    return {**_read(given, where), **kinds}


def _read_gemma3(given: Fields, where: str) -> Fields:
    """All but every sixth layer have the window, and rotary frequencies of their own."""
    num_layers = given["num_hidden_layers"]
    said = [given[name] for name in ("sliding_window_pattern", "_sliding_window_pattern")]
    pattern = next((n for n in said if n is not None), 6)
    if pattern < 1:
        raise refuse(where, f"sliding_window_pattern is {pattern}", "1 or more")
    types, implied = given["layer_types"], _every(pattern, num_layers)
    if types is not None and len(types) == num_layers and any(said) and types != implied:
        raise refuse_contradiction(where, f"sliding_window_pattern = {pattern}", "layer_types")
    types = implied if types is None else types
    kinds = dict(_kinds(types, given["sliding_window"], num_layers, where))
    if kinds["sliding_window"] is None:  # no layer has a window, and the local base is never used
        kinds["rope_local_theta"] = None
    return {**_read(given, where), **kinds}


def _read_smollm3(given: Fields, where: str) -> Fields:
    """Every fourth layer rotates nothing; a window counts for those layers."""
    num_layers, interval = given["num_hidden_layers"], given["no_rope_layer_interval"]
    if interval < 1:
        raise refuse(where, f"no_rope_layer_interval is {interval}", "1 or more")
    rotated = given["no_rope_layers"]
    if rotated is None:
        rotated = [int((i + 1) % interval != 0) for i in range(num_layers)]
    _check_length("no_rope_layers", rotated, num_layers, where)
    window = given["sliding_window"] if given["use_sliding_window"] else None
    implied = ["full_attention" if rotates else "sliding_attention" for rotates in rotated]
    types = given["layer_types"]
    if types is None and window is not None:
        types = implied
    values = {**_read(given, where), **_kinds(types, window, num_layers, where)}
    return values | {"rotary_layers": None if all(rotated) else tuple(map(bool, rotated))}


def _every(period: int, num_layers: int) -> list[str]:
    return [
        "full_attention" if i % period == period - 1 else "sliding_attention"
        for i in range(num_layers)
    ]


def _kinds(types: Any, window: int | None, num_layers: int, where: str) -> Fields:
    """The window and the layers that have it, in the form that does not list what is alike."""
    if types is None:
        return {"sliding_window": window, "layer_types": None}
    _check_length("layer_types", types, num_layers, where)
    if "sliding_attention" not in types:
        return {"sliding_window": None, "layer_types": None}
    if window is None:
        raise refuse_contradiction(
            where, "layer_types with sliding_attention", "a sliding_window that is null or not used"
        )
    return {
        "sliding_window": window,
        "layer_types": tuple(types) if "full_attention" in types else None,
    }


def _check_length(name: str, rows: Sequence[Any], num_layers: int, where: str) -> None:
    if len(rows) != num_layers:
        raise refuse_contradiction(
            where, f"{name} with {len(rows)} entries", f"num_hidden_layers = {num_layers}"
        )


# ---- writing -------------------------------------------------------------------------------------

NO_PADDING = {"pad_token_id": None}
"""Left out, it is that of the family's own tokenizer, and a smaller vocabulary lacks that id."""


def _types(config: LlamaConfig) -> list[str]:
    """One word a layer."""
    if config.layer_types is not None:
        return list(config.layer_types)
    kind = "full_attention" if config.sliding_window is None else "sliding_attention"
    return [kind] * config.num_hidden_layers


def _write_qwen(config: LlamaConfig) -> Fields:
    fields = write_rope(config)
    if config.sliding_window is not None:
        fields |= {"use_sliding_window": True, "max_window_layers": 0}
    if config.layer_types is not None:
        fields |= {"layer_types": _types(config)}
    return fields


def _write_qwen_moe(config: LlamaConfig) -> Fields:
    return {**write_rope(config), "use_sliding_window": config.sliding_window is not None}


def _write_gemma2(config: LlamaConfig) -> Fields:
    return {**write_rope(config), "layer_types": _types(config)}


def _write_phi3(config: LlamaConfig) -> Fields:
    return {**write_rope(config), **NO_PADDING}


def _write_smollm3(config: LlamaConfig) -> Fields:
    rotated = config.rotary_layers or (True,) * config.num_hidden_layers
    return {
        **write_rope(config),
        **NO_PADDING,
        "use_sliding_window": config.sliding_window is not None,
        "layer_types": _types(config),
        "no_rope_layers": [int(rotates) for rotates in rotated],
    }


# ---- families ------------------------------------------------------------------------------------


def _family(
    architecture: str,
    *,
    fields: Fields | None = None,
    defaults: Fields | None = None,
    **options: Any,
) -> Family:
    """A family of this architecture: what it has beside, or in place of, Llama's fields."""
    settings: dict[str, Any] = {"names": NAMES, "types": TYPES, "merge": merge_rope}
    settings |= {"read": _read, "write": write_rope} | options
    return Family(
        architecture=architecture,
        fields={theirs: ours for theirs, ours in {**FIELDS, **(fields or {})}.items() if ours},
        defaults={**DEFAULTS, **(defaults or {})},
        **settings,
    )


NO_BIAS = {"attention_bias": False}
NO_BIASES = {"attention_bias": False, "mlp_bias": False}
QWEN_WINDOW = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
# Gemma 2 and 3 read the newer name of the activation only, and have no use for the older.
GEMMA_ACT = {"hidden_act": "", "hidden_activation": "hidden_act"}
SAME_ACT = (("hidden_act", "hidden_activation"),)
CAPS = {
    name: name
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar")
}
GEMMA_DEFAULTS = {
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_act": None,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA2_DEFAULTS = GEMMA_DEFAULTS | {
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GEMMA2_CONSTANTS = {"norm_offset": True, "scale_embedding": True, "norms": "both"}
GEMMA2_HARMLESS = NO_BIAS | {"use_bidirectional_attention": False}

FAMILIES = {
    "llama": _family("LlamaForCausalLM", harmless=NO_BIASES | {"pretraining_tp": 1}),
    "mistral": _family(
        "MistralForCausalLM",
        fields=WINDOW,
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _family(
        "Qwen2ForCausalLM",
        fields=WINDOW,
        defaults=QWEN_WINDOW | {"num_key_value_heads": 32},
        constants={"qkv_bias": True},
        read=_read_qwen,
        write=_write_qwen,
    ),
    "qwen3": _family(
        "Qwen3ForCausalLM",
        fields=WINDOW,
        defaults=QWEN_WINDOW | {"num_key_value_heads": 32, "head_dim": 128},
        constants={"qk_norm": True},
        harmless=NO_BIAS,
        read=_read_qwen,
        write=_write_qwen,
    ),
    "gemma": _family(
        "GemmaForCausalLM",
        defaults={"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
        constants={"norm_offset": True, "scale_embedding": True},
        harmless=NO_BIAS,
        same=SAME_ACT,
    ),
    "gemma2": _family(
        "Gemma2ForCausalLM",
        fields=WINDOW | CAPS | GEMMA_ACT,
        defaults=GEMMA2_DEFAULTS
        | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        constants=GEMMA2_CONSTANTS,
        harmless=GEMMA2_HARMLESS,
        same=SAME_ACT,
        read=_read_gemma2,
        write=_write_gemma2,
    ),
    "gemma3_text": _family(
        "Gemma3ForCausalLM",
        fields=WINDOW | CAPS | GEMMA_ACT | {"rope_local_base_freq": "rope_local_theta"},
        defaults=GEMMA2_DEFAULTS
        | {"final_logit_softcapping": None, "attn_logit_softcapping": None}
        | {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0}
        | {"sliding_window_pattern": None, "_sliding_window_pattern": None},
        constants=GEMMA2_CONSTANTS | {"qk_norm": True},
        harmless=GEMMA2_HARMLESS,
        same=(*SAME_ACT, ("sliding_window_pattern", "_sliding_window_pattern")),
        read=_read_gemma3,
        write=_write_gemma2,
    ),
    "phi3": _family(
        "Phi3ForCausalLM",
        names=FUSED_NAMES,
        fields=WINDOW | {"partial_rotary_factor": "rotary_share"},
        defaults={
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
            # Counts for rope_scaling of type longrope only, which is refused.
            "original_max_position_embeddings": 4096,
        },
        harmless=NO_BIASES | {"lm_head_bias": False, "full_attn_mod": 1, "interpolate_factor": 1},
        write=_write_phi3,
    ),
    "olmo2": _family(
        "Olmo2ForCausalLM",
        defaults={"rms_norm_eps": 1e-5},
        constants={"norms": "after", "qk_norm": True, "qk_norm_all_heads": True},
        harmless=NO_BIAS,
    ),
    "smollm3": _family(
        "SmolLM3ForCausalLM",
        fields=WINDOW,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}
        | {"use_sliding_window": False, "sliding_window": None, "layer_types": None}
        | {"no_rope_layers": None, "no_rope_layer_interval": 4}
        # Published, and read by nothing.
        | {"max_window_layers": 28, "pretraining_tp": 1},
        harmless=NO_BIASES,
        read=_read_smollm3,
        write=_write_smollm3,
    ),
    "mixtral": _family(
        "MixtralForCausalLM",
        fields=WINDOW
        | {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"},
        defaults={"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": _family(
        "Qwen3MoeForCausalLM",
        names=MIXTURE_NAMES,
        fields=WINDOW
        | {name: name for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
        | {"norm_topk_prob": "norm_topk_prob"},
        defaults={"num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window": False}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"norm_topk_prob": False},
        constants={"qk_norm": True},
        # Layers with one MLP in place of experts.
        harmless=NO_BIAS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        read=_read_qwen_moe,
        write=_write_qwen_moe,
    ),
    "gpt_oss": _family(
        "GptOssForCausalLM",
        names=GPT_OSS_NAMES,
        fields=WINDOW
        | {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"}
        | {"hidden_act": ""},
        defaults={"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5}
        | {"rope_theta": 150_000.0, "rope_scaling": GPT_OSS_YARN, "layer_types": None}
        | {"sliding_window": 128, "num_local_experts": 128, "num_experts_per_tok": 4}
        # Names of the reference code, which published files have beside the others.
        | {"initial_context_length": None, "experts_per_token": None},
        constants={"qkv_bias": True, "o_bias": True, "attention_sinks": True}
        | {"expert_bias": True, "hidden_act": "clamped_swiglu"},
        # Of the activation one limit is built, in transformers too.
        harmless={"hidden_act": "silu", "attention_bias": True, "swiglu_limit": 7.0},
        read=_read_gpt_oss,
        write=_write_gemma2,
    ),
    "deepseek_v2": _family(
        "DeepseekV2ForCausalLM",
        names=DEEPSEEK_NAMES,
        fields=latent.V2_FIELDS,
        defaults=latent.V2_DEFAULTS,
        types=TYPES | latent.V2_TYPES,
        constants=latent.V2_CONSTANTS,
        harmless=latent.V2_HARMLESS,
        read=latent.read_v2,
        write=latent.write_v2,
    ),
    "deepseek_v3": _family(
        "DeepseekV3ForCausalLM",
        names=DEEPSEEK_NAMES,
        fields=latent.V3_FIELDS,
        defaults=latent.V3_DEFAULTS,
        types=TYPES | latent.TYPES,
        constants=latent.V3_CONSTANTS,
        harmless=latent.V3_HARMLESS,
        read=latent.read_v3,
        write=latent.write_v3,
    ),
}
"""`model_type` -> family."""
