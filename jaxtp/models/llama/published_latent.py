"""DeepSeek-V2 and V3 at Hugging Face: what their config.json has beside Llama's fields."""

from typing import Any

from jaxtp.models.llama.config import LlamaConfig
from jaxtp.models.llama.published_rope import read_rope, write_rope
from jaxtp.models.published import Fields, refuse, refuse_contradiction

MIXTURE = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "n_shared_experts": "n_shared_experts",
    "moe_intermediate_size": "moe_intermediate_size",
    "first_k_dense_replace": "first_k_dense_replace",
    "routed_scaling_factor": "routed_scaling_factor",
}
LATENTS = {name: name for name in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "v_head_dim")}
# A head's width is the sum of two, and there are as many kv heads as query heads.
DERIVED = {"head_dim": "", "num_key_value_heads": ""}

V2_FIELDS = MIXTURE | LATENTS | DERIVED
V3_FIELDS = V2_FIELDS | {
    "n_group": "n_group",
    "topk_group": "topk_group",
    "norm_topk_prob": "norm_topk_prob",
    "rope_interleave": "rope_interleave",
}

COMMON: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": None,
    # Labels, and what only training uses.
    "aux_loss_alpha": 0.0,
    "seq_aux": True,
    "ep_size": 1,
    "pretraining_tp": 1,
}
V2_DEFAULTS = COMMON | {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "n_group": None,
    "topk_group": None,
}
V3_DEFAULTS = COMMON | {
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "rope_interleave": True,
}

HARMLESS: dict[str, Any] = {
    "attention_bias": False,
    # Every layer behind the leading ones has experts.
    "moe_layer_freq": 1,
    # Layers that predict further tokens; their tensors are no part of the model.
    "num_nextn_predict_layers": 0,
}
V2_HARMLESS = HARMLESS | {"mlp_bias": False, "scoring_func": "softmax", "norm_topk_prob": False}
V3_HARMLESS = HARMLESS | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

V2_CONSTANTS = {"rope_interleave": True, "norm_topk_prob": False}
V3_CONSTANTS = {"scoring_func": "sigmoid", "router_correction": True}

TYPES: dict[str, Any] = {
    # Null says something in ours alone.
    "kv_lora_rank": int,
    "qk_rope_head_dim": int,
    "v_head_dim": int,
    "qk_nope_head_dim": int,
    "qk_head_dim": int | None,
    "topk_method": str,
}
"""Of fields that are not ours, or have another type there."""

V2_TYPES = TYPES | {"n_group": int | None, "topk_group": int | None}
"""Where a method knows no groups they are null."""


def read_v3(given: Fields, where: str) -> Fields:
    """Sizes of heads, and the scaling of rotary frequencies."""
    plain, rotated = given["qk_nope_head_dim"], given["qk_rope_head_dim"]
    # `transformers` calls the rotated part alone head_dim.
    for name, want in (("head_dim", rotated), ("qk_head_dim", plain + rotated)):
        if given[name] not in (None, want):
            raise refuse_contradiction(
                where,
                f"{name} = {given[name]}",
                f"qk_nope_head_dim = {plain} and qk_rope_head_dim = {rotated}",
            )
    heads = given["num_attention_heads"]
    if given["num_key_value_heads"] not in (None, heads):
        raise refuse(
            where,
            f"num_key_value_heads is {given['num_key_value_heads']} with latent attention",
            f"as many as query heads: {heads}",
        )
    sizes = {"num_key_value_heads": heads, "head_dim": plain + rotated}
    return {**read_rope(given, where), **sizes}


def read_v2(given: Fields, where: str) -> Fields:
    """The same, and in how many groups experts are, which counts for one method alone."""
    groups, chosen = given["n_group"], given["topk_group"]
    method = given["topk_method"]
    if method == "greedy":
        groups, chosen = 1, 1
    elif method != "group_limited_greedy" or groups is None or chosen is None:
        raise refuse(
            where,
            f"topk_method is {method!r} with n_group {groups} and topk_group {chosen}",
            "greedy; or group_limited_greedy with both numbers",
        )
    return {**read_v3(given, where), "n_group": groups, "topk_group": chosen}


def write_v3(config: LlamaConfig) -> dict[str, Any]:
    """What `read_v3` reads."""
    heads = {"num_key_value_heads": config.num_key_value_heads}
    plain = config.head_dim - config.rotary_width
    return {**write_rope(config), **heads, "qk_nope_head_dim": plain}


def write_v2(config: LlamaConfig) -> dict[str, Any]:
    """What `read_v2` reads."""
    fields = write_v3(config)
    if config.n_group == 1:
        return fields | {"topk_method": "greedy"}
    groups = {"n_group": config.n_group, "topk_group": config.topk_group}
    return fields | groups | {"topk_method": "group_limited_greedy"}
