"""Where the tokens of one device stand in the queues of their experts, and in which slots.

Shape suffixes as in `jaxtp.layers.experts`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Queue(NamedTuple):
    """Tokens in the order of their experts; the tokens of one expert in their own order.

    Attributes:
        order: token x K + choice of each place in the queue, (N x K,).
        starts: Where the queue of each expert begins, and the end of the last, (E + 1,).
        rank_NK: Place of each token in its experts' queues.
        index_NK: Its experts.
    """

    order: jax.Array
    starts: jax.Array
    rank_NK: jax.Array
    index_NK: jax.Array

    @classmethod
    def of(cls, index_NK: jax.Array, num_experts: int) -> "Queue":
        """The queues of what each token has chosen."""
        chosen = index_NK.reshape(-1)
        order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
        counts_E = jnp.sum(
            chosen[:, None] == jnp.arange(num_experts)[None], axis=0, dtype=jnp.int32
        )
        starts = jnp.pad(jnp.cumsum(counts_E, dtype=jnp.int32), (1, 0))
        places = jnp.arange(chosen.size, dtype=jnp.int32)
        place = jnp.zeros_like(places).at[order].set(places, unique_indices=True)
        return cls(order, starts, (place - starts[chosen]).reshape(index_NK.shape), index_NK)

    @property
    def counts_E(self) -> jax.Array:
        """Length of each queue, (E,)."""
        return jnp.diff(self.starts)


class Moves(NamedTuple):
    """Which token is in which slot, both ways; past the end for nobody and nowhere.

    Attributes:
        source_S: token x K + choice that a slot holds.
        slot_NK: The slot of each choice.
    """

    source_S: jax.Array
    slot_NK: jax.Array

    @classmethod
    def of(cls, queue: Queue, own_WE: jax.Array, first: jax.Array, size: int) -> "Moves":
        """Of the places `first` to `first + size` in the queues of some experts.

        For each device there is a slot of every expert that it has, then the next of each. What
        other devices send is then in the order of the products, for which tokens of one expert may
        lie apart by any stride; with the slots of an expert together it would have to be copied.

        Args:
            queue: Of all experts.
            own_WE: Those that there are slots of, for every device that has some.
            first: The first place.
            size: How many places.
        """
        own, num_own = own_WE.reshape(-1), own_WE.shape[1]
        places = queue.starts[own][:, None] + first + jnp.arange(size)[None]
        ends = queue.starts[own + 1][:, None]
        nobody = queue.order.size
        source = jnp.where(places < ends, queue.order[jnp.minimum(places, nobody - 1)], nobody)
        source_WEC = source.reshape(*own_WE.shape, size)
        # A token finds its own slot: rows of experts that are elsewhere do not exist.
        row_E = jnp.full(len(queue.starts) - 1, len(own)).at[own].set(jnp.arange(len(own)))
        rank_NK = queue.rank_NK - first
        is_here_NK = (rank_NK >= 0) & (rank_NK < size)
        device_NK, expert_NK = jnp.divmod(row_E[queue.index_NK], num_own)
        slot_NK = (device_NK * size + rank_NK) * num_own + expert_NK
        slot_NK = jnp.where(is_here_NK & (device_NK < len(own_WE)), slot_NK, source.size)
        return cls(source_WEC.swapaxes(1, 2).reshape(-1), slot_NK)

    @property
    def token_S(self) -> jax.Array:
        """The token that a slot holds."""
        return self.source_S // self.slot_NK.shape[1]


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `x`, zero where the index is past the end."""
    return x.at[index].get(mode="fill", fill_value=0)


# All moves are gathers in both directions: the derivative that JAX finds is a scatter that adds,
# which GPUs do by atomics, in no order.
@jax.custom_vjp
def to_slots(x_ND: jax.Array, moves: Moves) -> jax.Array:
    """The tokens in their slots, (S, D)."""
    return _rows(x_ND, moves.token_S)


def _to_slots_backward(moves: Moves, grad_SD: jax.Array) -> tuple[jax.Array, None]:
    grad_NKD = _rows(grad_SD, moves.slot_NK)
    return jnp.sum(grad_NKD, axis=1, dtype=jnp.float32).astype(grad_SD.dtype), None


to_slots.defvjp(lambda x_ND, moves: (to_slots(x_ND, moves), moves), _to_slots_backward)


@jax.custom_vjp
def weights_to_slots(weights_NK: jax.Array, moves: Moves) -> jax.Array:
    """The weight of the choice that is in each slot, (S,)."""
    return _rows(weights_NK.reshape(-1), moves.source_S)


def _weights_to_slots_backward(moves: Moves, grad_S: jax.Array) -> tuple[jax.Array, None]:
    return _rows(grad_S, moves.slot_NK), None


weights_to_slots.defvjp(
    lambda w, moves: (weights_to_slots(w, moves), moves), _weights_to_slots_backward
)


@jax.custom_vjp
def from_slots(y_SD: jax.Array, moves: Moves) -> jax.Array:
    """Sums of the slots of each token, (N, D); float32 inside."""
    y_NKD = _rows(y_SD, moves.slot_NK)
    return jnp.sum(y_NKD, axis=1, dtype=jnp.float32).astype(y_SD.dtype)


def _from_slots_backward(moves: Moves, grad_ND: jax.Array) -> tuple[jax.Array, None]:
    return _rows(grad_ND, moves.token_S), None


from_slots.defvjp(lambda y_SD, moves: (from_slots(y_SD, moves), moves), _from_slots_backward)
