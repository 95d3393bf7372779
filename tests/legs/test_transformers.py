"""Published Flax models of Hugging Face transformers, unmodified.

    python -m pytest tests/legs/test_transformers.py

Needs the packages of `constraints-legs.txt` beside the oldest stack. Two layers at published widths
are traced abstractly and compiled for four H100; two layers at tiny widths are run on simulated
devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
import transformers
from flax.traverse_util import flatten_dict, unflatten_dict
from published import Published

pytestmark = [
    pytest.mark.timeout(1800),
    # Names that mislead are no surprise here, and the packages speak about their own future.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def as_the_library_expects(monkeypatch):
    """Ranks that NumPy promotes, and names that JAX dropped and transformers 4.57 still uses."""
    clip = jnp.clip

    def old_clip(*args, a=None, a_min=None, a_max=None, **bounds):
        if a is None:
            return clip(*args, **bounds)
        return clip(a, min=a_min, max=a_max)

    monkeypatch.setattr(jnp, "clip", old_clip)
    monkeypatch.setattr(jnp, "cat", jnp.concatenate, raising=False)
    with jax.numpy_rank_promotion("allow"):
        yield


# How a configuration class spells the sizes, where not as most do.
USUAL = {
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_heads",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "num_hidden_layers": "num_layers",
}
GROUPED = USUAL | {"num_key_value_heads": "num_kv_heads", "head_dim": "head_dim"}
GPT = {
    "n_embd": "hidden_size",
    "n_head": "num_heads",
    "vocab_size": "vocab_size",
    "n_layer": "num_layers",
}
BLOOM = {"hidden_size": "hidden_size"} | {k: v for k, v in GPT.items() if k != "n_embd"}
NEO = {
    "hidden_size": "hidden_size",
    "num_heads": "num_heads",
    "vocab_size": "vocab_size",
    "num_layers": "num_layers",
}
TWO_SIDED = {"d_model": "hidden_size", "vocab_size": "vocab_size"} | {
    f"{side}_{theirs}": ours
    for side in ("encoder", "decoder")
    for theirs, ours in (
        ("attention_heads", "num_heads"),
        ("ffn_dim", "intermediate_size"),
        ("layers", "num_layers"),
    )
}
T5 = {
    "d_model": "hidden_size",
    "num_heads": "num_heads",
    "d_kv": "head_dim",
    "d_ff": "intermediate_size",
    "vocab_size": "vocab_size",
    "num_layers": "num_layers",
    "num_decoder_layers": "num_layers",
    "tie_word_embeddings": "tied_embeddings",
}
DISTIL = {
    "dim": "hidden_size",
    "n_heads": "num_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "n_layers": "num_layers",
}
VISION = {k: v for k, v in USUAL.items() if k != "vocab_size"}

ROBERTA = {"max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}
FRAMES = {"whisper_tiny": (3000, 80)}  # of speech, and of the tiny model
IMAGE = {"clip_vit_b32": (224, 64), "dinov2_base": (518, 28), "vit_base": (224, 32)}
CONTEXT = {"clip_vit_b32": 64}
PATCH = {"clip_vit_b32": 32, "dinov2_base": 14, "vit_base": 16}
TEXT, BOTH = ("input_ids",), ("input_ids", "decoder_input_ids")
# Tree -> class, configuration class, spelling, further settings, inputs.
MODELS = {
    "bart_large": ("BartForConditionalGeneration", "Bart", TWO_SIDED, {}, BOTH),
    "bert_base": ("BertForMaskedLM", "Bert", USUAL, {}, TEXT),
    "bloom_560m": ("BloomForCausalLM", "Bloom", BLOOM, {}, TEXT),
    "clip_vit_b32": ("CLIPModel", "CLIP", {}, {}, ("input_ids", "pixel_values")),
    "dinov2_base": ("Dinov2ForImageClassification", "Dinov2", VISION, {}, ("pixel_values",)),
    "distilbert": ("DistilBertForMaskedLM", "DistilBert", DISTIL, {}, TEXT),
    "gemma_2b": ("GemmaForCausalLM", "Gemma", GROUPED, {}, TEXT),
    "gpt2": ("GPT2LMHeadModel", "GPT2", GPT, {}, TEXT),
    "gpt_neo_1_3b": (
        "GPTNeoForCausalLM",
        "GPTNeo",
        NEO,
        {"attention_types": [[["global", "local"], 1]]},
        TEXT,
    ),
    "gptj_6b": ("GPTJForCausalLM", "GPTJ", GPT, {"tie_word_embeddings": False}, TEXT),
    "llama3_8b": ("LlamaForCausalLM", "Llama", GROUPED, {}, TEXT),
    "mistral_7b": ("MistralForCausalLM", "Mistral", GROUPED, {}, TEXT),
    "mt5_small": (
        "MT5ForConditionalGeneration",
        "MT5",
        T5,
        {"feed_forward_proj": "gated-gelu"},
        BOTH,
    ),
    "opt_125m": (
        "OPTForCausalLM",
        "OPT",
        {
            **{k: v for k, v in USUAL.items() if k != "intermediate_size"},
            "ffn_dim": "intermediate_size",
            "word_embed_proj_dim": "hidden_size",
        },
        {},
        TEXT,
    ),
    "pegasus_large": ("PegasusForConditionalGeneration", "Pegasus", TWO_SIDED, {}, BOTH),
    "roberta_base": ("RobertaForMaskedLM", "Roberta", USUAL, ROBERTA, TEXT),
    "t5_base": ("T5ForConditionalGeneration", "T5", T5, {}, BOTH),
    "vit_base": ("ViTForImageClassification", "ViT", VISION, {}, ("pixel_values",)),
    "whisper_tiny": (
        "WhisperForConditionalGeneration",
        "Whisper",
        TWO_SIDED,
        {},
        ("input_features", "decoder_input_ids"),
    ),
}


def settings(name, config, small):
    """Keyword arguments of a configuration class."""
    *_, spelling, more, inputs = MODELS[name]
    found = {theirs: config[ours] for theirs, ours in spelling.items()} | more
    if name == "gptj_6b":
        found["rotary_dim"] = 4 if small else 64
    if name == "clip_vit_b32":
        vision = published.tiny(config["vision"]) if small else config["vision"]
        found["projection_dim"] = TINY_WIDTH if small else 512
        found["text_config"] = {theirs: config[ours] for theirs, ours in USUAL.items()}
        found["vision_config"] = {theirs: vision[ours] for theirs, ours in VISION.items()} | {
            "image_size": IMAGE[name][small],
            "patch_size": PATCH[name],
        }
    elif "pixel_values" in inputs:
        found |= {"image_size": IMAGE[name][small], "patch_size": PATCH[name], "num_labels": 1000}
    if name in FRAMES:
        found["max_source_positions"] = FRAMES[name][small] // 2
    return found


TINY_WIDTH = published.TINY["hidden_size"]


def inputs_of(name, small):
    """What the model is called on: structs, or for a tiny model arrays."""
    batch, tokens = (4, 16) if small else (8, 128)
    frames, pixels = FRAMES.get(name, (0, 0))[small], IMAGE.get(name, (0, 0))[small]
    shapes = {
        "input_ids": ((batch, min(tokens, CONTEXT.get(name, tokens))), np.int32),
        "decoder_input_ids": ((batch, tokens), np.int32),
        "input_features": ((batch, 80, frames), np.float32),
        "pixel_values": ((batch, 3, pixels, pixels), np.float32),
    }
    wanted = {key: shapes[key] for key in MODELS[name][-1]}
    if not small:
        return {key: jax.ShapeDtypeStruct(*shape) for key, shape in wanted.items()}
    draw = np.random.default_rng(1)
    return {
        key: draw.integers(2, 1000, shape, dtype) if dtype is np.int32
        else draw.normal(size=shape).astype(dtype)
        for key, (shape, dtype) in wanted.items()
    }  # fmt: skip


@functools.cache
def build(name, *, small=False):
    """A model without weights of its own, and what experts say about it."""
    tree = published.labels(f"hf_{name}")
    config = published.tiny(tree["config"]) if small else tree["config"]
    cls, family, *_ = MODELS[name]
    own = getattr(transformers, f"{family}Config")(**settings(name, config, small))
    given = inputs_of(name, small)
    pixels = given.get("pixel_values")
    alone = {} if pixels is None or len(given) > 1 else {"input_shape": (1, *pixels.shape[2:], 3)}
    model = getattr(transformers, f"Flax{cls}")(own, _do_init=False, **alone)
    params = {"/".join(path): x for path, x in flatten_dict(dict(model.params_shape_tree)).items()}
    if not small:
        assert {path: list(x.shape) for path, x in params.items()} == tree["params"]

    def call(flat, given):
        nested = unflatten_dict({tuple(path.split("/")): leaf for path, leaf in flat.items()})
        return model(params=nested, **given)[0]

    return Published(call=call, params=params, inputs=(given,)), tree


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_plan_of_scrambled_names_is_the_experts(name, tp):
    found = published.verdicts_on_scrambled(*build(name), tp)
    assert set(found) <= {"agree", "acceptable"}, found
    assert found["agree"] > 0


@every_model
def test_the_plan_is_the_experts_or_moves_no_more(name):
    published.check_against_expert(*build(name))


@every_model
def test_sharded_is_unsharded(name):
    published.check_sharded_is_unsharded(build(name, small=True)[0])


@pytest.mark.parametrize("name", ["gpt2", "llama3_8b"])
def test_halves_that_take_turns_give_the_same(name):
    published.check_sharded_is_unsharded(build(name, small=True)[0], overlap="aggressive")
