"""Settings -> everything a run needs, each piece made once and on its mesh."""

import dataclasses
import functools
import hashlib
import operator
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxtp.activations.by_name import use_plan
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.settings import Config, settings
from jaxtp.errors import BadConfig, SizeMismatch, join
from jaxtp.io.hf import load_hf
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models.lora import is_adapter
from jaxtp.placement.arrays import shard_batch
from jaxtp.placement.init import init_sharded
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import leaves, map_with_path
from jaxtp.processes.startup import agree
from jaxtp.train.attention import choose_attention
from jaxtp.train.config_step import first_state, loss_of, options_of, step_of
from jaxtp.train.language import Batch, NextToken
from jaxtp.train.planning import Build, plan_of
from jaxtp.train.step import Step
from jaxtp.train.text import Batch as HostBatch
from jaxtp.train.text import Text, read_text
from jaxtp.train.update import TrainState, init_state, to_host


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Setup:
    """A run before its first step.

    Attributes:
        build: What the settings come to.
        attention: Which kernel computes it, and why.
        mesh: The mesh of devices.
        plan: Where parameters go.
        state: The state to begin with, placed.
        step: `(state, batch) -> (state, metrics)`, compiled at the first call.
        text: Training and validation batches by step number.
        validate: Mean nats per token of a state on a batch.
    """

    build: Build
    attention: str
    mesh: Mesh
    plan: Plan
    state: TrainState
    step: Step[TrainState]
    text: Text
    validate: Callable[[TrainState, Batch], float]

    @property
    def config(self) -> Config:
        """Resolved settings."""
        return self.build.config

    def placed(self, batch: Batch | HostBatch) -> Batch:
        """A host batch on the devices, split over dp and fsdp."""
        return shard_batch(batch, self.mesh)


def prepare(config: Config, *, resumes: bool = False) -> Setup:
    """Checks the settings against the devices that there are, and makes the run.

    Args:
        config: Settings as a user gave them.
        resumes: Whether a checkpoint takes the place of the state, so that no weights are read.

    Raises:
        BadConfig: TP020, for settings that this machine or this version cannot follow.
        SizeMismatch: TP003, if evaluation's sequences do not divide into micro-batches.
        BadData: TP130, for text that is missing or too short.
        ProcessesDisagree: TP014, if processes have other settings, another plan, mesh, text or
            tokenizer.
        JaxtpError: whatever `resolve`, `make_plan`, `init_sharded` and `load_hf` raise.
    """
    agree({name: operator.attrgetter(name)(config) for name in settings()})
    on_gpu = jax.default_backend() == "gpu"
    config, attention = choose_attention(resolve(config, jax.device_count()), on_gpu=on_gpu)
    build = Build.of(config)
    _check_machine(build)
    mesh = make_mesh(devices=jax.devices(), **build.sizes)
    text = read_text(config, build.model.vocab_size)
    plan = plan_of(build, mesh)
    # Before the first collective, which another plan would not have.
    digest = hashlib.sha256(plan.to_json().encode()).hexdigest()
    agree({"plan": digest, "mesh": mesh, **text.digests})
    state: TrainState = init_sharded(lambda: first_state(build), None, mesh, plan=plan)
    if config.weights and not resumes:
        state = _with_weights(state, build, plan, mesh)
    if config.zero.offload_optimizer == "cpu":
        state = to_host(state)
    return Setup(
        build=build,
        attention=attention,
        mesh=mesh,
        plan=plan,
        state=state,
        step=step_of(build, plan, mesh, state, options=options_of(build) if on_gpu else None),
        text=text,
        validate=functools.partial(_validate, _mean(loss_of(build.model), plan, mesh)),
    )


def _with_weights(state: TrainState, build: Build, plan: Plan, mesh: Mesh) -> TrainState:
    """The first state with the parameters of a folder; adapters keep their own first values."""
    places = jax.tree.map(lambda x: x.sharding, state.opt_state)
    drawn = [leaf for path, leaf in leaves(state.params) if not is_adapter(path)]
    for leaf in (*drawn, *jax.tree.leaves(state.opt_state)):
        leaf.delete()  # it makes room for what is read
    _, read = load_hf(
        build.config.weights,
        mesh,
        plan=plan,
        param_dtype=build.config.precision.params,
        progress=jax.process_index() == 0,
    )
    found = dict(leaves(read))
    params = map_with_path(lambda path, old: found.get(path, old), state.params)
    # Some optimizers begin with a copy of the parameters.
    opt_state = jax.jit(
        lambda p: init_state(p, build.optimizer, build.config.precision, build.trains).opt_state,
        out_shardings=places,
    )(params)
    return dataclasses.replace(state, params=params, opt_state=opt_state)


def _check_machine(build: Build) -> None:
    config = build.config
    pieces = config.batch.accumulation * config.mesh.data_ways
    if config.mesh.pp > 1 and config.run.eval_windows % pieces:
        below = config.run.eval_windows // pieces * pieces
        raise SizeMismatch(
            f"{config.run.eval_windows} sequences do not divide by {config.batch.accumulation} "
            f"micro-batches x {pieces // config.batch.accumulation} data-parallel devices",
            where="run.eval_windows",
            fix=join(n for n in (below, below + pieces) if n),
        )
    kinds = {device.device_kind for device in jax.devices()}
    if len(kinds) > 1 and not build.kinds:
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
