"""Published NNX models of google-tunix, unmodified, against the zoo's expert labels.

    python tests/leg_tunix.py ZOO [NAME ...]

ZOO is the folder with `score.py` and `trees/`. Needs `google-tunix==0.1.7`, which pytest's
environment does not have, so pytest does not collect this file. Two layers at published widths,
traced abstractly.

Expect: every model at 100.0% ok at tp 2, 4 and 8, nothing harmful.
"""

import dataclasses
import importlib
import sys

import jax
import jax.numpy as jnp
from flax import nnx
from zoo_leg import run

from jaxtp import trees

# Tree -> module, class, preset.
MODELS = {
    "gemma_2b": ("gemma", "Gemma", "gemma_2b"),
    "gemma_7b": ("gemma", "Gemma", "gemma_7b"),
    "gemma2_2b": ("gemma", "Gemma", "gemma2_2b"),
    "gemma2_9b": ("gemma", "Gemma", "gemma2_9b"),
    "gemma3_1b": ("gemma3", "Gemma3", "gemma3_1b_pt"),
    "llama3_1_8b": ("llama3", "Llama3", "llama3p1_8b"),
    "llama3_2_1b": ("llama3", "Llama3", "llama3p2_1b"),
    "qwen2_5_7b": ("qwen2", "Qwen2", "qwen2p5_7b"),
    "qwen3_0_6b": ("qwen3", "Qwen3", "qwen3_0p6b"),
    "qwen3_8b": ("qwen3", "Qwen3", "qwen3_8b"),
    "qwen3_30b_a3b": ("qwen3", "Qwen3", "qwen3_30b_a3b"),
}


def build(name, config):
    """A model without weights: its call, the shapes of its parameters by path, and its inputs."""
    package, cls, preset = MODELS[name]
    module = importlib.import_module(f"tunix.models.{package}.model")
    settings = dataclasses.replace(
        getattr(module.ModelConfig, preset)(), num_layers=config["num_layers"]
    )
    model = nnx.eval_shape(lambda: getattr(module, cls)(settings, rngs=nnx.Rngs(0)))
    state, rebuild = trees.as_pytree(model)
    structure = jax.tree.structure(state)
    params = dict(trees.leaves(state))

    def call(flat, tokens, positions, mask):
        own = rebuild(structure.unflatten([flat[path] for path in params]))
        return own(tokens, positions, None, mask)[0]

    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    return call, params, (tokens, tokens, jax.ShapeDtypeStruct((2, 16, 16), bool))


if __name__ == "__main__":
    sys.exit(run(__doc__, "tunix_", MODELS, build))
