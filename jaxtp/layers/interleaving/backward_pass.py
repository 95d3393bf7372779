"""The backward pass: the forward's turns in reverse, with whole blocks.

A turn holds one half's block, recomputed and differentiated, and the other half's message: the
cotangent of its block's input, of which each device knows the part that its weights see. A block
has two to three times the work of the forward pass, so no part of it need be divided.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.layers.interleaving.forward_pass import A, B, Params, Stack, take
from jaxtp.layers.interleaving.partial_blocks import Context
from jaxtp.plan.trees import PyTree


class State(NamedTuple):
    """What goes from layer to layer.

    Attributes:
        halves: Cotangent of each half's residual stream.
        message: Half A's, for the first branch of the layer behind, (W, batch, tokens, width).
        gradients: Of norm's and block's parameters of every branch, stacked over layers.
        first: Of the first branch's norm in half A, which a layer leaves to the one before it.
    """

    halves: list[jax.Array]
    message: jax.Array
    gradients: list[tuple[PyTree, PyTree]]
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
    num_layers = kept[A][0].shape[0]

    def body(turn: jax.Array, state: State) -> State:
        index = num_layers - 1 - turn
        return _layer(stack, params, kept, contexts, state, index)

    zeros = jax.tree.map(jnp.zeros_like, list(params))
    # Behind the last layer there is no other; its message is zero, and what comes of it.
    message = stack.ways.copies(jnp.zeros_like(cotangents[A]))
    state = State(list(cotangents), message, zeros, zeros[0][0])
    state = lax.fori_loop(0, num_layers, body, state)
    _, pull = jax.vjp(functools.partial(stack.norm, 0), take(params[0][0], 0), kept[A][0][0])
    first, dx = pull(stack.ways.total(state.message))
    (norm, block), *others = state.gradients
    norm = _add(norm, _put(state.first, first, 0))
    return [(norm, block), *others], [state.halves[A] + dx, state.halves[B]]


def _layer(
    stack: Stack,
    params: Params,
    kept: list[list[jax.Array]],
    contexts: list[Context],
    state: State,
    index: jax.Array,
) -> State:
    """One layer; half A's last message is left to the layer in front."""
    # Branches of this layer, and the first one of the layer behind, where half A's message is for.
    behind = jnp.minimum(index + 1, kept[A][0].shape[0] - 1)
    norms = [*(take(norm, index) for norm, _ in params), take(params[0][0], behind)]
    x = [[*(take(one, index) for one in half), take(half[0], behind)] for half in kept]
    d_norms: list[list[PyTree]] = [[] for _ in norms]
    d_blocks: list[PyTree] = []
    d_x, message = state.halves, state.message
    for i in reversed(range(len(params))):
        weights, pull_weights = jax.vjp(
            functools.partial(_weights, stack, i, d_x[A].dtype), take(params[i][1], index)
        )
        d_weights: list[PyTree] = []
        # The message is the other half's: for the branch behind this one in A, for this one in B.
        for me, other, to in ((B, A, i + 1), (A, B, i)):
            h = stack.ways.copies(stack.norm(i, norms[i], x[me][i]))
            _, pull = jax.vjp(functools.partial(_block, stack, i, contexts[me]), weights[0], h)
            d_cut, d_h = pull(stack.ways.copies(d_x[me]))
            # Gradients of weights stay outside of the barrier: they fill whatever room there is.
            d_h, total, d_x = lax.optimization_barrier((d_h, stack.ways.total(message), d_x))
            norm = functools.partial(stack.norm, to % len(params))
            d_norm, d_input = jax.vjp(norm, norms[to], x[other][to])[1](total)
            d_bias = None if weights[1] is None else d_x[me].sum((0, 1))
            d_weights.append((d_cut, d_bias))
            d_norms[to].append(d_norm)
            d_x[other] = d_x[other] + d_input
            message = d_h
        d_blocks.insert(0, pull_weights(_add(*d_weights))[0])
    here = [
        (_add(*d_norm), d_block) for d_norm, d_block in zip(d_norms[:-1], d_blocks, strict=True)
    ]
    (first,) = d_norms[-1]
    return State(d_x, message, _put(state.gradients, here, index), _put(state.first, first, behind))


def _weights(
    stack: Stack, i: int, dtype: jnp.dtype, block_params: PyTree
) -> tuple[PyTree, jax.Array | None]:
    """What a branch uses of its parameters: each device's part, and the bias behind the sum."""
    partial = stack.partials[i]
    return partial.cut(block_params, dtype), partial.bias(block_params, dtype)


def _block(stack: Stack, i: int, context: Context, weights: PyTree, h_WBTD: jax.Array) -> jax.Array:
    return stack.partials[i](weights, h_WBTD, context)


def _add(*trees: PyTree) -> PyTree:
    return functools.reduce(functools.partial(jax.tree.map, operator.add), trees)


def _put(stacked: PyTree, one: PyTree, index: jax.Array | int) -> PyTree:
    def put(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(w, x, index, 0)

    return jax.tree.map(put, stacked, one)
