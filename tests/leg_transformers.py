"""Published Flax models, unmodified, against the zoo's expert labels.

    python tests/leg_transformers.py ZOO [NAME ...]

ZOO is the folder with `score.py` and `trees/`. Needs `transformers==4.57.3`, which pytest's
environment does not have, so pytest does not collect this file. Models are built from a
configuration alone, two layers at published widths, and traced abstractly; parameter names are
replaced by random ones before the analysis and put back after.

Expect: every family at 100.0% ok at tp 2, 4 and 8 over the parameters that the call reaches,
nothing harmful.
"""

import sys

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from zoo_leg import run

LAYERS = 2


def _aliases():
    """Names that JAX dropped and transformers 4.57 still uses."""
    clip = jnp.clip

    def old_clip(arr=None, min=None, max=None, *, a=None, a_min=None, a_max=None):
        return clip(
            a if arr is None else arr,
            min=a_min if min is None else min,
            max=a_max if max is None else max,
        )

    jnp.clip = old_clip
    jnp.cat = jnp.concatenate


def _sizes(config, **names):
    """Keyword arguments of a configuration class, from the zoo's own field names."""
    return {theirs: config[ours] for theirs, ours in names.items()}


def _decoder(c):
    return _sizes(
        c,
        hidden_size="hidden_size",
        num_attention_heads="num_heads",
        num_key_value_heads="num_kv_heads",
        head_dim="head_dim",
        intermediate_size="intermediate_size",
        vocab_size="vocab_size",
    ) | {"num_hidden_layers": LAYERS}


def _bert(c):
    names = dict(
        hidden_size="hidden_size", num_attention_heads="num_heads", vocab_size="vocab_size"
    )
    return _sizes(c, intermediate_size="intermediate_size", **names) | {"num_hidden_layers": LAYERS}


def _roberta(c):
    return _bert(c) | {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}


def _gpt2(c):
    return _sizes(c, n_embd="hidden_size", n_head="num_heads", vocab_size="vocab_size") | {
        "n_layer": LAYERS
    }


def _neo(c):
    kinds = [[["global", "local"], LAYERS // 2]]
    names = dict(hidden_size="hidden_size", num_heads="num_heads", vocab_size="vocab_size")
    return _sizes(c, **names) | {"num_layers": LAYERS, "attention_types": kinds}


def _gptj(c):
    return _gpt2(c) | {"rotary_dim": 64, "tie_word_embeddings": False}


def _bloom(c):
    return _sizes(c, hidden_size="hidden_size", n_head="num_heads", vocab_size="vocab_size") | {
        "n_layer": LAYERS
    }


def _opt(c):
    names = dict(
        hidden_size="hidden_size", num_attention_heads="num_heads", vocab_size="vocab_size"
    )
    return _sizes(c, ffn_dim="intermediate_size", word_embed_proj_dim="hidden_size", **names) | {
        "num_hidden_layers": LAYERS
    }


def _bart(c):
    sides = {
        f"{side}_{name}": c[key]
        for side in ("encoder", "decoder")
        for name, key in (("attention_heads", "num_heads"), ("ffn_dim", "intermediate_size"))
    }
    return sides | {
        "d_model": c["hidden_size"],
        "vocab_size": c["vocab_size"],
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
    }


def _marian(c):
    return _bart(c) | {
        "pad_token_id": c["vocab_size"] - 1,
        "decoder_start_token_id": c["vocab_size"] - 1,
    }


def _t5(c):
    return _sizes(
        c,
        d_model="hidden_size",
        num_heads="num_heads",
        d_kv="head_dim",
        d_ff="intermediate_size",
        vocab_size="vocab_size",
    ) | {
        "num_layers": LAYERS,
        "num_decoder_layers": LAYERS,
        "tie_word_embeddings": c["tied_embeddings"],
    }


def _gated_t5(c):
    return _t5(c) | {"feed_forward_proj": "gated-gelu"}


def _longt5(c):
    return _gated_t5(c) | {"encoder_attention_type": "local"}


def _distilbert(c):
    return _sizes(
        c,
        dim="hidden_size",
        n_heads="num_heads",
        hidden_dim="intermediate_size",
        vocab_size="vocab_size",
    ) | {"n_layers": LAYERS}


def _vit(c):
    return _sizes(
        c,
        hidden_size="hidden_size",
        num_attention_heads="num_heads",
        intermediate_size="intermediate_size",
    ) | {"num_hidden_layers": LAYERS, "num_labels": 1000}


def _vit_huge(c):
    return _vit(c) | {"patch_size": 14}


def _dinov2(c):
    return _sizes(c, hidden_size="hidden_size", num_attention_heads="num_heads") | {
        "num_hidden_layers": LAYERS,
        "num_labels": 1000,
        "image_size": 518,
        "patch_size": 14,
    }


def _resnet(c):
    return _sizes(
        c, hidden_sizes="hidden_sizes", depths="depths", embedding_size="embedding_size"
    ) | {"num_labels": 1000}


def _clip(c):
    text = _sizes(
        c,
        hidden_size="hidden_size",
        num_attention_heads="num_heads",
        intermediate_size="intermediate_size",
        vocab_size="vocab_size",
    ) | {"num_hidden_layers": LAYERS}
    return {
        "text_config": text,
        "vision_config": _vit(c["vision"]) | {"patch_size": 32},
        "projection_dim": 512,
    }


def _whisper(c):
    return _bart(c)


TOKENS = jax.ShapeDtypeStruct((2, 24), jnp.int32)
FRAMES = jax.ShapeDtypeStruct((2, 80, 3000), jnp.float32)


def _pixels(size):
    return jax.ShapeDtypeStruct((2, 3, size, size), jnp.float32)


BOTH = {"input_ids": TOKENS, "decoder_input_ids": TOKENS}
TEXT = {"input_ids": TOKENS}
# Tree -> class, configuration class, how the zoo's sizes spell its fields, inputs.
MODELS = {
    "bart_large": ("BartForConditionalGeneration", "Bart", _bart, BOTH),
    "bert_base": ("BertForMaskedLM", "Bert", _bert, TEXT),
    "bert_large": ("BertForSequenceClassification", "Bert", _bert, TEXT),
    "blenderbot_small": ("BlenderbotSmallForConditionalGeneration", "BlenderbotSmall", _bart, BOTH),
    "bloom_176b": ("BloomForCausalLM", "Bloom", _bloom, TEXT),
    "bloom_560m": ("BloomForCausalLM", "Bloom", _bloom, TEXT),
    "clip_vit_b32": ("CLIPModel", "CLIP", _clip, TEXT | {"pixel_values": _pixels(224)}),
    "dinov2_base": (
        "Dinov2ForImageClassification",
        "Dinov2",
        _dinov2,
        {"pixel_values": _pixels(518)},
    ),
    "distilbert": ("DistilBertForMaskedLM", "DistilBert", _distilbert, TEXT),
    "electra_base_disc": (
        "ElectraForPreTraining",
        "Electra",
        lambda c: _bert(c) | {"embedding_size": 768},
        TEXT,
    ),
    "gemma_2b": ("GemmaForCausalLM", "Gemma", _decoder, TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2", _gpt2, TEXT),
    "gpt2_large": ("GPT2LMHeadModel", "GPT2", _gpt2, TEXT),
    "gpt_neo_1_3b": ("GPTNeoForCausalLM", "GPTNeo", _neo, TEXT),
    "gptj_6b": ("GPTJForCausalLM", "GPTJ", _gptj, TEXT),
    "llama2_70b": ("LlamaForCausalLM", "Llama", _decoder, TEXT),
    "llama2_7b": ("LlamaForCausalLM", "Llama", _decoder, TEXT),
    "llama3_8b": ("LlamaForCausalLM", "Llama", _decoder, TEXT),
    "longt5_local_base": ("LongT5ForConditionalGeneration", "LongT5", _longt5, BOTH),
    "marian_en_de": ("MarianMTModel", "Marian", _marian, BOTH),
    "mistral_7b": ("MistralForCausalLM", "Mistral", _decoder, TEXT),
    "mt5_small": ("MT5ForConditionalGeneration", "MT5", _gated_t5, BOTH),
    "open_llama_3b": ("LlamaForCausalLM", "Llama", _decoder, TEXT),
    "opt_125m": ("OPTForCausalLM", "OPT", _opt, TEXT),
    "opt_6_7b": ("OPTForCausalLM", "OPT", _opt, TEXT),
    "pegasus_large": ("PegasusForConditionalGeneration", "Pegasus", _bart, BOTH),
    "resnet_50": (
        "ResNetForImageClassification",
        "ResNet",
        _resnet,
        {"pixel_values": _pixels(224)},
    ),
    "roberta_base": ("RobertaForMaskedLM", "Roberta", _roberta, TEXT),
    "roberta_prelayernorm": (
        "RobertaPreLayerNormForMaskedLM",
        "RobertaPreLayerNorm",
        _roberta,
        TEXT,
    ),
    "t5_11b": ("T5ForConditionalGeneration", "T5", _t5, BOTH),
    "t5_base": ("T5ForConditionalGeneration", "T5", _t5, BOTH),
    "tinyllama_1_1b": ("LlamaForCausalLM", "Llama", _decoder, TEXT),
    "vit_base": ("ViTForImageClassification", "ViT", _vit, {"pixel_values": _pixels(224)}),
    "vit_huge": ("ViTModel", "ViT", _vit_huge, {"pixel_values": _pixels(224)}),
    "whisper_small": (
        "WhisperForConditionalGeneration",
        "Whisper",
        _whisper,
        {"input_features": FRAMES, "decoder_input_ids": TOKENS},
    ),
    "whisper_tiny": (
        "WhisperForConditionalGeneration",
        "Whisper",
        _whisper,
        {"input_features": FRAMES, "decoder_input_ids": TOKENS},
    ),
    "xlm_roberta_large": ("XLMRobertaForMaskedLM", "XLMRoberta", _roberta, TEXT),
}


def build(name, config):
    """A model without weights: its call, the shapes of its parameters by path, and its inputs."""
    import transformers

    cls, family, spell, inputs = MODELS[name]
    settings = getattr(transformers, f"{family}Config")(**spell(config))
    pixels = inputs.get("pixel_values")
    shape = (
        {"input_shape": (1, pixels.shape[2], pixels.shape[3], 3)}
        if pixels and len(inputs) == 1
        else {}
    )
    model = getattr(transformers, f"Flax{cls}")(settings, _do_init=False, **shape)
    tree = model.params_shape_tree
    params = {"/".join(path): leaf for path, leaf in flatten_dict(dict(tree)).items()}

    def call(flat, given):
        nested = unflatten_dict({tuple(path.split("/")): leaf for path, leaf in flat.items()})
        return model(params=nested, **given)[0]

    return call, params, (inputs,)


if __name__ == "__main__":
    _aliases()
    sys.exit(run(__doc__, "hf_", MODELS, build))
