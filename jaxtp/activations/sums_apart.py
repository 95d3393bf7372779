"""Products of a traced model with the sum over tensor-parallel devices as a step of its own.

As in `jaxtp.layers.interleaving.partial_blocks`: the devices are the leading dim of arrays, W, and
the sum over it stands where we say. Here one product at a time is rewritten, with the weight
reshaped so that each device's part is one entry; the local size of W is one, so the products are
those of the ordinary program.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True)
class SplitProduct:
    """An activation times a weight whose dim `split` is sharded over W devices.

    Attributes:
        params: Of the equation.
        weight: Which operand is the weight, 0 or 1.
        split: Its sharded dim.
        ways: W.
    """

    params: dict[str, Any]
    weight: int
    split: int
    ways: int

    @property
    def _dims(self) -> tuple[list[int], list[int]]:
        """The dims summed over, of the activation and of the weight."""
        summed, _ = self.params["dimension_numbers"]
        return list(summed[1 - self.weight]), list(summed[self.weight])

    @property
    def is_row(self) -> bool:
        """Whether the product sums over the sharded dim."""
        return self.split in self._dims[1]

    def parts(self, w: jax.Array) -> jax.Array:
        """The weight with its sharded dim as (W, rest)."""
        return _cut(w, self.split, self.ways)

    def column(self, x_W: jax.Array, w: jax.Array) -> jax.Array:
        """The product of every device's copy of an activation with its part of the weight.

        Args:
            x_W: Copies of the activation, (W, ...).
            w: As `parts` gives it, (..., W, rest, ...).
        """
        dims_x, dims_w = self._dims
        out = self._multiply(
            x_W, w, [d + 1 for d in dims_x], [d + (d > self.split) for d in dims_w], 0
        )
        free = [d for d in range(w.ndim - 1) if d not in dims_w]
        first = x_W.ndim - 1 - len(dims_x)
        place = free.index(self.split) + (first if self.weight else 0)
        out = jnp.moveaxis(out, 0, place)
        shape = out.shape
        return out.reshape(*shape[:place], shape[place] * shape[place + 1], *shape[place + 2 :])

    def row(self, x: jax.Array, w: jax.Array) -> jax.Array:
        """The parts of the product's sum, (W, ...).

        Args:
            x: The activation.
            w: As `parts` gives it, (..., W, rest, ...).
        """
        dims_x, dims_w = self._dims
        along = dims_x[dims_w.index(self.split)]
        x = _cut(x, along, self.ways)
        new_x = [d + (d >= along) for d in dims_x]
        new_w = [d + (d >= self.split) for d in dims_w]
        return self._multiply(x, w, new_x, new_w, along)

    def _multiply(
        self, x: jax.Array, w: jax.Array, dims_x: Sequence[int], dims_w: Sequence[int], batch: int
    ) -> jax.Array:
        kept = {k: self.params[k] for k in ("precision", "preferred_element_type")}
        sides = [(x, tuple(dims_x), (batch,)), (w, tuple(dims_w), (self.split,))]
        one, two = sides if self.weight else sides[::-1]
        numbers = ((one[1], two[1]), (one[2], two[2]))
        return jax.lax.dot_general(one[0], two[0], numbers, **kept)


def _cut(x: jax.Array, dim: int, ways: int) -> jax.Array:
    return x.reshape(*x.shape[:dim], ways, x.shape[dim] // ways, *x.shape[dim + 1 :])
