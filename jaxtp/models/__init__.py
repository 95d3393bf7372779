"""Models as single-device Flax NNX code: the Llama and GPT-2 families, by preset or config.

In: a preset name or a config. Out: a model, or its shapes alone. Never knows: meshes, specs, the
decisions of a plan; it names its activations, and whoever has a plan constrains them by name.
"""

import difflib

from flax import nnx

from jaxtp.errors import BadConfig, join
from jaxtp.models.gpt import GPT, GPTConfig
from jaxtp.models.layers import cross_entropy, generate
from jaxtp.models.llama import Llama, LlamaConfig, RopeScaling
from jaxtp.models.presets import PRESETS, Config

__all__ = [
    "GPT",
    "PRESETS",
    "Config",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "abstract",
    "build",
    "config_of",
    "cross_entropy",
    "generate",
]


def config_of(model: str | Config) -> Config:
    """The config behind a preset name; a config is returned as it is.

    Raises:
        BadConfig: TP020, if no preset has the name.
    """
    if not isinstance(model, str):
        return model
    if model not in PRESETS:
        near = difflib.get_close_matches(model, PRESETS, n=3) or PRESETS
        raise BadConfig(f"no preset is called {model!r}", where="model", fix=join(near, limit=20))
    return PRESETS[model]


def build(model: str | Config, rngs: nnx.Rngs | None = None) -> Llama | GPT:
    """A model with random parameters on the default device.

    Args:
        model: Preset name or config.
        rngs: Source of the parameters' random keys; default: `nnx.Rngs(0)`.

    Raises:
        BadConfig: TP020, if no preset has the name.
    """
    config = config_of(model)
    rngs = rngs or nnx.Rngs(0)
    return Llama(config, rngs) if isinstance(config, LlamaConfig) else GPT(config, rngs)


def abstract(model: str | Config) -> Llama | GPT:
    """The same model with `jax.ShapeDtypeStruct` parameters: no memory, milliseconds at any size.

    Raises:
        BadConfig: TP020, if no preset has the name.
    """
    config = config_of(model)
    return nnx.eval_shape(lambda: build(config))
