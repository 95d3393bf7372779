"""GPT-2 and GPT-3: learned positions, LayerNorm, GELU, biases, a tied head."""

from jaxtp.models.gpt.config import GPTConfig
from jaxtp.models.gpt.model import GPT
from jaxtp.models.gpt.presets import PRESETS
from jaxtp.models.gpt.published import FAMILIES

__all__ = ["FAMILIES", "GPT", "PRESETS", "GPTConfig"]
