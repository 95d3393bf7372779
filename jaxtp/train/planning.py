"""Settings -> what is to be built: model, mesh sizes, stages, optimizer; and its plan."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax
from jax.sharding import Mesh

from jaxtp import models
from jaxtp.config.batch_sizes import is_sequence_parallel
from jaxtp.config.settings import Config, Experts, Lora
from jaxtp.cost.stage_balance import deal
from jaxtp.errors import BadConfig
from jaxtp.hardware.clusters import Cluster
from jaxtp.hardware.gpus import DeviceKind
from jaxtp.io.hf.config import read_config
from jaxtp.mesh.axes import Axis
from jaxtp.models.lora import is_adapter
from jaxtp.plan.decisions import Plan
from jaxtp.plan.stages import Stages
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.planner import make_plan
from jaxtp.train.optimizer import build_optimizer


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Build:
    """What resolved settings come to, found once: the plan, the step and prices are made of it.

    Attributes:
        config: Resolved settings.
        model: Sizes of the model, its types, depth and kernel as the settings want them.
        dims: The same as plans and prices read it.
        sizes: The mesh as `make_mesh` takes it: devices along each axis, tp and those above 1.
        kinds: The kind of GPU of each stage where the target has several; else `()`.
        stages: How layers are assigned; None without stages.
        optimizer: What makes changes of gradients, clipping included.
        schedule: Learning rate by number of updates.
        trains: Whether the parameter of a path is trained; None if all are.
    """

    config: Config
    model: models.Config
    dims: ModelDims
    sizes: Mapping[str, int]
    kinds: tuple[DeviceKind, ...]
    stages: Stages | None
    optimizer: optax.GradientTransformation
    schedule: optax.Schedule
    trains: Callable[[str], bool] | None

    @classmethod
    def of(cls, config: Config) -> "Build":
        """What resolved settings come to.

        Raises:
            JaxtpError: whatever `model_of`, `stage_kinds`, `stages_of` and `build_optimizer` raise.
        """
        model, sizes = model_of(config), axis_sizes(config)
        kinds = stage_kinds(config, sizes)
        optimizer, schedule = build_optimizer(config.optimizer, config.steps)
        return cls(
            config=config,
            model=model,
            dims=ModelDims.of(model),
            sizes=sizes,
            kinds=kinds,
            stages=stages_of(config, model, kinds),
            optimizer=optimizer,
            schedule=schedule,
            trains=is_adapter if config.lora.rank else None,
        )

    @property
    def tokens(self) -> int:
        """Tokens of a step, global."""
        return self.config.batch.size * self.config.seq_len

    @property
    def num_micro(self) -> int:
        """Micro-batches that accumulate; a pipeline takes all of the batch, and has its own."""
        return 1 if self.stages else self.config.batch.accumulation


def plan_of(build: Build, mesh: Mesh | Mapping[str, int] | None = None) -> Plan:
    """The plan of a run on a mesh, or on the sizes of one; by default those of the settings."""
    config = build.config
    assert config.zero.stage is not None
    plan = make_plan(
        models.abstract(build.model),
        build.sizes if mesh is None else mesh,
        config=build.model,
        policy=config.tensor.policy,
        zero=config.zero.stage,
        stages=build.stages,
        pad_vocab=config.tensor.pad_vocab,
        strict=config.tensor.strict,
    )
    return dataclasses.replace(
        plan, sequence_parallel=is_sequence_parallel(config), overlap=config.communication.overlap
    )


def published_of(config: Config) -> models.Config:
    """The model as it was published: that of the preset, or of the folder of weights.

    Raises:
        BadConfig: TP020, if no preset has the name, or another depth is set than the weights have.
        UnsupportedModel, BadWeights: TP096, TP095, if the folder's config.json is of no model of
            ours, or is missing.
    """
    if not config.weights:
        return models.config_of(config.model)
    if config.layers:
        raise BadConfig(
            f"{config.layers} layers of a model whose weights are read from {config.weights}",
            where="layers",
            fix="0, for all layers that the weights have",
        )
    return read_config(config.weights)


def model_of(config: Config) -> models.Config:
    """The model of a config, with the types, remat, kernel and depth it asks for.

    Raises:
        BadConfig: TP020, if experts are set of a model without any.
        JaxtpError: whatever `published_of` raises.
    """
    published = published_of(config)
    return dataclasses.replace(
        published.of_depth(config.layers),
        **_of_experts(config.experts, published),
        dtype=config.precision.compute,
        param_dtype=config.precision.params,
        remat=config.remat,
        # What auto comes to is known where the devices are, see `jaxtp.train.attention`.
        attention_implementation="xla" if config.attention == "auto" else config.attention,
        lora=lora_of(config.lora),
    )


def _of_experts(settings: Experts, model: models.Config) -> dict[str, Any]:
    """What a section of settings changes in a model."""
    given = {
        "capacity_factor": settings.capacity_factor,
        "drop_tokens": settings.drop_tokens,
        "router_aux_loss_coef": settings.load_balance_loss,
        "router_z_loss_coef": settings.router_z_loss,
    }
    found = {name: value for name, value in given.items() if value}
    if found and not getattr(model, "num_experts", 0):
        raise BadConfig("the model has no experts", where="experts", fix="leave the section out")
    return found


def lora_of(settings: Lora) -> models.Lora | None:
    """The adapters of a section of settings; None for rank 0.

    Raises:
        BadConfig: TP020, if there are no targets.
    """
    if not settings.rank:
        return None
    targets = tuple(name.strip() for name in settings.targets.split(",") if name.strip())
    alpha = settings.alpha or 2.0 * settings.rank
    return models.Lora(rank=settings.rank, alpha=alpha, targets=targets)


def axis_sizes(config: Config) -> dict[str, int]:
    """The mesh of a resolved config as `make_mesh` orders it; axes of size 1 are left out."""
    sizes = config.mesh.sizes.items()
    return {axis.value: size for axis, size in sizes if size > 1 or axis is Axis.TP}


def stages_of(config: Config, model: models.Config, kinds: tuple[DeviceKind, ...]) -> Stages | None:
    """How the layers of a resolved config are assigned; None without stages.

    Args:
        config: Resolved settings.
        model: Its model.
        kinds: The kind of each stage where there are several.

    Raises:
        BadStages: TP074, if there are fewer layers than chunks.
    """
    pipeline = config.pipeline
    if config.mesh.pp == 1:
        return None
    batch = {"micro_batches": pipeline.micro_batches, "num_rounds": pipeline.rounds}
    if kinds:
        return deal(pipeline.load_balance, model.num_staged_layers, kinds, **batch)
    return Stages.even(model.num_staged_layers, config.mesh.pp, **batch)


def stage_kinds(config: Config, sizes: Mapping[str, int]) -> tuple[DeviceKind, ...]:
    """The kind of GPU of each stage where the target has several; else `()`.

    Raises:
        BadConfig: TP020, for a target of several kinds that the settings do not allow.
        BadTarget, BadMesh: TP116, TP010, if stages cannot be of one kind each.
    """
    if "+" not in config.target:
        return ()
    if not config.pipeline.allow_heterogeneous:
        raise BadConfig(
            f"the target {config.target} has several kinds of GPU",
            where="pipeline.allow_heterogeneous",
            fix="true; stages of one kind each then get layers by pipeline.load_balance",
        )
    return Cluster.parse(config.target).stage_kinds(sizes)
