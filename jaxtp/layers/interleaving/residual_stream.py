"""The residual stream of one half: all on every device of a replica, or each its own tokens.

Sequence parallelism divides it: norms and residual sums are done once, not on every device, and
each all-reduce becomes a reduce-scatter behind one block and an all-gather in front of the next.
Shape suffixes as in `partial_blocks`, R replicas and N the tokens of one device.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxtp.activations.by_name import ActivePlan, in_force
from jaxtp.errors import NotInterleaved
from jaxtp.layers.interleaving.partial_blocks import Ways
from jaxtp.plan.trees import PyTree

Norm = Callable[[PyTree, jax.Array], jax.Array]

TOKENS = 1  # the dim of `(batch, tokens, width)` and of `(W, tokens of a device, width)`


@dataclasses.dataclass(frozen=True)
class Stream:
    """A residual stream that every device has, (batch, tokens, width).

    Attributes:
        ways: The devices.
        num_tokens: Tokens of a sequence.
    """

    ways: Ways
    num_tokens: int

    @property
    def is_sharded(self) -> bool:
        """Whether each device has its own tokens, so that blocks need a gather of them."""
        return False

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """The residual stream as it is between blocks, from how models have it."""
        return x_BTD

    def leave(self, x: jax.Array) -> jax.Array:
        """The same back again."""
        return x

    def norm(self, norm: Norm, params: PyTree, x: jax.Array) -> jax.Array:
        """What a norm makes of it; nothing moves."""
        with in_force(self.ways.active):
            return norm(params, x)

    def pull_norm(
        self, norm: Norm, params: PyTree, x: jax.Array, d_h: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Cotangents of a norm's parameters and of its input."""
        return jax.vjp(functools.partial(self.norm, norm), params, x)[1](d_h)

    def by_device(self, stacked: jax.Array) -> jax.Array:
        """Zeros where gradients of a norm's parameter are collected, (layers, ...)."""
        return jnp.zeros_like(stacked)

    def sum_devices(self, collected: jax.Array) -> jax.Array:
        """The gradients, of what was collected."""
        return collected

    def copies(self, x: jax.Array) -> jax.Array:
        """All tokens for every device, (W, batch, tokens, width); nothing moves."""
        x_RBTD = x.reshape(self.ways.num_replicas, -1, *x.shape[1:])
        return self.ways.each(self.ways.place(x_RBTD))

    def no_parts(self, x: jax.Array) -> jax.Array:
        """Zeros of the shape of `copies`."""
        return self.copies(jnp.zeros_like(x))

    def total(self, p_WBTD: jax.Array) -> jax.Array:
        """The sum over a replica's devices: one all-reduce in its type."""
        # Not jnp.sum, which adds in float32 and would move twice the bytes.
        x_RBTD = jax.lax.reduce_sum(self.ways.by_replica(p_WBTD), (1,))
        x_RBTD = self.ways.place(x_RBTD)
        x_BTD = x_RBTD.reshape(-1, *x_RBTD.shape[2:])
        return self.ways.place(x_BTD)


class ShardedStream(Stream):
    """One of which every device has its own tokens, (W, tokens of a device, width).

    These are a piece of all tokens of the replica in a row, not of each sequence: so pieces lie in
    memory one after the other, and no gather needs a copy.
    """

    @property
    def is_sharded(self) -> bool:
        """True."""
        return True

    def enter(self, x_BTD: jax.Array) -> jax.Array:
        """Each device's tokens of one that models have sharded by sequences: one all-gather."""
        x_BTD = self.ways.place(x_BTD)
        x_RWND = x_BTD.reshape(self.ways.num_replicas, self.ways.num, -1, x_BTD.shape[-1])
        return self._own(x_RWND)

    def leave(self, x: jax.Array) -> jax.Array:
        """The same back again, on all devices: one all-gather."""
        x_RWND = self.ways.place(self.ways.by_replica(x))
        return self.ways.place(x_RWND.reshape(-1, self.num_tokens, x.shape[-1]))

    def norm(self, norm: Norm, params: PyTree, x: jax.Array) -> jax.Array:
        """What a norm makes of each device's tokens; nothing moves."""

        def one(x_ND: jax.Array) -> jax.Array:
            return norm(params, x_ND[None])[0]

        with in_force(self.ways.active.mapped()):
            return jax.vmap(one, spmd_axis_name=self.ways.axes)(x)

    def pull_norm(
        self, norm: Norm, params: PyTree, x: jax.Array, d_h: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Cotangents of a norm's parameters on each device, (W, ...), and of its input.

        Summed in each layer, over all axes, they would keep NVLink waiting for the network.
        """

        def one(x_ND: jax.Array, d_ND: jax.Array) -> tuple[PyTree, jax.Array]:
            _, pull = jax.vjp(lambda params, x: norm(params, x[None])[0], params, x_ND)
            return pull(d_ND)

        with in_force(self.ways.active.mapped()):
            return jax.vmap(one, spmd_axis_name=self.ways.axes)(x, d_h)

    def by_device(self, stacked: jax.Array) -> jax.Array:
        """Zeros where gradients of a norm's parameter are collected, (layers, W, ...)."""
        num = self.ways.num_replicas * self.ways.num
        zeros = jnp.zeros((stacked.shape[0], num, *stacked.shape[1:]), stacked.dtype)
        return self.ways.active.place(zeros, None, self.ways.axes, *[None] * (stacked.ndim - 1))

    def sum_devices(self, collected: jax.Array) -> jax.Array:
        """The sum over all devices, of all layers at once."""
        return jax.lax.reduce_sum(collected, (1,))

    def copies(self, x: jax.Array) -> jax.Array:
        """All tokens for every device, (W, batch, tokens, width): one all-gather.

        A piece that is not a number of sequences is one, of so many tokens.
        """
        x_RWND = self.ways.place(self.ways.by_replica(x))
        return self.ways.each(x_RWND.reshape(self.ways.num_replicas, *self._shape(x)))

    def no_parts(self, x: jax.Array) -> jax.Array:
        """Zeros of the shape of `copies`; nothing moves."""
        zeros_W = jnp.zeros((x.shape[0], *self._shape(x)), x.dtype)
        return self.ways.active.place(zeros_W, self.ways.axes, None, None, None)

    def total(self, p_WBTD: jax.Array) -> jax.Array:
        """The sum over a replica's devices, to each its tokens: one reduce-scatter."""
        num, width = self.ways.num, p_WBTD.shape[-1]
        p_RW = self.ways.by_replica(p_WBTD.reshape(p_WBTD.shape[0], num, -1, width))
        return self._own(jax.lax.reduce_sum(p_RW, (1,)))

    def _shape(self, x: jax.Array) -> tuple[int, int, int]:
        size = self.ways.num * x.shape[TOKENS]
        cut = (-1, self.num_tokens) if size % self.num_tokens == 0 else (1, size)
        return size // cut[1], cut[1], x.shape[-1]

    def _own(self, x_RWND: jax.Array) -> jax.Array:
        active = self.ways.active
        x_RWND = active.place(x_RWND, active.shape.batch, active.shape.tp, None, None)
        x_WND = x_RWND.reshape(-1, *x_RWND.shape[2:])
        return active.place(x_WND, self.ways.axes, None, None)


def stream_of(x_BTD: jax.Array, active: ActivePlan) -> Stream:
    """How the plan in force has the residual stream.

    Raises:
        NotInterleaved: TP073, if tokens do not divide over the devices.
    """
    ways, tokens = Ways(active), x_BTD.shape[TOKENS]
    if not active.sequence_parallel:
        return Stream(ways, tokens)
    if tokens % ways.num:
        raise NotInterleaved(
            f"{tokens} tokens on {ways.num} tensor-parallel devices of sequence parallelism",
            fix=f"sequences of a multiple of {ways.num} tokens",
        )
    return ShardedStream(ways, tokens)
