"""One optimizer step, written for one device: micro-batches, loss scaling, the update.

What is sharded here is the gradients, and only because ZeRO says so.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.activations.by_name import use_plan
from jaxtp.config.settings import Precision
from jaxtp.errors import BadConfig, BadStages, join
from jaxtp.mesh.axes import Axis, MeshShape, Shards
from jaxtp.mesh.build import plan_mesh
from jaxtp.placement.train_state import plan_slots
from jaxtp.plan.decisions import Plan
from jaxtp.plan.specs import partition_spec
from jaxtp.plan.trees import PyTree, leaves, map_with_path

FIRST_SCALE = 2.0**15
"""Where an adaptive loss scale starts, as in Micikevicius et al. 2018 and DeepSpeed."""


HOST = "pinned_host"
"""JAX's name for host memory that devices read and write directly."""


class Loss(Protocol):
    """What a step minimises: a sum over tokens, divided by how many there are."""

    def total(self, params: PyTree, batch: PyTree) -> jax.Array:
        """Summed loss of a batch, a float32 scalar."""
        ...

    def count(self, batch: PyTree) -> jax.Array:
        """Over how much it is summed, a float32 scalar; at least 1."""
        ...


@runtime_checkable
class CountingLoss(Loss, Protocol):
    """A loss that adds others to what is minimised, and counts something beside it."""

    def objective(self, params: PyTree, batch: PyTree) -> tuple[jax.Array, PyTree]:
        """What is minimised, summed like `total`; and float32 scalars that add up over batches."""
        ...

    def metrics(self, sums: PyTree, count: jax.Array) -> Mapping[str, jax.Array]:
        """Metrics of those sums over a batch of this `count`."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LossScale:
    """What the loss is multiplied by so that float16 gradients do not vanish.

    Attributes:
        scale: float32 scalar.
        good_steps: Steps since it last changed, an int32 scalar.
    """

    scale: jax.Array
    good_steps: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
        params: Parameters.
        opt_state: The optimizer's state.
        num_updates: Updates so far, an int32 scalar; skipped steps do not count.
        loss_scale: None except under float16.
    """

    params: PyTree
    opt_state: PyTree
    num_updates: jax.Array
    loss_scale: LossScale | None


Total = tuple[jax.Array, PyTree]
"""What is minimised, a float32 scalar, and sums that are counted beside it."""

Weighted = Callable[[PyTree, PyTree], Total]
"""`(params, micro-batch) -> total`."""

Update = Callable[[TrainState, PyTree], tuple[TrainState, dict[str, jax.Array]]]


def init_state(
    params: PyTree,
    tx: optax.GradientTransformation,
    precision: Precision,
    trains: Callable[[str], bool] | None = None,
) -> TrainState:
    """The state before the first step; the optimizer keeps nothing for what is not trained.

    Args:
        params: All parameters.
        tx: The optimizer.
        precision: Loss scaling.
        trains: Whether a path is trained; by default all are.
    """
    scale = None
    if precision.compute == "float16":
        first = jnp.float32(precision.loss_scale or FIRST_SCALE)
        scale = LossScale(first, jnp.int32(0))
    return TrainState(params, tx.init(_trained(params, trains)), jnp.int32(0), scale)


def _trained(params: PyTree, trains: Callable[[str], bool] | None) -> PyTree:
    """All parameters, or those that are trained, by path."""
    if trains is None:
        return params
    return {path: leaf for path, leaf in leaves(params) if trains(path)}


def _with_trained(params: PyTree, trained: PyTree, trains: Callable[[str], bool] | None) -> PyTree:
    """All parameters, with what `_trained` takes out of them as `trained` has it."""
    if trains is None:
        return trained
    return map_with_path(lambda path, leaf: trained.get(path, leaf), params)


def make_update(
    loss: Loss,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule,
    plan: Plan,
    mesh: Mesh,
    *,
    num_micro: int = 1,
    precision: Precision | None = None,
    offload: bool = False,
    trains: Callable[[str], bool] | None = None,
) -> Update:
    """A step function for `jit_step`.

    Its metrics are float32 scalars: loss (mean over all tokens of the batch), grad_norm (of the
    mean gradient, before clipping), lr, under float16 loss_scale, and what the loss counts.

    Args:
        loss: What to minimise.
        tx: The optimizer, clipping included.
        schedule: Learning rate by number of updates, to report.
        plan: Says where gradients lie.
        mesh: The mesh that the state is placed on.
        num_micro: Micro-batches; the batch size is a multiple of it. Stages have their own.
        precision: Loss scaling; by default there is none.
        offload: The optimizer's state comes from the host's memory, see `to_host`.
        trains: Whether a path is trained, by default all are: others have no gradient.

    Raises:
        BadStages: TP074, for micro-batches beside those of the plan's stages.
    """
    if plan.stages is not None and num_micro > 1:
        raise BadStages(
            f"{num_micro} micro-batches, each of {plan.stages.micro_batches} for the stages",
            where="num_micro",
            fix=f"num_micro=1, and stages with {num_micro * plan.stages.micro_batches}",
        )
    settings = precision or Precision()

    def update(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
        count = loss.count(batch)

        trained = _trained(state.params, trains)

        def weighted(trained: PyTree, micro: PyTree) -> tuple[jax.Array, PyTree]:
            total, sums = _objective(loss, _with_trained(state.params, trained, trains), micro)
            return total * (scale / count), sums

        (total, sums), grads = mean_gradients(
            weighted,
            trained,
            batch,
            plan,
            mesh,
            num_micro,
            in_float32=settings.gradients == "float32",
        )
        if state.loss_scale is not None:
            total = total / scale
            grads = jax.tree.map(lambda grad: grad / scale, grads)
        norm = optax.tree.norm(grads)
        changes, opt_state = tx.update(
            grads, _to_device(state.opt_state) if offload else state.opt_state, trained
        )
        new = TrainState(
            _with_trained(state.params, optax.apply_updates(trained, changes), trains),
            opt_state,
            state.num_updates + 1,
            state.loss_scale,
        )
        metrics = {"loss": total, "grad_norm": norm, "lr": schedule(state.num_updates)}
        metrics |= loss.metrics(sums, count) if isinstance(loss, CountingLoss) else {}
        if state.loss_scale is not None:
            metrics["loss_scale"] = scale
            new = _unless_overflow(new, state, jnp.isfinite(norm + total), settings)
        return new, {name: jnp.float32(value) for name, value in metrics.items()}

    return update


def _objective(loss: Loss, params: PyTree, batch: PyTree) -> Total:
    """What is minimised, and what is counted beside it; of most losses nothing."""
    if isinstance(loss, CountingLoss):
        return loss.objective(params, batch)
    return loss.total(params, batch), {}


def to_host(state: TrainState) -> TrainState:
    """The state with the optimizer's arrays in the host's pinned memory; its counters stay.

    `jit_step` then returns them there. They cross to the device during the step, when the update
    needs them.

    Raises:
        BadConfig: TP020, if the devices cannot reach such memory.
    """
    device = jax.local_devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if HOST not in kinds:
        raise BadConfig(
            f"a {device.device_kind} reaches the memories {join(kinds)}, not {HOST}",
            where="zero.offload_optimizer",
            fix="none; or shard the state further with zero.stage and mesh.fsdp",
        )

    def move(leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, leaf.sharding.with_memory_kind(HOST)) if leaf.ndim else leaf

    return dataclasses.replace(state, opt_state=jax.tree.map(move, state.opt_state))


def mean_gradients(
    loss: Weighted,
    params: PyTree,
    batch: PyTree,
    plan: Plan,
    mesh: Mesh,
    num_micro: int,
    *,
    in_float32: bool = False,
) -> tuple[Total, PyTree]:
    """Loss and gradients, summed over micro-batches, placed as ZeRO wants them.

    Args:
        loss: `(params, micro-batch) -> (scalar, sums)`; the scalar is already weighted, so that
            sums of it are means.
        params: Parameters.
        batch: Arrays `(batch, ...)`.
        plan: Where gradients lie.
        mesh: The mesh of the parameters.
        num_micro: Micro-batches.
        in_float32: Whether replicas sum in float32 also where there is one micro-batch.
    """
    placed = functools.partial(_place_gradients, plan=plan, mesh=plan_mesh(mesh, plan.mesh))
    # Stages sum on each device over all ticks, in the type of the parameters, and reduce once.
    asked = num_micro > 1 or (in_float32 and plan.stages is None)
    if asked and plan.zero < 2 and plan.mesh.ways(_replicas(plan).batch) > 1:
        total, grads = _reduce_once(loss, params, batch, plan, mesh, num_micro)
        return total, placed(_as_parameters(grads, params))
    if num_micro == 1:
        total, grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        return total, placed(grads)
    total, grads = _accumulate(loss, params, batch, num_micro, placed)
    return total, _as_parameters(grads, params)


def _as_parameters(grads: PyTree, params: PyTree) -> PyTree:
    """Sums, which are float32, in the types that the optimizer expects."""
    return jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)


def _accumulate(
    loss: Weighted,
    params: PyTree,
    batch: PyTree,
    num_micro: int,
    placed: Callable[[PyTree], PyTree],
) -> tuple[Total, PyTree]:
    """One micro-batch after the other, summed in float32; one set of activations is alive."""

    def split(x: jax.Array) -> jax.Array:
        # Strided: every device divides the rows it has. Contiguous micro-batches would each lie on
        # a few devices alone.
        return jnp.moveaxis(x.reshape(x.shape[0] // num_micro, num_micro, *x.shape[1:]), 1, 0)

    def add(sums: PyTree, micro: PyTree) -> tuple[PyTree, None]:
        total, grads = jax.value_and_grad(loss, has_aux=True)(params, micro)
        return jax.tree.map(jnp.add, sums, (total, placed(grads))), None

    def zeros(like: Any) -> jax.Array:
        return jnp.zeros(like.shape, jnp.float32)

    micros = jax.tree.map(split, batch)
    total = jax.eval_shape(loss, params, jax.tree.map(lambda x: x[0], micros))
    first = (jax.tree.map(zeros, total), placed(jax.tree.map(zeros, params)))
    return jax.lax.scan(add, first, micros)[0]


def _reduce_once(
    loss: Weighted,
    params: PyTree,
    batch: PyTree,
    plan: Plan,
    mesh: Mesh,
    num_micro: int,
) -> tuple[Total, PyTree]:
    """As `_accumulate`, with one float32 reduction over the batch axes at the end.

    Left to XLA, each layer of each micro-batch reduces its gradients. Replicated gradients can be
    summed on each device first; those that ZeRO shards cannot, they would not fit.
    """
    axes = _replicas(plan).batch
    # Inside, the batch is already sharded: only tensor parallelism, and experts on an axis of their
    # own, are left to the partitioner.
    shape = plan.mesh.without(
        axis for axis in Axis.that_shard(Shards.BATCH) if plan.mesh.name_of(axis) in axes
    )
    inner = dataclasses.replace(plan, mesh=shape)
    own_mesh = plan_mesh(mesh, plan.mesh)

    def local(params: PyTree, batch: PyTree) -> tuple[Total, PyTree]:
        with use_plan(inner, own_mesh):
            sums = _accumulate(loss, params, batch, num_micro, lambda grads: grads)
        return jax.lax.psum(sums, axes)

    return jax.shard_map(
        local,
        mesh=own_mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axes)),
        out_specs=PartitionSpec(),
        axis_names=set(axes),
        check_vma=False,
    )(params, batch)


def _replicas(plan: Plan) -> MeshShape:
    """The mesh with those batch axes alone along which all parameters are replicated."""
    return plan.mesh.without(
        axis
        for axis in Axis.that_shard(Shards.BATCH)
        if any(d.dim_on([plan.mesh.name_of(axis)]) is not None for d in plan.decisions)
    )


def _place_gradients(grads: PyTree, *, plan: Plan, mesh: Mesh) -> PyTree:
    """Gradients beside their parameters, or from stage 2 on beside the optimizer's state."""
    slots: Mapping[str, Any] = plan_slots(plan, state=plan.zero >= 2)

    def place(path: str, grad: jax.Array) -> jax.Array:
        spec = partition_spec(slots[path].spec)
        return jax.lax.with_sharding_constraint(grad, NamedSharding(mesh, spec))

    return map_with_path(place, grads)


def _unless_overflow(
    new: TrainState, old: TrainState, is_finite: jax.Array, settings: Precision
) -> TrainState:
    """The new state; the old one with half the loss scale if something overflowed."""
    assert old.loss_scale is not None
    kept = jax.tree.map(functools.partial(jnp.where, is_finite), new, old)
    if settings.loss_scale:
        return kept
    scale, good = old.loss_scale.scale, old.loss_scale.good_steps + 1
    grows = good >= settings.loss_scale_window
    raised = jnp.where(grows, scale * 2, scale)
    return dataclasses.replace(
        kept,
        loss_scale=LossScale(
            scale=jnp.where(is_finite, raised, jnp.maximum(scale / 2, 1)),
            good_steps=jnp.where(is_finite & ~grows, good, 0),
        ),
    )


def _to_device(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), tree)
