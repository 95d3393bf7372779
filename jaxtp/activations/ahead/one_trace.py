"""A function and its pullback, traced once for both passes.

JAX orders the leaves of a pullback by how it was traced: run eagerly, a function has them in
another order than inside of a loop. Numbers of leaves therefore hold for one trace alone, and
whoever keeps some of them by number runs that trace.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun


@dataclasses.dataclass(frozen=True)
class OneTrace:
    """A program that gives results and the leaves of their pullback.

    Attributes:
        closed: It, with its constants.
        results: Structure of the results.
        pullback: Structure of the pullback.
    """

    closed: Any
    results: Any
    pullback: Any

    @classmethod
    def of(cls, vjp: Callable[..., tuple[Any, Any]], *structs: Any) -> "OneTrace":
        """Traces `vjp`, which gives results and their pullback, for arguments of these structs."""
        closed, (results, pull) = jax.make_jaxpr(vjp, return_shape=True)(*structs)
        return cls(closed, jax.tree.structure(results), jax.tree.structure(pull))

    @property
    def jaxpr(self) -> Jaxpr:
        """The program without its constants."""
        return self.closed.jaxpr

    @property
    def leaves(self) -> Sequence[Any]:
        """Variables of the pullback's leaves."""
        return self.jaxpr.outvars[self.results.num_leaves :]

    def __call__(self, *arguments: Any) -> tuple[Any, list[Any]]:
        """The results for arguments like those traced, and the leaves of the pullback."""
        given = jax.tree.leaves(arguments)
        pairs = zip(given, self.closed.in_avals, strict=True)
        assert all((x.shape, x.dtype) == (aval.shape, aval.dtype) for x, aval in pairs)
        found = jaxpr_as_fun(self.closed)(*given)
        num = self.results.num_leaves
        return jax.tree.unflatten(self.results, found[:num]), found[num:]
