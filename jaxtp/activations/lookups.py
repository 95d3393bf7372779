"""A lookup of a single row in a sharded table, as of two.

Of one index XLA makes a slice, for which it brings the whole table to every device. Of two, as of
many, each device looks among its own rows, and an all-reduce adds what they find.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp


def rows_of(equation: Any) -> int:
    """How many indices a `gather` looks up, of all devices; 0 if it is no lookup of rows.

    That is one that takes single entries of its operand's first dim, for each index in turn.
    """
    dims, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    is_lookup = (
        dims.collapsed_slice_dims == (0,) == dims.start_index_map
        and not dims.operand_batching_dims
        and sizes[0] == 1
        and 0 not in dims.offset_dims
    )
    *shape, _ = equation.invars[1].aval.shape
    return math.prod(shape) if is_lookup and shape else 0


def twice(equation: Any, table: jax.Array, indices: jax.Array) -> jax.Array:
    """What a `gather` finds, each index looked up twice."""
    doubled = jax.lax.optimization_barrier(jnp.repeat(indices, 2, axis=0))  # or XLA undoes it
    return equation.primitive.bind(table, doubled, **equation.params)[::2]
