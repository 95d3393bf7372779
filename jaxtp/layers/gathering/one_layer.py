"""One layer as the loops over layers run it: on all replicas at once, and its backward pass alone.

A layer is traced once, on one replica, to see in which type its products take each parameter and
what its remat policy keeps. Its pullback, as `jax.vjp` gives it, is a tree; leaves that are
arguments of the layer are given again in the backward pass, and only the others kept.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtp.activations.ahead.one_trace import OneTrace
from jaxtp.activations.ahead.product_types import product_type
from jaxtp.activations.ahead.weights import Replicas, Weights, weights_of
from jaxtp.activations.by_name import ActivePlan, in_force
from jaxtp.errors import NotInterleaved
from jaxtp.layers.gathering.draws import DRAWS, Draw, Layer, drawn_shapes
from jaxtp.layers.recomputation import Policy
from jaxtp.plan.trees import PyTree


@dataclasses.dataclass(frozen=True)
class GatheredRun:
    """What does not depend on arrays.

    Attributes:
        weights: How its parameters come and gradients go.
        num_layers: Of the stack.
        context_axes: Which entries of the context differ between replicas: 0, else None.
        trace: One layer on one replica, recomputed as the policy says, and its pullback.
        kept: Which of the pullback's leaves are kept of the forward pass, by number.
        given: The others: leaf -> number of the argument's leaf that it is.
        draw: What the layer draws, for all of the batch; None for one that draws nothing.
    """

    weights: Weights
    num_layers: int
    context_axes: Any
    trace: OneTrace
    kept: tuple[int, ...]
    given: Mapping[int, int]
    draw: Draw | None

    def around(self, context: Any, row: Any) -> Any:
        """What one layer takes beside the residual stream and weights."""
        return {**context, **row}

    def forward(
        self, x: jax.Array, w: PyTree, context: Any
    ) -> tuple[jax.Array, tuple[()], tuple[jax.Array, list[jax.Array]]]:
        """One layer on all replicas: the residual stream behind it, and what is kept."""

        def one(x: jax.Array, w: PyTree, context: Any) -> tuple[jax.Array, list[jax.Array]]:
            out, found = self.trace(x, w, context)
            return out, [found[n] for n in self.kept]

        axes = (0, None, self.context_axes)
        out, kept = self.weights.replicas.mapped(one, axes)(x, w, self._with_draws(context))
        return out, (), (x, kept)

    def value(
        self, x: jax.Array, w: PyTree, context: Any
    ) -> tuple[jax.Array, tuple[()], tuple[()]]:
        """The residual stream behind one layer."""
        return self.forward(x, w, context)[0], (), ()

    def backward(
        self,
        kept: tuple[jax.Array, list[jax.Array]],
        w: PyTree,
        context: Any,
        d_x: list[jax.Array],
        d_y: list[jax.Array],
    ) -> tuple[list[jax.Array], PyTree, tuple[()]]:
        """One layer's cotangents on all replicas: of its input, and of its weights (R, ...)."""
        del d_y
        x, others = kept

        def one(
            kept: list[jax.Array], x: jax.Array, w: PyTree, context: Any, d_x: jax.Array
        ) -> tuple[jax.Array, PyTree]:
            arguments = jax.tree.leaves((x, w, context))
            found = dict(zip(self.kept, kept, strict=True))
            found |= {leaf: arguments[number] for leaf, number in self.given.items()}
            with in_force(self.weights.replicas.inner):
                pull = jax.tree.unflatten(
                    self.trace.pullback, [found[n] for n in range(len(found))]
                )
                return pull(d_x)

        axes = (0, 0, None, self.context_axes, 0)
        context = self._with_draws(context)
        d_input, d_w = self.weights.replicas.mapped(one, axes)(others, x, w, context, d_x[0])
        return [d_input], self.weights.place_partial(d_w), ()

    def of_context(self, sums: tuple[()]) -> list[Any]:
        """None: layers give no gradient of what they take as context."""
        return [*sums]

    def _with_draws(self, context: Any) -> Any:
        if self.draw is None:
            return context
        join, axes = self.weights.replicas.join, self.context_axes
        whole = {name: one if axes[name] is None else join(one) for name, one in context.items()}
        return {**context, DRAWS: self.draw(whole)}


def trace_layer(
    body: Layer,
    policy: Policy | None,
    x_BTD: jax.Array,
    params: PyTree,
    context: Mapping[str, Any],
    rows: Mapping[str, Any],
    active: ActivePlan,
) -> GatheredRun:
    """Traces one layer on one replica, to see what its backward pass needs."""
    if policy is None:
        raise NotInterleaved(
            "layers that keep everything would keep gathered weights",
            where="remat",
            fix='remat="block_outputs" or "full"',
        )
    num_replicas = active.shape.batch_ways
    x, w, own = layer_structs(x_BTD, params, context, rows, num_replicas)
    axes = jax.tree.map(lambda one: None if one.shape[0] == 1 else 0, dict(context))
    axes |= dict.fromkeys(rows)
    draw, replicas = None, Replicas(active)
    with in_force(replicas.inner):
        types = product_types(body, x, w, own)
        if parts := drawn_shapes(body, x, w, own):
            every, _, around = layer_structs(x_BTD, params, context, rows, 1)
            draw = Draw.of(body, every, w, around, parts, replicas)
            own[DRAWS], axes[DRAWS] = draw.parts, draw.axes
            body = draw.taken(body)
        layer = jax.checkpoint(body, policy=policy, prevent_cse=False)
        trace, kept, given = _traced(layer, x, _of_types(w, types), own)
    return GatheredRun(
        weights=weights_of(params, types, active),
        num_layers=jax.tree.leaves(params)[0].shape[0],
        context_axes=axes,
        trace=trace,
        kept=kept,
        given=given,
        draw=draw,
    )


def _traced(
    layer: Layer, x: Any, w: PyTree, context: Any
) -> tuple[OneTrace, tuple[int, ...], dict[int, int]]:
    """A layer with its pullback, and `kept` and `given` of a `GatheredRun`."""

    def vjp(x: Any, w: PyTree, context: Any) -> tuple[Any, Any]:
        return jax.vjp(lambda x, w: layer(x, w, context), x, w)

    trace = OneTrace.of(vjp, x, w, context)
    inputs = {id(var): number for number, var in enumerate(trace.jaxpr.invars)}
    given = {n: inputs[id(out)] for n, out in enumerate(trace.leaves) if id(out) in inputs}
    kept = tuple(n for n in range(len(trace.leaves)) if n not in given)
    return trace, kept, given


def _of_types(w: PyTree, types: list[Any]) -> PyTree:
    found, tree = jax.tree.flatten(w)
    pairs = zip(found, types, strict=True)
    return jax.tree.unflatten(tree, [jax.ShapeDtypeStruct(one.shape, t) for one, t in pairs])


def layer_structs(
    x_BTD: Any, params: PyTree, context: Mapping[str, Any], rows: Mapping[str, Any], pieces: int
) -> tuple[jax.ShapeDtypeStruct, PyTree, dict[str, Any]]:
    """What one layer takes on one of several equal pieces of the batch, as structs.

    Args:
        x_BTD: The residual stream, of all of the batch.
        params: Stacked, `(layers, ...)`.
        context: Arrays `(batch or 1, ...)`, the same for all layers.
        rows: What differs between layers, `(layers, ...)`.
        pieces: Into how many the batch is divided.

    Returns:
        The stream, one layer's parameters, and its context with its row.
    """

    def piece(x: Any) -> jax.ShapeDtypeStruct:
        size = x.shape[0] if x.shape[0] == 1 else x.shape[0] // pieces
        return _struct(x, (size, *x.shape[1:]))

    def first(w: Any) -> jax.ShapeDtypeStruct:
        return _struct(w, w.shape[1:])

    own = {**jax.tree.map(piece, dict(context)), **jax.tree.map(first, dict(rows))}
    return piece(x_BTD), jax.tree.map(first, params), own


def _struct(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A struct of this shape in the type that JAX gives a NumPy array like `x`."""
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    return jax.ShapeDtypeStruct(shape, dtype)


def product_types(body: Callable[..., Any], x: Any, w: PyTree, context: Any) -> list[Any]:
    """The types that a layer's products take its parameters in, in the order of the leaves."""
    jaxpr = jax.make_jaxpr(body)(x, w, context).jaxpr
    return [product_type(jaxpr, var) for var in jaxpr.invars[1:][: len(jax.tree.leaves(w))]]
