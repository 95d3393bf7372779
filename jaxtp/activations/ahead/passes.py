"""Layers one after the other, each with the next one's weights on their way.

The forward pass gathers the weights of layer i + 1 beside layer i. The backward pass gathers those
of layer i - 1 and reduces the gradients of layer i + 1 beside layer i. What is kept of the forward
pass a `LayerRun` says; no gathered weight is.
"""

import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.ahead.beside import with_arrived
from jaxtp.activations.ahead.loops import in_pairs, take
from jaxtp.activations.ahead.weights import Replicas, Weights
from jaxtp.plan.trees import PyTree

barrier = lax.optimization_barrier


class LayerRun(Protocol):
    """Equal layers on all replicas; R in front of an array's shape is one dim a batch axis."""

    @property
    def weights(self) -> Weights:
        """How their parameters come and gradients go."""
        ...

    @property
    def num_layers(self) -> int:
        """How many there are."""
        ...

    def around(self, context: Any, row: Any) -> Any:
        """What one layer takes beside its input and weights.

        Args:
            context: The same for all layers.
            row: Its own.
        """
        ...

    def forward(self, x: Any, w: PyTree, context: Any) -> tuple[Any, Any, Any]:
        """One layer.

        Args:
            x: What layers hand on, all arrays (R, ...) or the same for all replicas.
            w: Its weights.
            context: As from `around`.

        Returns:
            What it hands on, what it gives beside that, and what is kept of it, both (R, ...).
        """
        ...

    def value(self, x: Any, w: PyTree, context: Any) -> tuple[Any, Any, tuple[()]]:
        """One layer that nobody differentiates, as from `forward`, of which nothing is kept."""
        ...

    def backward(
        self, kept: Any, w: PyTree, context: Any, d_x: Any, d_y: Any
    ) -> tuple[Any, PyTree, Any]:
        """Its backward pass.

        Args:
            kept: As from `forward`.
            w: Its weights.
            context: As from `around`.
            d_x: Cotangents of what it hands on, floats alone.
            d_y: Cotangents of what it gives beside that.

        Returns:
            Cotangents of the floats of `x`, of `w` as `(R, ...)`, and of the context, (R, ...).
        """
        ...

    def of_context(self, sums: Any) -> Any:
        """Cotangents of the context's floats, of those of all layers."""
        ...


def differentiable(run: LayerRun) -> Any:
    """`(params, x, context, rows) -> (x, y)`, with its own backward pass.

    What it takes are trees: parameters stacked, `(layers, ...)`; what the first layer takes, (R,
    ...); what all layers take; what differs between them and has no gradient, `(layers, ...)`. It
    gives what the last layer hands on, and what all give beside that, `(layers, R, ...)`.
    """

    @jax.custom_vjp
    def whole(params: PyTree, x: Any, context: Any, rows: Any) -> Any:
        return _forward(run, params, x, context, rows, keep=False)[:2]

    def whole_forward(params: PyTree, x: Any, context: Any, rows: Any) -> Any:
        out, ys, kept = _forward(run, params, x, context, rows, keep=True)
        return (out, ys), (params, kept, x, context, rows)

    def whole_backward(saved: Any, cotangents: Any) -> Any:
        params, kept, x, context, rows = saved
        d_x, d_y = (_floats(one) for one in cotangents)
        d_params, d_x, sums = _backward(run, params, kept, (context, rows), d_x, d_y)
        return d_params, _with_none(d_x, x), _with_none(run.of_context(sums), context), None

    whole.defvjp(whole_forward, whole_backward)
    return whole


def _forward(
    run: LayerRun, params: PyTree, x: Any, context: Any, rows: Any, *, keep: bool
) -> tuple[Any, Any, Any]:
    """What the last layer hands on, what all give beside it, and what is kept if `keep`.

    Of the last layer that is an array of its own. Stacked with the others it would lie there twice,
    for XLA stores it late, and its backward pass comes first.
    """
    one = run.forward if keep else run.value

    def layer(i: jax.Array | int, x: Any, w: PyTree) -> tuple[Any, Any, Any]:
        return one(x, w, run.around(context, take(rows, i)))

    def body(i: jax.Array | int, carry: Any) -> Any:
        x, w, stacks = carry
        # Between the barriers stand a layer, and gathers that wait for nothing else.
        x, w, shards = barrier((x, w, run.weights.shards(params, i + 1)))
        following = run.weights.gather(shards)
        out, *given = layer(i, x, w)
        stacks = jax.tree.map(functools.partial(_put, i), stacks, tuple(given))
        return *barrier((out, following)), stacks

    last = run.num_layers - 1
    w = run.weights.gather(run.weights.shards(params, 0))
    _, *structs = jax.eval_shape(functools.partial(layer, 0), x, w)
    pairs = zip((run.num_layers, last), structs, strict=True)
    stacks = tuple(jax.tree.map(functools.partial(_room, run, num), one) for num, one in pairs)
    x, w, (ys, kept) = in_pairs(last, body, (x, w, stacks))
    x, y, kept_last = layer(last, x, w)
    return x, jax.tree.map(functools.partial(_put, last), ys, y), (kept, kept_last)


def _backward(
    run: LayerRun, params: PyTree, kept: Any, around: tuple[Any, Any], d_x: Any, d_ys: Any
) -> tuple[PyTree, Any, Any]:
    """Gradients of the parameters, of what the first layer takes, and sums of the context's."""
    weights, last, (context, rows) = run.weights, run.num_layers - 1, around
    kept, kept_last = kept

    def layer(
        i: jax.Array | int, here: Any, w: PyTree, d_x: Any, beside: PyTree = ()
    ) -> tuple[Any, PyTree]:
        own = run.around(context, take(rows, i))
        return with_arrived(run.backward, (here, w, own, d_x, take(d_ys, i)), beside)

    def body(turn: jax.Array | int, carry: Any, *, final: bool = False) -> Any:
        d_x, w, partial, collected, sums = carry
        i = last - 1 - turn
        shards = () if final else weights.shards(params, i - 1)
        d_x, w, partial, collected, shards = barrier((d_x, w, partial, collected, shards))
        preceding = shards if final else weights.gather(shards)
        (d_x, partial, found), behind = layer(i, take(kept, i), w, d_x, weights.reduce(partial))
        collected = weights.put(collected, behind, i + 1)
        sums = jax.tree.map(jnp.add, sums, found)
        return *barrier((d_x, preceding, partial, collected)), sums

    w, collected, preceding = (
        weights.gather(weights.shards(params, last)),
        weights.zeros(params),
        (),
    )
    if last:
        # The second layer's gather waits for the first one's turn, so that two are never ahead.
        d_x, w, shards = barrier((d_x, w, weights.shards(params, last - 1)))
        preceding = weights.gather(shards)
    (d_x, partial, sums), _ = layer(last, kept_last, w, d_x)
    if last:
        carry = *barrier((d_x, preceding, partial, collected)), sums
        d_x, _, partial, collected, sums = body(
            last - 1, in_pairs(last - 1, body, carry), final=True
        )
    collected = weights.put(collected, weights.reduce(partial), 0)
    return weights.finish(collected, params), d_x, sums


def is_float(x: Any) -> bool:
    """Whether an array or a struct has gradients."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def _with_none(cotangents: Any, like: Any) -> Any:
    """A tree of cotangents for `like`, whose floats are given in order."""
    found, (arrays, tree) = iter(jax.tree.leaves(cotangents)), jax.tree.flatten(like)
    return jax.tree.unflatten(tree, [next(found, None) if is_float(x) else None for x in arrays])


def _room(run: LayerRun, num_layers: int, one: Any) -> jax.Array:
    replicas: Replicas = run.weights.replicas
    zeros = jnp.zeros((num_layers, *one.shape), one.dtype)
    if one.ndim < len(replicas.axes):
        return zeros
    free = [jax.sharding.PartitionSpec.UNCONSTRAINED] * (one.ndim - len(replicas.axes))
    return replicas.active.place(zeros, None, *replicas.axes, *free)


def _put(index: jax.Array | int, stacked: jax.Array, one: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stacked, one, index, 0)
