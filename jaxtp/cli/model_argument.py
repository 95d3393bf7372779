"""What a command is asked about: a file of shapes, a preset, or anybody's function."""

import dataclasses
import difflib
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.errors import BadUsage, join
from jaxtp.io.model_functions import own_model
from jaxtp.io.tree_files import load_tree
from jaxtp.plan.trees import PyTree

PRESET_TOKENS = 2048
"""Tokens of the one sequence that presets are traced on, or as many as the model takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model, as far as it is known; the arguments of `make_plan`.

    Attributes:
        params: Its parameters.
        config: Sizes written beside them, or None.
        fn: Its function, or None for a file of shapes or an `nnx.Module`.
        inputs: What the function is traced on, or None for a file of shapes.
    """

    params: PyTree
    config: Any = None
    fn: Any = None
    inputs: Sequence[Any] | None = None


def load_subject(text: str) -> Subject:
    """The model that a word stands for.

    Args:
        text: A file written by `jaxtp.dump_tree`; a preset such as llama3-8b; or
            "package.module:function", a function without arguments that returns `(fn, params,
            inputs)` as `make_plan` takes them, found from the working directory too.

    Raises:
        BadUsage: TP132, if it is none of these, or the function cannot be had or does not return
            three things.
    """
    if Path(text).is_file():
        params, config = load_tree(text)
        return Subject(params=params, config=config)
    # Half a second of imports, which a file of shapes need not wait for.
    models = importlib.import_module("jaxtp.models")
    if text in models.PRESETS:
        most = getattr(models.config_of(text), "max_position_embeddings", PRESET_TOKENS)
        tokens = min(PRESET_TOKENS, most)  # learned positions are a table that ends
        inputs = (jax.ShapeDtypeStruct((1, tokens), jnp.int32),)
        return Subject(params=models.abstract(text), inputs=inputs)
    if ":" in text:
        own = own_model(text, otherwise=f"presets are {join(models.PRESETS, 20)}")
        return Subject(params=own.params, fn=own.fn, inputs=own.inputs)
    near = difflib.get_close_matches(text, models.PRESETS, n=3)
    raise BadUsage(
        "no such file, and no preset of this name",
        where=text,
        fix=(f"{join(near)}? " if near else "")
        + f"presets are {join(models.PRESETS, 20)}; a file is written by jaxtp.dump_tree",
    )
