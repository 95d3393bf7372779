"""The backward pass: the forward's turns in reverse, with whole blocks.

A turn holds one half's block, recomputed and differentiated, and the other half's message: the
cotangent of its block's input, of which each device knows the part that its weights see. A block
has two to three times the work of the forward pass, so no part of it need be divided.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.ahead.beside import with_arrived
from jaxtp.activations.ahead.loops import in_pairs, take
from jaxtp.activations.ahead.weights import Weights
from jaxtp.layers.interleaving.backward_turns import (
    State,
    add,
    inputs_of,
    last_branch,
    one_layer,
    put_layer,
)
from jaxtp.layers.interleaving.forward_pass import A, B, Params, Stack
from jaxtp.layers.interleaving.partial_blocks import Context
from jaxtp.plan.trees import PyTree


def backward(
    stack: Stack,
    params: Params,
    kept: list[list[jax.Array]],
    contexts: list[Context],
    cotangents: list[jax.Array],
) -> tuple[list[tuple[PyTree, PyTree]], list[jax.Array]]:
    """Gradients of the parameters, and of both halves in front of the first layer.

    Args:
        stack: As in the forward pass.
        params: Likewise.
        kept: The residual stream of each half in front of each branch, (layers, ...).
        contexts: Of each half.
        cotangents: Of both halves behind the last layer.
    """
    last = kept[A][0].shape[0] - 1
    layer = functools.partial(one_layer, stack, params, kept, contexts)
    norms = [jax.tree.map(stack.stream.by_device, norm) for norm, _ in params]
    # Behind the last layer there is no other; its message is zero, and what comes of it.
    message = stack.stream.no_parts(cotangents[A])
    ready = []
    if stack.stream.is_sharded:
        ready = inputs_of(stack, *last_branch(params, kept, last), cotangents[B])
    blocks = _collected(stack, params)
    state = State(list(cotangents), message, ready, norms, blocks, norms[0])
    if stack.weights is None:

        def body(turn: jax.Array, state: State) -> State:
            index = last - turn
            own = [take(block, index) for _, block in params]
            state, blocks, _ = layer(state, own, index)
            pairs = zip(state.blocks, blocks, strict=True)
            return state._replace(blocks=[put_layer(all_, one, index) for all_, one in pairs])

        state = lax.fori_loop(0, last + 1, body, state)
        blocks = state.blocks
    else:
        state = _one_behind(stack, stack.weights, params, layer, state, last)
        pairs = zip(stack.weights, state.blocks, params, strict=True)
        blocks = [weights.finish(found, block) for weights, found, (_, block) in pairs]
    total = stack.stream.total(state.message)
    first, dx = stack.pull_norm(0, take(params[0][0], 0), kept[A][0][0], total)
    norms = [add(state.norms[0], put_layer(state.first, first, 0)), *state.norms[1:]]
    norms = [jax.tree.map(stack.stream.sum_devices, norm) for norm in norms]
    return list(zip(norms, blocks, strict=True)), [state.halves[A] + dx, state.halves[B]]


def _collected(stack: Stack, params: Params) -> list[PyTree]:
    """Where the gradients of all blocks go."""
    if stack.weights is None:
        return [jax.tree.map(jnp.zeros_like, block) for _, block in params]
    pairs = zip(stack.weights, params, strict=True)
    return [weights.zeros(block) for weights, (_, block) in pairs]


def _one_behind(
    stack: Stack,
    all_weights: tuple[Weights, ...],
    params: Params,
    layer: Callable[..., tuple[State, list[PyTree], PyTree]],
    state: State,
    last: int,
) -> State:
    """All layers from the last to the first; gradients are reduced a layer behind their own.

    Where replicas share weights, those of the layer in front are gathered meanwhile.
    """

    def reduced(partial: list[PyTree]) -> list[PyTree]:
        return [one.reduce(part) for one, part in zip(all_weights, partial, strict=True)]

    def put(state: State, gradients: list[PyTree], index: jax.Array | int) -> State:
        triples = zip(all_weights, state.blocks, gradients, strict=True)
        return state._replace(blocks=[one.put(found, g, index) for one, found, g in triples])

    def own_of(own: list[PyTree], index: jax.Array | int) -> list[PyTree]:
        return own if stack.gathers else stack.gather(stack.shards(params, index))

    def body(turn: jax.Array | int, carry: Any, *, final: bool = False) -> Any:
        index = last - 1 - turn
        shards = [] if final or not stack.gathers else stack.shards(params, index - 1)
        (state, own, partial), shards = lax.optimization_barrier((carry, shards))
        preceding = stack.gather(shards) if shards else []
        args = state, own_of(own, index), index
        if stack.stream.is_sharded:
            state, partial, behind = layer(*args, partial)
        else:
            (state, partial, _), behind = with_arrived(layer, args, reduced(partial))
        state = put(state, behind, index + 1)
        return lax.optimization_barrier((state, preceding, partial))

    own = stack.gather(stack.shards(params, last)) if stack.gathers else []
    preceding: list[PyTree] = []
    if last and stack.gathers:
        # The second layer's gather waits for the first one's turn, so that two are never ahead.
        alive = (state, own, stack.shards(params, last - 1))
        state, own, shards = lax.optimization_barrier(alive)
        preceding = stack.gather(shards)
    state, partial, _ = layer(state, own_of(own, last), last)
    if last:
        carry = lax.optimization_barrier((state, preceding, partial))
        carry = in_pairs(last - 1, body, carry)
        state, _, partial = body(last - 1, carry, final=True)
    return put(state, reduced(partial), 0)
