"""Windows along tokens that devices along cp share, in models that never heard of it.

Of a convolution or a pooling a device computes its own tokens, with edges of its neighbours', which
come by permutes. XLA would exchange the same edges, but its partitioner sums gradients of kernels
over too many devices, as `grouped_kernels` says, and loses gradients of overlapping windows of a
maximum. So no window is left to it with its tokens sharded; where edges alone do not do, tokens are
gathered.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from jaxtp.activations.grouped_kernels import (
    CONVOLUTION,
    Shared,
    convolve,
    free_axes,
    on_own_part,
)
from jaxtp.activations.sequences import Sequences
from jaxtp.rules.jaxpr.reentry import bind
from jaxtp.rules.jaxpr.walk import Scope, shape_of

OUTSIDE = {
    CONVOLUTION: 0.0,
    "reduce_window_sum": 0.0,
    "reduce_window_max": -jnp.inf,
    "reduce_window_min": jnp.inf,
}
"""Primitives with windows -> what they read in front of the first token and behind the last."""

PICKING = {"select_and_gather_add", "select_and_scatter_add"}
"""Derivatives of a pooling: the cotangent or tangent, and the operand that says who was picked."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenWindow:
    """A convolution, a pooling or a pooling's derivative along tokens.

    Attributes:
        number: Which entry of its parameters is about the tokens.
        source: Their dim in the operand.
        target: Their dim in the result.
        operands: How many of the first operands have the tokens.
        edges: How many tokens before and behind its own a device needs, fewer than none where it
            leaves some out; None where edges of its neighbours do not do.
    """

    number: int
    source: int
    target: int
    operands: int
    edges: tuple[int, int] | None

    def run(
        self,
        equation: Any,
        operands: Sequence[Any],
        axis: str,
        rows: Sequence[str],
        mesh: Mesh | AbstractMesh,
        place: Callable[..., Any],
    ) -> list[Any]:
        """The results of the equation, of which there is one.

        Args:
            equation: With the windows.
            operands: What it goes along, global; the kernel of a convolution behind it, on all
                devices along the axis.
            axis: The mesh axis that shards the tokens.
            rows: The mesh axes that share the rows of a grouped convolution.
            mesh: The mesh.
            place: `(x, {dim: axes})` -> `x` with these dims constrained.
        """
        if self.edges is None:
            # All tokens, in both directions: gradients come through the second constraint.
            gathered = [place(x, {self.source: ()}) for x in operands[: self.operands]]
            run = partial(convolve, axes=rows, mesh=mesh) if rows else bind
            (result,) = run(equation, [*gathered, *operands[self.operands :]])
            return [place(result, {self.target: ()})]
        padding = list(equation.params["padding"])
        padding[self.number] = (0, 0)
        params = equation.params | {"padding": tuple(padding)}
        mesh, rows, ways = free_axes(rows, mesh)

        def own(x: Any, *kernel: Any) -> Any:
            outside = OUTSIDE[equation.primitive.name]
            x = _with_edges(x, self, axis, mesh.shape[axis], outside)
            return equation.primitive.bind(x, *kernel, **params)

        shared: list[Shared] = [((axis,), self.source, self.target)]
        if rows:
            numbers = params["dimension_numbers"]
            if operands[0].shape[numbers.lhs_spec[0]] % ways == 0:
                shared.append((rows, numbers.lhs_spec[0], numbers.out_spec[0]))
        return [on_own_part(own, operands, shared, mesh)]


def window_of(scope: Scope, equation: Any, sequences: Sequences) -> TokenWindow | None:
    """How an equation's windows go along tokens that are shared, or None if it has none."""
    name, params = equation.primitive.name, equation.params
    if name not in OUTSIDE.keys() | PICKING or not sequences.axes:
        return None
    operands = 2 if name in PICKING else 1
    known = [scope.values.get(v) for v in equation.invars[:operands] if not isinstance(v, Literal)]
    after = scope.values.get(equation.outvars[0])
    dims = params.get("dimension_numbers")
    if dims is None:
        places = [(dim, dim) for dim, size in enumerate(params["window_dimensions"]) if size > 1]
    else:
        places = list(zip(dims.lhs_spec[2:], dims.out_spec[2:], strict=True))
    for source, target in places:
        found = (*((before, source) for before in known), (after, target))
        if any(value is not None and sequences.axes_of(value.dims[d]) for value, d in found):
            number = source if dims is None else dims.lhs_spec.index(source) - 2
            window = TokenWindow(number, source, target, operands, None)
            if name in PICKING:
                return window
            return dataclasses.replace(window, edges=_edges(equation, window, sequences.ways))
    return None


def _edges(equation: Any, window: TokenWindow, ways: int) -> tuple[int, int] | None:
    """As in `Window`."""
    params, number = equation.params, window.number
    stride, before = params["window_strides"][number], params["padding"][number][0]
    if dims := params.get("dimension_numbers"):
        size = shape_of(equation.invars[1].aval)[dims.rhs_spec[2 + number]]
        dilation, spread = params["rhs_dilation"][number], params["lhs_dilation"][number]
    else:
        size = params["window_dimensions"][number]
        dilation, spread = params["window_dilation"][number], params["base_dilation"][number]
    tokens = shape_of(equation.invars[0].aval)[window.source]
    results = shape_of(equation.outvars[0].aval)[window.target]
    is_plain = spread == 1 == params.get("batch_group_count", 1)
    # Else the results of a device are not those of its own tokens.
    if not is_plain or results * stride != tokens or results % ways:
        return None
    edges = before, (size - 1) * dilation + 1 - stride - before
    return edges if max(edges) <= tokens // ways else None


def _with_edges(x: Any, window: TokenWindow, axis: str, ways: int, outside: float) -> Any:
    """A device's own tokens and those beside them."""
    assert window.edges is not None
    dim, (before, behind) = window.source, window.edges
    length, index = x.shape[dim], jax.lax.axis_index(axis)
    if not jnp.issubdtype(x.dtype, jnp.inexact) and outside:
        limits = jnp.iinfo(x.dtype)
        outside = limits.max if outside > 0 else limits.min

    def edge(part: Any, step: int, outermost: int) -> Any:
        routes = [(i, i + step) for i in range(ways) if 0 <= i + step < ways]
        arrived = jax.lax.ppermute(part, axis, routes)  # zeros where nothing arrives
        filled = jnp.full_like(part, outside)
        return jnp.where(index == outermost, filled, arrived) if outside else arrived

    parts = [jax.lax.slice_in_dim(x, max(-before, 0), length + min(behind, 0), axis=dim)]
    if before > 0:
        last = jax.lax.slice_in_dim(x, length - before, None, axis=dim)
        parts.insert(0, edge(last, 1, 0))
    if behind > 0:
        parts.append(edge(jax.lax.slice_in_dim(x, 0, behind, axis=dim), -1, ways - 1))
    return jnp.concatenate(parts, axis=dim)
