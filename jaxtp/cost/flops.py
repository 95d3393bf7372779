"""What a step costs before anything is compiled: FLOPs from sizes alone.

Seconds and wire bytes come from the compiled program (`compile/`), or as a floor from `cost/floor`.
"""

import dataclasses
import math

from jaxtp.plan.decisions import Plan
from jaxtp.rules.roles import Role


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
    *, matmul_params: int, tokens: int, layers: int, heads: int, head_dim: int, seq: int
) -> StepFlops:
    """FLOPs of forward and backward.

    A product takes 2 FLOPs per parameter and token forward and twice that backward (6 in all,
    Kaplan et al. 2020, section 2.1); scores and values take 2 x 2 x seq x heads x head_dim per
    token and layer forward, three times that in all (Narayanan et al. 2021, appendix A).

    Args:
        matmul_params: Parameters that multiply activations: all but tables that are looked up and
            norms.
        tokens: Tokens of the global batch.
        layers: Attention layers.
        heads: Query heads of one layer.
        head_dim: Width of one head, in elements.
        seq: Tokens of one sequence.

    >>> train_flops(matmul_params=10, tokens=3, layers=0, heads=1, head_dim=1, seq=1).full
    180
    """
    return StepFlops(
        projections=6 * matmul_params * tokens,
        attention=3 * 4 * seq * heads * head_dim * tokens * layers,
    )


def matmul_params(plan: Plan, *, tied: bool = False) -> int:
    """Elements of a plan's parameters that multiply activations, global.

    Matrices count; norms, biases and looked-up tables do not, unless the head shares the token
    table.

    Args:
        plan: The plan, of a model whose token table is called an embedding.
        tied: Whether the token table is the head too.
    """
    vectors = {Role.NORM, Role.COLUMN_BIAS, Role.ROW_BIAS, Role.POSITION, Role.HEAD_TABLE}
    tables = () if tied else ("embedding",)
    return sum(
        math.prod(d.shape)
        for d in plan.decisions
        if len(d.shape) > 1 and d.role not in vectors and not d.path.endswith(tables)
    )
