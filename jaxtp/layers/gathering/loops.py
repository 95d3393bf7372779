"""Loops whose turns hand large arrays to each other."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def in_pairs(turns: int, body: Callable[[jax.Array | int, Any], Any], carry: Any) -> Any:
    """`lax.fori_loop(0, turns, body, carry)` with two turns in the loop's body.

    What a turn hands on lies in one buffer while the next turn fills the other. With one turn in
    the body XLA copies gathered weights and gradients at its end: three copies of a layer each way.
    """

    def pair(j: jax.Array, carry: Any) -> Any:
        return body(2 * j + 1, body(2 * j, carry))

    carry = lax.fori_loop(0, turns // 2, pair, carry)
    return body(turns - 1, carry) if turns % 2 else carry
