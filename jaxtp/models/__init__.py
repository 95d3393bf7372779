"""Models as single-device Flax NNX code, by preset or config; `registry` lists the architectures.

In: a preset name or a config. Out: a model, or its shapes alone. Never knows: meshes, specs, the
decisions of a plan; it names its activations, and whoever has a plan constrains them by name.
"""

from jaxtp.models.decoder import Decoder, cross_entropy, generate
from jaxtp.models.gpt import GPT, GPTConfig
from jaxtp.models.layers import DecoderConfig
from jaxtp.models.llama import Llama, LlamaConfig, RopeScaling
from jaxtp.models.lora import Lora, merge_lora, unmerge_lora
from jaxtp.models.quantized import quantize
from jaxtp.models.registry import PRESETS, Config, abstract, build, config_of

__all__ = [
    "GPT",
    "PRESETS",
    "Config",
    "Decoder",
    "DecoderConfig",
    "GPTConfig",
    "Llama",
    "LlamaConfig",
    "Lora",
    "RopeScaling",
    "abstract",
    "build",
    "config_of",
    "cross_entropy",
    "generate",
    "merge_lora",
    "quantize",
    "unmerge_lora",
]
