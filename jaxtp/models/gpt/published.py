"""GPT-2 as Hugging Face publishes it: names of tensors, fields of config.json."""

from jaxtp.models.published import Family, Fields, Stored, refuse

NAMES = {
    "wte/embedding": Stored("transformer.wte.weight", "v d"),
    "wpe/embedding": Stored("transformer.wpe.weight", "t d"),
    "h/ln_1/scale": Stored("transformer.h.{}.ln_1.weight", "d"),
    "h/ln_1/bias": Stored("transformer.h.{}.ln_1.bias", "d"),
    "h/attn/c_attn/kernel": Stored("transformer.h.{}.attn.c_attn.weight", "d (3 n h) -> d 3 n h"),
    "h/attn/c_attn/bias": Stored("transformer.h.{}.attn.c_attn.bias", "(3 n h) -> 3 n h"),
    "h/attn/c_proj/kernel": Stored("transformer.h.{}.attn.c_proj.weight", "(n h) d -> n h d"),
    "h/attn/c_proj/bias": Stored("transformer.h.{}.attn.c_proj.bias", "d"),
    "h/ln_2/scale": Stored("transformer.h.{}.ln_2.weight", "d"),
    "h/ln_2/bias": Stored("transformer.h.{}.ln_2.bias", "d"),
    "h/mlp/c_fc/kernel": Stored("transformer.h.{}.mlp.c_fc.weight", "d f"),
    "h/mlp/c_fc/bias": Stored("transformer.h.{}.mlp.c_fc.bias", "f"),
    "h/mlp/c_proj/kernel": Stored("transformer.h.{}.mlp.c_proj.weight", "f d"),
    "h/mlp/c_proj/bias": Stored("transformer.h.{}.mlp.c_proj.bias", "d"),
    "ln_f/scale": Stored("transformer.ln_f.weight", "d"),
    "ln_f/bias": Stored("transformer.ln_f.bias", "d"),
}
"""Parameter path -> how it is stored."""


def _read(given: Fields, where: str) -> Fields:
    """GPT-2's MLP is four times as wide as the stream; another width is refused."""
    inner, hidden = given["n_inner"], given["n_embd"]
    if inner is not None and inner != 4 * hidden:
        raise refuse(where, f"n_inner is {inner}", f"null, or 4 x n_embd; n_embd is {hidden}")
    return {}


FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        names=NAMES,
        fields={
            "vocab_size": "vocab_size",
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "layer_norm_epsilon": "layer_norm_epsilon",
        },
        defaults={"layer_norm_epsilon": 1e-5, "n_inner": None},
        harmless={
            "activation_function": "gelu_new",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "tie_word_embeddings": True,
        },
        types={"n_inner": int | None},
        same=(("n_ctx", "n_positions"),),
        read=_read,
    ),
}
"""`model_type` -> family."""
