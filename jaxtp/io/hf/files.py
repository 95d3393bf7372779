"""A Hugging Face folder: its config.json, its safetensors files, and the index over them."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax.numpy as jnp

from jaxtp.errors import BadWeights, Problems, join
from jaxtp.io.json_text import read_json
from jaxtp.io.safetensors import StoredTensor, read_header

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (NumPy name of the type, shape in elements)."""


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name, from model.safetensors or else from the index's files.

    Raises:
        BadWeights: TP095, with every damaged file, and every disagreement of index and files.
    """
    if (folder / WEIGHTS).exists():
        return read_header(folder / WEIGHTS)
    if not (folder / INDEX).exists():
        found = join(sorted(file.name for file in folder.iterdir())) or "nothing"
        raise BadWeights(
            f"no {WEIGHTS} and no {INDEX}; the folder has {found}",
            where=str(folder),
            fix="download the safetensors files; convert *.bin with transformers' save_pretrained",
        )
    placed = _weight_map(folder / INDEX)
    problems = Problems()
    tensors: dict[str, StoredTensor] = {}
    for name in sorted(set(placed.values())):
        try:
            found = read_header(folder / name)
        except BadWeights as err:
            problems.add(err)
            continue
        listed = {tensor for tensor, file in placed.items() if file == name}
        if missing := sorted(listed - found.keys()):
            problems.add(_bad(folder / name, f"lacks what the index lists: {join(missing)}"))
        if extra := sorted(found.keys() - listed):
            problems.add(_bad(folder / name, f"has what the index does not list: {join(extra)}"))
        tensors |= found
    problems.raise_any()
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise _bad(index, "has no weight_map")
    for name, file in placed.items():
        # A path would read outside of the folder.
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise _bad(index, f"tensor {name!r} is in {file!r}, which is no file of this folder")
    return placed


def _bad(file: Path, what: str) -> BadWeights:
    return BadWeights(what, where=str(file), fix="download the file again")


def split_files(tensors: Tensors, limit: int) -> dict[str, list[str]]:
    """File name -> names of the tensors in it; layers stay in order, and mostly together.

    Args:
        tensors: What is to be written.
        limit: Bytes of tensors in one file; a larger tensor has a file of its own.
    """
    groups: list[list[str]] = [[]]
    used = 0
    for name in sorted(tensors, key=_natural):
        size = num_bytes(*tensors[name])
        if groups[-1] and used + size > limit:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    stem = WEIGHTS.removesuffix(".safetensors")
    return {
        f"{stem}-{i:05}-of-{len(groups):05}.safetensors": group for i, group in enumerate(groups, 1)
    }


def write_index(folder: Path, files: Mapping[str, Iterable[str]], total_bytes: int) -> None:
    """Writes the index over several files; one file needs none."""
    if len(files) == 1:
        return
    placed = {name: file for file, names in files.items() for name in names}
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(placed.items()))}
    (folder / INDEX).write_text(json.dumps(content, indent=2) + "\n")


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key with layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]
