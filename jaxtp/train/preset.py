"""A whole train step of a preset, abstract: what `jaxtp preflight --model` compiles."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.activations.by_name import use_plan
from jaxtp.compile.deviceless import preflight
from jaxtp.compile.options import CompileOptions
from jaxtp.compile.report import Report
from jaxtp.cost.floor import plan_floor_bytes
from jaxtp.cost.flops import model_flops
from jaxtp.errors import SizeMismatch
from jaxtp.hardware.gpus import Target
from jaxtp.mesh.axes import Axis, Shards
from jaxtp.mesh.build import plan_mesh
from jaxtp.models import abstract, config_of
from jaxtp.models.layers import cross_entropy
from jaxtp.placement.arrays import shard
from jaxtp.plan.decisions import Plan
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.planner import make_plan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """What to compile; plain values, so that they travel to the compiler's process as JSON."""

    model: str
    """A preset of `jaxtp.models`."""

    tp: int = 8
    """Devices along the tensor axis; the rest are replicas, over which the batch is sharded."""

    batch: int = 8
    """Sequences of the global batch."""

    seq: int = 2048
    """Tokens of one sequence."""

    layers: int = 0
    """Layers to compile; 0 is all of the preset's."""

    remat: str = "block_outputs"
    """What the backward pass recomputes: none, full, block_outputs, dots or stage."""

    param_dtype: str = "float32"
    """Type of the stored parameters."""

    attention: str = "xla"
    """Kernel of attention: xla or cudnn."""

    optimizer: str = "adamw"
    """adamw, sgd, or none for gradients only."""

    sequence_parallel: bool = False
    """Shard the residual stream along the sequence over the tensor axis."""

    overlap: str = "auto"
    """Program structure: aggressive interleaves two half-batches; see `jaxtp.overlap`."""

    donate: bool = True
    """Let the new state use the memory of the old one."""

    pad_vocab: bool = False
    """Pad a vocabulary that tp does not divide, as Megatron-LM does."""

    wide_gradients: bool = False
    """Sum the replicas' gradients in float32, all at the end, instead of layer by layer in the type
    of the activations."""


def preset_plan(mesh: Any, options: StepOptions) -> tuple[Any, Plan]:
    """The abstract model of the options and its plan on `mesh`.

    Args:
        mesh: Anything that `make_plan` takes.
        options: What to compile.
    """
    config = config_of(options.model)
    config = dataclasses.replace(
        config,
        num_hidden_layers=options.layers or config.num_hidden_layers,
        remat=options.remat,
        param_dtype=options.param_dtype,
        attention_implementation=options.attention,
    )
    model = abstract(config)
    plan = make_plan(model, mesh, config=config, pad_vocab=options.pad_vocab)
    return model, dataclasses.replace(
        plan, sequence_parallel=options.sequence_parallel, overlap=options.overlap
    )


def preflight_preset(
    options: StepOptions,
    target: str,
    *,
    entry: str = "jaxtp.train.preset:preset_step",
    compiler_options: CompileOptions | None = None,
    time_limit: float = 900.0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> tuple[Plan, Report]:
    """The plan of a preset on a target, and the report of its compiled step.

    Args:
        options: What to compile.
        target: `KIND:HOSTSxGPUS` or `KIND:SLICESxHOSTSxGPUS`.
        entry: What makes the step from the options, `module:function`; another one than
            `preset_step` compiles the same model by another plan, against the same floor.
        compiler_options: From `compile_options`.
        time_limit: Seconds that the compiler may take.
        on_progress: Called a few times a second with the seconds so far.

    Raises:
        SizeMismatch: TP003, if tp does not divide the devices, or the replicas the batch.
        JaxtpError: whatever `make_plan` and `preflight` raise.
    """
    devices, tp = Target.parse(target).num_devices, options.tp
    if tp < 1 or devices % tp or options.batch % (devices // tp):
        raise SizeMismatch(
            f"tp={tp} on {devices} devices with a batch of {options.batch}",
            fix=f"tp divides {devices}, and the batch is a multiple of {devices}/tp",
        )
    mesh = {Axis.DP.value: devices // tp, Axis.TP.value: tp}
    _, plan = preset_plan(mesh, options)
    config = config_of(options.model)
    layers = options.layers or config.num_hidden_layers
    config = dataclasses.replace(config, num_hidden_layers=layers)
    dims = ModelDims.of(config)
    tokens = options.batch * options.seq
    report = preflight(
        entry,
        target=target,
        mesh=dict(plan.mesh.sizes),
        keywords=dataclasses.asdict(options),
        options=compiler_options,
        tensor_axes=plan.mesh.tp,
        floor_bytes=plan_floor_bytes(plan, dims, tokens=tokens, dtype=config.dtype),
        model_flops=model_flops(plan, dims, tokens=tokens, seq=options.seq).full,
        time_limit=time_limit,
        on_progress=on_progress,
    )
    return plan, report


def preset_step(mesh: Mesh, **settings: Any) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step and its abstract arguments; the entry point of the compiler's process.

    Args:
        mesh: A mesh of the target's devices, with the plan's axes.
        **settings: Fields of `StepOptions`.

    Returns:
        `step(params, opt_state, tokens) -> (params, opt_state, loss)` and the structs for it.
        `tokens` is `(batch, seq + 1)`.
    """
    options = StepOptions(**settings)
    # The plan's axes are factors of the one tensor axis that planning starts from.
    mesh = Mesh(mesh.devices.reshape(-1, options.tp), (Axis.DP, Axis.TP))
    model, plan = preset_plan(mesh, options)
    return planned_step(model, plan, mesh, options)


def planned_step(
    model: Any, plan: Plan, mesh: Mesh, options: StepOptions, *, constrain: bool = True
) -> tuple[Any, tuple[Any, ...]]:
    """The same as `preset_step`, for a plan from anywhere.

    Args:
        model: The abstract model.
        plan: Where its parameters lie.
        mesh: The devices.
        options: What to compile.
        constrain: Whether the plan's activation constraints hold; without them the partitioner
            places activations by itself.
    """
    own_mesh = plan_mesh(mesh, plan.mesh)
    graph, params = nnx.split(model)
    tx = {"adamw": optax.adamw, "sgd": optax.sgd}.get(options.optimizer, optax.sgd)(1e-4)
    params = shard(params, mesh, plan=plan)
    opt_state = shard(jax.eval_shape(tx.init, params), mesh, plan=plan)
    batch = NamedSharding(own_mesh, PartitionSpec(plan.mesh.batch or None))
    tokens = jax.ShapeDtypeStruct((options.batch, options.seq + 1), jnp.int32, sharding=batch)

    def gradients(plan: Plan, params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        def loss_fn(params: Any) -> jax.Array:
            return cross_entropy(nnx.merge(graph, params)(tokens[:, :-1]), tokens[:, 1:])

        with use_plan(plan, own_mesh) if constrain else contextlib.nullcontext():
            return jax.value_and_grad(loss_fn)(params)

    def wide_gradients(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        # Inside, the batch is already sharded: only tensor parallelism is left to the partitioner.
        inner = dataclasses.replace(plan, mesh=plan.mesh.without(Axis.that_shard(Shards.BATCH)))

        def local(params: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
            loss, grads = gradients(inner, params, tokens)
            wide = jax.tree.map(lambda grad: grad.astype(jnp.float32), grads)
            return jax.lax.pmean((loss, wide), plan.mesh.batch)

        return jax.shard_map(
            local,
            mesh=own_mesh,
            in_specs=(PartitionSpec(), batch.spec),
            out_specs=PartitionSpec(),
            axis_names=set(plan.mesh.batch),
            check_vma=False,
        )(params, tokens)

    def step(params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        if options.wide_gradients and plan.mesh.batch:
            loss, grads = wide_gradients(params, tokens)
        else:
            loss, grads = gradients(plan, params, tokens)
        if options.optimizer == "none":
            return grads, opt_state, loss
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    places = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))
    donated = (0, 1) if options.donate and options.optimizer != "none" else ()
    jitted = jax.jit(step, out_shardings=(*places, None), donate_argnums=donated)
    return jitted, (params, opt_state, tokens)
