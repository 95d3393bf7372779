"""Settings -> the train step, one for preflight and for training, and its arguments as shapes."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp import models
from jaxtp.compile.options import CompileOptions, compile_options
from jaxtp.config.settings import Config
from jaxtp.models.lora import is_adapter
from jaxtp.placement.arrays import shard, shard_batch
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import PyTree
from jaxtp.train.language import NextToken
from jaxtp.train.optimizer import build_optimizer
from jaxtp.train.planning import model_of
from jaxtp.train.step import Step, jit_step
from jaxtp.train.update import TrainState, Update, init_state, make_update

REDUCTIONS = "xla_gpu_all_reduce_combine_threshold_bytes"
LARGEST = 2**31 - 1
"""No threshold, in bytes."""


def step_of(
    config: Config,
    plan: Plan,
    mesh: Mesh,
    state: TrainState,
    *,
    options: CompileOptions | None = None,
) -> Step[TrainState]:
    """The jitted step of a resolved config, `(state, batch) -> (state, metrics)`.

    Args:
        config: Resolved settings.
        plan: Where the state lies.
        mesh: The mesh that it is placed on.
        state: Arrays, or structs from `abstract_state` placed by `shard`.
        options: Compile options of this step; None for those of XLA.
    """
    offload = config.zero.offload_optimizer == "cpu" and not is_abstract(state)
    return jit_step(
        update_of(config, plan, mesh, offload=offload),
        state,
        mesh,
        plan=plan,
        donate=config.communication.donate,
        compiler_options=None if options is None else options.options,
    )


def is_abstract(state: TrainState) -> bool:
    """Whether a state is shapes; these are not in the host's memory, wherever they are to be."""
    return isinstance(state.num_updates, jax.ShapeDtypeStruct)


def options_of(config: Config) -> CompileOptions:
    """The compile options of a config's communication.

    Where adapters are trained, an all-reduce takes whatever else there is to sum with it, of any
    size: that is then the narrow product of an adapter, or gradients of adapters.
    """
    communication = config.communication
    joins = config.lora.rank and communication.gradient_fusion
    return compile_options(
        overlap=communication.overlap,
        gradient_fusion=communication.gradient_fusion,
        extra={REDUCTIONS: LARGEST} if joins else None,
    )


def loss_of(model: models.Config) -> NextToken:
    """What training of a model minimises."""
    return NextToken(nnx.split(models.abstract(model))[0])


def update_of(config: Config, plan: Plan, mesh: Mesh, *, offload: bool = False) -> Update:
    """The step function of a resolved config.

    Args:
        config: Resolved settings.
        plan: Where parameters go.
        mesh: The mesh that the state is placed on.
        offload: Whether the optimizer's state comes from the host's memory.
    """
    tx, schedule = build_optimizer(config.optimizer, config.steps)
    return make_update(
        loss_of(model_of(config)),
        tx,
        schedule,
        plan,
        mesh,
        # A pipeline takes the whole batch: its micro-batches are those of accumulation.
        num_micro=1 if plan.stages else config.batch.accumulation,
        precision=config.precision,
        offload=offload,
        trains=is_adapter if config.lora.rank else None,
    )


def first_state(config: Config) -> TrainState:
    """The state before the first step, with parameters drawn from the seed."""
    tx, _ = build_optimizer(config.optimizer, config.steps)
    _, params = nnx.split(models.build(model_of(config), nnx.Rngs(config.seed)))
    trains = is_adapter if config.lora.rank else None
    return init_state(params, tx, config.precision, trains)


def first_optimizer_state(config: Config, params: PyTree) -> PyTree:
    """The optimizer's state before the first step, for these parameters."""
    tx, _ = build_optimizer(config.optimizer, config.steps)
    trains = is_adapter if config.lora.rank else None
    return init_state(params, tx, config.precision, trains).opt_state


def abstract_state(config: Config) -> TrainState:
    """The same as structs: no memory, milliseconds at any size."""
    return jax.eval_shape(lambda: first_state(config))


def abstract_batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of a resolved config as structs, each `(batch, seq + 1)` int32."""
    shape = (config.batch.size, config.seq_len + 1)
    names = ("tokens", "segments") if config.data.packed else ("tokens",)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}


def abstract_step(
    config: Config, plan: Plan, mesh: Mesh
) -> tuple[Step[TrainState], tuple[TrainState, Any]]:
    """The step of a resolved config and its arguments as structs on a mesh.

    Args:
        config: Resolved settings.
        plan: Where the state lies.
        mesh: Devices of any kind, those of a compiler without devices included.
    """
    state = shard(abstract_state(config), mesh, plan=plan)
    arguments = (state, shard_batch(abstract_batch(config), mesh))
    return step_of(config, plan, mesh, state), arguments
