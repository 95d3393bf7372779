"""A train step of anybody's model on a mesh of a search: for the compiler, and to train with."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxtp.activations.by_dataflow import parallelize
from jaxtp.config.settings import Precision
from jaxtp.io.model_functions import own_model
from jaxtp.placement.arrays import shard, shard_batch
from jaxtp.plan.decisions import Plan
from jaxtp.rules.planner import make_plan
from jaxtp.train.own_model import Batched, batched
from jaxtp.train.step import jit_step
from jaxtp.train.update import init_state, make_update

RATE = 1e-3
"""Learning rate of the Adam that stands in; no price depends on it."""


class _Loss:
    """The loss that stands in, under a plan; see `jaxtp.train.update.Loss`."""

    def __init__(self, model: Batched, plan: Plan, mesh: Mesh) -> None:
        self._model, self._call = model, parallelize(model.call, plan, mesh)

    def total(self, params: Any, batch: Any) -> jax.Array:
        """Summed over the batch."""
        return self._model.loss(params, batch, self._call)

    def count(self, batch: Any) -> jax.Array:
        """Sequences of the batch."""
        return jax.numpy.float32(next(iter(batch.values())).shape[0])


def step_on_target(
    mesh: Mesh, entry: str, batch: int, micro_batches: int, zero: int
) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step and its arguments as structs; runs in the compiler's process.

    Args:
        mesh: The target's devices, on the axes of the plan.
        entry: "package.module:function", the model.
        batch: Sequences of the global batch.
        micro_batches: Pieces that it comes in.
        zero: ZeRO stage.
    """
    model = batched(own_model(entry))
    plan = make_plan(model.params, mesh, zero=zero, fn=model.call, inputs=model.inputs)
    trained = model.trained()
    tx = optax.adamw(RATE)
    trains = trained.__contains__ if len(trained) < len(jax.tree.leaves(model.params)) else None
    state = jax.eval_shape(lambda params: init_state(params, tx, Precision(), trains), model.params)
    placed = shard(state, mesh, plan=plan)
    update = make_update(
        _Loss(model, plan, mesh),
        tx,
        optax.constant_schedule(RATE),
        plan,
        mesh,
        num_micro=micro_batches,
        trains=trains,
    )
    return jit_step(update, placed, mesh, plan=plan), (
        placed,
        shard_batch(model.batch(batch), mesh),
    )
