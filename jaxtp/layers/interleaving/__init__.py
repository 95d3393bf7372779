"""Hiding tensor-parallel communication: two halves of the batch take turns.

`partial_blocks` runs a block without summing its result over the devices; `forward_pass` and
`backward_pass` decide when the sums are taken. All of it is ordinary single-program JAX: XLA still
writes every collective.
"""

from jaxtp.layers.interleaving.halves import interleave
from jaxtp.layers.interleaving.partial_blocks import Context, ResidualBranch

__all__ = ["Context", "ResidualBranch", "interleave"]
