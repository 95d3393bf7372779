"""Model FLOPs of a step, and the parameters that its products are with."""

import dataclasses
import math

from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.roles import Role

VECTORS = frozenset(
    {Role.NORM, Role.COLUMN_BIAS, Role.ROW_BIAS, Role.POSITION, Role.HEAD_TABLE, Role.CACHE}
)
"""Roles of parameters that multiply no matrix, whatever their shape."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepFlops:
    """Matrix-product FLOPs of one training step of the whole model, recomputation left out.

    Attributes:
        projections: Of the products with parameters.
        attention: Of scores and values, every position with every other.
    """

    projections: float
    attention: float

    @property
    def full(self) -> float:
        """With attention counted in full, as Megatron-LM and NVIDIA's tables do."""
        return self.projections + self.attention

    @property
    def causal(self) -> float:
        """With half of the attention, which is what a causal mask leaves (MaxText since 2025)."""
        return self.projections + self.attention / 2


def train_flops(
    *,
    matmul_params: int,
    tokens: int,
    layers: int,
    heads: int,
    head_dim: int,
    seq: int,
    value_dim: int | None = None,
) -> StepFlops:
    """FLOPs of forward and backward.

    A product takes 2 FLOPs per parameter and token forward and twice that backward (6 in all,
    Kaplan et al. 2020, section 2.1); scores and values take 2 x seq x heads x head_dim each per
    token and layer forward, three times that in all (Narayanan et al. 2021, appendix A).

    Args:
        matmul_params: Parameters that multiply activations: all but tables that are looked up and
            norms.
        tokens: Tokens of the global batch.
        layers: Attention layers.
        heads: Query heads of one layer.
        head_dim: Width of one head, in elements.
        seq: Tokens of one sequence.
        value_dim: Width of its values; None: that of the head.

    >>> train_flops(matmul_params=10, tokens=3, layers=0, heads=1, head_dim=1, seq=1).full
    180
    """
    widths = head_dim + (head_dim if value_dim is None else value_dim)
    return StepFlops(
        projections=6 * matmul_params * tokens,
        attention=3 * 2 * seq * heads * widths * tokens * layers,
    )


def matmul_params(plan: Plan, *, tied: bool = False, dims: ModelDims | None = None) -> int:
    """Elements of a plan's parameters that multiply a token's activations, global.

    Matrices count; norms, biases and looked-up tables do not, unless the head shares the token
    table. Of experts those count that a token has.

    Args:
        plan: The plan, of a model whose token table is called an embedding.
        tied: Whether the token table is the head too.
        dims: Says how many experts there are, and how many a token has; by default all.
    """
    tables = () if tied else ("embedding",)
    chosen, experts = (
        (dims.chosen, dims.experts) if dims and dims.chosen and dims.experts else (1, 1)
    )
    return sum(
        math.prod(d.shape) * (chosen if d.role is Role.EXPERT else experts) // experts
        for d in plan.decisions
        if len(d.shape) > 1 and d.role not in VECTORS and not d.path.endswith(tables)
    )


def is_tied(plan: Plan) -> bool:
    """Whether a decoder's token table is its head too."""
    return "lm_head/kernel" not in plan.params


def model_flops(plan: Plan, dims: ModelDims, *, tokens: int, seq: int) -> StepFlops:
    """FLOPs of one step of a model, recomputation left out.

    Args:
        plan: The plan.
        dims: Sizes of its model.
        tokens: Tokens of the global batch.
        seq: Tokens of one sequence.
    """
    return train_flops(
        matmul_params=matmul_params(plan, tied=is_tied(plan), dims=dims),
        tokens=tokens,
        layers=dims.layers,
        heads=dims.heads,
        head_dim=dims.head_dim,
        seq=seq,
        value_dim=dims.value_dim or None,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerParams:
    """Elements of the matrices of all layers, global, by what their products do.

    Attributes:
        columns: They read the residual stream: query, key, value, gate, up, router.
        attention_out: Attention's row product.
        mlp_out: The MLP's row product, or that of all experts.
    """

    columns: int
    attention_out: int
    mlp_out: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.columns + self.attention_out + self.mlp_out


def layer_params(plan: Plan, dims: ModelDims) -> LayerParams:
    """The matrices of a decoder's layers.

    Args:
        plan: The plan.
        dims: Sizes of its model.
    """
    sizes = {
        d.path: math.prod(d.shape)
        for d in plan.decisions
        if len(d.shape) > 1 and d.role not in VECTORS | {Role.VOCAB} and not _is_table(d.path)
    }
    total = sum(sizes.values())
    # Row products write the residual stream; of experts only those do.
    out = sum(size for path, size in sizes.items() if _writes_stream(plan[path], dims))
    values = dims.heads * (dims.value_dim or dims.head_dim)
    attention_out = dims.layers * values * dims.hidden_size
    return LayerParams(
        columns=total - out, attention_out=attention_out, mlp_out=out - attention_out
    )


def _writes_stream(decision: ParamDecision, dims: ModelDims) -> bool:
    is_expert = decision.role is Role.EXPERT and decision.shape[-1] == dims.hidden_size
    return decision.role is Role.ROW or is_expert


def _is_table(path: str) -> bool:
    return path.endswith(("embedding", "lm_head/kernel"))
