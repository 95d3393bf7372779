"""Hiding tensor-parallel communication: two halves of the batch take turns.

Stage in: the branches of stacked layers as data, the residual stream, and the plan in force. Stage
out: the same numbers, from a program in which nearly every all-reduce of one half moves while the
other half computes.

`partial` runs a block without summing its result over the devices; `forward` and `backward` decide
when the sums are taken. All of it is ordinary single-program JAX: XLA still writes every
collective.
"""

from jaxtp.layers.interleaving.halves import interleave
from jaxtp.layers.interleaving.partial_blocks import Branch, Context

__all__ = ["Branch", "Context", "interleave"]
