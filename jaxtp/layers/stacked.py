"""Stacked layers one after the other, on one device or in pipeline stages.

In stages every device along the pp axis runs one program; `ticks` says when it does what.

Shape suffixes: S stages, R replicas that a stage sees, M micro-batches, B sequences, T tokens, D
width.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, subjaxprs
from jax.sharding import PartitionSpec

from jaxtp.activations.ahead.weights import decisions_of
from jaxtp.activations.by_name import ActivePlan, active_plan, constrain, in_force
from jaxtp.errors import BadStages, BadTree, NotInterleaved, SizeMismatch, join, warn
from jaxtp.errors.arguments import FUNCTION, MAPPING, TEXT, Kind, checked
from jaxtp.layers.gathering import (
    Once,
    layer_structs,
    once_of,
    product_types,
    refuse_draws,
    room_in,
    run_ahead,
    with_gradients,
)
from jaxtp.layers.interleaving import Context
from jaxtp.layers.recomputation import LAYER_INPUT, Policy, remat_of
from jaxtp.layers.ticks import Orders, orders_of
from jaxtp.mesh.axes import Axis, Shards
from jaxtp.plan.stages import Stages
from jaxtp.plan.tree_kinds import STACKED
from jaxtp.plan.trees import PyTree, map_with_path

Rows = Mapping[str, Any]
"""What differs between layers and is no parameter, NumPy arrays `(layers, ...)` by name."""

Layer = Callable[[jax.Array, PyTree, Context], jax.Array]
"""`(x, parameters of one layer, context) -> x`."""

Counting = Callable[[jax.Array, PyTree, Context], tuple[jax.Array, PyTree]]
"""The same with what the layer counts beside it, `(batch,)` arrays."""


@checked(
    body=FUNCTION.raising(BadTree),
    x_BTD=Kind(lambda x: getattr(x, "ndim", 0) >= 2, "an array (batch, tokens, width)", BadTree),
    params=STACKED,
    context=MAPPING.or_none(),
    remat=TEXT,
    rows=MAPPING.or_none(),
)
def scan_layers(
    body: Layer,
    x_BTD: jax.Array,
    params: PyTree,
    *,
    context: Context | None = None,
    remat: str = "none",
    rows: Rows | None = None,
) -> jax.Array:
    """The residual stream behind stacked layers: `lax.scan`, or a pipeline where the plan has one.

    Args:
        body: One layer, `(x, params, context) -> x`. What differs between sequences comes by
            `context`, not from around the function: in stages a layer sees a few at a time.
        x_BTD: The residual stream in front of the first layer, (batch, tokens, width).
        params: Stacked, `(layers, ...)` everywhere; in stages as the plan stores them.
        context: Arrays `(batch or 1, ...)`, the same for all layers; None entries are passed on.
        remat: Key of `jaxtp.layers.recomputation.REMAT`; stage without stages is block_outputs.
        rows: What differs between layers and is no parameter, `(layers, ...)`, in the layers' own
            order; a layer finds its row in the context.

    Raises:
        BadConfig: TP020, if `remat` names no policy.
        SizeMismatch: TP003, if the batch does not divide into replicas x micro-batches.
        BadStages: TP074, if the parameters are not stored for the stages.
        BadTree: TP046, for a body that cannot be called, or parameters that are not stacked.
    """
    active = active_plan()
    ahead = active is not None and active.interleave and active.stages is None
    if active is not None and ahead and active.shape.batch_ways > 1:
        keep = remat_of(remat).layer
        try:
            return run_ahead(body, keep, x_BTD, params, context or {}, rows or {}, active)
        except NotInterleaved as obstacle:
            warn(str(obstacle))

    def counting(x: jax.Array, params: PyTree, context: Context) -> tuple[jax.Array, PyTree]:
        return body(x, params, context), ()

    return scan_counting(
        counting, x_BTD, params, zeros=lambda _: (), context=context, remat=remat, rows=rows
    )[0]


def scan_counting(
    body: Counting,
    x_BTD: jax.Array,
    params: PyTree,
    *,
    zeros: Callable[[jax.Array], PyTree],
    context: Context | None = None,
    remat: str = "none",
    rows: Rows | None = None,
    in_stages: bool = True,
) -> tuple[jax.Array, PyTree]:
    """`scan_layers` of layers that count something: what they count, summed over all of them.

    Sums are taken sequence by sequence in the layers and over the batch once, behind them: there it
    takes one all-reduce of scalars, here one in every layer.

    Args:
        body: One layer.
        x_BTD: See `scan_layers`, as for what follows.
        params: See there.
        zeros: What no layer counts of an `x`.
        context: See there.
        remat: See there.
        rows: See there.
        in_stages: Whether the plan's stages share these layers. If not, each stage runs all of them
            on its part of the batch, as it does with what is no layer.
    """
    policies, active = remat_of(remat), active_plan()
    if policies.layer is not None:
        # A scan body is compiled on its own, so XLA cannot merge recomputation with the first run.
        body = jax.checkpoint(body, policy=policies.layer, prevent_cse=False)
    context, rows = context or {}, rows or {}
    if active is None or active.stages is None or not in_stages:
        _check_apart(active, params, in_stages=in_stages)

        def step(carry: _Carry, layer: tuple[PyTree, Rows]) -> tuple[_Carry, None]:
            x, found = body(carry[0], layer[0], {**context, **layer[1]})
            return (x, jax.tree.map(jnp.add, carry[1], found)), None

        x_BTD, sums = jax.lax.scan(step, (x_BTD, zeros(x_BTD)), (params, rows))[0]
    else:
        pipe = _Pipeline(body, zeros, policies.chunk, active, active.stages, rows)
        x_BTD, sums = _in_stages(pipe, x_BTD, params, context)
    return x_BTD, jax.tree.map(jnp.sum, sums)


_Carry = tuple[jax.Array, PyTree]
"""The residual stream, and what was counted so far."""


def runs_in_stages(jaxpr: Jaxpr, axis: str) -> bool:
    """Whether a traced function sends anything from stage to stage along this axis."""
    return any(
        equation.primitive.name == "ppermute" and axis in equation.params["axis_name"]
        for equation in jaxpr.eqns
    ) or any(runs_in_stages(inner, axis) for inner in subjaxprs(jaxpr))


@dataclasses.dataclass(frozen=True)
class _Pipeline:
    """The same for all ticks.

    Attributes:
        layer: One layer.
        zeros: What no layer counts.
        keep: Policy of what a tick keeps.
        active: The plan in force around the stages.
        stages: Its stages.
        rows: See `scan_layers`.
    """

    layer: Counting
    zeros: Callable[[jax.Array], PyTree]
    keep: Policy
    active: ActivePlan
    stages: Stages
    rows: Rows

    @property
    def axis(self) -> str:
        return self.active.shape.name_of(Axis.PP)

    @property
    def manual_batch(self) -> tuple[str, ...]:
        """Batch axes that the partitioner has no part in.

        Gradients of parameters that are replicated on these axes are then summed on each device
        over all ticks and reduced once, where the partitioner would reduce them in every tick.
        """
        return () if self.active.params_sharded else self.active.shape.batch

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Layers of a chunk that all chunks have together or not at all: first, and behind last."""
        counts = sorted({count for around in self.stages.layers for count in around})
        return list(itertools.pairwise((0, *counts)))

    @property
    def inner(self) -> ActivePlan:
        """What counts inside a stage."""
        shape = self.active.shape
        if self.manual_batch:
            shape = shape.without(Axis.that_shard(Shards.BATCH))
        return dataclasses.replace(self.active, shape=shape, stages=None)

    def own_rows(self, stage: jax.Array) -> dict[str, jax.Array]:
        """The rows of a stage's layers, (rounds, layers, ...); what no layer has is arbitrary."""
        stages = self.stages
        counts = np.array(stages.layers).reshape(-1)  # round after round
        first = (np.cumsum(counts) - counts).reshape(stages.num_rounds, stages.num_stages)
        layer = np.minimum(first[..., None] + np.arange(stages.block), counts.sum() - 1)
        return {name: jnp.asarray(rows[layer])[:, stage] for name, rows in self.rows.items()}

    def gathered(self, weights: PyTree) -> PyTree:
        """A layer's weights; those that tp leaves replicated are gathered where ZeRO shards them.

        XLA would shard them over tp first, by a permute that devices of all stages have to join,
        and a stage without a micro-batch does not.
        """
        active, shape = self.inner, self.active.shape
        if shape.tp_size == 1:
            return weights

        def leaf(path: str, w: jax.Array) -> jax.Array:
            found = decisions_of(path, (self.stages.num_layers, *w.shape), active)
            specs = {decision.spec[1:] for decision in found}
            if len(specs) != 1 or shape.tp_ways(spec := specs.pop()) > 1:
                return w
            inner = [tuple(axis for axis in axes if axis not in shape.zero) for axes in spec]
            return w if inner == [*spec] else active.place(w, *inner)

        return map_with_path(leaf, weights)

    def split(self, x: jax.Array) -> jax.Array:
        """Inside a stage: (R, M, B, ...) of `(batch, ...)`, (1, 1, 1, ...) of one row for all."""
        shape, num_micro = self.inner.shape, self.stages.micro_batches
        cut = (1, 1) if x.shape[0] == 1 else (shape.batch_ways, num_micro)
        return x.reshape(*cut, -1, *x.shape[1:])


def _in_stages(
    pipe: _Pipeline, x_BTD: jax.Array, params: PyTree, context: Context
) -> tuple[jax.Array, PyTree]:
    """`scan_counting` in stages."""
    _check(pipe, x_BTD, params)
    given, places = (params, ()), PartitionSpec(pipe.axis)
    if (once := _gathers_once(pipe, x_BTD, params, context)) is not None:
        given, places = once(params), once.specs
        pipe = dataclasses.replace(
            pipe, active=dataclasses.replace(pipe.active, params_sharded=False, decisions=())
        )
    active, shape = pipe.active, pipe.active.shape
    replicas = PartitionSpec(pipe.manual_batch or None)
    sides = jax.tree.map(lambda x: PartitionSpec() if x.shape[0] == 1 else replicas, dict(context))
    run = jax.shard_map(
        functools.partial(_stage, pipe),
        mesh=active.here,
        in_specs=(PartitionSpec(pipe.axis, *replicas), places, sides),
        out_specs=(
            PartitionSpec(pipe.axis, *replicas),
            PartitionSpec((pipe.axis, *pipe.manual_batch)),
        ),
        axis_names={pipe.axis, *pipe.manual_batch},
        check_vma=False,
    )
    # An entry for every stage, going in and coming out. What moves is left to the partitioner: a
    # gather over pp on the way in, a reduce-scatter on the way out.
    place = (pipe.axis, shape.batch, active.sequence, None)
    x_BTD = constrain(x_BTD, "residual")
    x_SBTD = jnp.broadcast_to(x_BTD[None], (pipe.stages.num_stages, *x_BTD.shape))
    out_SBTD, counted = run(active.place(x_SBTD, *place), given, dict(context))
    # Not jnp.sum, which adds in float32 and would move twice the bytes.
    out_BTD = jax.lax.reduce_sum(active.place(out_SBTD, *place), (0,))
    return constrain(out_BTD, "residual"), counted


def _gathers_once(
    pipe: _Pipeline, x_BTD: jax.Array, params: PyTree, context: Context
) -> Once | None:
    """How weights are gathered once for all ticks; None where each tick gathers its own, or none.

    Warns with TP073 where that was asked for and cannot be.
    """

    def types() -> list[Any]:
        pieces = pipe.active.shape.batch_ways * pipe.stages.micro_batches
        row = layer_structs(x_BTD, params, context, pipe.rows, pieces)
        apart = dataclasses.replace(pipe.active, params_sharded=False)
        with in_force(dataclasses.replace(pipe, active=apart).inner):
            refuse_draws(pipe.layer, *row)
            return product_types(pipe.layer, *row)

    if not pipe.active.interleave:
        return None
    try:
        return once_of(types, params, pipe.active)
    except NotInterleaved as obstacle:
        warn(str(obstacle))
        return None


def _check(pipe: _Pipeline, x_BTD: jax.Array, params: PyTree) -> None:
    stages, shape = pipe.stages, pipe.active.shape
    num_replicas, num_micro = shape.batch_ways, stages.micro_batches
    if x_BTD.shape[0] % (num_replicas * num_micro):
        raise SizeMismatch(
            f"{x_BTD.shape[0]} sequences for {num_replicas} replicas x {num_micro} micro-batches",
            where="batch",
            fix=f"a batch that is a multiple of {num_replicas * num_micro}",
        )
    stored = stages.num_stages * stages.num_rounds * stages.block
    found = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(params)}
    if found != {stored}:
        raise BadStages(
            f"stacked parameters have {join(sorted(found))} rows; {stages.num_stages} stages x "
            f"{stages.num_rounds} rounds of at most {stages.block} layers are stored in {stored}",
            fix="parameters from jaxtp.shard or init_sharded under this plan",
        )


def _check_apart(active: ActivePlan | None, params: PyTree, *, in_stages: bool) -> None:
    """Layers beside those of the stages lie in their own order only if they are fewer or more.

    Raises:
        BadStages: TP074, if there are as many, which a plan cannot tell apart.
    """
    if active is None or active.stages is None or in_stages:
        return
    stages = active.stages
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(params)}
    if counts & {stages.num_layers, stages.num_stages * stages.num_rounds * stages.block}:
        raise BadStages(
            f"{stages.num_layers} layers in {stages.num_stages} stages, and as many in front of "
            "them that all stages run",
            where="pp",
            fix="pp=1, or a model with more layers",
        )


def _stage(
    pipe: _Pipeline, x_SBTD: jax.Array, given: tuple[PyTree, PyTree], context: Context
) -> tuple[jax.Array, PyTree]:
    """All ticks of one stage; zeros from all but the last one, whose result counts.

    What its layers count has a leading dim of 1, for all stages and replicas to be summed.
    """
    stages, axis = pipe.stages, pipe.axis
    stage, last = jax.lax.axis_index(axis), stages.num_stages - 1
    ring = [(s, (s + 1) % stages.num_stages) for s in range(stages.num_stages)]
    cut = (stages.num_rounds, stages.block)
    weights, gradients = jax.tree.map(lambda w: w.reshape(*cut, *w.shape[1:]), given)
    chunks = weights, pipe.own_rows(stage)
    x_RMBTD = pipe.split(x_SBTD[0])
    sums = pipe.zeros(_take(x_RMBTD, 0))
    context = jax.tree.map(pipe.split, context)

    def tick(carry: _Tick, order: Orders) -> tuple[_Tick, None]:
        arrived_BTD, buffer_RMBTD, counted, gradients = carry
        x_BTD = jnp.where(order.enters, _take(buffer_RMBTD, order.micro), arrived_BTD)
        rooms: list[PyTree] = []
        for span in pipe.spans:
            room, gradients = room_in(gradients, order.turn, *span)
            rooms.append(room)
        x_BTD, found = _chunk(pipe, (x_BTD, sums), chunks, rooms, context, order)
        # The last stage's buffer ends as the result. The others' holds what comes in until then.
        buffer_RMBTD = jax.lax.dynamic_update_index_in_dim(
            buffer_RMBTD, x_BTD.reshape(buffer_RMBTD[:, 0].shape), order.micro, axis=1
        )
        counted = jax.tree.map(jnp.add, counted, found)
        return (jax.lax.ppermute(x_BTD, axis, ring), buffer_RMBTD, counted, gradients), None

    with in_force(pipe.inner):
        carry = (jnp.zeros_like(_take(x_RMBTD, 0)), x_RMBTD, sums, gradients)
        (_, out_RMBTD, counted, _), _ = jax.lax.scan(tick, carry, orders_of(stages, stage))
    out_SBTD = jnp.where(stage == last, out_RMBTD, 0).reshape(x_SBTD.shape)
    return out_SBTD, jax.tree.map(lambda x: x[None], counted)


_Tick = tuple[jax.Array, jax.Array, PyTree, PyTree]
"""What arrived, a buffer of all micro-batches, what was counted, and room for gradients."""


def _chunk(
    pipe: _Pipeline,
    carry: _Carry,
    chunks: PyTree,
    rooms: list[PyTree],
    context: Context,
    order: Orders,
) -> _Carry:
    """One micro-batch behind the layers that a stage runs in one tick, and what they count."""

    # Weights and context are cut out inside, so that every tick recomputes the cut and none keeps a
    # copy.
    @functools.partial(jax.checkpoint, policy=pipe.keep, prevent_cse=False)
    def run(
        carry: _Carry, chunks: PyTree, rooms: list[PyTree], context: Context, order: Orders
    ) -> _Carry:
        own = jax.tree.map(lambda c: _take(c, order.micro), dict(context))

        def layer(carry: _Carry, row: tuple[PyTree, Rows, PyTree]) -> tuple[_Carry, None]:
            x_BTD = checkpoint_name(constrain(carry[0], "residual"), LAYER_INPUT)
            weights = pipe.gathered(with_gradients(row[0], row[2]))
            x_BTD, found = pipe.layer(x_BTD, weights, {**own, **row[1]})
            return (constrain(x_BTD, "residual"), jax.tree.map(jnp.add, carry[1], found)), None

        # Branches, not masks: a stage with fewer layers, or without a micro-batch, is done earlier.
        # Between two counts that occur a chunk has all layers or none, so one branch serves them.
        # All devices of a stage take the same one, and their collectives meet.
        for (first, end), room in zip(pipe.spans, rooms, strict=True):
            rows = jax.tree.map(functools.partial(_rows, order.turn, first, end), chunks)
            carry = jax.lax.cond(
                order.layers >= end,
                lambda carry, rows: jax.lax.scan(layer, carry, rows)[0],
                lambda carry, _: carry,
                carry,
                (*rows, room),
            )
        return carry

    return run(carry, chunks, rooms, context, order)


def _rows(turn: jax.Array, first: int, end: int, w: jax.Array) -> jax.Array:
    """Some layers of one chunk, of (rounds, layers, ...)."""
    sizes = (1, end - first, *w.shape[2:])
    return jax.lax.dynamic_slice(w, (turn, first, *[0] * (w.ndim - 2)), sizes)[0]


def _take(x_RMB: jax.Array, micro: jax.Array | int) -> jax.Array:
    """One micro-batch, (R x B, ...), replicas major; an index past the end takes the last one."""
    x_RB = jax.lax.dynamic_index_in_dim(x_RMB, micro, 1, keepdims=False)
    return x_RB.reshape(-1, *x_RB.shape[2:])
