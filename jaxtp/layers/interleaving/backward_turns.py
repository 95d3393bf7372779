"""The turns of one layer in the backward pass.

Where devices have their own tokens a message is a scatter, and the turn that follows it starts from
two gathers: of the cotangent that the message completes, and of the input, for the gradients of
weights. Recomputation is beside the one, what is behind it beside the others.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.ahead.loops import take
from jaxtp.layers.interleaving.forward_pass import A, B, Params, Stack
from jaxtp.layers.interleaving.partial_blocks import Context
from jaxtp.layers.interleaving.reductions import Held, Reductions
from jaxtp.plan.trees import PyTree


class State(NamedTuple):
    """What goes from layer to layer.

    Attributes:
        halves: Cotangent of each half's residual stream.
        message: Half A's, for the first branch of the layer behind, (W, batch, tokens, width).
        ready: What half B's last turn starts from, gathered (`_inputs`); empty where nothing is.
        norms: Gradients of the norms' parameters of every branch, stacked over layers.
        blocks: Of the blocks', likewise; with several replicas as `Weights` collects them.
        first: Of the first branch's norm in half A, which a layer leaves to the one before it.
    """

    halves: list[jax.Array]
    message: jax.Array
    ready: list[jax.Array]
    norms: list[PyTree]
    blocks: list[PyTree]
    first: PyTree


def last_branch(
    params: Params, kept: list[list[jax.Array]], index: jax.Array | int
) -> tuple[int, PyTree, jax.Array]:
    """A layer's last branch: its number, its norm's parameters, and half B in front of it."""
    return len(params) - 1, take(params[-1][0], index), take(kept[B][-1], index)


def inputs_of(
    stack: Stack, i: int, norm_params: PyTree, x: jax.Array, d_x: jax.Array
) -> list[jax.Array]:
    """What a turn starts from: a block's input and the cotangent of its sum, on all devices."""
    return [stack.stream.copies(one) for one in (stack.norm(i, norm_params, x), d_x)]


def one_layer(
    stack: Stack,
    params: Params,
    kept: list[list[jax.Array]],
    contexts: list[Context],
    state: State,
    own: list[PyTree],
    index: jax.Array | int,
    behind_partial: Sequence[PyTree] = (),
) -> tuple[State, list[PyTree], list[PyTree]]:
    """One layer; half A's last message is left to the layer in front.

    Args:
        stack: As in the forward pass.
        params: Likewise.
        kept: The residual stream of each half in front of each branch, (layers, ...).
        contexts: Of each half.
        state: Behind the layer.
        own: The weights of its blocks, by branch.
        index: Which layer.
        behind_partial: Gradients of the blocks of the layer behind, by branch and replica, if they
            are to be reduced here.

    Returns:
        The state in front of it, gradients of its blocks, by branch and replica, and those of the
        layer behind, reduced meanwhile.
    """
    turns = _Turns(stack, params, kept, contexts, state, index)
    # In one portion XLA launches them only beside the last turn, where turns hold two messages.
    ends = turns.num // 2 - 1, turns.num - 1
    beside = Reductions(stack.weights or (), behind_partial, ends)
    d_blocks: list[PyTree] = []
    for i in reversed(range(len(params))):
        dtype, partial = turns.d_x[A].dtype, stack.partials[i]
        weights = partial.cut(own[i], dtype)
        d_weights: list[PyTree] = []
        d_sums: list[jax.Array] = []
        for me in (B, A):
            number = 2 * (len(params) - 1 - i) + (me == A)
            d_cut, held = turns.work(i, me, weights, beside.held(number))
            beside.let_go(number, held)
            d_weights.append(d_cut)
            d_sums.append(turns.d_x[me])
        d_blocks.insert(0, partial.uncut(own[i], dtype, add(*d_weights), d_sums))
    return turns.state(state), d_blocks, beside.trees()


class _Turns:
    """Both halves' turns on one layer.

    Attributes:
        num: How many there are.
        d_x: Cotangents of the residual stream of both halves.
        message: The last turn's.
        ready: What the next turn starts from, gathered (`inputs_of`); empty where nothing is.
    """

    def __init__(
        self,
        stack: Stack,
        params: Params,
        kept: list[list[jax.Array]],
        contexts: list[Context],
        state: State,
        index: jax.Array | int,
    ) -> None:
        self.stack, self.contexts, self.index = stack, contexts, index
        self.num = 2 * len(params)
        self.d_x, self.message, self.ready = state.halves, state.message, state.ready
        # Branches of this layer, and the first one of the layer behind, where half A's message is
        # for.
        self.behind = jnp.minimum(index + 1, kept[A][0].shape[0] - 1)
        self.norms = [*(take(norm, index) for norm, _ in params), take(params[0][0], self.behind)]
        self.x = [[*(take(x, index) for x in half), take(half[0], self.behind)] for half in kept]
        self.in_front = last_branch(params, kept, jnp.maximum(index - 1, 0))
        self.d_norms: list[list[PyTree]] = [[] for _ in self.norms]

    def work(self, i: int, me: int, weights: PyTree, held: Held) -> tuple[PyTree, Held]:
        """One half's branch; cotangents of its weights, and `held` behind the turn."""
        stack, other = self.stack, 1 - me
        # The message is the other half's: for the branch behind this one in A, for this one in B.
        to = i + 1 if other == A else i
        # Gradients of weights stay outside of most barriers: they fill whatever room there is.
        if self.ready:
            h, d_sum = self.ready
            total = stack.stream.total(self.message)
            d_cut, d_h, total = _pulled_beside(
                stack, i, weights, h, self.contexts[me], d_sum, total
            )
        else:
            h, d_sum = inputs_of(stack, i, self.norms[i], self.x[me][i], self.d_x[me])
            _, pull = jax.vjp(functools.partial(_block, stack, i, self.contexts[me]), weights, h)
            d_cut, d_h = pull(d_sum)
            total = stack.stream.total(self.message)
            alive = (d_h, total, self.d_x, held)
            d_h, total, self.d_x, held = lax.optimization_barrier(alive)
        norm, x = self.norms[to], self.x[other][to]
        d_norm, d_input = stack.pull_norm(to % len(stack.branches), norm, x, total)
        self.d_norms[to].append(d_norm)
        self.d_x = [d + d_input if half == other else d for half, d in enumerate(self.d_x)]
        if self.ready:
            # The other half is next: on this branch, or on the one in front of it.
            j = i if other == A else i - 1
            where = self.in_front if j < 0 else (j, self.norms[j], self.x[other][j])
            ready = inputs_of(stack, *where, self.d_x[other])
            # Behind recomputed attention is too little for two gathers, without its weights'
            # gradients.
            late = () if stack.branches[i].tokenwise else d_cut
            alive = (d_h, self.d_x, ready, held, late)
            d_h, self.d_x, self.ready, held, late = lax.optimization_barrier(alive)
            d_cut = late or d_cut
        self.message = d_h
        return d_cut, held

    def state(self, before: State) -> State:
        """The state in front of the layer."""
        here = [add(*d_norm) for d_norm in self.d_norms[:-1]]
        (first,) = self.d_norms[-1]
        pairs = zip(before.norms, here, strict=True)
        return State(
            self.d_x,
            self.message,
            self.ready,
            [put_layer(all_, one, self.index) for all_, one in pairs],
            before.blocks,
            put_layer(before.first, first, self.behind),
        )


def _pulled_beside(
    stack: Stack,
    i: int,
    weights: PyTree,
    h_WBTD: jax.Array,
    context: Context,
    d_sum: jax.Array,
    total: jax.Array,
) -> tuple[PyTree, jax.Array, jax.Array]:
    """Cotangents of a block's weights and input; recomputation is beside a message's `total`.

    What follows is then beside the gathers that need the total. Neither may be too short for what
    is beside it: XLA's scheduler fills what is left with the launch of a reduction over replicas,
    which it would otherwise launch at the beginning of the layer.
    """
    multiply: Any = None

    def columns(weights: PyTree, h_WBTD: jax.Array) -> list[jax.Array]:
        nonlocal multiply
        inner, multiply = stack.partials[i].columns(weights, h_WBTD, context)
        return inner

    inner, pull = jax.vjp(columns, weights, h_WBTD)
    if stack.branches[i].tokenwise:
        inner, d_sum, total = lax.optimization_barrier((inner, d_sum, total))
        d_row, d_inner = jax.vjp(multiply, weights, inner)[1](d_sum)
    else:
        # Recomputed attention is shorter than the scatter; with one more product it is not.
        d_inner = jax.vjp(functools.partial(multiply, weights), inner)[1](d_sum)[0]
        inner, d_inner, total = lax.optimization_barrier((inner, d_inner, total))
        (d_row,) = jax.vjp(lambda weights: multiply(weights, inner), weights)[1](d_sum)
    d_columns, d_h = pull(d_inner)
    return add(d_row, d_columns), d_h, total


def _block(stack: Stack, i: int, context: Context, weights: PyTree, h_WBTD: jax.Array) -> jax.Array:
    return stack.partials[i](weights, h_WBTD, context)


def add(*trees: PyTree) -> PyTree:
    """Their sum."""
    return functools.reduce(functools.partial(jax.tree.map, operator.add), trees)


def put_layer(stacked: PyTree, one: PyTree, index: jax.Array | int) -> PyTree:
    """Stacked arrays with those of one layer in their place."""

    def put(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(w, x, index, 0)

    return jax.tree.map(put, stacked, one)
