"""What the loops over layers share: turns that hand large arrays on, one layer, no gradient."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxtp.plan.trees import PyTree


def in_pairs(turns: int, body: Callable[[jax.Array | int, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop(0, turns, body, carry)` with two turns in the loop's body.

    What a turn hands on lies in one buffer while the next turn fills the other. With one turn in
    the body XLA copies gathered weights and gradients at its end: three copies of a layer each way.
    """

    def pair(j: jax.Array, carry: Any) -> Any:
        return body(2 * j + 1, body(2 * j, carry))

    if turns > 1:
        carry = lax.fori_loop(0, turns // 2, pair, carry)
    return body(turns - 1, carry) if turns % 2 else carry


def take(stacked: PyTree, index: jax.Array | int) -> PyTree:
    """One layer of stacked arrays."""

    def one(w: jax.Array) -> jax.Array:
        return lax.dynamic_index_in_dim(w, index, keepdims=False)

    return jax.tree.map(one, stacked)


@jax.custom_jvp
def no_gradient(x: jax.Array) -> jax.Array:
    """`x`, of which there is no derivative."""
    return x


@no_gradient.defjvp
def _refuse(_primals: Any, _tangents: Any) -> Any:
    raise NotImplementedError("layers give no gradient of what blocks take as context")
