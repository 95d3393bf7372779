"""PEFT folders: adapter_config.json and adapter_model.safetensors, read and written.

PEFT stores A as (rank, in) and B as (out, rank), one pair a layer; our models keep layers stacked
and heads apart. Which dims of a kernel are inputs follows from the table of stored names.
"""

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from jaxtp.config.named_files import as_folder
from jaxtp.errors import BadCheckpoint, BadConfig, BadWeights, Problems, UnsupportedModel, join
from jaxtp.io.assemble import ParameterSource
from jaxtp.io.hf.config import FAMILIES, write_fields
from jaxtp.io.hf.files import Tensors
from jaxtp.io.hf.save import complete, fetch, places_of
from jaxtp.io.json_text import read_json
from jaxtp.io.safetensors import read_header, write_file, write_order
from jaxtp.models import Decoder, Lora, abstract
from jaxtp.models.lora import FACTORS
from jaxtp.models.published import Storage, Stored, storages
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import PyTree, flatten, leaves

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."

UNSUPPORTED = (
    *("use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "modules_to_save"),
    *("layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices"),
    *("use_qalora", "alora_invocation_tokens"),
)
"""Settings of PEFT that change what an adapter computes, and that ours do not have."""


def read_lora(folder: str | Path) -> Lora:
    """The settings of a PEFT folder's adapter.

    Raises:
        BadWeights: TP095, if a file is missing, damaged or holds other names than PEFT gives.
        UnsupportedModel: TP096, for anything but plain LoRA.
    """
    where = Path(folder) / CONFIG
    fields = read_json(where)
    asked = [name for name in UNSUPPORTED if fields.get(name)]
    if fields.get("bias", "none") != "none":
        asked.append("bias")
    if fields.get("peft_type") != "LORA" or asked:
        kind = fields.get("peft_type")
        raise UnsupportedModel(
            f"an adapter of type {kind!r}" + (f" with {join(asked)}" if asked else ""),
            where=str(where),
            fix="plain LoRA; or merge it into the model with PEFT, and load that",
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise BadWeights(
            f"r is {rank!r} and lora_alpha {alpha!r}", where=str(where), fix="give both as numbers"
        )
    if fields.get("use_rslora"):
        alpha *= math.sqrt(rank)  # scaled by alpha / sqrt(rank)
    names = (name.split(".")[-3] for name in read_header(Path(folder) / WEIGHTS) if "." in name)
    return Lora(rank=rank, alpha=float(alpha), targets=tuple(sorted(set(names))))


def adapter_sources(
    model: Decoder, names: Mapping[str, Stored], folder: Path
) -> dict[str, ParameterSource]:
    """Which tensors of a PEFT folder each factor is made of.

    Args:
        model: The abstract model, its config with the adapter's settings.
        names: Its family's table of stored names.
        folder: The PEFT folder.

    Raises:
        BadWeights: TP095, for missing tensors, tensors of another model, and other shapes.
    """
    stored, problems = read_header(folder / WEIGHTS), Problems()
    sources: dict[str, ParameterSource] = {}
    wanted: set[str] = set()
    for path, (row, how) in adapter_table(model, names).items():
        sources[path] = ParameterSource(np.empty(how.stack, object), how)
        for index in np.ndindex(how.stack):
            name = row.name.format(*how.numbers(index))
            wanted.add(name)
            if name not in stored:
                continue
            sources[path].tensors[index] = stored[name]
            if stored[name].shape != how.shape:
                problems.add(
                    stored[name].bad(
                        f"has shape {list(stored[name].shape)}, this model asks for "
                        f"{list(how.shape)}",
                        "load the model that the adapter was trained on",
                    )
                )
    for what, differ in (
        ("are missing", wanted - stored.keys()),
        ("are not of this model", stored.keys() - wanted),
    ):
        if differ:
            problems.add(
                BadWeights(
                    f"{len(differ)} tensors {what}: {join(sorted(differ))}",
                    where=str(folder / WEIGHTS),
                    fix="load the model that the adapter was trained on",
                )
            )
    problems.raise_any()
    return sources


def adapter_table(model: Decoder, names: Mapping[str, Stored]) -> dict[str, tuple[Stored, Storage]]:
    """Path of every factor -> what PEFT calls it and how it is stored.

    Raises:
        UnsupportedModel: TP096, for a kernel that is one of several in a tensor of its family.
    """
    shapes = {path: param.shape for path, param in flatten(model).items()}
    tensors = {path: (names[path].name, names[path].after) for path in shapes if path in names}
    shared = Counter(tensors.values())
    rows: dict[str, Stored] = {}
    for path in shapes:
        module, _, factor = path.rpartition("/")
        if factor not in FACTORS:
            continue
        kernel = names[f"{module}/kernel"]
        if shared[tensors[f"{module}/kernel"]] > 1:
            raise UnsupportedModel(
                f"an adapter of {module}, which is one part of {kernel.name}",
                where=path,
                fix="adapters of other linear maps",
            )
        inputs, outputs = _sides(kernel.dims)
        side, is_a = (inputs, True) if factor == FACTORS[0] else (outputs, False)
        flat = side if " " not in side else f"({side})"
        dims = f"r {flat} -> {side} r" if is_a else f"{flat} r -> r {side}"
        name = kernel.name.removesuffix("weight") + f"lora_{'A' if is_a else 'B'}.weight"
        rows[path] = Stored(PREFIX + name, dims, after=kernel.after)
    hows = storages(rows, {path: shapes[path] for path in rows}, among=shapes)
    return {path: (row, hows[path]) for path, row in rows.items()}


def _sides(dims: str) -> tuple[str, str]:
    """The input and output dims of a kernel, in letters; a kernel has its inputs first.

    >>> _sides("d (n h) -> n h d"), _sides("d (3 n h) -> d 3 n h"), _sides("d f")
    (('n h', 'd'), ('d', '3 n h'), ('d', 'f'))
    """
    left, _, right = dims.partition(" -> ")
    groups = [g.strip("()") for g in left.replace(") ", ")|").replace(" (", "|(").split("|")]
    if len(groups) == 1:
        groups = left.split()
    order = right or " ".join(groups)
    inputs = next(group for group in groups if order.startswith(group + " "))
    return inputs, order.removeprefix(inputs + " ")


def save_adapter(
    params: PyTree,
    folder: str | Path,
    *,
    config: Any = None,
    plan: Plan | None = None,
    base: str = "",
) -> None:
    """Writes a model's adapters as a folder that PEFT and `load_hf(..., adapter=)` load.

    With several processes all of them take part and the first one writes. The folder appears only
    when it is complete.

    Args:
        params: The `nnx.Module`, or its parameters as a tree with the same paths.
        folder: A folder that does not exist yet.
        config: The model's config; needed if `params` is no module.
        plan: The plan they were placed by; needed where layers lie in pipeline stages.
        base: What PEFT shall load the adapter on: a folder, or a name on the hub.

    Raises:
        BadCheckpoint: TP090, if `folder` exists.
        BadConfig: TP020, if there is no adapter.
    """
    folder, config = as_folder(folder), config or getattr(params, "config", None)
    if folder.exists():
        raise BadCheckpoint("the folder exists", where=str(folder), fix="choose a new folder")
    lora: Lora | None = getattr(config, "lora", None)
    if config is None or lora is None:
        raise BadConfig(
            "the parameters have no adapter",
            where="config",
            fix="save_adapter(model, ...), of a model whose config has lora set",
        )
    model, tree = abstract(config), dict(leaves(params))
    shapes = flatten(model)
    family = write_fields(dataclasses.replace(config, lora=None))["model_type"]
    rows = adapter_table(model, FAMILIES[family].names)

    def each() -> Iterator[tuple[str, Any]]:
        for path, (row, how) in rows.items():
            places = places_of(path, tree[path], how.stack, plan)
            for index in np.ndindex(how.stack):
                at = tuple(int(p[i]) for p, i in zip(places, index, strict=True))
                yield (
                    row.name.format(*how.numbers(index)),
                    (tree[path], at, shapes[path].shape, how),
                )

    pieces = dict(each())
    tensors: Tensors = {n: (str(p[0].dtype), p[3].shape) for n, p in pieces.items()}
    with complete(folder) as unfinished:
        arrays = (fetch(*pieces[name]) for name in write_order(tensors))
        if unfinished is None:
            for _ in arrays:
                pass  # the first process needs this one's part
        else:
            write_file(unfinished / WEIGHTS, tensors, arrays)
            text = json.dumps(_fields(lora, base, [row for row, _ in rows.values()]), indent=2)
            (unfinished / CONFIG).write_text(text + "\n")
    multihost_utils.sync_global_devices(f"save_adapter {folder}")


def _fields(lora: Lora, base: str, rows: Any) -> Mapping[str, Any]:
    """adapter_config.json, with the fields that PEFT needs."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets),
        "bias": "none",
        "fan_in_fan_out": any(row.name.startswith(PREFIX + "transformer.h") for row in rows),
        "inference_mode": True,
    }
