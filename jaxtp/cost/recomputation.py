"""What each remat policy runs again in the backward pass: products, and all-reduces behind them."""

import dataclasses
from collections.abc import Mapping

from jaxtp.cost.flops import layer_params
from jaxtp.plan.decisions import Plan
from jaxtp.rules.model_dims import ModelDims


@dataclasses.dataclass(frozen=True, slots=True)
class Reruns:
    """How often the backward pass runs each kind of product of a layer once more.

    Attributes:
        columns: Products that read the residual stream: query, key, value, gate, up.
        attention: Scores and values.
        attention_out: The row product behind attention, with its all-reduce.
        mlp_out: The row product behind the MLP, with its all-reduce.
    """

    columns: int = 0
    attention: int = 0
    attention_out: int = 0
    mlp_out: int = 0


RERUNS: Mapping[str, Reruns] = {
    "none": Reruns(),
    # From a layer's input on. Its last product is left out: no gradient needs the result.
    "full": Reruns(columns=1, attention=1, attention_out=1),
    # What row products give is kept.
    "block_outputs": Reruns(columns=1, attention=1),
    # What products with parameters give is kept; scores and values are none.
    "dots": Reruns(attention=1),
    # All layers of a stage once, from what entered it, in which "block_outputs" keeps what it
    # keeps; then each layer as under that.
    "stage": Reruns(columns=2, attention=2, attention_out=1, mlp_out=1),
}
"""Remat policy -> what runs again, as FLOPs of the compiled step show (tests/test_flops.py)."""


def reruns_of(remat: str, plan: Plan) -> Reruns:
    """What runs again in a plan's program; "stage" without stages is "block_outputs".

    Args:
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        plan: The plan.
    """
    return RERUNS["block_outputs" if remat == "stage" and plan.stages is None else remat]


def recomputed_flops(remat: str, plan: Plan, dims: ModelDims, *, tokens: int, seq: int) -> float:
    """FLOPs of one step of the whole model that recomputation adds to `model_flops(...).full`.

    A product runs forward with 2 FLOPs per parameter and token, and scores and values with 4 x seq
    x heads x head_dim per token, as in `train_flops`; each as often as `RERUNS` says. Attention is
    taken to keep its scores: a fused kernel runs them once more under every policy.

    Args:
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        plan: The plan.
        dims: Sizes of the model.
        tokens: Tokens of the global batch.
        seq: Tokens of one sequence.
    """
    again = reruns_of(remat, plan)
    params = layer_params(plan, dims)
    products = (
        again.columns * params.columns
        + again.attention_out * params.attention_out
        + again.mlp_out * params.mlp_out
    )
    scores = again.attention * 2 * seq * dims.heads * dims.head_widths * dims.layers
    return (2 * products + scores) * tokens
