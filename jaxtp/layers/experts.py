"""Tokens go to the experts that they chose, and their results come back.

Each device sorts its tokens by expert and gives every expert room for `capacity` of them, so that
all products of a device are one batched `dot_general`, which is fast and right on GPUs and CPUs:
`jax.lax.ragged_dot` has no padding, and on GPUs XLA computes it by all experts on all tokens. An
expert that is sent more tokens drops the last ones, or takes them in further, smaller rounds.

Experts lie on axes of two kinds. Along an axis that shards the batch, such as ep, tokens travel:
one all-to-all there and one back. Along one on which tokens are replicated, tp, nothing does: each
device works for the experts that it has, and one all-reduce sums the results, as in a dense MLP.

Shape suffixes: N tokens of one device, K experts chosen for each, E experts, C their capacity, D
hidden size, F width of an expert, S slots (experts x capacity), W devices that exchange tokens (E
is then what each has), B batch, T tokens of a sequence.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtp.activations.by_name import ActivePlan, active_plan
from jaxtp.layers.token_slots import Moves, Queue, from_slots, to_slots, weights_to_slots
from jaxtp.mesh.axes import Axis

LATER_SHARE = 8
"""A round behind the first has 1/8 of its capacity: most routings that overflow do so by little."""


PIECES = 2
"""Parts of an all-to-all's slots that travel on their own, so that the way there of one passes
beside the products of another, and its way back beside those of the next. More of them hide little
more, and every message has a start-up."""

LEAST_BYTES = 8 * 2**20
"""Of each part that a device sends: 20 microseconds of NVLink, several start-ups."""

MOST_FREE = 256
"""Tokens that an expert of 16-bit weights can take while these are read: a weight is 2 bytes and a
token 2 FLOPs, of which an H100 does 295 in the time of a byte (989 TFLOP/s over 3.35 TB/s)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Capacity:
    """How many tokens an expert takes from one device.

    Attributes:
        factor: Capacity over tokens x chosen / experts, which balanced routing needs (GShard,
            Lepikhin et al. 2021, section 3.2).
        drops: Whether what is beyond it is dropped; else further rounds take it.
    """

    factor: float
    drops: bool

    def of(self, num_tokens: int, num_chosen: int, num_experts: int) -> int:
        """Tokens, at least 1 and at most all."""
        wanted = math.ceil(self.factor * num_tokens * num_chosen / num_experts)
        return min(max(wanted, 1), num_tokens)

    def of_step(self, num_tokens: int, num_chosen: int, num_experts: int) -> "Capacity":
        """The same for one new token a row: room for all while weights are read, and no rounds.

        A further round would read every weight again, from a copy of it.
        """
        if num_tokens > MOST_FREE:
            return self
        return Capacity(num_experts / num_chosen, self.drops)


class ExpertWeights(NamedTuple):
    """Stacked gated MLPs, in the type of the products; biases are None or all there.

    Integers have a scale for each output of each expert, float32, that their products are
    multiplied by; floats have None. See `jaxtp.models.quantized`.
    """

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array
    gate_EF: jax.Array | None = None
    up_EF: jax.Array | None = None
    down_ED: jax.Array | None = None
    gate_scale_EF: jax.Array | None = None
    up_scale_EF: jax.Array | None = None
    down_scale_ED: jax.Array | None = None


INNER_DIM: tuple[int | None, ...] = (2, 2, 1, 1, 1, None, 1, 1, None)
"""Which dim of each of these arrays is the width inside an expert."""

Gate = Callable[[jax.Array, jax.Array], jax.Array]
"""What becomes of gate and up in front of the last product."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """Which axes of the mesh shard what; those of one device are left out.

    Attributes:
        tokens: The batch.
        sequence: The tokens of each sequence.
        experts: The expert dim of the weights, major to minor.
        inner: The width inside an expert.
        ways: Devices along each axis.
    """

    tokens: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    ways: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(
        cls, active: ActivePlan | None, batch: tuple[int, ...], shape: tuple[int, ...] = ()
    ) -> "Layout":
        """The layout under a plan.

        Args:
            active: The plan in force.
            batch: (sequences, tokens of each, ...).
            shape: Of the gate's weights, (experts, hidden size, width); `()` for tokens alone.
        """
        if active is None:
            return cls()
        sizes = {name: size for name, size in active.shape.sizes if size > 1}
        specs = (spec for known, spec in active.experts if shape and known[-3:] == shape)
        *_, expert_axes, _, inner_axes = next(specs, ((), (), ()))
        # ZeRO's axes are gathered; parameters inside a stage may lie on axes that are gone there.
        gathered = {*active.shape.zero} - {active.shape.name_of(Axis.EP)}
        known = {name for _, name in active.shape.others} | set(active.shape.tp)
        usable = [name for name in sizes if name in known and name not in gathered]
        tokens = tuple(name for name in active.shape.batch if name in sizes)
        while batch[0] % math.prod(sizes[name] for name in tokens):
            tokens = tokens[:-1]  # too few sequences: the rest of the mesh sees the same ones
        sequence = tuple(name for name in active.tokens if name in sizes)
        if batch[1] % math.prod(sizes[name] for name in sequence):
            sequence = ()
        return cls(
            tokens=tokens,
            sequence=sequence,
            experts=tuple(name for name in expert_axes if name in usable),
            inner=tuple(name for name in inner_axes if name in active.shape.tp and name in sizes),
            ways=tuple(sizes.items()),
        )

    @property
    def axes(self) -> set[str]:
        """All of them."""
        return {*self.tokens, *self.sequence, *self.experts, *self.inner}

    @property
    def exchanged(self) -> tuple[str, ...]:
        """Axes along which tokens travel to experts."""
        return tuple(name for name in self.experts if name in self.tokens)

    @property
    def apart(self) -> tuple[str, ...]:
        """Axes of experts on which tokens are replicated."""
        return tuple(name for name in self.experts if name not in self.tokens)

    @property
    def summed(self) -> tuple[str, ...]:
        """Axes over which results are summed."""
        return self.apart + self.inner

    @property
    def replicas(self) -> tuple[str, ...]:
        """Axes whose devices have the same experts and other tokens."""
        return (*(name for name in self.tokens if name not in self.experts), *self.sequence)

    def size(self, axes: Iterable[str]) -> int:
        """Devices along some axes together."""
        sizes = dict(self.ways)
        return math.prod(sizes[name] for name in axes)

    def own_experts(self, num_experts: int) -> np.ndarray:
        """Experts that the devices along `exchanged` have, one row for each device along `apart`.

        A row is in the order in which an all-to-all along `exchanged` deals it out.
        """
        sizes = dict(self.ways)
        order = [self.experts.index(name) for name in self.apart + self.exchanged]
        all_experts = np.arange(num_experts).reshape(*(sizes[name] for name in self.experts), -1)
        return all_experts.transpose(*order, len(order)).reshape(self.size(self.apart), -1)


def by_device(choose: Callable[[jax.Array], jax.Array], wanted_BTE: jax.Array) -> jax.Array:
    """`choose(wanted)`, each device for its own tokens; nothing has a gradient.

    Left to XLA, `jax.lax.top_k` of a batch that two axes shard gathers all scores on every device.
    """
    wanted_BTE, active = jax.lax.stop_gradient(wanted_BTE), active_plan()
    layout = Layout.of(active, wanted_BTE.shape)
    if active is None or not layout.tokens + layout.sequence:
        return choose(wanted_BTE)
    spec = _spec(layout.tokens, layout.sequence, None)
    return jax.shard_map(
        choose,
        mesh=active.here,
        in_specs=spec,
        out_specs=spec,
        axis_names={*layout.tokens, *layout.sequence},
        check_vma=False,
    )(wanted_BTE)


def run_experts(
    h_BTD: jax.Array,
    weights_BTK: jax.Array,
    index_BTK: jax.Array,
    experts: ExpertWeights,
    gate: Gate,
    capacity: Capacity,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of what the chosen experts make of every token.

    Args:
        h_BTD: Tokens.
        weights_BTK: Weight of each chosen expert, float32.
        index_BTK: The chosen experts of a token, all different, int32.
        experts: Their weights.
        gate: What becomes of the gate's and the other product.
        capacity: How many tokens an expert takes from a device.

    Returns:
        The sum, like `h_BTD`; and by how many of its experts each token was dropped, int32 (batch,
        tokens).
    """
    active = active_plan()
    layout = Layout.of(active, h_BTD.shape, experts.gate_EDF.shape)
    static = _Static(layout, gate, capacity, experts.gate_EDF.shape[0])
    run = functools.partial(_local, static)
    if active is None or not layout.axes:
        one = jax.tree.map(lambda w: w[None], experts)
        out_1BTD, dropped_BT = run(h_BTD[None], weights_BTK[None], index_BTK, one)
        return out_1BTD[0], dropped_BT
    # An entry for every device along the summed axes, and of the weights for every replica. What
    # moves, here and in the backward pass, is left to the partitioner: the sums and, with ZeRO, the
    # gathers of a dense MLP, outside of all rounds.
    by_token = (layout.summed, layout.tokens, layout.sequence)
    spread = functools.partial(_spread, active, layout.size(layout.summed))
    weights = [_sharded(active, layout, *row) for row in zip(experts, INNER_DIM, strict=True)]
    out_RBTD, dropped_BT = jax.shard_map(
        run,
        mesh=active.here,
        in_specs=(
            _spec(*by_token, None),
            _spec(*by_token, None),
            _spec(*by_token[1:], None),
            ExpertWeights(*(spec for _, spec in weights)),
        ),
        out_specs=(_spec(*by_token, None), _spec(*by_token[1:])),
        axis_names=layout.axes,
        check_vma=False,
    )(
        spread(h_BTD, *by_token, None),
        spread(weights_BTK, *by_token, None),
        index_BTK,
        ExpertWeights(*(w for w, _ in weights)),
    )
    # Not jnp.sum, which adds in float32 and would move twice the bytes.
    return jax.lax.reduce_sum(out_RBTD, (0,)), dropped_BT


def _spec(*entries: tuple[str, ...] | None) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in entries))


def _spread(active: ActivePlan, copies: int, x: jax.Array, *entries: object) -> jax.Array:
    """`x` with an entry of a leading dim for each device along some axes."""
    return active.place(jnp.broadcast_to(x[None], (copies, *x.shape)), *entries)


def _sharded(
    active: ActivePlan, layout: Layout, w: jax.Array | None, inner_dim: int | None
) -> tuple[Any, Any]:
    """An array of the experts with a leading dim of replicas, and its spec."""
    if w is None:
        return None, None
    inner = [layout.inner if dim == inner_dim else () for dim in range(1, w.ndim)]
    # First gathered, then spread: at once, ZeRO's shards would take an all-to-all.
    w = active.place(w, layout.experts, *inner)
    entries = (layout.replicas, layout.experts, *inner)
    return _spread(active, layout.size(layout.replicas), w, *entries), _spec(*entries)


# ---- on one device -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Static:
    """What is known without the values: see `run_experts`."""

    layout: Layout
    gate: Gate
    capacity: Capacity
    num_experts: int


Inputs = tuple[jax.Array, jax.Array, ExpertWeights]
"""What has a gradient: tokens (N, D), weights (N, K), the experts of this device."""


def _local(
    static: _Static,
    h_1BTD: jax.Array,
    weights_1BTK: jax.Array,
    index_BTK: jax.Array,
    experts: ExpertWeights,
) -> tuple[jax.Array, jax.Array]:
    """What one device does, between the exchanges."""
    x_ND = h_1BTD.reshape(-1, h_1BTD.shape[-1])
    num_chosen = index_BTK.shape[-1]
    queue = Queue.of(index_BTK.reshape(-1, num_chosen), static.num_experts)
    inputs = (x_ND, weights_1BTK.reshape(-1, num_chosen), jax.tree.map(lambda w: w[0], experts))
    size = static.capacity.of(len(x_ND), num_chosen, static.num_experts)
    out_ND = _round(static, size, jnp.int32(0), queue, inputs)
    is_dropped = jnp.zeros((), bool)
    if static.capacity.drops:
        is_dropped = queue.rank_NK >= size
    elif size < len(x_ND):
        later = -(-size // LATER_SHARE)
        most = jnp.max(queue.counts_E[_own(static)])
        if static.layout.exchanged:
            most = jax.lax.pmax(most, static.layout.exchanged)
        num_later = -(-jnp.maximum(most - size, 0) // later)
        out_ND = out_ND + _later_rounds(static, (size, later), num_later, queue, inputs)
    is_dropped = jnp.broadcast_to(is_dropped, queue.rank_NK.shape).reshape(index_BTK.shape)
    return out_ND.reshape(h_1BTD.shape), jnp.sum(is_dropped, axis=2, dtype=jnp.int32)


def _own(static: _Static) -> jax.Array:
    """The experts that this device and those that it exchanges tokens with have."""
    table = jnp.asarray(static.layout.own_experts(static.num_experts), jnp.int32)
    return table[jax.lax.axis_index(static.layout.apart) if static.layout.apart else 0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later_rounds(
    static: _Static, sizes: tuple[int, int], num_later: jax.Array, queue: Queue, inputs: Inputs
) -> jax.Array:
    """The sum of the rounds behind the first; none, where nothing is left."""
    first, size = sizes

    def add(turn: jax.Array, sum_ND: jax.Array) -> jax.Array:
        return sum_ND + _round(static, size, first + turn * size, queue, inputs)

    return jax.lax.fori_loop(0, num_later, add, jnp.zeros_like(inputs[0]))


def _later_forward(
    static: _Static, sizes: tuple[int, int], num_later: jax.Array, queue: Queue, inputs: Inputs
) -> tuple[jax.Array, Any]:
    out_ND = _later_rounds(static, sizes, num_later, queue, inputs)
    return out_ND, (num_later, queue, inputs)


def _later_backward(
    static: _Static, sizes: tuple[int, int], saved: Any, grad_ND: jax.Array
) -> tuple[None, None, Inputs]:
    """Round by round again, since nobody knows how many results there would be to keep."""
    (first, size), (num_later, queue, inputs) = sizes, saved

    def add(turn: jax.Array, sums: Inputs) -> Inputs:
        run = functools.partial(_round, static, size, first + turn * size, queue)
        return jax.tree.map(jnp.add, sums, jax.vjp(run, inputs)[1](grad_ND)[0])

    zeros = jax.tree.map(jnp.zeros_like, inputs)
    return None, None, jax.lax.fori_loop(0, num_later, add, zeros)


_later_rounds.defvjp(_later_forward, _later_backward)


def _round(static: _Static, size: int, first: jax.Array, queue: Queue, inputs: Inputs) -> jax.Array:
    """Results of the tokens at places `first` to `first + size` of each expert's queue, (N, D)."""
    x_ND, weights_NK, experts = inputs
    ways = static.layout.size(static.layout.exchanged)
    moves = Moves.of(queue, _own(static).reshape(ways, -1), first, size)

    x_WCED = to_slots(x_ND, moves).reshape(ways, size, -1, x_ND.shape[1])
    w_WCE = weights_to_slots(weights_NK, moves).reshape(x_WCED.shape[:3])
    is_long = x_WCED.nbytes >= PIECES * LEAST_BYTES and ways > 1
    cuts = [size * piece // PIECES for piece in range(1, PIECES)] if is_long else []
    parts = zip(jnp.split(x_WCED, cuts, axis=1), jnp.split(w_WCE, cuts, axis=1), strict=True)
    y_WCED = jnp.concatenate([_there_and_back(static, x, w, experts) for x, w in parts], axis=1)
    return from_slots(y_WCED.reshape(-1, x_ND.shape[1]), moves)


def _there_and_back(
    static: _Static, x_WCED: jax.Array, w_WCE: jax.Array, experts: ExpertWeights
) -> jax.Array:
    """What experts make of some slots of each of them, wherever they are.

    Weights travel with their tokens: their gradient then needs what an expert makes of a token
    where the expert is, and a layer that is recomputed has no way back to take again.
    """
    shape, exchanged = x_WCED.shape, static.layout.exchanged
    if exchanged:
        x_WCED, w_WCE = (
            jax.lax.all_to_all(x, exchanged, 0, 0, tiled=True) for x in (x_WCED, w_WCE)
        )
    x_CED, w_CE = x_WCED.reshape(-1, *shape[2:]), w_WCE.reshape(-1, shape[2])
    y_WCED = _products(static, x_CED, w_CE, experts).reshape(shape)
    return jax.lax.all_to_all(y_WCED, exchanged, 0, 0, tiled=True) if exchanged else y_WCED


def _products(
    static: _Static, x_CED: jax.Array, w_CE: jax.Array, experts: ExpertWeights
) -> jax.Array:
    """What the experts of a device make of their tokens, times the weights of these.

    A part of the sum if `inner` is split.
    """
    gate_CEF = _product(x_CED, experts.gate_EDF, experts.gate_scale_EF)
    up_CEF = _product(x_CED, experts.up_EDF, experts.up_scale_EF)
    if experts.gate_EF is not None and experts.up_EF is not None:
        gate_CEF, up_CEF = gate_CEF + experts.gate_EF[None], up_CEF + experts.up_EF[None]
    # In front of the last product: there it is part of a pass over memory that is made anyway.
    inner_CEF = static.gate(gate_CEF, up_CEF).astype(jnp.float32) * w_CE[..., None]
    inner_CEF = inner_CEF.astype(x_CED.dtype)
    y_CED = _product(inner_CEF, experts.down_EFD, experts.down_scale_ED)
    if experts.down_ED is None:
        return y_CED
    bias_ED = experts.down_ED
    if static.layout.inner:  # added by one of the devices that hold parts of the sum
        bias_ED = bias_ED * (jax.lax.axis_index(static.layout.inner) == 0)
    return y_CED + (bias_ED[None] * w_CE[..., None]).astype(y_CED.dtype)


def _product(x_CEI: jax.Array, w_EIO: jax.Array, scale_EO: jax.Array | None) -> jax.Array:
    """Each expert's product of its tokens, in their type; integers are scaled behind it."""
    out_CEO = jnp.einsum("cei,eio->ceo", x_CEI, w_EIO.astype(x_CEI.dtype))
    if scale_EO is None:
        return out_CEO
    return (out_CEO.astype(jnp.float32) * scale_EO[None]).astype(out_CEO.dtype)
