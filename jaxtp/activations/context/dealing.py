"""Which tokens of a sequence lie on which device along cp: an early and a late piece on each.

A causal token meets all before it, so the last device of a plain split would do 2 - 1/cp times the
mean work. Of 2 cp pieces device i has the pieces i and 2 cp - 1 - i: together they meet as many
tokens on every device (as in Megatron-LM's and Transformer Engine's load balancing).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtp.activations.by_name import ActivePlan, active_plan
from jaxtp.errors import SizeMismatch


def pieces_of(ways: int) -> np.ndarray:
    """The pieces of every device, (ways, 2): its early one and its late one.

    >>> pieces_of(2).tolist()
    [[0, 3], [1, 2]]
    """
    early = np.arange(ways)
    return np.stack([early, 2 * ways - 1 - early], axis=1)


def sharing() -> ActivePlan | None:
    """The plan in force, if its devices share sequences."""
    active = active_plan()
    return active if active is not None and active.shape.ways(active.tokens) > 1 else None


def deal(x_BT: jax.Array) -> jax.Array:
    """Token ids, positions or segments in the order of the devices; as they are without cp.

    Args:
        x_BT: Integers, (batch or 1, tokens).

    Raises:
        SizeMismatch: TP003, if the tokens do not divide into two pieces a device.
    """
    active = sharing()
    if active is None:
        return x_BT
    pieces = pieces_of(active.shape.ways(active.tokens)).reshape(-1)
    _check_length(x_BT.shape[1], pieces.size)
    cut = x_BT.reshape(x_BT.shape[0], pieces.size, -1)
    return jnp.concatenate([cut[:, piece] for piece in pieces], axis=1)


def undo(x_BTD: jax.Array) -> jax.Array:
    """Hidden states in the sequence's own order again: device i has the pieces 2 i and 2 i + 1.

    Two permutes of half the tokens each. Of the two pieces of a device one number is even, so each
    device sends one even piece and one odd piece, and receives one of each.
    """
    active = sharing()
    if active is None:
        return x_BTD
    spec = PartitionSpec(None, active.tokens)
    return jax.shard_map(
        functools.partial(_undo, axis=active.tokens[0], ways=active.shape.ways(active.tokens)),
        mesh=active.here,
        in_specs=spec,
        out_specs=spec,
        axis_names=set(active.tokens),
        check_vma=False,
    )(x_BTD)


def deal_features(x_BTD: jax.Array) -> jax.Array:
    """Activations in the order of the devices, as `deal` orders ids: `undo` the other way round."""
    return jax.linear_transpose(undo, x_BTD)(x_BTD)[0]


def _undo(x_BTD: jax.Array, *, axis: str, ways: int) -> jax.Array:
    pieces = pieces_of(ways)
    early, late = jnp.split(x_BTD, 2, axis=1)
    is_even = jax.lax.axis_index(axis) % 2 == 0  # the early piece has the device's own number
    own = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    arrived: list[jax.Array] = []
    for parity, piece in enumerate(own):
        numbers = [next(int(n) for n in pair if n % 2 == parity) for pair in pieces]
        routes = [(device, number // 2) for device, number in enumerate(numbers)]
        is_home = all(source == target for source, target in routes)  # the even ones of two devices
        arrived.append(piece if is_home else jax.lax.ppermute(piece, axis, routes))
    return jnp.concatenate(arrived, axis=1)


def _check_length(num_tokens: int, num_pieces: int) -> None:
    if num_tokens % num_pieces == 0:
        return
    near = num_tokens // num_pieces * num_pieces
    raise SizeMismatch(
        f"cp={num_pieces // 2} assigns two pieces of {num_tokens} tokens to each device",
        where="tokens",
        fix=f"a multiple of {num_pieces}, such as {near or num_pieces} or {near + num_pieces}; "
        "shorter sequences are padded",
    )
