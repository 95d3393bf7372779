"""What published checkpoints call each parameter, and how they store it.

One row per parameter: the tensor's name, with `{}` for each leading dim of the parameter that is
separate tensors in the file (layers, then experts), and the dims of one tensor as stored and as the
model has them. Parentheses are one stored dim that the model has as several, major to minor.
PyTorch's linear layers store (out, in), GPT-2's (in, out).
"""

import math
import re
from typing import NamedTuple

from jaxtp.models.gpt import GPTConfig
from jaxtp.models.presets import Config


class Stored(NamedTuple):
    """How a checkpoint stores one parameter.

    Attributes:
        name: Name of a tensor, with `{}` for each leading dim of the parameter.
        dims: Dims of one tensor as stored -> as the model has them; without an arrow they agree.
    """

    name: str
    dims: str


class Storage(NamedTuple):
    """A parameter's dims as stored, in sizes.

    Attributes:
        stack: Sizes of the leading dims that are separate tensors.
        shape: One tensor's shape in the file.
        split: The same with merged dims apart.
        order: Which dim of `split` each further dim of the parameter is.
    """

    stack: tuple[int, ...]
    shape: tuple[int, ...]
    split: tuple[int, ...]
    order: tuple[int, ...]


LLAMA = {
    "embed_tokens/embedding": Stored("model.embed_tokens.weight", "v d"),
    "layers/input_layernorm/scale": Stored("model.layers.{}.input_layernorm.weight", "d"),
    "layers/self_attn/q_proj/kernel": Stored(
        "model.layers.{}.self_attn.q_proj.weight", "(n h) d -> d n h"
    ),
    "layers/self_attn/q_proj/bias": Stored("model.layers.{}.self_attn.q_proj.bias", "(n h) -> n h"),
    "layers/self_attn/k_proj/kernel": Stored(
        "model.layers.{}.self_attn.k_proj.weight", "(k h) d -> d k h"
    ),
    "layers/self_attn/k_proj/bias": Stored("model.layers.{}.self_attn.k_proj.bias", "(k h) -> k h"),
    "layers/self_attn/v_proj/kernel": Stored(
        "model.layers.{}.self_attn.v_proj.weight", "(k h) d -> d k h"
    ),
    "layers/self_attn/v_proj/bias": Stored("model.layers.{}.self_attn.v_proj.bias", "(k h) -> k h"),
    "layers/self_attn/o_proj/kernel": Stored(
        "model.layers.{}.self_attn.o_proj.weight", "d (n h) -> n h d"
    ),
    "layers/self_attn/q_norm/scale": Stored("model.layers.{}.self_attn.q_norm.weight", "h"),
    "layers/self_attn/k_norm/scale": Stored("model.layers.{}.self_attn.k_norm.weight", "h"),
    "layers/post_attention_layernorm/scale": Stored(
        "model.layers.{}.post_attention_layernorm.weight", "d"
    ),
    "layers/mlp/gate_proj/kernel": Stored("model.layers.{}.mlp.gate_proj.weight", "f d -> d f"),
    "layers/mlp/up_proj/kernel": Stored("model.layers.{}.mlp.up_proj.weight", "f d -> d f"),
    "layers/mlp/down_proj/kernel": Stored("model.layers.{}.mlp.down_proj.weight", "d f -> f d"),
    "layers/mlp/router/kernel": Stored(
        "model.layers.{}.block_sparse_moe.gate.weight", "e d -> d e"
    ),
    "layers/mlp/experts/gate_proj/kernel": Stored(
        "model.layers.{}.block_sparse_moe.experts.{}.w1.weight", "f d -> d f"
    ),
    "layers/mlp/experts/up_proj/kernel": Stored(
        "model.layers.{}.block_sparse_moe.experts.{}.w3.weight", "f d -> d f"
    ),
    "layers/mlp/experts/down_proj/kernel": Stored(
        "model.layers.{}.block_sparse_moe.experts.{}.w2.weight", "d f -> f d"
    ),
    "norm/scale": Stored("model.norm.weight", "d"),
    "lm_head/kernel": Stored("lm_head.weight", "v d -> d v"),
}
"""Llama, Mistral, Qwen2, Qwen3, Gemma and Mixtral; a model has some of these."""

GPT2 = {
    "wte/embedding": Stored("transformer.wte.weight", "v d"),
    "wpe/embedding": Stored("transformer.wpe.weight", "t d"),
    "h/ln_1/scale": Stored("transformer.h.{}.ln_1.weight", "d"),
    "h/ln_1/bias": Stored("transformer.h.{}.ln_1.bias", "d"),
    "h/attn/c_attn/kernel": Stored("transformer.h.{}.attn.c_attn.weight", "d (3 n h) -> d 3 n h"),
    "h/attn/c_attn/bias": Stored("transformer.h.{}.attn.c_attn.bias", "(3 n h) -> 3 n h"),
    "h/attn/c_proj/kernel": Stored("transformer.h.{}.attn.c_proj.weight", "(n h) d -> n h d"),
    "h/attn/c_proj/bias": Stored("transformer.h.{}.attn.c_proj.bias", "d"),
    "h/ln_2/scale": Stored("transformer.h.{}.ln_2.weight", "d"),
    "h/ln_2/bias": Stored("transformer.h.{}.ln_2.bias", "d"),
    "h/mlp/c_fc/kernel": Stored("transformer.h.{}.mlp.c_fc.weight", "d f"),
    "h/mlp/c_fc/bias": Stored("transformer.h.{}.mlp.c_fc.bias", "f"),
    "h/mlp/c_proj/kernel": Stored("transformer.h.{}.mlp.c_proj.weight", "f d"),
    "h/mlp/c_proj/bias": Stored("transformer.h.{}.mlp.c_proj.bias", "d"),
    "ln_f/scale": Stored("transformer.ln_f.weight", "d"),
    "ln_f/bias": Stored("transformer.ln_f.bias", "d"),
}
"""GPT-2."""

HEAD = "lm_head.weight"
"""Never has the prefix of the other names. Files of tied models may hold it; they need not."""

BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
"""Tensors in older files that are no parameters: rotary frequencies and causal masks."""


def table_of(config: Config) -> dict[str, Stored]:
    """The table for a config's model, parameter path -> how it is stored."""
    return GPT2 if isinstance(config, GPTConfig) else LLAMA


def storage(stored: Stored, shape: tuple[int, ...]) -> Storage:
    """How a parameter of this shape (elements) is stored.

    >>> storage(Stored("layers.{}.o.weight", "d (n h) -> n h d"), (2, 4, 8, 16))
    Storage(stack=(2,), shape=(16, 32), split=(16, 4, 8), order=(1, 2, 0))
    """
    num_stacked = stored.name.count("{}")
    left, _, right = stored.dims.partition(" -> ")
    merged = [group.strip("()").split() for group in re.findall(r"\(.*?\)|\S+", left)]
    letters = [letter for group in merged for letter in group]
    model_letters = right.split() or letters
    sizes = dict(zip(model_letters, shape[num_stacked:], strict=True))
    return Storage(
        stack=shape[:num_stacked],
        shape=tuple(math.prod(sizes[letter] for letter in group) for group in merged),
        split=tuple(sizes[letter] for letter in letters),
        order=tuple(letters.index(letter) for letter in model_letters),
    )
