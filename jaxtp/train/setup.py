"""Settings -> everything a run needs, each piece made once and on its mesh."""

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable, Mapping

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxtp import models
from jaxtp.activations.by_name import use_plan
from jaxtp.compile.options import CompileOptions, compile_options
from jaxtp.config.batch_sizes import is_sequence_parallel, resolve
from jaxtp.config.settings import Communication, Config, settings
from jaxtp.cost.stage_balance import deal
from jaxtp.errors import BadConfig, SizeMismatch, join
from jaxtp.hardware.clusters import Cluster
from jaxtp.hardware.gpus import DeviceKind
from jaxtp.mesh.axes import Axis
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.placement.arrays import shard_batch
from jaxtp.placement.init import init_sharded
from jaxtp.plan.decisions import Plan
from jaxtp.plan.stages import Stages
from jaxtp.processes.startup import agree
from jaxtp.rules.planner import make_plan
from jaxtp.train.language import Batch, NextToken
from jaxtp.train.optimizer import build_optimizer
from jaxtp.train.step import Step, jit_step
from jaxtp.train.text import Text, read_text
from jaxtp.train.update import TrainState, Update, init_state, make_update, to_host


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Setup:
    """A run before its first step.

    Attributes:
        config: Resolved settings.
        model: Sizes of the model, its types as the settings want them.
        mesh: The mesh of devices.
        plan: Where parameters go.
        state: The state to begin with, placed.
        step: `(state, batch) -> (state, metrics)`, compiled at the first call.
        text: Training and validation batches by step number.
        validate: Mean nats per token of a state on a batch.
    """

    config: Config
    model: models.Config
    mesh: Mesh
    plan: Plan
    state: TrainState
    step: Step[TrainState]
    text: Text
    validate: Callable[[TrainState, Batch], float]

    def placed(self, batch: Batch) -> Batch:
        """A host batch on the devices, split over dp and fsdp."""
        return shard_batch(batch, self.mesh)


def prepare(config: Config) -> Setup:
    """Checks the settings against the devices that there are, and makes the run.

    Raises:
        BadConfig: TP020, for settings that this machine or this version cannot follow.
        SizeMismatch: TP003, if evaluation's sequences do not divide into micro-batches.
        BadData: TP130, for text that is missing or too short.
        ProcessesDisagree: TP014, if processes have other settings, another plan, mesh, text or
            tokenizer.
        JaxtpError: whatever `resolve`, `make_plan` and `init_sharded` raise.
    """
    agree({name: operator.attrgetter(name)(config) for name in settings()})
    config = resolve(config, jax.device_count())
    _check_machine(config)
    mesh = make_mesh(devices=jax.devices(), **axis_sizes(config))
    model = model_of(config)
    text = read_text(config, model.vocab_size)
    plan = plan_of(config, model, mesh)
    # Before the first collective, which another plan would not have.
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    agree({"plan": digest, "mesh": mesh, **text.digests})
    tx, _ = build_optimizer(config.optimizer, config.steps)

    def init() -> TrainState:
        _, params = nnx.split(models.build(model, nnx.Rngs(config.seed)))
        return init_state(params, tx, config.precision)

    state: TrainState = init_sharded(init, None, mesh, plan=plan)
    offload = config.zero.offload_optimizer == "cpu"
    if offload:
        state = to_host(state)
    update = update_of(config, model, plan, mesh, offload=offload)
    on_gpu = jax.default_backend() == "gpu"
    return Setup(
        config=config,
        model=model,
        mesh=mesh,
        plan=plan,
        state=state,
        step=jit_step(
            update,
            state,
            mesh,
            plan=plan,
            donate=config.communication.donate,
            compiler_options=options_of(config.communication).options if on_gpu else None,
        ),
        text=text,
        validate=functools.partial(_validate, _mean(loss_of(model), plan, mesh)),
    )


def options_of(communication: Communication) -> CompileOptions:
    """The compile options of a section of settings."""
    return compile_options(
        overlap=communication.overlap, gradient_fusion=communication.gradient_fusion
    )


def model_of(config: Config) -> models.Config:
    """The model of a config, in the types and with the remat that it asks for."""
    return dataclasses.replace(
        models.config_of(config.model), dtype=config.precision.compute, remat=config.remat
    )


def loss_of(model: models.Config) -> NextToken:
    """What training of a model minimises."""
    return NextToken(nnx.split(models.abstract(model))[0])


def update_of(
    config: Config, model: models.Config, plan: Plan, mesh: Mesh, *, offload: bool = False
) -> Update:
    """The step function of a resolved config.

    Args:
        config: Resolved settings.
        model: The model, as `model_of` gives it.
        plan: Where parameters go.
        mesh: The mesh that the state is placed on.
        offload: Whether the optimizer's state comes from the host's memory.
    """
    tx, schedule = build_optimizer(config.optimizer, config.steps)
    return make_update(
        loss_of(model),
        tx,
        schedule,
        plan,
        mesh,
        # A pipeline takes the whole batch: its micro-batches are those of accumulation.
        num_micro=1 if plan.stages else config.batch.accumulation,
        precision=config.precision,
        offload=offload,
    )


def axis_sizes(config: Config) -> dict[str, int]:
    """The mesh of a resolved config as `make_mesh` orders it; axes of size 1 are left out."""
    sizes = config.mesh.sizes.items()
    return {axis.value: size for axis, size in sizes if size > 1 or axis is Axis.TP}


def plan_of(config: Config, model: models.Config, mesh: Mesh | Mapping[str, int]) -> Plan:
    """The plan of a resolved config's model on a mesh, or on the sizes of one."""
    assert config.zero.stage is not None
    plan = make_plan(
        models.abstract(model),
        mesh,
        config=model,
        policy=config.tensor.policy,
        zero=config.zero.stage,
        stages=stages_of(config, model),
        pad_vocab=config.tensor.pad_vocab,
        strict=config.tensor.strict,
    )
    return dataclasses.replace(
        plan, sequence_parallel=is_sequence_parallel(config), overlap=config.communication.overlap
    )


def stages_of(config: Config, model: models.Config) -> Stages | None:
    """How the layers of a resolved config are assigned; None without stages.

    Raises:
        BadConfig: TP020, for a target of several kinds that the settings do not allow.
        BadTarget, BadMesh: TP116, TP010, if stages cannot be of one kind each.
        BadStages: TP074, if there are fewer layers than chunks.
    """
    kinds, pipeline = stage_kinds(config), config.pipeline
    if config.mesh.pp == 1:
        return None
    batch = {"micro_batches": pipeline.micro_batches, "num_rounds": pipeline.rounds}
    if kinds:
        return deal(pipeline.load_balance, model.num_hidden_layers, kinds, **batch)
    return Stages.even(model.num_hidden_layers, config.mesh.pp, **batch)


def stage_kinds(config: Config) -> tuple[DeviceKind, ...]:
    """The kind of GPU of each stage where the target has several; else `()`."""
    if "+" not in config.target:
        return ()
    if not config.pipeline.allow_heterogeneous:
        raise BadConfig(
            f"the target {config.target} has several kinds of GPU",
            where="pipeline.allow_heterogeneous",
            fix="true; stages of one kind each then get layers by pipeline.load_balance",
        )
    return Cluster.parse(config.target).stage_kinds(axis_sizes(config))


def _check_machine(config: Config) -> None:
    pieces = config.batch.accumulation * config.mesh.dp * config.mesh.fsdp
    if config.mesh.pp > 1 and config.run.eval_windows % pieces:
        below = config.run.eval_windows // pieces * pieces
        raise SizeMismatch(
            f"{config.run.eval_windows} sequences do not divide by {config.batch.accumulation} "
            f"micro-batches x {pieces // config.batch.accumulation} data-parallel devices",
            where="run.eval_windows",
            fix=join(n for n in (below, below + pieces) if n),
        )
    kinds = {device.device_kind for device in jax.devices()}
    if len(kinds) > 1 and not stage_kinds(config):
        raise BadConfig(
            f"the devices are of several kinds: {join(sorted(kinds))}",
            where="target",
            fix="name them in the order of jax.devices(), such as a100-80:1x8+h100:1x8",
        )
    if config.precision.compute == "float16" and jax.default_backend() == "cpu":
        raise BadConfig(
            "JAX has no float16 matrix products on CPUs",
            where="precision.compute",
            fix="float32 or bfloat16; float16 on GPUs",
        )


def _mean(loss: NextToken, plan: Plan, mesh: Mesh) -> Callable[[TrainState, Batch], jax.Array]:
    own_mesh = plan_mesh(mesh, plan.mesh)

    @jax.jit
    def mean(state: TrainState, batch: Batch) -> jax.Array:
        with use_plan(plan, own_mesh):
            return loss.total(state.params, batch) / loss.count(batch)

    return mean


def _validate(
    mean: Callable[[TrainState, Batch], jax.Array], state: TrainState, batch: Batch
) -> float:
    return float(mean(state, batch))
