"""Layers of our models, each with the next one's weights on their way: `activations.ahead`.

Of the forward pass is kept what the remat policy keeps.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.activations.ahead.loops import no_gradient
from jaxtp.activations.ahead.passes import differentiable
from jaxtp.activations.ahead.weights import other_axes
from jaxtp.activations.by_name import ActivePlan
from jaxtp.errors import NotInterleaved
from jaxtp.layers.gathering.one_layer import Layer, trace_layer
from jaxtp.layers.recomputation import Policy
from jaxtp.plan.trees import PyTree


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
    if others := other_axes(active.shape):
        raise NotInterleaved(
            f"layers communicate along {others}", where="layers", fix='overlap="auto"'
        )
    run = trace_layer(body, policy, x_BTD, params, context, rows, active)
    replicas = run.weights.replicas
    fixed = jax.tree.map(no_gradient, dict(context))
    x = replicas.split(x_BTD)
    context = jax.tree.map(replicas.split, fixed)
    tables = {name: jnp.asarray(row) for name, row in rows.items()}
    return replicas.join(differentiable(run)(params, x, context, tables)[0])
