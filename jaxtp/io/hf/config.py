"""Hugging Face's config.json <-> jaxtp's configs; `jaxtp.models.registry` says how, by family.

A field that is not known here is refused by name unless it is null, two fields that contradict each
other are refused, and so is a number out of its bounds: reading past any of these would give a
model that runs and answers wrongly, or none after a long time. The same reading proves what is
written: a config goes into the first family whose fields, read back, give exactly that config.
"""

import contextlib
import dataclasses
import functools
import json
import typing
from pathlib import Path
from typing import Any, cast

from jaxtp.errors import JaxtpError, Problems, UnsupportedModel, join
from jaxtp.io.hf.files import CONFIG
from jaxtp.io.json_text import read_json
from jaxtp.models.bounds import Bounds, bounds_of
from jaxtp.models.layers import DecoderConfig
from jaxtp.models.published import Family, Fields, refuse, refuse_contradiction
from jaxtp.models.registry import ARCHITECTURES, FAMILIES, Config, architecture_of

RUNTIME: dict[str, Any] = {
    "dtype": "float32",
    "param_dtype": "float32",
    "remat": "none",
    "lora": None,
    "quantize": "none",
    "attention_implementation": "xla",
    "capacity_factor": 1.25,
    "drop_tokens": False,
    "router_aux_loss_coef": 0.0,
    "router_z_loss_coef": 0.0,
}
"""Settings of how a model runs and is trained, not of what it computes; no part of a config.json.
Not every config has all of them."""

# Labels of the file, and limits and token ids for decoding.
LABELS = (
    *("_name_or_path", "architectures", "model_type", "transformers_version", "use_cache"),
    *("dtype", "torch_dtype", "max_position_embeddings", "n_ctx", "task_specific_params"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "cache_implementation", "auto_map"),
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

LABEL_TYPES: dict[str, Any] = {
    "architectures": list[str] | None,
    "max_position_embeddings": int | None,
    "n_ctx": int | None,
    "torch_dtype": str | None,
    "dtype": str | None,
}
"""Of labels that something here reads."""

COUNT = Bounds(0, 2**31 - 1)
"""Of integers that are no field of ours: pattern lengths and limits."""

QUANTISED = "quantization_config"

_CHECK = "if it changes nothing, take it out of config.json; otherwise the model is not supported"


def family_of(fields: Fields, where: str) -> tuple[str, Family]:
    """The family of a config.json, and its name.

    Raises:
        UnsupportedModel: TP096, if it is not known, or `architectures` names another one.
    """
    name = fields.get("model_type")
    family = FAMILIES.get(name) if isinstance(name, str) else None
    if family is None or not isinstance(name, str):
        raise refuse(where, f"model_type {name!r}", f"supported: {join(FAMILIES, limit=20)}")
    return name, family


def read_config(folder: str | Path) -> Config:
    """The config of a Hugging Face folder, in fp32 and without remat; no tensor is read.

    Raises:
        BadWeights: TP095, if there is no readable config.json.
        UnsupportedModel: TP096, as `read_fields`.
    """
    file = Path(folder) / CONFIG
    return read_fields(read_json(file), str(file))


def read_fields(fields: Fields, where: str) -> Config:
    """The config that a config.json describes, in fp32 and without remat.

    Args:
        fields: Its content.
        where: Its path, for messages.

    Raises:
        UnsupportedModel: TP096, naming every field that asks for something else than our models do,
            is missing, out of bounds, of the wrong type, or contradicts another.
        SizeMismatch: TP003, if sizes do not fit each other.
    """
    name, family = family_of(fields, where)
    fields = family.merge(fields, where)
    config = next(row.config for row in ARCHITECTURES if name in row.families)
    _check_fields(fields, family, config, where)
    given = {**family.defaults, **fields}
    if missing := sorted(theirs for theirs in family.fields if theirs not in given):
        raise refuse(where, f"fields are missing: {join(missing)}", "see the model's own file")
    values = {ours: given[theirs] for theirs, ours in family.fields.items()}
    values |= {**family.constants, **family.read(given, where)}
    return cast(Config, config(**values, **runtime_of(config)))


def runtime_of(config: type[DecoderConfig]) -> dict[str, Any]:
    """Of `RUNTIME` what configs of this class have."""
    known = {field.name for field in dataclasses.fields(config)}
    return {name: value for name, value in RUNTIME.items() if name in known}


def _check_fields(fields: Fields, family: Family, config: type[DecoderConfig], where: str) -> None:
    """Every field of a file by itself, then those that should agree."""
    known = family.fields.keys() | family.defaults.keys() | WITHOUT_EFFECT
    problems = Problems()
    for name, value in fields.items():
        if name in family.harmless:
            if value != (want := family.harmless[name]):
                problems.add(refuse(where, f"{name} is {value!r}", f"only {want!r} is supported"))
        elif name in known:
            if what := _wrong(name, value, family, config):
                problems.add(refuse(where, *what))
        elif name == QUANTISED and value is not None:
            problems.add(_refuse_quantised(value, where))
        elif value is not None:
            problems.add(refuse(where, f"unknown field {name} = {value!r:.200}", _CHECK))
    problems.raise_any()
    for one, other in (("torch_dtype", "dtype"), *family.same):
        values = fields.get(one), fields.get(other)
        if None not in values and values[0] != values[1]:
            raise refuse_contradiction(where, f"{one} = {values[0]!r}", f"{other} = {values[1]!r}")
    _check_architecture(fields, family, where)


def _refuse_quantised(value: Any, where: str) -> UnsupportedModel:
    """The error about weights of a few bits, as those of gpt-oss and DeepSeek-V3 are published."""
    method = value.get("quant_method") if isinstance(value, dict) else value
    how = 'AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16"'
    if method == "mxfp4":
        how += ", quantization_config=Mxfp4Config(dequantize=True)"
    return refuse(
        where,
        f"{QUANTISED} has quant_method {method!r}, and weights are read in 16 or 32 bits",
        f"a folder with bfloat16 weights: in transformers, {how}).save_pretrained(new)",
    )


def _check_architecture(fields: Fields, family: Family, where: str) -> None:
    """`architectures` may name a model with another head, not another model."""
    stem = family.architecture.lower().removesuffix("forcausallm").removesuffix("lmheadmodel")
    named = fields.get("architectures") or ()
    if named and not any(name.lower().startswith(stem) for name in named):
        raise refuse_contradiction(
            where, f"architectures = {join(named)}", f"model_type = {fields['model_type']!r}"
        )


def _wrong(
    name: str, value: Any, family: Family, config: type[DecoderConfig]
) -> tuple[str, str] | None:
    """What is wrong with a value by itself, and what would not be; None if nothing is."""
    ours = family.fields.get(name, name)
    kind = (LABEL_TYPES | dict(family.types)).get(name) or _hints(config).get(ours)
    if kind is None:
        return None
    if message := _type_error(kind, value):
        return f"{name}: {message}", "see the model's own config.json"
    bounds = bounds_of(config).get(ours, COUNT)
    if not bounds.admit(value):
        return f"{name} is {value}", f"{bounds}"
    return None


@functools.cache
def _hints(config: type[DecoderConfig]) -> dict[str, Any]:
    return typing.get_type_hints(config)


def _type_error(kind: Any, value: Any) -> str | None:
    from pydantic import ValidationError

    try:
        # From JSON text, where strict still lets an integer be a float.
        _adapter(kind).validate_json(json.dumps(value), strict=True)
    except ValidationError as err:
        return err.errors()[0]["msg"]
    return None


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def write_fields(config: Config, prefer: str = "") -> dict[str, Any]:
    """The fields of a config.json that `transformers` reads as this config.

    Args:
        config: Ours.
        prefer: The `model_type` to try first; llama and mistral can say the same.

    Raises:
        UnsupportedModel: TP096, if no family computes what this config does.
    """
    plain = dataclasses.replace(config, **runtime_of(type(config)))
    families = architecture_of(config).families
    for model_type in sorted(families, key=lambda name: name != prefer):
        family = families[model_type]
        fields: dict[str, Any] = {
            "architectures": [family.architecture],
            "model_type": model_type,
            "torch_dtype": config.param_dtype,
            **{theirs: getattr(config, ours) for theirs, ours in family.fields.items()},
            **family.write(config),
        }
        with contextlib.suppress(JaxtpError):
            if read_fields(fields, model_type) == plain:
                return fields
    raise UnsupportedModel(
        f"no Hugging Face family has this combination: {config}",
        where="config",
        fix=f"families: {join(families, limit=20)}",
    )
