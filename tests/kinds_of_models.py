"""Thirteen kinds of third-party model, each with the specs that an expert would write by hand."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import kinds_linen as linen
import kinds_nnx
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxtp.plan import trees

TP = 8
BATCH, SEQ = 2, 128
COLUMN, ROW, FIRST = P(None, "tp"), P("tp"), P("tp")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model.

    Attributes:
        apply: `(params, *inputs)` -> output.
        params: Tree of shapes in bfloat16.
        inputs: Structs.
        hand: Pattern of a whole path -> spec; what none matches is replicated.
    """

    apply: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]
    hand: Mapping[str, P]


KINDS: dict[str, Callable[[], Kind]] = {}


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def halved(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), tree)


STREAM = (bf16(BATCH, SEQ, 256),)


def of_nnx(name, module, inputs, hand):
    def build():
        plain, rebuild = trees.as_pytree(nnx.eval_shape(lambda: module(nnx.Rngs(0))))
        return Kind(lambda p, *xs: rebuild(p)(*xs), halved(plain), inputs, hand)

    KINDS[name] = build


def of_linen(name, module, inputs, hand):
    def build():
        variables = jax.eval_shape(module.init, jax.random.key(0), *inputs)
        return Kind(
            lambda p, *xs: module.apply({"params": p}, *xs),
            halved(variables["params"]),
            inputs,
            hand,
        )

    KINDS[name] = build


ATTENTION = {r".*/to_[qkv]/kernel": COLUMN, r".*/merge/kernel": ROW}
BLOCKS = ATTENTION | {
    r".*/grow/kernel": COLUMN,
    r".*/grow/bias": FIRST,
    r".*/shrink/kernel": ROW,
}
MIXERS = {
    r"Mix_\d/(ask|offer|content)/kernel": COLUMN,
    r"Mix_\d/gather/kernel": ROW,
    # Python makes the outer layer first.
    r"Think_\d/Dense_1/kernel": COLUMN,
    r"Think_\d/Dense_1/bias": FIRST,
    r"Think_\d/Dense_0/kernel": ROW,
}
EXPERTS = {r"Stack_0/(one|two)": FIRST}

of_nnx(
    "dense decoder",
    kinds_nnx.Dense,
    (ints(BATCH, SEQ),),
    BLOCKS | {"words/embedding": FIRST, "out/kernel": COLUMN},
)
of_linen("experts by einsum", linen.EinsumExperts(), STREAM, EXPERTS)
of_linen("experts by capacity", linen.CapacityExperts(), STREAM, EXPERTS)
of_nnx(
    "experts by ragged_dot",
    kinds_nnx.Ragged,
    STREAM,
    {"one": P(None, None, "tp"), "two": P(None, "tp")},
)
of_nnx(
    "latent attention",
    kinds_nnx.Latent,
    STREAM,
    {"spread_(q|kv)/kernel": COLUMN, "last/kernel": ROW},
)
of_nnx(
    "mamba-2",
    kinds_nnx.StateSpace,
    STREAM,
    {
        "(gate|value|step)/kernel": COLUMN,
        "step/bias|decay|jump": FIRST,
        "out/kernel": ROW,
    },
)
of_linen(
    "rwkv",
    linen.TimeMix(),
    STREAM,
    {"[rkvg]/kernel|key2/kernel": COLUMN, "decay|first": FIRST, "(o|val2)/kernel": ROW},
)
of_nnx(
    "u-net",
    kinds_nnx.UNet,
    (bf16(BATCH, 32, 32, 4), bf16(BATCH)),
    ATTENTION
    | {
        ".*/near/kernel": P(None, None, None, "tp"),
        ".*/near/bias|.*/post/(scale|bias)|.*/when/bias": FIRST,
        ".*/when/kernel": COLUMN,
        ".*/far/kernel": P(None, None, "tp"),
    },
)
of_linen(
    "convnext",
    linen.ConvNeXt(),
    (bf16(BATCH, 64, 64, 3),),
    {
        "Dense_[1357]/kernel": COLUMN,
        "Dense_[1357]/bias": FIRST,
        "Dense_[0246]/kernel": ROW,
    },
)
of_nnx("vit", kinds_nnx.ViT, (bf16(BATCH, 64, 64, 3),), BLOCKS)
of_linen(
    "encoder-decoder",
    linen.Translate(),
    (ints(BATCH, SEQ), ints(BATCH, SEQ)),
    MIXERS | {"Embed_0/embedding": FIRST},
)
of_linen(
    "audio",
    linen.Listen(),
    (bf16(BATCH, SEQ, 80),),
    MIXERS
    | {
        "Conv_0/kernel": P(None, None, "tp"),
        "Conv_0/bias": FIRST,
        "Conv_1/kernel": P(None, "tp"),
    },
)
of_nnx(
    "gated attention unit",
    kinds_nnx.GatedUnit,
    STREAM,
    {"(gate|value)/kernel": COLUMN, "(gate|value)/bias": FIRST, "out/kernel": ROW},
)
