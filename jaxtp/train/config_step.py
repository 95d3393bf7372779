"""A build -> the train step, one for preflight and for training, and its arguments as shapes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxtp import models
from jaxtp.compile.options import CompileOptions, Value, compile_options
from jaxtp.config.settings import Config
from jaxtp.hardware.links import MIB
from jaxtp.placement.arrays import shard, shard_batch
from jaxtp.plan.decisions import Plan
from jaxtp.train.language import NextToken
from jaxtp.train.planning import Build
from jaxtp.train.step import Step, jit_step
from jaxtp.train.update import TrainState, Update, init_state, make_update

REDUCTIONS = "xla_gpu_all_reduce_combine_threshold_bytes"
LARGEST = 2**31 - 1
"""No threshold, in bytes."""

OF_EXPERTS: Mapping[str, Value] = {
    # Of the result, which a message has as many times as it has devices. Gradients of a layer's
    # experts in one message would wait for the last of their products, and little is left of the
    # layer to pass them beside.
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 8 * MIB,
    # Experts' weights are gathered beside all-to-alls of their tokens, which take another link: two
    # gathers on their way leave room for one of these.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 3,
}
"""Options of models with experts, where none are asked for."""

OF_WHOLE_LAYERS: Mapping[str, Value] = {
    # XLA would multiply q, k and v side by side, and for that write their gathered weights once
    # more, forward and backward, and their gradients too. Of whole layers no product is narrow
    # enough to gain by it.
    "xla_gpu_dot_merger_threshold_mb": 0,
}
"""Options of `aggressive` with fsdp and without tp, where products are of all of a weight."""


def step_of(
    build: Build,
    plan: Plan,
    mesh: Mesh,
    state: TrainState,
    *,
    options: CompileOptions | None = None,
) -> Step[TrainState]:
    """The jitted step of a run, `(state, batch) -> (state, metrics)`.

    Args:
        build: The run.
        plan: Where the state lies.
        mesh: The mesh that it is placed on.
        state: Arrays, or structs from `abstract_state` placed by `shard`.
        options: Compile options of this step; None for those of XLA.
    """
    offload = build.config.zero.offload_optimizer == "cpu" and not is_abstract(state)
    return jit_step(
        update_of(build, plan, mesh, offload=offload),
        state,
        mesh,
        plan=plan,
        donate=build.config.communication.donate,
        compiler_options=None if options is None else options.options,
    )


def is_abstract(state: TrainState) -> bool:
    """Whether a state is shapes; these are not in the host's memory, wherever they are to be."""
    return isinstance(state.num_updates, jax.ShapeDtypeStruct)


def options_of(build: Build) -> CompileOptions:
    """The compile options of a run's communication.

    Where adapters are trained, an all-reduce takes whatever else there is to sum with it, of any
    size: that is then the narrow product of an adapter, or gradients of adapters.
    """
    config, communication = build.config, build.config.communication
    extra = dict[str, Value]()
    if config.lora.rank and communication.gradient_fusion:
        extra[REDUCTIONS] = LARGEST
    asks = communication.gradient_fusion is not True or communication.overlap != "auto"
    if getattr(build.model, "num_experts", 0) and not asks:
        extra |= OF_EXPERTS
    if communication.overlap == "aggressive" and config.mesh.tp == 1 < config.mesh.fsdp:
        extra |= OF_WHOLE_LAYERS
    return compile_options(
        overlap=communication.overlap,
        gradient_fusion=communication.gradient_fusion,
        extra=extra,
    )


def loss_of(model: models.Config) -> NextToken:
    """What training of a model minimises."""
    return NextToken(nnx.split(models.abstract(model))[0])


def update_of(build: Build, plan: Plan, mesh: Mesh, *, offload: bool = False) -> Update:
    """The step function of a run.

    Args:
        build: The run.
        plan: Where parameters go.
        mesh: The mesh that the state is placed on.
        offload: Whether the optimizer's state comes from the host's memory.
    """
    return make_update(
        loss_of(build.model),
        build.optimizer,
        build.schedule,
        plan,
        mesh,
        num_micro=build.num_micro,
        precision=build.config.precision,
        offload=offload,
        trains=build.trains,
    )


def first_state(build: Build) -> TrainState:
    """The state before the first step, with parameters drawn from the seed."""
    _, params = nnx.split(models.build(build.model, nnx.Rngs(build.config.seed)))
    return init_state(params, build.optimizer, build.config.precision, build.trains)


def abstract_state(build: Build) -> TrainState:
    """The same as structs: no memory, milliseconds at any size."""
    return jax.eval_shape(lambda: first_state(build))


def abstract_batch(config: Config) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch of a resolved config as structs, each `(batch, seq + 1)` int32."""
    shape = (config.batch.size, config.seq_len + 1)
    names = ("tokens", "segments") if config.data.packed else ("tokens",)
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in names}


def abstract_step(
    build: Build, plan: Plan, mesh: Mesh
) -> tuple[Step[TrainState], tuple[TrainState, Any]]:
    """The step of a run and its arguments as structs on a mesh.

    Args:
        build: The run.
        plan: Where the state lies.
        mesh: Devices of any kind, those of a compiler without devices included.
    """
    state = shard(abstract_state(build), mesh, plan=plan)
    arguments = (state, shard_batch(abstract_batch(build.config), mesh))
    return step_of(build, plan, mesh, state), arguments
