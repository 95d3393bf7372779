"""The backward pass: the forward's turns in reverse, with whole blocks.

A turn holds one half's block, recomputed and differentiated, and the other half's message: the
cotangent of its block's input, of which each device knows the part that its weights see. A block
has two to three times the work of the forward pass, so no part of it need be divided.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.ahead.beside import with_arrived
from jaxtp.activations.ahead.loops import in_pairs, take
from jaxtp.activations.ahead.weights import Weights
from jaxtp.layers.interleaving.forward_pass import A, B, Params, Stack
from jaxtp.layers.interleaving.partial_blocks import Context
from jaxtp.plan.trees import PyTree


class State(NamedTuple):
    """What goes from layer to layer.

    Attributes:
        halves: Cotangent of each half's residual stream.
        message: Half A's, for the first branch of the layer behind, (W, batch, tokens, width).
        norms: Gradients of the norms' parameters of every branch, stacked over layers.
        blocks: Of the blocks', likewise; with several replicas as `Weights` collects them.
        first: Of the first branch's norm in half A, which a layer leaves to the one before it.
    """

    halves: list[jax.Array]
    message: jax.Array
    norms: list[PyTree]
    blocks: list[PyTree]
    first: PyTree


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
    layer = functools.partial(_layer, stack, params, kept, contexts)
    norms = [jax.tree.map(jnp.zeros_like, norm) for norm, _ in params]
    # Behind the last layer there is no other; its message is zero, and what comes of it.
    message = stack.ways.copies(jnp.zeros_like(cotangents[A]))
    state = State(list(cotangents), message, norms, _collected(stack, params), norms[0])
    if stack.weights is None:

        def body(turn: jax.Array, state: State) -> State:
            index = last - turn
            own = [take(block, index) for _, block in params]
            state, blocks = layer(state, own, index)
            pairs = zip(state.blocks, blocks, strict=True)
            return state._replace(blocks=[_put(all_, one, index) for all_, one in pairs])

        state = lax.fori_loop(0, last + 1, body, state)
        blocks = state.blocks
    else:
        state = _one_behind(stack, stack.weights, params, layer, state, last)
        pairs = zip(stack.weights, state.blocks, params, strict=True)
        blocks = [weights.finish(found, block) for weights, found, (_, block) in pairs]
    _, pull = jax.vjp(functools.partial(stack.norm, 0), take(params[0][0], 0), kept[A][0][0])
    first, dx = pull(stack.ways.total(state.message))
    norms = [_add(state.norms[0], _put(state.first, first, 0)), *state.norms[1:]]
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
    layer: Callable[..., tuple[State, list[PyTree]]],
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
        (state, partial), behind = with_arrived(layer, args, reduced(partial))
        state = put(state, behind, index + 1)
        return lax.optimization_barrier((state, preceding, partial))

    own = stack.gather(stack.shards(params, last)) if stack.gathers else []
    preceding: list[PyTree] = []
    if last and stack.gathers:
        # The second layer's gather waits for the first one's turn, so that two are never ahead.
        alive = (state, own, stack.shards(params, last - 1))
        state, own, shards = lax.optimization_barrier(alive)
        preceding = stack.gather(shards)
    state, partial = layer(state, own_of(own, last), last)
    if last:
        carry = lax.optimization_barrier((state, preceding, partial))
        carry = in_pairs(last - 1, body, carry)
        state, _, partial = body(last - 1, carry, final=True)
    return put(state, reduced(partial), 0)


def _layer(
    stack: Stack,
    params: Params,
    kept: list[list[jax.Array]],
    contexts: list[Context],
    state: State,
    own: list[PyTree],
    index: jax.Array | int,
) -> tuple[State, list[PyTree]]:
    """One layer; half A's last message is left to the layer in front.

    Args:
        stack: See `backward`.
        params: See there.
        kept: See there.
        contexts: See there.
        state: Behind the layer.
        own: The weights of its blocks, by branch.
        index: Which layer.

    Returns:
        The state in front of it, and gradients of its blocks, by branch and replica.
    """
    # Branches of this layer, and the first one of the layer behind, where half A's message is for.
    behind = jnp.minimum(index + 1, kept[A][0].shape[0] - 1)
    norms = [*(take(norm, index) for norm, _ in params), take(params[0][0], behind)]
    x = [[*(take(one, index) for one in half), take(half[0], behind)] for half in kept]
    d_norms: list[list[PyTree]] = [[] for _ in norms]
    d_blocks: list[PyTree] = []
    d_x, message = state.halves, state.message
    for i in reversed(range(len(params))):
        dtype, partial = d_x[A].dtype, stack.partials[i]
        weights = partial.cut(own[i], dtype)
        d_weights: list[PyTree] = []
        d_sums: list[jax.Array] = []
        # The message is the other half's: for the branch behind this one in A, for this one in B.
        for me, other, to in ((B, A, i + 1), (A, B, i)):
            h = stack.ways.copies(stack.norm(i, norms[i], x[me][i]))
            _, pull = jax.vjp(functools.partial(_block, stack, i, contexts[me]), weights, h)
            d_cut, d_h = pull(stack.ways.copies(d_x[me]))
            # Gradients of weights stay outside of the barrier: they fill whatever room there is.
            alive = (d_h, stack.ways.total(message), d_x)
            d_h, total, d_x = lax.optimization_barrier(alive)
            norm = functools.partial(stack.norm, to % len(params))
            d_norm, d_input = jax.vjp(norm, norms[to], x[other][to])[1](total)
            d_weights.append(d_cut)
            d_sums.append(d_x[me])
            d_norms[to].append(d_norm)
            d_x[other] = d_x[other] + d_input
            message = d_h
        d_blocks.insert(0, partial.uncut(own[i], dtype, _add(*d_weights), d_sums))
    here = [_add(*d_norm) for d_norm in d_norms[:-1]]
    (first,) = d_norms[-1]
    norms = [_put(all_, one, index) for all_, one in zip(state.norms, here, strict=True)]
    return State(d_x, message, norms, state.blocks, _put(state.first, first, behind)), d_blocks


def _block(stack: Stack, i: int, context: Context, weights: PyTree, h_WBTD: jax.Array) -> jax.Array:
    return stack.partials[i](weights, h_WBTD, context)


def _add(*trees: PyTree) -> PyTree:
    return functools.reduce(functools.partial(jax.tree.map, operator.add), trees)


def _put(stacked: PyTree, one: PyTree, index: jax.Array | int) -> PyTree:
    def put(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(w, x, index, 0)

    return jax.tree.map(put, stacked, one)
