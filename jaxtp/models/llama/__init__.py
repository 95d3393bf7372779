"""Llama and the decoders that differ from it by options of one config."""

from jaxtp.models.llama.config import LlamaConfig, RopeScaling, YarnRopeScaling
from jaxtp.models.llama.model import Llama, LlamaLayer
from jaxtp.models.llama.presets import PRESETS
from jaxtp.models.llama.published import FAMILIES
from jaxtp.models.llama.rotary import rotary_frequencies

__all__ = [
    "FAMILIES",
    "PRESETS",
    "Llama",
    "LlamaConfig",
    "LlamaLayer",
    "RopeScaling",
    "YarnRopeScaling",
    "rotary_frequencies",
]
