"""Bounds from the arithmetic: how far two orders of the same float32 sums may be apart.

Rounding of a sum of n terms grows as sqrt(n) epsilons of its largest partial sum (Higham and Mary,
"A new approach to probabilistic rounding error analysis", 2019); a bound that was once seen on one
CPU says nothing about the next.
"""

import math

import jax
import numpy as np

EPSILON = float(np.finfo(np.float32).eps)


def bound(terms, sums=10):
    """Relative error of `sums` sums of `terms` float32 terms, one after the other."""
    return sums * math.sqrt(terms) * EPSILON


def assert_close(got, want, terms):
    """Trees are equal up to the order of their sums, relative to each array's largest element.

    An array that is zero in truth, such as the gradient of a key bias, holds rounding of its
    neighbours' size: none is held to less than a hundredth of the largest.
    """
    largest = max(float(np.abs(w).max()) for w in jax.tree.leaves(want))
    for (path, g), w in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        scale = max(float(np.abs(w).max()), largest / 100)
        np.testing.assert_allclose(
            np.asarray(g) / scale,
            np.asarray(w) / scale,
            rtol=0,
            atol=bound(terms),
            err_msg=jax.tree_util.keystr(path),
        )
