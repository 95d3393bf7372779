"""Hugging Face's config.json <-> jaxtp's configs, family by family.

A field that is not known here is refused by name unless it is null: reading past it would give a
model that runs and answers wrongly. The same reading proves what is written: a config goes into the
first family whose fields, read back, give exactly that config.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from jaxtp.errors import JaxtpError, Problems, UnsupportedModel, join
from jaxtp.models.gpt import GPTConfig
from jaxtp.models.llama import LlamaConfig, RopeScaling
from jaxtp.models.presets import Config

Fields = Mapping[str, Any]

RUNTIME = {
    "dtype": "float32",
    "param_dtype": "float32",
    "remat": "none",
    "attention_implementation": "xla",
}
"""Settings of how a model runs, not of what it computes; no part of a config.json."""

# Labels of the file, and limits and token ids for decoding.
LABELS = (
    *("_name_or_path", "architectures", "model_type", "transformers_version", "use_cache"),
    *("dtype", "torch_dtype", "max_position_embeddings", "n_ctx", "task_specific_params"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
)
# What only training uses; jaxtp's train step has its own settings.
TRAINING = (
    *("initializer_range", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"),
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
# GPT-2's head for classification, which the language model does not have.
SUMMARY = tuple(
    f"summary_{name}"
    for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj")
)
WITHOUT_EFFECT = frozenset(LABELS + TRAINING + SUMMARY)
"""Fields that change no logits, at any value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`.

    Attributes:
        architecture: The class of `transformers` that loads it.
        config: Our config class.
        fields: Their field -> ours.
        defaults: What `transformers` takes for fields that a file leaves out; others are required.
        constants: Our fields that the family fixes.
        harmless: Fields that our models do not have -> the value at which they change nothing.
    """

    architecture: str
    config: type[Config]
    fields: Mapping[str, str]
    defaults: Fields
    constants: Fields = dataclasses.field(default_factory=dict[str, Any])
    harmless: Fields = dataclasses.field(default_factory=dict[str, Any])


SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "intermediate_size"),
)
OPTIONS = ("hidden_act", "rms_norm_eps", "rope_theta", "rope_scaling", "tie_word_embeddings")
ROTARY = {name: name for name in SIZES + OPTIONS}
WINDOW = {"sliding_window": "sliding_window"}
# Qwen says separately whether, and in which layers, its window is in use.
QWEN_WINDOW = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

ROTARY_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}

FAMILIES = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        config=LlamaConfig,
        fields=ROTARY,
        defaults=ROTARY_DEFAULTS,
        harmless={"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        config=LlamaConfig,
        fields=ROTARY | WINDOW,
        defaults=ROTARY_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        config=LlamaConfig,
        fields=ROTARY | WINDOW,
        defaults=ROTARY_DEFAULTS | QWEN_WINDOW | {"num_key_value_heads": 32},
        constants={"qkv_bias": True},
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        config=LlamaConfig,
        fields=ROTARY | WINDOW,
        defaults=ROTARY_DEFAULTS | QWEN_WINDOW | {"num_key_value_heads": 32, "head_dim": 128},
        constants={"qk_norm": True},
        harmless={"attention_bias": False},
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        config=LlamaConfig,
        fields=ROTARY,
        defaults=ROTARY_DEFAULTS
        | {"num_key_value_heads": 16, "head_dim": 256, "tie_word_embeddings": True}
        | {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": None},
        constants={"norm_offset": True, "scale_embedding": True},
        harmless={"attention_bias": False},
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        config=LlamaConfig,
        fields=ROTARY
        | WINDOW
        | {"num_local_experts": "num_experts", "num_experts_per_tok": "num_experts_per_tok"},
        defaults=ROTARY_DEFAULTS
        | {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
        | {"sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        config=GPTConfig,
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
    ),
}
"""`model_type` -> family."""


def read_fields(fields: Fields, where: str) -> Config:
    """The config that a config.json describes, in fp32 and without remat.

    Args:
        fields: Its content.
        where: Its path, for messages.

    Raises:
        UnsupportedModel: TP096, naming every field that asks for something else than our models do,
            is missing, or is of the wrong type.
        SizeMismatch: TP003, if sizes do not fit each other.
    """
    family = FAMILIES.get(fields.get("model_type", ""))
    if family is None:
        raise _refuse(
            where, f"model_type {fields.get('model_type')!r}", f"supported: {join(FAMILIES)}"
        )
    given = _with_rope({**family.defaults, **fields})
    problems = Problems()
    known = family.fields.keys() | family.defaults.keys() | WITHOUT_EFFECT
    for name, value in given.items():
        if name in family.harmless:
            if value != (want := family.harmless[name]):
                problems.add(_refuse(where, f"{name} is {value!r}", f"only {want!r} is supported"))
        elif name not in known and value is not None:
            problems.add(_refuse(where, f"unknown field {name} = {value!r}", _CHECK))
    problems.raise_any()
    values = {ours: given[theirs] for theirs, ours in family.fields.items() if theirs in given}
    for derive in (_heads, _activation, _window, _inner):
        values |= derive(given, where)
    values = {k: v for k, v in values.items() if k in family.config.__dataclass_fields__}
    return _validated(family, values | dict(family.constants), where)


_CHECK = "if it changes nothing, take it out of config.json; otherwise the model is not supported"


def _refuse(where: str, what: str, fix: str) -> UnsupportedModel:
    return UnsupportedModel(what, where=where, fix=fix)


def _with_rope(given: dict[str, Any]) -> dict[str, Any]:
    """Fields with the one `rope_parameters` of transformers 5 as the two of version 4."""
    rope = given.pop("rope_parameters", None)
    if rope is None:
        return given
    rope = dict(rope)
    theta = rope.pop("rope_theta", given.get("rope_theta"))
    return given | {"rope_theta": theta, "rope_scaling": rope}


def _heads(given: Fields, where: str) -> Fields:
    """Sizes that a null leaves to others."""
    values: dict[str, Any] = {}
    if given.get("num_key_value_heads", 0) is None:
        values["num_key_value_heads"] = given.get("num_attention_heads")
    if given.get("head_dim", 0) is None:
        hidden, heads = given.get("hidden_size"), given.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            values["head_dim"] = hidden // heads
    return values | {"rope_scaling": _rope_scaling(given.get("rope_scaling"), where)}


def _rope_scaling(scaling: Any, where: str) -> Any:
    if not isinstance(scaling, Mapping):
        return scaling
    kind = scaling.get("rope_type", scaling.get("type"))
    rest = {k: v for k, v in scaling.items() if k not in ("rope_type", "type")}
    if kind == "default" and not rest:
        return None
    known = {field.name for field in dataclasses.fields(RopeScaling)}
    if kind != "llama3" or not rest.keys() <= known:
        raise _refuse(
            where,
            f"rope_scaling is {dict(scaling)!r}",
            f"supported: null, and rope_type llama3 with {join(sorted(known))}",
        )
    return rest


def _activation(given: Fields, where: str) -> Fields:
    """Gemma's `hidden_activation` goes before `hidden_act`; some versions read the latter alone."""
    chosen = given.get("hidden_activation")
    return {} if chosen is None else {"hidden_act": chosen}


def _window(given: Fields, where: str) -> Fields:
    """The one window of all layers, from Qwen's three fields and a list of layer types."""
    num_layers, window = given.get("num_hidden_layers"), given.get("sliding_window")
    if "use_sliding_window" not in given or not isinstance(num_layers, int):
        return {}
    if not given["use_sliding_window"]:
        window = None
    full, sliding = "full_attention", "sliding_attention"
    types = given.get("layer_types")
    if types is None:
        first = num_layers if window is None else given["max_window_layers"]
        types = [full if i < first else sliding for i in range(num_layers)]
    if set(types) == {full}:
        return {"sliding_window": None}
    if set(types) == {sliding} and window is not None:
        return {"sliding_window": window}
    raise _refuse(
        where,
        f"sliding_window = {window} in {types.count(sliding)} of {num_layers} layers "
        "(layer_types, use_sliding_window, max_window_layers)",
        "all layers have the window, or none",
    )


def _inner(given: Fields, where: str) -> Fields:
    """GPT-2's MLP is four times as wide as the residual stream; another width is refused."""
    inner, hidden = given.get("n_inner"), given.get("n_embd")
    if inner is not None and (not isinstance(hidden, int) or inner != 4 * hidden):
        raise _refuse(where, f"n_inner is {inner}", f"null, or 4 x n_embd; n_embd is {hidden}")
    return {}


def _validated(family: Family, values: dict[str, Any], where: str) -> Config:
    """The config object, every value of its declared type."""
    from pydantic import TypeAdapter, ValidationError

    theirs = {ours: name for name, ours in family.fields.items()}
    for name, value in values.items():
        if type(value) is int and value < 1:
            raise _refuse(where, f"{theirs.get(name, name)} is {value}", "sizes are 1 or more")
    try:
        # From JSON text, where strict still lets an integer be a float.
        return TypeAdapter(family.config).validate_json(json.dumps(values | RUNTIME), strict=True)
    except ValidationError as err:
        problems = Problems()
        for found in err.errors():
            cause = found.get("ctx", {}).get("error")
            name = ".".join(str(theirs.get(str(part), part)) for part in found["loc"])
            problems.add(
                cause
                if isinstance(cause, JaxtpError)
                else _refuse(where, f"{name}: {found['msg']}", "see the model's own config.json")
            )
        problems.raise_any()
        raise


def write_fields(config: Config, prefer: str = "") -> dict[str, Any]:
    """The fields of a config.json that `transformers` reads as this config.

    Args:
        config: Ours.
        prefer: The `model_type` to try first; llama and mistral can say the same.

    Raises:
        UnsupportedModel: TP096, if no family computes what this config does.
    """
    plain = dataclasses.replace(config, **RUNTIME)
    for model_type in sorted(FAMILIES, key=lambda name: name != prefer):
        family = FAMILIES[model_type]
        if not isinstance(config, family.config):
            continue
        fields = {theirs: getattr(config, ours) for theirs, ours in family.fields.items()}
        if isinstance(scaling := fields.get("rope_scaling"), RopeScaling):
            fields["rope_scaling"] = {"rope_type": "llama3", **dataclasses.asdict(scaling)}
        if "use_sliding_window" in family.defaults and fields["sliding_window"] is not None:
            fields |= {"use_sliding_window": True, "max_window_layers": 0}
        fields = {
            "architectures": [family.architecture],
            "model_type": model_type,
            "torch_dtype": config.param_dtype,
            **fields,
        }
        with contextlib.suppress(UnsupportedModel):
            if read_fields(fields, model_type) == plain:
                return fields
    raise _refuse(
        "config",
        f"no Hugging Face family has this combination: {config}",
        f"families: {join(FAMILIES)}",
    )
