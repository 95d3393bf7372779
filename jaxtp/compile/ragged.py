"""Ragged products that XLA computes densely: all groups on all rows.

`jax.lax.ragged_dot` needs one group for each row. Without a kernel for it XLA masks the rows of
each group and multiplies them by all groups, in one large product that nothing gives away but its
FLOPs: for a mixture of 128 experts 128 times those that are needed.
"""

import re

from jaxtp.compile.hlo import Module
from jaxtp.compile.instruction_work import own_products

_RAGGED = re.compile(r"chlo\.ragged_dot.*: \(tensor<[^>]*>, tensor<[^>]*>, tensor<(\d+)xi\d+>\)")
_NAME = "ragged_dot"

INSTEAD = (
    "Give every expert the same room and multiply all by one batched product, as jaxtp.models does "
    "(docs/experts.md)"
)
"""What a model should do with its experts."""


def ragged_groups(text: str) -> int:
    """The most groups of any ragged product in a lowered program (StableHLO); 0 without any."""
    return max((int(found[1]) for found in _RAGGED.finditer(text)), default=0)


def dense_ragged(module: Module, groups: int, all_flops: float) -> str:
    """A note on the ragged products that were compiled densely; "" without any.

    Those that a kernel computes are no matrix products of the compiled program.

    Args:
        module: The compiled program.
        groups: What `ragged_groups` found before it was compiled.
        all_flops: FLOPs of all matrix products of a device and step.
    """
    dense = {
        (computation.name, one.name): module.counts[computation.name]
        * sum(products.flops for products in own_products(computation, one))
        for computation in module.computations.values()
        for one in computation
        if _NAME in one.op_name
    }
    flops = sum(dense.values())
    if groups < 2 or not flops:
        return ""
    computation, name = max(dense, key=lambda place: dense[place])
    source = module.source(module.computations[computation].instructions[name])
    at = f" at {source}" if source else ""
    return (
        f"ragged_dot{at} is computed densely: all {groups} groups on every row, {groups} x the "
        f"FLOPs needed and {flops / all_flops:.0%} of the step's. {INSTEAD}"
    )
