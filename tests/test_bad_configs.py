"""Hugging Face folders that lie are refused by key, in under a second and in bounded memory."""

import dataclasses
import gc
import json
import os
import resource
import shutil
import time
from pathlib import Path

import jax
import pytest

from jaxtp.errors import BadConfig, BadWeights, SizeMismatch, UnsupportedModel
from jaxtp.io.hf import load_hf
from jaxtp.mesh.build import make_mesh
from jaxtp.models import DecoderConfig, LlamaConfig, RopeScaling, config_of
from jaxtp.models.bounds import bounds_of
from jaxtp.models.registry import ARCHITECTURES, FAMILIES, architecture_of

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FULL, SLIDING = "full_attention", "sliding_attention"

YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
}

# What is asked for -> (family, fields that replace those of the fixture, what the message says).
REFUSED = {
    # Not built.
    "unknown family": ("llama", {"model_type": "bert"}, "model_type 'bert'\n.*supported: llama,"),
    "unknown field": ("llama", {"logit_scale": 2.0}, "unknown field logit_scale = 2.0"),
    "quantised": (
        "llama",
        {"quantization_config": {"bits": 4}},
        "quantization_config has quant_method None",
    ),
    "biases": ("llama", {"attention_bias": True}, "attention_bias is True\n.*only False"),
    "yarn": ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_scaling is"),
    "longrope": (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [2]}},
        "rope_scaling is .*longrope",
    ),
    "activation": ("llama", {"hidden_act": "relu"}, "hidden_act: Input should be 'silu'"),
    "other gelu": ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation: Input should be"),
    "both directions": (
        "gemma3_text",
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention is True",
    ),
    "wide MLP": ("gpt2", {"n_inner": 100}, "n_inner is 100\n.*4 x n_embd"),
    "scaled attention": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "by_inverse_layer_idx is",
    ),
    "more scaling": ("llama", {"rope_scaling": LLAMA3 | {"beta_fast": 3}}, "is .*beta_fast"),
    "less scaling": (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        "rope_scaling is .* without high_freq_factor, low_freq_factor",
    ),
    "experts in some layers": ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    "further tokens": ("deepseek_v3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
    "another choice": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    "sigmoid": ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
    "weights of one": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
    "no latents": ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank: Input should be a valid"),
    "groups of latents": ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    "truncated by a number": (
        "deepseek_v3",
        {"rope_scaling": YARN | {"truncate": 0}},
        "rope_scaling is .*truncate",
    ),
    "weights of 4 bits": (
        "gpt_oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
        r"quantization_config has quant_method 'mxfp4', .*\n.*Mxfp4Config\(dequantize=True\)",
    ),
    "weights of 8 bits": (
        "deepseek_v3",
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config has quant_method 'fp8'",
    ),
    "another limit": ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
    "two numbers of experts": ("gpt_oss", {"experts_per_token": 2}, "experts_per_token = 2 contra"),
    # Of the wrong type.
    "a word": ("llama", {"vocab_size": "many"}, "vocab_size: Input should be a valid integer"),
    "nothing": ("llama", {"hidden_size": None}, "hidden_size: Input should be a valid integer"),
    "true": ("llama", {"num_hidden_layers": True}, "num_hidden_layers: Input should be"),
    "a list of families": ("llama", {"model_type": ["llama"]}, r"model_type \['llama'\]"),
    "an object as family": ("llama", {"model_type": {}}, "model_type {}"),
    "scaling is a word": ("llama", {"rope_scaling": "yes"}, "rope_scaling is 'yes'"),
    "parameters are a list": ("llama", {"rope_parameters": [1]}, r"rope_parameters is \[1\]"),
    "factor is a word": (
        "llama",
        {"rope_scaling": LLAMA3 | {"factor": "8"}},
        "rope_scaling is .*'factor': '8'",
    ),
    "types are a word": ("gemma2", {"layer_types": FULL}, "layer_types: Input should be a valid"),
    "types are lists": ("gemma2", {"layer_types": [[], [], []]}, "layer_types: Input should be"),
    "other types": ("gemma2", {"layer_types": [FULL, "chunked", FULL]}, "layer_types: Input sh"),
    "no groups": ("deepseek_v3", {"n_group": None}, "n_group: Input should be a valid integer"),
    "dtype is a list": ("llama", {"dtype": ["float32"]}, "dtype: Input should be a valid string"),
    "architectures is a number": ("llama", {"architectures": 3}, "architectures: Input should be"),
    "window in use: a word": ("qwen3", {"use_sliding_window": "no"}, "use_sliding_window: Input"),
    # Out of bounds.
    "negative": ("gpt2", {"n_layer": -1}, "n_layer is -1\n.*1 to 16,384"),
    "a billion layers": ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    "a billion layers of types": ("qwen2", {"num_hidden_layers": 10**9}, "num_hidden_layers is 10"),
    "a huge vocabulary": ("llama", {"vocab_size": 2**62}, "vocab_size is"),
    "a huge integer": ("llama", {"hidden_size": 10**400}, "hidden_size"),
    "no heads": ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    "negative epsilon": ("llama", {"rms_norm_eps": -1}, "rms_norm_eps is -1"),
    "no epsilon": ("gpt2", {"layer_norm_epsilon": 0.0}, "layer_norm_epsilon is 0.0"),
    "infinite base": ("llama", {"rope_theta": 1e999}, "rope_theta is inf|Infinity is no JSON"),
    "no window": ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    "negative factor": (
        "llama",
        {"rope_scaling": LLAMA3 | {"factor": -8.0}},
        "rope_scaling: factor is -8.0",
    ),
    "no cap": ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping is 0.0"),
    "no scale": ("gemma2", {"query_pre_attn_scalar": -3}, "query_pre_attn_scalar is -3"),
    "rotates nothing": ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor is 0.0"),
    "rotates too much": ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
    "no pattern": ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0"),
    "yarn upside down": (
        "deepseek_v3",
        {"rope_scaling": YARN | {"beta_slow": 32.0}},
        "rope_scaling: beta_slow 32.0 is not below beta_fast 4.0",
    ),
    # Two keys that say different things.
    "rotated part twice": (
        "deepseek_v3",
        {"head_dim": 16},
        "head_dim = 16 contradicts qk_nope_head_dim = 10 and qk_rope_head_dim = 6",
    ),
    "scaling twice": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
        "rope_scaling = .* contradicts rope_parameters",
    ),
    "base twice": (
        "llama",
        {"rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 5.0}},
        "rope_theta = 10000.0 contradicts rope_parameters",
    ),
    "kind twice": (
        "llama",
        {"rope_scaling": LLAMA3 | {"type": "linear"}},
        "rope_scaling.type = 'linear' contradicts rope_type = 'llama3'",
    ),
    "dtype twice": ("llama", {"torch_dtype": "float16"}, "torch_dtype = 'float16' contradicts"),
    "activation twice": (
        "gemma2",
        {"hidden_act": "silu"},
        "hidden_act = 'silu' contradicts hidden_activation",
    ),
    "positions twice": ("gpt2", {"n_ctx": 7}, "n_ctx = 7 contradicts n_positions = 80"),
    "another architecture": (
        "llama",
        {"architectures": ["MistralForCausalLM"]},
        "architectures = MistralForCausalLM contradicts model_type = 'llama'",
    ),
    "types for other layers": (
        "qwen3",
        {"layer_types": [FULL]},
        "layer_types with 1 entries contradicts num_hidden_layers = 3",
    ),
    "types for no layers": ("gemma2", {"layer_types": []}, "layer_types with 0 entries"),
    "rotation of other layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers with 1"),
    "types without a window": (
        "qwen2",
        {"layer_types": [SLIDING, FULL, FULL]},
        "layer_types with sliding_attention contradicts a sliding_window",
    ),
    "types and pattern": (
        "gemma3_text",
        {"layer_types": [FULL, SLIDING, SLIDING]},
        "sliding_window_pattern = 3 contradicts layer_types",
    ),
    "pattern twice": (
        "gemma3_text",
        {"sliding_window_pattern": 2},
        "sliding_window_pattern = 2 contradicts _sliding_window_pattern = 3",
    ),
    "local base twice": (
        "gemma3_text",
        {
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
                SLIDING: {"rope_type": "default", "rope_theta": 7.0},
            }
        },
        "rope_local_base_freq = 100.0 contradicts rope_parameters",
    ),
}


@pytest.fixture
def copy(tmp_path):
    """Makes a copy of a fixture with other fields in its config."""

    def make(family, **fields):
        folder = tmp_path / family
        shutil.copytree(FIXTURES / family, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


@pytest.fixture
def load():
    """Loads a folder that is refused; fails if that takes a second of CPU or 256 MB."""
    mesh = make_mesh(tp=1, devices=jax.devices()[:1])
    load_hf(FIXTURES / "gpt2", mesh, progress=False)  # imports and first compilations

    def run(folder):
        held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        gc.disable()  # what other tests left behind is not collected on this one's time
        start = time.thread_time()
        try:
            load_hf(folder, mesh, progress=False)
        finally:
            seconds = time.thread_time() - start
            gc.enable()
            assert seconds < 1
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 256 * 1024

    return run


@pytest.mark.parametrize(("family", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_is_refused_by_key(copy, load, family, change, message):
    folder = copy(family, **change)
    with pytest.raises((UnsupportedModel, BadWeights), match=message) as error:
        load(folder)
    assert error.value.code in {"TP096", "TP095"}
    assert error.value.where == str(folder / "config.json")


TEXTS = {
    "a key twice": ('{"model_type": "llama", "model_type": "gpt2"}', "twice .*: model_type"),
    "NaN": ('{"model_type": "llama", "rms_norm_eps": NaN}', "NaN is no JSON number"),
    "nested for ever": ("[" * 100_000, "is no JSON"),
    "a million keys": (json.dumps({str(i): i for i in range(900_000)}), "is no description"),
}


@pytest.mark.parametrize(("text", "message"), TEXTS.values(), ids=TEXTS)
def test_a_text_that_is_no_config_is_refused(copy, load, text, message):
    folder = copy("llama")
    (folder / "config.json").write_text(text)
    with pytest.raises(BadWeights, match=message):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pipe_is_no_file(copy, load, name):
    folder = copy("llama")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(BadWeights, match=f"{name}: is no regular file"):
        load(folder)


@pytest.mark.parametrize("entries", [30_000, 900_000])
def test_a_header_of_very_many_tensors_is_refused(copy, load, entries):
    folder = copy("llama")
    rows = (
        f'"t{i}":{{"dtype":"U8","shape":[1],"data_offsets":[{i},{i + 1}]}}' for i in range(entries)
    )
    text = f"{{{','.join(rows)}}}".encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text + bytes(entries))
    with pytest.raises(BadWeights, match=r"is no description of a model|are not of this model"):
        load(folder)


@pytest.mark.parametrize(
    "shape", [[10**18] * 100_000, [1] * 65, [2**63, 0]], ids=["product", "dims", "long"]
)
def test_shapes_that_no_array_has_are_refused(copy, load, shape):
    folder = copy("llama")
    entry = {"dtype": "U8", "shape": shape, "data_offsets": [0, 1]}
    text = json.dumps({"t": entry}).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"x")
    with pytest.raises(BadWeights, match="has no dtype, shape and data_offsets of the right form"):
        load(folder)


def test_more_layers_than_the_files_hold_are_refused_at_once(copy, load):
    folder = copy("llama", num_hidden_layers=16_000, rope_scaling=None)
    with pytest.raises(BadWeights, match=r"asks for 144,003 tensors, the files hold 30"):
        load(folder)


def test_sizes_that_do_not_fit_each_other_are_refused(copy, load):
    with pytest.raises(SizeMismatch, match="TP003 at num_key_value_heads: 8 query heads for 3"):
        load(copy("llama", num_key_value_heads=3))


def numbers_of(config):
    return [
        field.name
        for field in dataclasses.fields(config)
        if isinstance(getattr(config, field.name), int | float)
        and not isinstance(getattr(config, field.name), bool)
    ]


@pytest.mark.parametrize("preset", ["llama3-8b", "gpt2"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e300])
def test_every_number_of_a_config_has_bounds(preset, value):
    config = config_of(preset)
    for name in numbers_of(config):
        with pytest.raises((BadConfig, SizeMismatch)) as error:
            dataclasses.replace(config, **{name: value})
        assert name in str(error.value)
    with pytest.raises(BadConfig, match="TP020 at factor: factor is"):
        RopeScaling(
            factor=value,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8,
        )


def test_every_number_is_declared_with_bounds():
    for row in ARCHITECTURES:
        hinted = {f.name: f.type for f in dataclasses.fields(row.config)}
        plain = {name for name, kind in hinted.items() if kind in (int, float, int | None)}
        assert not plain - bounds_of(row.config).keys(), row.config


def test_every_family_belongs_to_one_architecture():
    assert sum(len(row.families) for row in ARCHITECTURES) == len(FAMILIES)
    assert {path.name for path in FIXTURES.iterdir()} == set(FAMILIES)


def test_a_config_of_no_architecture_is_refused():
    sizes = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 8
    )
    with pytest.raises(BadConfig, match="TP020 at model: a DecoderConfig is of no known archit"):
        architecture_of(DecoderConfig(**sizes))
    with pytest.raises(BadConfig, match="soft cap"):
        dataclasses.replace(
            config_of("llama3-8b"), attn_logit_softcapping=3.0, attention_implementation="cudnn"
        )
    with pytest.raises(SizeMismatch, match=r"low_freq_factor 4.0 is not below"):
        RopeScaling(
            factor=8.0,
            low_freq_factor=4.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8,
        )
    assert architecture_of(config_of("llama3-8b")).config is LlamaConfig
