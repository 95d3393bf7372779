"""What published checkpoints of Llama-like models call each parameter."""

from jaxtp.models.published import Stored

NAMES = {
    "embed_tokens/embedding": Stored("model.embed_tokens.weight", "v d"),
    "layers/input_layernorm/scale": Stored("model.layers.{}.input_layernorm.weight", "d"),
    "layers/self_attn/q_proj/kernel": Stored(
        "model.layers.{}.self_attn.q_proj.weight", "(n h) d -> d n h"
    ),
    "layers/self_attn/q_proj/bias": Stored("model.layers.{}.self_attn.q_proj.bias", "(n h) -> n h"),
    "layers/self_attn/k_proj/kernel": Stored(
        "model.layers.{}.self_attn.k_proj.weight", "(k h) d -> d k h"
    ),
    "layers/self_attn/k_proj/bias": Stored("model.layers.{}.self_attn.k_proj.bias", "(k h) -> k h"),
    "layers/self_attn/v_proj/kernel": Stored(
        "model.layers.{}.self_attn.v_proj.weight", "(k h) d -> d k h"
    ),
    "layers/self_attn/v_proj/bias": Stored("model.layers.{}.self_attn.v_proj.bias", "(k h) -> k h"),
    "layers/self_attn/o_proj/kernel": Stored(
        "model.layers.{}.self_attn.o_proj.weight", "d (n h) -> n h d"
    ),
    "layers/self_attn/q_norm/scale": Stored("model.layers.{}.self_attn.q_norm.weight", "h"),
    "layers/self_attn/k_norm/scale": Stored("model.layers.{}.self_attn.k_norm.weight", "h"),
    "layers/post_attention_layernorm/scale": Stored(
        "model.layers.{}.post_attention_layernorm.weight", "d"
    ),
    "layers/pre_feedforward_layernorm/scale": Stored(
        "model.layers.{}.pre_feedforward_layernorm.weight", "d"
    ),
    "layers/post_feedforward_layernorm/scale": Stored(
        "model.layers.{}.post_feedforward_layernorm.weight", "d"
    ),
    "layers/mlp/gate_proj/kernel": Stored("model.layers.{}.mlp.gate_proj.weight", "f d -> d f"),
    "layers/mlp/up_proj/kernel": Stored("model.layers.{}.mlp.up_proj.weight", "f d -> d f"),
    "layers/mlp/down_proj/kernel": Stored("model.layers.{}.mlp.down_proj.weight", "d f -> f d"),
    "layers/mlp/router/kernel": Stored(
        "model.layers.{}.block_sparse_moe.gate.weight", "e d -> d e"
    ),
    "layers/mlp/experts/gate_proj/kernel": Stored(
        "model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "f d -> d f"
    ),
    "layers/mlp/experts/up_proj/kernel": Stored(
        "model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "f d -> d f"
    ),
    "layers/mlp/experts/down_proj/kernel": Stored(
        "model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "d f -> f d"
    ),
    "norm/scale": Stored("model.norm.weight", "d"),
    "lm_head/kernel": Stored("lm_head.weight", "v d -> d v"),
}
"""Parameter path -> how it is stored; a model has some of these."""

QKV, GATE_UP = (
    "model.layers.{}.self_attn.qkv_proj.weight",
    "model.layers.{}.mlp.gate_up_proj.weight",
)

MIXTURE = "model.layers.{}.mlp"
MIXTURE_NAMES = NAMES | {
    "layers/mlp/router/kernel": Stored(f"{MIXTURE}.gate.weight", "e d -> d e"),
    "layers/mlp/experts/gate_proj/kernel": Stored(
        f"{MIXTURE}.experts.{{}}.gate_proj.weight", "f d -> d f"
    ),
    "layers/mlp/experts/up_proj/kernel": Stored(
        f"{MIXTURE}.experts.{{}}.up_proj.weight", "f d -> d f"
    ),
    "layers/mlp/experts/down_proj/kernel": Stored(
        f"{MIXTURE}.experts.{{}}.down_proj.weight", "d f -> f d"
    ),
}
"""The same where a mixture of experts is stored as Qwen3 does."""

_TURNS = f"{MIXTURE}.experts.gate_up_proj"
GPT_OSS_NAMES = NAMES | {
    "layers/self_attn/o_proj/bias": Stored("model.layers.{}.self_attn.o_proj.bias", "d"),
    "layers/self_attn/sinks": Stored("model.layers.{}.self_attn.sinks", "n"),
    "layers/mlp/router/kernel": Stored(f"{MIXTURE}.router.weight", "e d -> d e"),
    "layers/mlp/router/bias": Stored(f"{MIXTURE}.router.bias", "e"),
    "layers/mlp/experts/gate_proj/kernel": Stored(_TURNS, "e d f", part=0, in_turns=2),
    "layers/mlp/experts/up_proj/kernel": Stored(_TURNS, "e d f", part=1, in_turns=2),
    "layers/mlp/experts/gate_proj/bias": Stored(f"{_TURNS}_bias", "e f", part=0, in_turns=2),
    "layers/mlp/experts/up_proj/bias": Stored(f"{_TURNS}_bias", "e f", part=1, in_turns=2),
    "layers/mlp/experts/down_proj/kernel": Stored(f"{MIXTURE}.experts.down_proj", "e f d"),
    "layers/mlp/experts/down_proj/bias": Stored(f"{MIXTURE}.experts.down_proj_bias", "e d"),
}
"""The same where all experts are one tensor, and gate and up take turns in another."""

ATTENTION = "model.layers.{}.self_attn"
_LATENT_NAMES = MIXTURE_NAMES | {
    "layers/self_attn/q_a_proj/kernel": Stored(f"{ATTENTION}.q_a_proj.weight", "c d -> d c"),
    "layers/self_attn/q_a_layernorm/scale": Stored(f"{ATTENTION}.q_a_layernorm.weight", "c"),
    "layers/self_attn/q_b_proj/kernel": Stored(f"{ATTENTION}.q_b_proj.weight", "(n h) c -> c n h"),
    "layers/self_attn/kv_a_proj_with_mqa/kernel": Stored(
        f"{ATTENTION}.kv_a_proj_with_mqa.weight", "c d -> d c"
    ),
    "layers/self_attn/kv_a_layernorm/scale": Stored(f"{ATTENTION}.kv_a_layernorm.weight", "c"),
    "layers/self_attn/kv_b_proj/kernel": Stored(
        f"{ATTENTION}.kv_b_proj.weight", "(n h) c -> c n h"
    ),
    "layers/mlp/e_score_correction_bias": Stored(f"{MIXTURE}.gate.e_score_correction_bias", "e"),
    "layers/mlp/shared_experts/gate_proj/kernel": Stored(
        f"{MIXTURE}.shared_experts.gate_proj.weight", "f d -> d f"
    ),
    "layers/mlp/shared_experts/up_proj/kernel": Stored(
        f"{MIXTURE}.shared_experts.up_proj.weight", "f d -> d f"
    ),
    "layers/mlp/shared_experts/down_proj/kernel": Stored(
        f"{MIXTURE}.shared_experts.down_proj.weight", "d f -> f d"
    ),
}

DENSE = "dense_layers"
DEEPSEEK_NAMES = {
    path: row._replace(after=DENSE) if path.startswith("layers/") else row
    for path, row in _LATENT_NAMES.items()
} | {
    path.replace("layers/", f"{DENSE}/", 1): row
    for path, row in _LATENT_NAMES.items()
    if path.startswith("layers/")
}
"""The same with latent attention, shared experts, and layers without experts in front."""

FUSED_NAMES = NAMES | {
    "layers/self_attn/q_proj/kernel": Stored(QKV, "(n h) d -> d n h", part=0),
    "layers/self_attn/k_proj/kernel": Stored(QKV, "(k h) d -> d k h", part=1),
    "layers/self_attn/v_proj/kernel": Stored(QKV, "(k h) d -> d k h", part=2),
    "layers/mlp/gate_proj/kernel": Stored(GATE_UP, "f d -> d f", part=0),
    "layers/mlp/up_proj/kernel": Stored(GATE_UP, "f d -> d f", part=1),
}
"""`NAMES` where queries, keys and values are one tensor, and gate and up another."""
