"""Layers one after the other, each with the next one's weights on their way.

The forward pass gathers the weights of layer i + 1 beside layer i. The backward pass gathers those
of layer i - 1 and reduces the gradients of layer i + 1 beside layer i. Of the forward pass is kept
what the remat policy keeps, and no gathered weight.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.by_name import ActivePlan
from jaxtp.errors import NotInterleaved, join
from jaxtp.layers.gathering.loops import in_pairs, no_gradient, take
from jaxtp.layers.gathering.one_layer import Layer, Run, trace_layer
from jaxtp.layers.recomputation import Policy
from jaxtp.mesh.axes import Axis
from jaxtp.plan.trees import PyTree

barrier = lax.optimization_barrier


def run_ahead(
    body: Layer,
    policy: Policy | None,
    x_BTD: jax.Array,
    params: PyTree,
    context: Mapping[str, Any],
    rows: Mapping[str, Any],
    active: ActivePlan,
) -> jax.Array:
    """The residual stream behind all layers; numbers as from one layer after the other.

    Args:
        body: One layer.
        policy: What is kept of it beside its input.
        x_BTD: The residual stream in front of the first layer.
        params: Stacked, `(layers, ...)` everywhere.
        context: Arrays `(batch or 1, ...)`, the same for all layers.
        rows: What differs between layers and is no parameter, `(layers, ...)`.
        active: The plan in force.

    Raises:
        NotInterleaved: TP073, if the batch does not divide over the replicas, the layer draws
            random numbers where they cannot be taken out, or the policy keeps everything.
    """
    num_replicas = active.shape.batch_ways
    if x_BTD.shape[0] % num_replicas:
        raise NotInterleaved(
            f"{x_BTD.shape[0]} sequences on {num_replicas} replicas",
            fix=f"a batch that is a multiple of {num_replicas}",
        )
    known = {*active.shape.batch, *active.shape.tp}
    others = [axis for axis, size in active.shape.sizes if size > 1 and axis not in known]
    if others or active.shape.size_of(Axis.EP) > 1:
        raise NotInterleaved(
            f"layers communicate along {join(others or [active.shape.name_of(Axis.EP)])}",
            where="layers",
            fix='overlap="auto"',
        )
    run = trace_layer(body, policy, x_BTD, params, context, rows, active)
    replicas = run.weights.replicas
    fixed = jax.tree.map(no_gradient, dict(context))
    x = replicas.split(x_BTD)
    context = jax.tree.map(replicas.split, fixed)
    tables = {name: jnp.asarray(row) for name, row in rows.items()}
    return replicas.join(_differentiable(run)(params, x, context, tables))


class Kept(NamedTuple):
    """Of all layers, `(layers, R, ...)`, for the backward pass.

    Attributes:
        inputs: The residual stream in front of each layer.
        others: What the remat policy keeps beside it.
    """

    inputs: jax.Array
    others: list[jax.Array]


def _forward(
    run: Run, params: PyTree, x: jax.Array, context: Any, rows: Any, *, keep: bool
) -> tuple[jax.Array, Kept | None]:
    """The residual stream behind the last layer, and what is kept if `keep`."""

    def layer(i: jax.Array | int, x: jax.Array, w: PyTree, kept: Kept | None) -> Any:
        out, others = run.forward(x, w, {**context, **take(rows, i)})
        if kept is not None:
            kept = Kept(*jax.tree.map(functools.partial(_put, i), tuple(kept), (x, others)))
        return out, kept

    def body(i: jax.Array | int, carry: Any) -> Any:
        x, w, kept = carry
        # Between the barriers stand a layer, and gathers that wait for nothing else.
        x, w, shards = barrier((x, w, run.weights.shards(params, i + 1)))
        following = run.weights.gather(shards)
        out, kept = layer(i, x, w, kept)
        return *barrier((out, following)), kept

    w, kept = run.weights.gather(run.weights.shards(params, 0)), None
    if keep:
        shapes = jax.eval_shape(run.forward, x, w, {**context, **take(rows, 0)})[1]
        kept = Kept(*jax.tree.map(functools.partial(_room, run), (x, shapes)))
    x, w, kept = in_pairs(run.num_layers - 1, body, (x, w, kept))
    return layer(run.num_layers - 1, x, w, kept)


def _backward(
    run: Run, params: PyTree, kept: Kept, context: Any, rows: Any, d_x: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Gradients of the parameters, and of the residual stream in front of the first layer."""
    weights, last = run.weights, run.num_layers - 1

    def layer(i: jax.Array | int, w: PyTree, d_x: jax.Array) -> tuple[jax.Array, PyTree]:
        x, others = take(tuple(kept), i)
        return run.backward(others, x, w, {**context, **take(rows, i)}, d_x)

    def body(turn: jax.Array | int, carry: Any, *, final: bool = False) -> Any:
        d_x, w, partial, collected = carry
        i = last - 1 - turn
        shards = () if final else weights.shards(params, i - 1)
        d_x, w, partial, collected, shards = barrier((d_x, w, partial, collected, shards))
        preceding = shards if final else weights.gather(shards)
        collected = weights.put(collected, weights.reduce(partial), i + 1)
        d_x, partial = layer(i, w, d_x)
        return barrier((d_x, preceding, partial, collected))

    w, collected, preceding = (
        weights.gather(weights.shards(params, last)),
        weights.zeros(params),
        (),
    )
    if last:
        # The second layer's gather waits for the first one's turn, so that two are never ahead.
        d_x, w, shards = barrier((d_x, w, weights.shards(params, last - 1)))
        preceding = weights.gather(shards)
    d_x, partial = layer(last, w, d_x)
    if last:
        carry = in_pairs(last - 1, body, barrier((d_x, preceding, partial, collected)))
        d_x, _, partial, collected = body(last - 1, carry, final=True)
    collected = weights.put(collected, weights.reduce(partial), 0)
    return weights.finish(collected, params), d_x


def _differentiable(run: Run) -> Any:
    """`(params, x, context, rows) -> x`, with its own backward pass."""

    @jax.custom_vjp
    def whole(params: PyTree, x: jax.Array, context: Any, rows: Any) -> jax.Array:
        return _forward(run, params, x, context, rows, keep=False)[0]

    def whole_forward(params: PyTree, x: jax.Array, context: Any, rows: Any) -> Any:
        out, kept = _forward(run, params, x, context, rows, keep=True)
        return out, (params, kept, context, rows)

    def whole_backward(saved: Any, d_x: jax.Array) -> tuple[PyTree, jax.Array, None, None]:
        params, kept, context, rows = saved
        return *_backward(run, params, kept, context, rows, d_x), None, None

    whole.defvjp(whole_forward, whole_backward)
    return whole


def _room(run: Run, one: Any) -> jax.Array:
    axes = run.weights.replicas.axes
    zeros = jnp.zeros((run.num_layers, *one.shape), one.dtype)
    if one.ndim < len(axes):
        return zeros
    return run.weights.replicas.active.place(
        zeros, None, *axes, *[jax.sharding.PartitionSpec.UNCONSTRAINED] * (one.ndim - len(axes))
    )


def _put(index: jax.Array | int, stacked: jax.Array, one: jax.Array) -> jax.Array:
    return lax.dynamic_update_index_in_dim(stacked, one, index, 0)
