"""Sizes of a model: what the user or a config object says about heads, widths and vocabulary."""

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any

from jaxtp.errors import BadConfig, SizeMismatch
from jaxtp.errors.arguments import is_whole

# One size, and how configuration classes spell it: Hugging Face's attribute names first, then the
# abbreviations of GPT-2 (n_*), T5 (d_*), Falcon and MPT, and those of MaxText and t5x.
SPELLINGS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "n_embd", "d_model", "embed_dim", "emb_dim", "base_emb_dim"),
    "heads": ("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_kv", "n_kv_heads"),
    "head_dim": ("head_dim", "d_kv", "d_head", "head_size"),
    "value_dim": ("v_head_dim",),
    "vocab_size": ("vocab_size", "n_vocab", "num_embed", "padded_vocab_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "chosen": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    "layers": ("num_hidden_layers", "num_layers", "n_layer", "n_layers"),
}

NOT_CONFIGS = (str, bytes, int, float, list, tuple, set, frozenset, os.PathLike)
"""What people give for a config that has no sizes by name."""


@dataclasses.dataclass(frozen=True, slots=True)
class ModelDims:
    """Known sizes of a model in elements or counts; 0 means unknown.

    Attributes:
        hidden_size: Width of the residual stream.
        heads: Query heads of one layer.
        kv_heads: Key/value heads of one layer.
        head_dim: Width of one head.
        value_dim: Width of its values, where that is another.
        vocab_size: Rows of the token table.
        experts: Experts of one mixture layer.
        chosen: Experts that a token has.
        layers: Layers of one stack.
        insist: Whether heads were given by keyword: then they must fit, while a config may speak of
            another part of the tree.
    """

    hidden_size: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    value_dim: int = 0
    vocab_size: int = 0
    experts: int = 0
    chosen: int = 0
    layers: int = 0
    insist: bool = False

    @property
    def head_widths(self) -> int:
        """Width of a head's keys and of its values together."""
        return self.head_dim + (self.value_dim or self.head_dim)

    @classmethod
    def of(
        cls,
        config: Any = None,
        *,
        heads: int | None = None,
        kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> "ModelDims":
        """Sizes from a config object or dict, with keyword sizes on top.

        Args:
            config: Anything with Hugging Face's attribute names (a transformers config, a dict, a
                dataclass); fields it lacks stay unknown.
            heads: Query heads.
            kv_heads: Key/value heads.
            head_dim: Width of a head.

        Raises:
            BadConfig: TP020, if the config is no object or dict, or a size no whole number.
            SizeMismatch: TP003, if query heads are not a multiple of kv heads, or a size is
                negative.
        """
        plain = isinstance(config, NOT_CONFIGS)
        found = {} if plain else {field: _read(config, names) for field, names in SPELLINGS.items()}
        # A class or a module of settings says sizes too; one that says none is a mistake.
        code = inspect.isroutine(config) or inspect.isclass(config) or inspect.ismodule(config)
        if plain or (code and not any(found.values())):
            raise BadConfig(
                f"is a {type(config).__name__}: {config!r:.60}",
                where="config",
                fix="the loaded config, not its file: an object or a dict with num_attention_heads",
            )
        given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        for name, value in given.items():
            if value is not None and not is_whole(value):
                raise BadConfig(
                    f"is {value!r}, a {type(value).__name__}", where=name, fix="an integer"
                )
        found.update({k: v for k, v in given.items() if v is not None})
        dims = cls(**found, insist=heads is not None)
        if dims.heads and dims.kv_heads and dims.heads % dims.kv_heads:
            raise SizeMismatch(
                f"{dims.heads} query heads are not a multiple of {dims.kv_heads} kv heads",
                fix="give heads= and kv_heads= of one layer, before any sharding",
            )
        if negative := {k: v for k, v in found.items() if v < 0}:
            raise SizeMismatch(f"sizes below 0: {negative}", fix="leave out sizes that are unknown")
        return dims


def _read(config: Any, names: tuple[str, ...]) -> int:
    """The first of `names` that a config has as an integer, or 0."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if is_whole(value):
            return int(value)
        if value is not None:
            raise BadConfig(
                f"is {value!r:.60}, a {type(value).__name__}",
                where=f"config.{name}",
                fix="an integer; leave it out where it differs between layers",
            )
    return 0
