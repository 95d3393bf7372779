"""The forward pass: two halves in alternation, messages of one beside the work of the other.

A *unit* of work is a block on one half, or on half the tokens of one half where the block works on
each token alone. Its result is partial; the sum over the devices is its *message*. The halves take
turns, and each message moves beside the other half's next unit. With attention and MLP:

    A   attention          MLP, 1st piece          MLP, 2nd piece          attention
    B           MLP, 2nd               attention               MLP, 1st               MLP, 2nd

With the halves that far apart the short attention of grouped-query models hides the small messages
of MLP pieces, and MLP pieces hide the large ones of attention. Side by side, in one piece each,
two of four messages a layer are longer than the attention beside them.

A barrier over everything alive ends each turn. Between two barriers XLA's scheduler has one message
and one chain of products to place, and no other choice.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.ahead.loops import in_pairs, take
from jaxtp.activations.ahead.weights import Weights
from jaxtp.layers.interleaving.partial_blocks import Context, Partial, ResidualBranch
from jaxtp.layers.interleaving.residual_stream import TOKENS, Stream
from jaxtp.plan.trees import PyTree

A, B = 0, 1

Params = Sequence[tuple[PyTree, PyTree]]
"""Norm's and block's parameters of every branch, stacked over layers."""


@dataclasses.dataclass(frozen=True)
class Stack:
    """What does not depend on arrays.

    Attributes:
        branches: Of a layer, in order.
        partials: Their blocks.
        num_pieces: Units of each on one half.
        stream: How devices have the residual stream.
        weights: How the blocks' weights come to the replicas and their gradients leave them; None
            with one replica.
    """

    branches: tuple[ResidualBranch, ...]
    partials: tuple[Partial, ...]
    num_pieces: tuple[int, ...]
    stream: Stream
    weights: tuple[Weights, ...] | None

    @property
    def gathers(self) -> bool:
        """Whether replicas share the blocks' weights, so that they are gathered a layer ahead."""
        return any(one.are_sharded for one in self.weights or ())

    def shards(self, params: Params, index: jax.Array | int) -> list[PyTree]:
        """Of each branch, one layer's weights as devices store them, in the type of products."""
        assert self.weights is not None
        pairs = zip(self.weights, params, strict=True)
        return [weights.shards(block, index) for weights, (_, block) in pairs]

    def gather(self, shards: list[PyTree]) -> list[PyTree]:
        """The same on all replicas."""
        assert self.weights is not None
        return [one.gather(part) for one, part in zip(self.weights, shards, strict=True)]

    @property
    def units(self) -> list[tuple[int, int]]:
        """(branch, piece) of one half's work on one layer."""
        return [(i, piece) for i, num in enumerate(self.num_pieces) for piece in range(num)]

    def norm(self, i: int, norm_params: PyTree, x: jax.Array) -> jax.Array:
        """The input of a branch's block, once."""
        return self.stream.norm(self.branches[i].norm, norm_params, x)

    def pull_norm(
        self, i: int, norm_params: PyTree, x: jax.Array, d_h: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Cotangents of a norm's parameters, as `Stream.by_device` has them, and of its input."""
        return self.stream.pull_norm(self.branches[i].norm, norm_params, x, d_h)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Half:
    """One half of the batch on its way.

    Attributes:
        x: The residual stream, with every branch added whose messages have all arrived.
        inputs: What the pieces of the next branch start from, (W, batch, tokens, width), or what is
            gathered for it; None while a message for it is under way.
        ready: The next piece's, gathered; None where there is nothing to gather, or it is not yet.
        sums: Messages that have arrived of a branch whose others have not.
        kept: The residual stream in front of each branch, (layers, ...), for the backward pass;
            empty if there will be none.
    """

    x: jax.Array
    inputs: list[jax.Array] | None
    ready: jax.Array | None
    sums: list[jax.Array]
    kept: list[jax.Array]


class Message(NamedTuple):
    """A sum over the devices that is still to be taken.

    Attributes:
        half: Whose.
        unit: Where it comes from, an index of `Stack.units`.
        ahead: Of which layer, counted from the current one.
        partial: The parts, (W, batch, tokens, width).
    """

    half: int
    unit: int
    ahead: int
    partial: jax.Array


def forward(
    stack: Stack, params: Params, halves: list[jax.Array], contexts: list[Context], *, keep: bool
) -> tuple[list[jax.Array], list[list[jax.Array]]]:
    """Both halves behind the last layer, and what is kept of them if `keep`."""
    num_layers = jax.tree.leaves(params)[0].shape[0]
    num_units = len(stack.units)
    lead = (num_units - 1) // 2  # half A's, in units; see the drawing

    def layer(
        index: jax.Array | int,
        start: list[Half],
        partial: jax.Array,
        gathered: Sequence[list[PyTree]],
        final: bool = False,
    ) -> Turns:
        """Both halves' work on a layer, half A `lead` units ahead, up to where it starts again."""
        turns = Turns(stack, params, contexts, start, index, gathered, final=final)
        turns.messages.append(Message(B, num_units - 1, -1, partial))
        for unit in range(num_units):
            ahead, unit_ahead = divmod(lead + unit, num_units)
            if not (ahead and final):
                turns.work(A, unit_ahead, ahead)
            turns.work(B, unit, 0)
        if not final:
            turns.bring(A)
        return turns

    def body(index: jax.Array | int, carry: Any) -> Any:
        halves, partial = carry
        turns = layer(index, halves, partial, ())
        (message,) = turns.messages
        return turns.halves, message.partial

    def gathering(index: jax.Array | int, carry: Any) -> Any:
        halves, partial, own = carry
        shards = stack.shards(params, index + 1)
        kept = [half.kept for half in halves]
        alive = [dataclasses.replace(half, kept=[]) for half in halves]
        alive, partial, own, shards = lax.optimization_barrier((alive, partial, own, shards))
        start = [dataclasses.replace(half, kept=k) for half, k in zip(alive, kept, strict=True)]
        following = stack.gather(shards)
        turns = layer(index, start, partial, (own, following))
        (message,) = turns.messages
        return turns.halves, *lax.optimization_barrier((message.partial, following))

    first = stack.gather(stack.shards(params, 0)) if stack.gathers else []
    carry = _opening(
        Turns(stack, params, contexts, _started(params, halves, keep), 0, (first,)), lead
    )
    last: Sequence[list[PyTree]] = ()
    if stack.gathers:
        both, partial, own = in_pairs(num_layers - 1, gathering, (*carry, first))
        last = (own,)
    else:
        # Not a scan: where the index is the loop's own counter, XLA reads weights in place.
        both, partial = lax.fori_loop(0, num_layers - 1, body, carry)
    turns = layer(num_layers - 1, both, partial, last, final=True)
    turns.receive_all()
    return [half.x for half in turns.halves], [half.kept for half in turns.halves]


def _started(params: Params, halves: list[jax.Array], keep: bool) -> list[Half]:
    """Both halves in front of the first layer, with room for what is kept of each."""
    num_layers = jax.tree.leaves(params)[0].shape[0]
    kept = [[jnp.zeros((num_layers, *x.shape), x.dtype)] * len(params) * keep for x in halves]
    return [Half(x, None, None, [], streams) for x, streams in zip(halves, kept, strict=True)]


def _opening(turns: "Turns", lead: int) -> tuple[list[Half], jax.Array]:
    """Half A's first `lead` units; both halves, and the message that the first layer receives."""
    turns.begin(A, 0, 0)
    for unit in range(lead):
        turns.work(A, unit, 0)
        turns.receive_all()
    turns.bring(A)
    # Half B comes to every layer one message short; to the first one with a message of zeros.
    num_pieces = turns.stack.num_pieces[-1]
    zeros = jnp.zeros_like(_piece(turns.halves[B].x, 0, num_pieces))
    turns.halves[B].sums = [zeros] * (num_pieces - 1)
    return turns.halves, turns.stack.stream.no_parts(zeros)


class Turns:
    """Units of work in order, each beside the oldest message."""

    def __init__(
        self,
        stack: Stack,
        params: Params,
        contexts: list[Context],
        halves: Sequence[Half],
        layer: jax.Array | int,
        gathered: Sequence[list[PyTree]],
        *,
        final: bool = False,
    ) -> None:
        self.gathered = gathered  # weights of every branch, for this layer and the next
        self.stack, self.params, self.contexts = stack, params, contexts
        self.layer, self.final = layer, final
        self.halves = [dataclasses.replace(half) for half in halves]
        self.messages = collections.deque[Message]()

    def work(self, half: int, unit: int, ahead: int) -> None:
        """One unit of a half; the oldest message moves meanwhile."""
        i, _ = self.stack.units[unit]
        while self.halves[half].inputs is None:  # behind the last layer's A, B has nobody beside it
            self.receive(self.messages.popleft())
        me, partial = self.halves[half], self.stack.partials[i]
        assert me.inputs is not None
        if self.stack.gathers:
            own = self.gathered[ahead][i]
        else:
            own = take(self.params[i][1], self.layer + ahead)
        weights = partial.cut(own, me.x.dtype)
        self.bring(half)
        start, *following = me.inputs
        start = start if me.ready is None else me.ready
        me.inputs, me.ready = following or None, None
        if self.stack.stream.is_sharded and self.messages:
            result = self._shared_turn(half, partial, weights, start)
        else:
            result = partial(weights, start, self.contexts[half])
            if self.messages:
                result = self.receive(self.messages.popleft(), beside=result)
        self.messages.append(Message(half, unit, ahead, result))

    def _shared_turn(self, half: int, partial: Partial, weights: PyTree, start: jax.Array) -> Any:
        """The same where devices have their own tokens: a message is a scatter and a gather.

        If the other half's next piece is gathered of what is scattered now, columns are beside the
        one and rows beside the other.
        """
        message, other = self.messages.popleft(), 1 - half
        self.bring(other)
        inner, multiply = partial.columns(weights, start, self.contexts[half])
        total = self.stack.stream.total(message.partial)
        if self.halves[other].ready is None:
            inner, total = self.hold((inner, total))
        self.add(message, total)
        self.bring(other)
        return self.hold(multiply(weights, inner))

    def receive(self, message: Message, beside: Any = None) -> Any:
        """Takes a message's sum; returns `beside`, with all that follows held back behind both."""
        total = self.stack.stream.total(message.partial)
        beside, total = self.hold((beside, total))
        self.add(message, total)
        return beside

    def add(self, message: Message, total: jax.Array) -> None:
        """Adds a message's sum to its half, which begins the next branch after its last one."""
        me = self.halves[message.half]
        me.sums = [*me.sums, total]
        i, piece = self.stack.units[message.unit]
        if piece == self.stack.num_pieces[i] - 1:
            me.x, me.sums = me.x + self.biased(message, jnp.concatenate(me.sums, TOKENS)), []
            more, branch = divmod(i + 1, len(self.params))
            if not (self.final and message.ahead + more > 0):
                self.begin(message.half, branch, message.ahead + more)

    def hold(self, others: Any) -> Any:
        """A barrier over these and everything alive."""
        alive = [(half.x, half.inputs, half.ready, half.sums) for half in self.halves]
        others, alive = lax.optimization_barrier((others, alive))
        for half, (x, inputs, ready, sums) in zip(self.halves, alive, strict=True):
            half.x, half.inputs, half.ready, half.sums = x, inputs, ready, sums
        return others

    def bring(self, half: int) -> None:
        """Gathers what the next piece of a half starts from, if that is to be done."""
        me = self.halves[half]
        if self.stack.stream.is_sharded and me.inputs and me.ready is None:
            me.ready = self.stack.stream.copies(me.inputs[0])

    def biased(self, message: Message, total: jax.Array) -> jax.Array:
        """A block's sum with the bias behind its row product, if there is one."""
        i, _ = self.stack.units[message.unit]
        index = self.layer + message.ahead
        bias = self.stack.partials[i].bias(take(self.params[i][1], index), total.dtype)
        if bias is None:
            return total
        # The zeros that half B starts with are no block's.
        return total + jnp.where(index < 0, 0, bias)[None, None]

    def receive_all(self) -> None:
        """Takes all messages, with nothing beside them."""
        while self.messages:
            self.receive(self.messages.popleft())

    def begin(self, half: int, i: int, ahead: int) -> None:
        """Prepares the pieces of a branch, in front of which the residual stream is complete."""
        me, num_pieces = self.halves[half], self.stack.num_pieces[i]
        if me.kept:
            me.kept = list(me.kept)
            me.kept[i] = lax.dynamic_update_index_in_dim(me.kept[i], me.x, self.layer + ahead, 0)
        norm_params = take(self.params[i][0], self.layer + ahead)
        pieces = [_piece(me.x, piece, num_pieces) for piece in range(num_pieces)]
        normed = [self.stack.norm(i, norm_params, x) for x in pieces]
        stream = self.stack.stream
        me.inputs = normed if stream.is_sharded else [stream.copies(x) for x in normed]


def _piece(x: jax.Array, piece: int, num_pieces: int) -> jax.Array:
    size = x.shape[TOKENS] // num_pieces
    return lax.slice_in_dim(x, piece * size, (piece + 1) * size, axis=TOKENS)
