"""Layers run in two halves of the batch that take turns."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.activations.ahead.loops import no_gradient
from jaxtp.activations.ahead.weights import Weights, weights_of
from jaxtp.activations.by_name import ActivePlan
from jaxtp.errors import NotInterleaved
from jaxtp.layers.interleaving.backward_pass import backward
from jaxtp.layers.interleaving.forward_pass import Params, Stack, forward
from jaxtp.layers.interleaving.partial_blocks import Context, ResidualBranch, partial_of
from jaxtp.layers.interleaving.residual_stream import TOKENS, stream_of
from jaxtp.plan.trees import PyTree, leaves

Saved = tuple[Params, list[list[jax.Array]], list[Context]]


def interleave(
    branches: Sequence[ResidualBranch], x_BTD: jax.Array, context: Context, active: ActivePlan
) -> jax.Array:
    """The residual stream behind all layers; numbers as from one branch after the other.

    The backward pass keeps the residual stream in front of every branch and recomputes the rest,
    no communication among it: the memory of `remat="block_outputs"`.

    Args:
        branches: Of a layer, in order; parameters stacked over layers.
        x_BTD: The residual stream in front of the first layer.
        context: What blocks take beside their input, for all of the batch.
        active: The plan in force.

    Raises:
        NotInterleaved: TP073, if the batch on a device is odd, sequence parallelism cannot shard
            its sequences, or a block is not a sum of parts under this plan.
    """
    num_replicas = active.shape.batch_ways
    if x_BTD.shape[0] % (2 * num_replicas):
        raise NotInterleaved(
            f"{x_BTD.shape[0]} sequences on {num_replicas} replicas do not make two equal halves",
            fix=f"a batch that is a multiple of {2 * num_replicas}",
        )
    stream = stream_of(x_BTD, active)
    halves = [stream.enter(_half(x_BTD, half)) for half in (0, 1)]
    num_tokens = halves[0].shape[TOKENS]
    stack = Stack(
        branches=tuple(branches),
        partials=tuple(partial_of(branch, active) for branch in branches),
        num_pieces=tuple(2 if b.tokenwise and num_tokens % 2 == 0 else 1 for b in branches),
        stream=stream,
        weights=_weights(branches, x_BTD.dtype, active),
    )
    params = [(branch.norm_params, branch.block_params) for branch in branches]
    fixed = jax.tree.map(no_gradient, dict(context))
    contexts = [jax.tree.map(functools.partial(_half, half=half), fixed) for half in (0, 1)]
    behind = _differentiable(stack)(params, halves, contexts)
    return jnp.stack([stream.leave(x) for x in behind], axis=1).reshape(x_BTD.shape)


def _weights(
    branches: Sequence[ResidualBranch], dtype: jnp.dtype, active: ActivePlan
) -> tuple[Weights, ...] | None:
    """How the blocks' weights come to the replicas; None if there is one."""
    if active.shape.batch_ways == 1:
        return None
    found: list[Weights] = []
    for branch in branches:
        partial = partial_of(branch, active)
        # What is cut is cast, as in `Partial.cut`; norms and biases inside keep their type.
        types = [
            w.dtype if partial.cuts[path].dim is None else dtype
            for path, w in leaves(branch.block_params)
        ]
        found.append(weights_of(branch.block_params, types, active, branch.name))
    return tuple(found)


def _half(x: jax.Array, half: int) -> jax.Array:
    """Every other row, so that each half lies on all replicas; one row for all stays."""
    return x if x.shape[0] == 1 else x.reshape(-1, 2, *x.shape[1:])[:, half]


def _differentiable(stack: Stack) -> Any:
    """`(params, halves, contexts) -> halves`, with its own backward pass."""

    @jax.custom_vjp
    def run(params: Params, halves: list[jax.Array], contexts: list[Context]) -> list[jax.Array]:
        return forward(stack, params, halves, contexts, keep=False)[0]

    def run_forward(
        params: Params, halves: list[jax.Array], contexts: list[Context]
    ) -> tuple[list[jax.Array], Saved]:
        behind, kept = forward(stack, params, halves, contexts, keep=True)
        return behind, (params, kept, contexts)

    def run_backward(saved: Saved, cotangents: list[jax.Array]) -> tuple[PyTree, PyTree, None]:
        return *backward(stack, *saved, cotangents), None

    run.defvjp(run_forward, run_backward)
    return run
