"""One turn of a scan in anybody's model, on all replicas at once, and its backward pass alone.

The turn takes and gives arrays in pieces, tuples of as many as a replica's rows are taken in, or of
one for what has no rows. Its pullback, as `jax.vjp` gives it, is a tree. Of its leaves those that
depend on what turns hand on are kept; those that only depend on weights, which are there again in
the backward pass, are computed again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, Literal
from jax.sharding import PartitionSpec

from jaxtp.activations.ahead.one_trace import OneTrace
from jaxtp.activations.ahead.passes import is_float
from jaxtp.activations.ahead.weights import Weights
from jaxtp.plan.trees import PyTree
from jaxtp.rules.jaxpr.reentry import bind, read

Pieces = tuple[Any, ...]

Body = Callable[[Sequence[Pieces]], list[Pieces]]
"""Constants, what is carried and a row -> what is carried, and what else the turn gives."""


@dataclasses.dataclass(frozen=True)
class Turn:
    """A scan's body on one replica.

    Attributes:
        body: It.
        num_carry: How many of its results are carried.
        rows: The type of each row; weights come in that of products.
    """

    body: Body
    num_carry: int
    rows: Sequence[Any]

    def __call__(self, x: list[Pieces], w: PyTree, around: Any) -> tuple[list[Pieces], list[Any]]:
        """What is carried, and what else it gives.

        Args:
            x: What is carried.
            w: Rows that have gradients, by number.
            around: Constants, and the other rows by number.
        """
        constants, others = around
        # The body converts a weight to its products' type by itself; both conversions cancel.
        rows = [
            (w[str(n)].astype(dtype) if str(n) in w else others[str(n)],)
            for n, dtype in enumerate(self.rows)
        ]
        out = self.body([*constants, *x, *rows])
        return out[: self.num_carry], out[self.num_carry :]

    def vjp(self, x: list[Pieces], w: PyTree, around: Any) -> tuple[Any, Any]:
        """What the turn gives, and the pullback of its floats."""
        constants, others = around

        def floats(x_floats: list[Any], w: PyTree, constant_floats: list[Any]) -> Any:
            given = _filled(constants, constant_floats), others
            out = self(_filled(x, x_floats), w, given)
            return [floats_of(one) for one in out], out

        _, pull, out = jax.vjp(floats, floats_of(x), w, floats_of(constants), has_aux=True)
        return out, pull


@dataclasses.dataclass(frozen=True)
class Pullback:
    """What differentiating a turn keeps.

    Attributes:
        trace: The turn and its pullback.
        sources: Where each leaf comes from: what is kept, the arguments, or what is computed again;
            with its number there.
        kept: Numbers of the leaves that are kept.
        again: Variables of the leaves that are computed again.
    """

    trace: OneTrace
    sources: tuple[tuple[str, int], ...]
    kept: tuple[int, ...]
    again: tuple[Any, ...]

    @classmethod
    def of(cls, turn: Turn, x: Any, w: PyTree, around: Any, in_rows: Sequence[bool]) -> "Pullback":
        """Traces a turn on one replica.

        Args:
            turn: It.
            x: Structs of what it takes.
            w: Likewise.
            around: Likewise.
            in_rows: Which leaves of `x`, `w` and `around` have the batch in them.
        """
        trace = OneTrace.of(turn.vjp, x, w, around)
        jaxpr, num_x = trace.jaxpr, len(jax.tree.leaves(x))
        arguments = {id(var): n for n, var in enumerate(jaxpr.invars)}
        carried = {id(var) for var in jaxpr.invars[:num_x]}
        rows = {id(v) for v, lies in zip(jaxpr.invars, in_rows, strict=True) if lies}
        changing = _reached(jaxpr, carried | rows)
        sources: list[tuple[str, int]] = []
        kept: dict[int, tuple[int, int]] = {}  # id of a variable -> number among the kept, leaf
        again: list[Any] = []
        for leaf, var in enumerate(trace.leaves):
            if id(var) in arguments and id(var) not in carried:
                sources.append(("argument", arguments[id(var)]))
            elif id(var) in changing:
                number, _ = kept.setdefault(id(var), (len(kept), leaf))
                sources.append(("kept", number))
            else:
                sources.append(("again", len(again)))
                again.append(var)
        numbers = tuple(leaf for _, leaf in kept.values())
        return cls(trace, tuple(sources), numbers, tuple(again))

    def forward(self, x: Any, w: PyTree, around: Any) -> tuple[Any, list[Any]]:
        """What the turn gives, and what is kept of it."""
        out, leaves = self.trace(x, w, around)
        return out, [leaves[n] for n in self.kept]

    def __call__(self, kept: Sequence[Any], x: Any, w: PyTree, around: Any) -> Any:
        """The pullback again.

        Args:
            kept: Of the forward pass.
            x: What the turn took, of which nothing but its structure is looked at.
            w: As it took them.
            around: Likewise.
        """
        arguments = [*jax.tree.leaves(x), *jax.tree.leaves((w, around))]
        unknown = len(jax.tree.leaves(x))
        known = dict(enumerate(arguments[unknown:], unknown))
        computed = _run(self.trace.closed, known, self.again)
        found = {"kept": kept, "argument": arguments, "again": computed}
        pullback = self.trace.pullback
        return jax.tree.unflatten(pullback, [found[where][n] for where, n in self.sources])


@dataclasses.dataclass(frozen=True)
class ScanRun:
    """A `LayerRun` of a scan.

    Attributes:
        turn: Its body.
        weights: How rows with gradients come and gradients go.
        num_layers: Turns.
        pullback: What differentiating a turn keeps.
        x: Structs of what it carries on one replica.
        axes: Of what it carries, of its constants and of the other rows: 0 for what differs between
            replicas, else None.
        shared: Of each of its constants' floats whether all replicas have the same.
    """

    turn: Turn
    weights: Weights
    num_layers: int
    pullback: Pullback
    x: Any
    axes: tuple[Any, Any, Mapping[str, Any]]
    shared: Sequence[bool]

    def around(self, context: Any, row: Any) -> Any:
        """What one turn takes beside what is carried, and weights."""
        return context, row

    def forward(self, x: Any, w: PyTree, context: Any) -> tuple[Any, Any, Any]:
        """One turn on all replicas."""

        def one(x: Any, w: PyTree, around: Any) -> Any:
            (carry, ys), kept = self.pullback.forward(x, w, around)
            return carry, ys, kept

        x_axes, *around = self.axes
        mapped = self.weights.replicas.mapped(one, (x_axes, None, tuple(around)), (x_axes, 0, 0))
        return mapped(x, w, context)

    def value(self, x: Any, w: PyTree, context: Any) -> tuple[Any, Any, tuple[()]]:
        """One turn by the functions of custom rules, of which their derivatives may differ."""
        x_axes, *around = self.axes
        mapped = self.weights.replicas.mapped(
            self.turn.__call__, (x_axes, None, tuple(around)), (x_axes, 0)
        )
        return *mapped(x, w, context), ()

    def backward(
        self, kept: Any, w: PyTree, context: Any, d_x: Any, d_y: Any
    ) -> tuple[Any, PyTree, Any]:
        """Its backward pass."""

        def one(kept: Any, w: PyTree, around: Any, d_x: Any, d_y: Any) -> Any:
            return self.pullback(kept, self.x, w, around)([d_x, d_y])

        axes = (0, None, self.axes[1:], 0, 0)
        found = self.weights.replicas.mapped(one, axes)(kept, w, context, d_x, d_y)
        d_x, d_w, d_context = found
        return d_x, self.weights.place_partial(d_w), [self._placed(g) for g in d_context]

    def of_context(self, sums: Any) -> list[Any]:
        """Of constants that all replicas share the sum over them."""
        axes = tuple(range(len(self.weights.replicas.axes)))
        pairs = zip(sums, self.shared, strict=True)
        return [lax.reduce_sum(g, axes) if shared else g for g, shared in pairs]

    def _placed(self, g: jax.Array) -> jax.Array:
        replicas = self.weights.replicas
        free = [PartitionSpec.UNCONSTRAINED] * (g.ndim - len(replicas.axes))
        return replicas.active.place(g, *replicas.axes, *free)


def floats_of(tree: Any) -> list[Any]:
    """The leaves that have gradients."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _filled(tree: Any, floats: Sequence[Any]) -> Any:
    """A tree with other floats."""
    rest, (found, structure) = iter(floats), jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [next(rest) if is_float(x) else x for x in found])


def _reached(jaxpr: Jaxpr, sources: set[int]) -> set[int]:
    """Ids of the variables that depend on some, those included."""
    found = set(sources)
    for equation in jaxpr.eqns:
        if any(id(var) in found for var in equation.invars):
            found |= {id(var) for var in equation.outvars}
    return found


def _run(traced: Any, arguments: Mapping[int, Any], wanted: Sequence[Any]) -> list[Any]:
    """Some variables of a program of which some arguments are known."""
    jaxpr = traced.jaxpr
    needed = {id(var) for var in wanted}
    equations: list[Any] = []
    for equation in reversed(jaxpr.eqns):
        if any(id(var) in needed for var in equation.outvars):
            needed |= {id(v) for v in equation.invars if not isinstance(v, Literal)}
            equations.append(equation)
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    known |= {jaxpr.invars[n]: value for n, value in arguments.items()}
    for equation in reversed(equations):
        results = bind(equation, [read(var, known) for var in equation.invars])
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(var, known) for var in wanted]
