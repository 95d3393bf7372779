"""Causal attention over sequences that the devices along cp share.

Keys and values go around the devices, cp - 1 permutes of a device's own ones, each beside the
products with those that came before: together the bytes of one all-gather of them, and no device
holds more than two devices' share. With tokens dealt as in `dealing`, a device does in each turn
two products of one piece of queries and one piece of keys that lie in front of it as a whole:

- its late queries over the early keys that arrived;
- its early queries over those, if they come from a device before it, or else its late queries over
  the late keys that arrived.

In the backward pass keys and values go around again, and one turn behind them the sum of their
gradients, which ends where they live: twice the bytes of the forward pass.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxtp.activations.by_name import ActivePlan
from jaxtp.activations.context.blocks import AttentionPart, Scores, TokenSpan, View, merge
from jaxtp.activations.context.by_device import Gradients, attend
from jaxtp.activations.context.kernels import gradients_of, part_of
from jaxtp.mesh.axes import Axis

EARLY, LATE = 0, 1
"""The halves of a device's tokens, which are pieces of the sequence."""


def attend_shared(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    window: jax.Array | None,
    sinks_N: jax.Array | None,
    scores: Scores,
    active: ActivePlan,
) -> jax.Array:
    """Attention of global arrays whose tokens are dealt along cp; like the queries.

    Args:
        q_BTNH: Queries.
        k_BTKH: Keys.
        v_BTKH: Values.
        segment_ids_BT: Which segment each token belongs to, (batch or 1, tokens); None: one.
        window: How many tokens a token sees, itself included, a scalar; None: all before it.
        sinks_N: A score of each query head beside those of its keys, without a value; None: none.
        scores: How scores are made.
        active: The plan in force, with a cp axis.
    """
    how = (_around, scores, active)
    return attend(how, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, window, sinks_N)


def _around(scores: Scores, active: ActivePlan) -> "_Around":
    (axis,) = active.tokens
    in_stage = active.shape.name_of(Axis.PP) in getattr(active.here, "manual_axes", ())
    return _Around(axis, active.shape[axis], scores, gathers=in_stage)


class _Tokens(NamedTuple):
    """What the devices send each other.

    Attributes:
        kv: Keys and values, (2, batch, tokens, kv heads, width).
        ids: Segments; None: one.
    """

    kv: jax.Array
    ids: jax.Array | None


@dataclasses.dataclass(frozen=True, slots=True)
class _Around:
    """One device's part of the work.

    Attributes:
        axis: The mesh axis.
        ways: Devices along it.
        scores: How scores are made.
        gathers: Whether keys and values are gathered at once. Inside pipeline stages they are:
            stages may be idle, and a permute, unlike an all-gather, waits for all of the mesh.
        index: The device's own place along the axis, see `at`.
    """

    axis: str
    ways: int
    scores: Scores
    gathers: bool
    index: Any = None

    def at(self, q: jax.Array) -> tuple["_Around", jax.Array]:
        """The same with the device's own index, and the queries.

        The index follows from the queries, as far as JAX can see: of what does not, a scan over
        layers would compute the masks of all tiles ahead and keep them, tokens x tokens.
        """
        index, q = jax.lax.optimization_barrier((jax.lax.axis_index(self.axis), q))
        return dataclasses.replace(self, index=index), q

    def forward(self, q: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array]:
        """The result and the `lse` of a device's own queries; arguments as for `attend`."""
        here, q = self.at(q)
        return here._forward(q, *others)

    def backward(self, q: jax.Array, *others: Any) -> Gradients:
        """The gradients of a device's own queries, keys and values."""
        here, q = self.at(q)
        return here._backward(q, *others)

    def _forward(
        self, q: jax.Array, k: jax.Array, v: jax.Array, ids: Any, window: Any
    ) -> tuple[jax.Array, jax.Array]:
        own = _Tokens(jnp.stack([k, v]), ids)

        def run(half: Any, keys: _Tokens, source: Any, of: Any) -> AttentionPart:
            view = self._view(own, half, keys, source, of, window)
            k, v = _half(keys.kv, of, 2)
            return part_of(_half(q, half, 1), k, v, view, self.scores)

        def add(
            sums: AttentionPart, half: Any, keys: _Tokens, source: Any, of: Any
        ) -> AttentionPart:
            part = run(half, keys, source, of)
            both = merge(AttentionPart(*map(_half, sums, (half, half), (1, 2))), part)
            return AttentionPart(*map(_put, sums, both, (half, half), (1, 2)))

        halves = [run(half, own, self.index, half) for half in (EARLY, LATE)]
        sums = AttentionPart(*map(jnp.concatenate, zip(*halves, strict=True), (1, 2)))
        sums = add(sums, LATE, own, self.index, EARLY)

        def turn(sums: AttentionPart, source: jax.Array, tokens: _Tokens) -> AttentionPart:
            sums = add(sums, LATE, tokens, source, EARLY)
            both = self._alike(source)
            return add(sums, both, tokens, source, both)

        out, lse = self._turns(turn, sums, own)
        return out.astype(q.dtype), lse

    def _backward(
        self, q: Any, k: Any, v: Any, ids: Any, window: Any, out: Any, lse: Any, d_out: Any
    ) -> Gradients:
        own = _Tokens(jnp.stack([k, v]), ids)

        def run(half: Any, keys: _Tokens, source: Any, of: Any) -> tuple[Any, Any]:
            view = self._view(own, half, keys, source, of, window)
            k, v = _half(keys.kv, of, 2)
            whole = AttentionPart(_half(out, half, 1), _half(lse, half, 2))
            rows = (_half(x, half, 1) for x in (q, d_out))
            dq, dk, dv = gradients_of(next(rows), k, v, whole, next(rows), view, self.scores)
            return dq, jnp.stack([dk, dv])

        def add(sums: Any, half: Any, keys: _Tokens, source: Any, of: Any) -> Any:
            more = run(half, keys, source, of)
            places = (half, of), (1, 2)
            both = map(jnp.add, map(_half, sums, *places), more)
            return tuple(map(_put, sums, both, *places))

        halves = [run(half, own, self.index, half) for half in (EARLY, LATE)]
        d_q, home = map(jnp.concatenate, zip(*halves, strict=True), (1, 2))
        d_q, home = add((d_q, home), LATE, own, self.index, EARLY)

        def turn(d_q: Any, source: jax.Array, tokens: _Tokens) -> tuple[Any, jax.Array]:
            more, d_early = run(LATE, tokens, source, EARLY)
            d_q = _put(d_q, _half(d_q, LATE, 1) + more, LATE, 1)
            d_kv = jnp.concatenate([d_early, jnp.zeros_like(d_early)], axis=2)
            both = self._alike(source)
            return add((d_q, d_kv), both, tokens, source, both)

        d_q, arrived = self._turns_back(turn, d_q, own)
        dk, dv = home + arrived.astype(jnp.float32)
        return d_q.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)

    def _turns(self, turn: Any, sums: Any, own: _Tokens) -> Any:
        """`turn(sums, source, tokens)` for the tokens of every other device."""
        if self.gathers:
            every = jax.tree.map(lambda x: jax.lax.all_gather(x, self.axis), own)

            def take(sums: Any, number: jax.Array) -> tuple[Any, None]:
                source = self._source(number)
                return turn(sums, source, jax.tree.map(lambda x: x[source], every)), None

            return jax.lax.scan(take, sums, jnp.arange(1, self.ways))[0]

        def body(carry: Any, number: jax.Array) -> tuple[Any, None]:
            sums, tokens = carry
            following = self._next(tokens)  # does not wait for this turn's products
            return (turn(sums, self._source(number), tokens), following), None

        numbers = jnp.arange(1, self.ways - 1)
        (sums, tokens), _ = jax.lax.scan(body, (sums, self._next(own)), numbers)
        return turn(sums, self._source(self.ways - 1), tokens)

    def _turns_back(self, turn: Any, sums: Any, own: _Tokens) -> tuple[Any, jax.Array]:
        """As `_turns`, where a turn also gives the gradients of its tokens; and this device's."""
        dtype = own.kv.dtype
        if self.gathers:
            every = jax.tree.map(lambda x: jax.lax.all_gather(x, self.axis), own)

            def take(carry: Any, number: jax.Array) -> tuple[Any, None]:
                sums, d_every = carry
                source = self._source(number)
                tokens = jax.tree.map(lambda x: x[source], every)
                sums, d_kv = turn(sums, source, tokens)
                return (sums, d_every.at[source].set(d_kv.astype(dtype))), None

            first = (sums, jnp.zeros_like(every.kv))
            (sums, d_every), _ = jax.lax.scan(take, first, jnp.arange(1, self.ways))
            return sums, jax.lax.psum_scatter(d_every, self.axis)

        def body(carry: Any, number: jax.Array) -> tuple[Any, None]:
            sums, tokens, travelled = carry
            # In one message, which does not wait for this turn's products: XLA hides one at a time.
            both = self._next(tokens._replace(kv=jnp.stack([tokens.kv, travelled])))
            following, arrived = both._replace(kv=both.kv[0]), both.kv[1]
            sums, d_kv = turn(sums, self._source(number), tokens)
            return (sums, following, (arrived + d_kv).astype(dtype)), None

        tokens = self._next(own)
        after = self._next(tokens) if self.ways > 2 else tokens
        sums, d_kv = turn(sums, self._source(1), tokens)
        carry = (sums, after, d_kv.astype(dtype))
        (sums, tokens, travelled), _ = jax.lax.scan(body, carry, jnp.arange(2, self.ways - 1))
        if self.ways > 2:
            arrived = self._shift(travelled)
            sums, d_kv = turn(sums, self._source(self.ways - 1), tokens)
            travelled = (arrived + d_kv).astype(dtype)
        return sums, self._shift(travelled)

    def _source(self, number: Any) -> jax.Array:
        """Whose tokens a turn is about."""
        return (self.index - number) % self.ways

    def _alike(self, source: jax.Array) -> jax.Array:
        """Which half of its tokens a device multiplies with the same half of another's."""
        return jnp.where(source < self.index, EARLY, LATE)

    def _view(
        self, own: _Tokens, half: Any, keys: _Tokens, source: Any, of: Any, window: Any
    ) -> View:
        """Which keys of one half of a device's tokens one half of our queries see."""
        length = own.kv.shape[2] // 2

        def side(tokens: _Tokens, device: Any, half: Any) -> TokenSpan:
            number = jnp.where(half == EARLY, device, 2 * self.ways - 1 - device)
            ids = None if tokens.ids is None else _half(tokens.ids, half, 1)
            return TokenSpan(number * length, ids)

        diagonal = keys is own and half is of
        return View(side(own, self.index, half), side(keys, source, of), window, diagonal)

    def _next(self, tokens: _Tokens) -> _Tokens:
        return jax.tree.map(self._shift, tokens)

    def _shift(self, x: jax.Array) -> jax.Array:
        """What the device before this one has."""
        return jax.lax.ppermute(x, self.axis, [(i, (i + 1) % self.ways) for i in range(self.ways)])


def _half(x: jax.Array, half: Any, dim: int) -> jax.Array:
    length = x.shape[dim] // 2
    return jax.lax.dynamic_slice_in_dim(x, half * length, length, dim)


def _put(x: jax.Array, new: jax.Array, half: Any, dim: int) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, new, half * (x.shape[dim] // 2), dim)
