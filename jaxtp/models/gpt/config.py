"""Sizes and options of the GPT-2 family."""

import dataclasses

from jaxtp.errors import SizeMismatch
from jaxtp.models.bounds import Epsilon, Tokens
from jaxtp.models.layers import DecoderConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig(DecoderConfig):
    """Sizes and options of one GPT-2-like model.

    Raises:
        SizeMismatch: TP003, if the hidden size does not divide by the heads.
    """

    max_position_embeddings: Tokens
    """Rows of the position table: the longest sequence, in tokens."""

    layer_norm_epsilon: Epsilon = 1e-5
    """Added to the variance before its root."""

    def __post_init__(self) -> None:
        # Not super(): a slotted dataclass is a second class object, and the closure cell names the
        # first one.
        DecoderConfig.__post_init__(self)
        if self.hidden_size % self.num_attention_heads:
            raise SizeMismatch(
                f"hidden size {self.hidden_size} does not divide by {self.num_attention_heads}",
                where="num_attention_heads",
                fix="use a divisor of hidden_size",
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        """Number of key/value heads: one for each query head."""
        return self.num_attention_heads

    @property
    def intermediate_size(self) -> int:
        """Width of the MLP: four times the hidden size."""
        return 4 * self.hidden_size
