"""Shape listings: a parameter tree as a JSON file, to plan a model without sharing it.

{"params": {"h/0/attn/q_proj/kernel": [768, 768]}, "dtypes": {}, "config": {"num_heads": 12}}
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtp.config.named_files import write_text
from jaxtp.errors import BadUsage
from jaxtp.errors.arguments import Kind, checked
from jaxtp.io.json_text import unique_keys
from jaxtp.plan.trees import PyTree, flatten


def _is_json(config: Any) -> bool:
    if not isinstance(config, Mapping):
        return False
    try:
        return json.loads(json.dumps(dict(config))) is not None
    except (TypeError, ValueError, RecursionError):
        return False


@checked(config=Kind(_is_json, 'a dict of sizes: {"num_attention_heads": 32}', BadUsage).or_none())
def dump_tree(
    params: PyTree, path: str | os.PathLike[str], config: Mapping[str, Any] | None = None
) -> None:
    """Writes the listing of a tree: paths, shapes (elements, global) and dtypes, no values.

    Args:
        params: Any tree that `jaxtp.make_plan` takes.
        path: File to write.
        config: Sizes that help a planner, e.g. `{"num_attention_heads": 32}`.

    Raises:
        BadTree: TP046, if the tree holds something that is no array.
        BadUsage: TP132, if the file cannot be written.
    """
    leaves = flatten(params)
    listing = {
        "params": {p.path: list(p.shape) for p in leaves.values()},
        "dtypes": {p.path: p.dtype for p in leaves.values() if p.dtype != "float32"},
        "config": dict(config or {}),
    }
    write_text(path, json.dumps(listing, indent=1) + "\n")


def load_tree(
    path: str | os.PathLike[str],
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, Any]]:
    """A listing as a flat tree of structs, and the sizes written beside it.

    Unknown keys are ignored, so that listings may carry notes. Arrays without a dtype are float32.

    Raises:
        BadUsage: TP132, if the file is missing, is not JSON, or a shape is not a list of counts.
    """
    try:
        data = json.loads(Path(path).read_text(), object_pairs_hook=unique_keys)
        shapes = data["params"]
        dtypes = data.get("dtypes", {})
        tree = {str(p): _struct(s, dtypes.get(p, "float32")) for p, s in shapes.items()}
        return tree, dict(data.get("config") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        what = "it is not text" if isinstance(err, UnicodeError) else repr(err)
        raise BadUsage(
            f"not a shape listing: {what}",
            where=str(path),
            fix='write one with jaxtp.dump_tree(params, path): {"params": {path: shape}}',
        ) from None


def _struct(shape: Any, dtype: str) -> jax.ShapeDtypeStruct:
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"shape {shape} is not a list of counts")
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
