"""Every architecture, one row each: its config, its model, its families at Hugging Face.

Adding one is a folder with these three and a row here; whatever asks by config or by `model_type`
asks this table, and what it does not have is refused.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from flax import nnx

from jaxtp.errors import BadConfig, join
from jaxtp.models import gpt, llama
from jaxtp.models.decoder import Decoder
from jaxtp.models.layers import DecoderConfig
from jaxtp.models.lora import add_adapters
from jaxtp.models.published import Family
from jaxtp.models.quantized import is_quantized, quantize


class Architecture(NamedTuple):
    """One kind of decoder.

    Attributes:
        config: The class of its configs.
        model: The model of (config, random keys).
        families: `model_type` of Hugging Face -> what its files look like; all load as this.
        presets: Name -> published sizes.
    """

    config: type[DecoderConfig]
    model: Callable[[Any, nnx.Rngs], Decoder]
    families: Mapping[str, Family]
    presets: Mapping[str, Any]


ARCHITECTURES = (
    Architecture(llama.LlamaConfig, llama.Llama, llama.FAMILIES, llama.PRESETS),
    Architecture(gpt.GPTConfig, gpt.GPT, gpt.FAMILIES, gpt.PRESETS),
)

Config = llama.LlamaConfig | gpt.GPTConfig
"""What type checkers know of a config: the first column."""

PRESETS: dict[str, Config] = {name: c for row in ARCHITECTURES for name, c in row.presets.items()}
"""Preset name -> config; `dataclasses.replace` changes single fields."""

FAMILIES: dict[str, Family] = {
    n: family for row in ARCHITECTURES for n, family in row.families.items()
}
"""`model_type` of Hugging Face -> family."""


def architecture_of(config: DecoderConfig) -> Architecture:
    """The row of a config.

    Raises:
        BadConfig: TP020, if it has none.
    """
    for row in ARCHITECTURES:
        if isinstance(config, row.config):
            return row
    raise BadConfig(
        f"a {type(config).__name__} is of no known architecture",
        where="model",
        fix=f"configs: {join(row.config.__name__ for row in ARCHITECTURES)}; "
        "jaxtp.models.registry.ARCHITECTURES takes another row",
    )


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


def build(model: str | Config, rngs: nnx.Rngs | None = None) -> Decoder:
    """A model with random parameters on the default device.

    Args:
        model: Preset name or config.
        rngs: Source of the parameters' random keys; default: `nnx.Rngs(0)`.

    Raises:
        BadConfig: TP020, if no preset has the name or no architecture the config.
    """
    config, rngs = config_of(model), rngs or nnx.Rngs(0)
    floats = dataclasses.replace(config, quantize="none")
    built = architecture_of(floats).model(floats, rngs)
    if config.lora is not None:
        add_adapters(built, config.lora, rngs)
    return quantize(built, config.quantize) if is_quantized(config) else built


def abstract(model: str | Config) -> Decoder:
    """The same model with `jax.ShapeDtypeStruct` parameters: no memory, milliseconds at any size.

    Raises:
        BadConfig: TP020, if no preset has the name or no architecture the config.
    """
    config = config_of(model)
    return nnx.eval_shape(lambda: build(config))
