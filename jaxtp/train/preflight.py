"""Preflight of a config: its step compiled for GPUs that are not there, and what its mesh costs."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxtp.compile.deviceless import preflight
from jaxtp.compile.options import CompileOptions
from jaxtp.compile.report import Report
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.files import parse
from jaxtp.config.settings import Config
from jaxtp.cost.bound import held_in_stages, needed
from jaxtp.cost.floor import plan_floor_bytes, stream_bytes
from jaxtp.cost.flops import model_flops
from jaxtp.cost.memory import state_bytes_per_device
from jaxtp.cost.stage_balance import LayerWork, compare, layer_work, table
from jaxtp.cost.tensor_time import reduction_seconds
from jaxtp.errors import DoesNotFit, warn
from jaxtp.hardware.clusters import Cluster
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB
from jaxtp.mesh.axes import Axis
from jaxtp.placement.train_state import Slot, slots
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import FlatTree, Param
from jaxtp.train.attention import choose_attention
from jaxtp.train.config_step import abstract_state, abstract_step, options_of
from jaxtp.train.planning import Build, plan_of


def preflight_config(
    config: Config,
    *,
    entry: str = "jaxtp.train.preflight:step_on_target",
    options: CompileOptions | None = None,
    time_limit: float = 900.0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> tuple[Plan, Report]:
    """The plan and the compiled step of a run on `config.target`.

    Args:
        config: Settings; `target` says for which machine, e.g. `h100:8x8`.
        entry: What makes the step from the settings, `module:function`; another one than
            `step_on_target` compiles the same run by another plan, against the same lower bound.
        options: Compile options other than those of `options_of`.
        time_limit: Seconds that the compiler may take.
        on_progress: Called a few times a second with the seconds so far.

    Raises:
        BadTarget: TP116, without a target.
        DoesNotFit: TP114, before compiling, if the state alone is larger than a GPU's memory.
        JaxtpError: whatever `resolve`, `make_plan` and `preflight` raise.
    """
    # One program runs on all kinds of GPU, so it has to fit the smallest.
    target = Cluster.parse(config.target).smallest
    config, attention = choose_attention(
        resolve(config, target.num_devices), on_gpu=True, ahead=True
    )
    build = Build.of(config)
    state = FlatTree.of(abstract_state(build)).shapes()
    plan = plan_of(build)
    places = slots(state, plan)
    warn_across_hosts(build, plan, target)
    refuse_too_large(config, plan, target, state_bytes_per_device(state, places, plan.mesh))
    report = preflight(
        entry,
        target=target,
        mesh=dict(plan.mesh.sizes),
        keywords={"settings": json.dumps(dataclasses.asdict(config), default=str)},
        options=options or options_of(build),
        tensor_axes=plan.mesh.tp,
        floor_bytes=plan_floor_bytes(
            plan, build.dims, tokens=build.tokens, dtype=build.model.dtype
        ),
        model_flops=model_flops(plan, build.dims, tokens=build.tokens, seq=config.seq_len).full,
        needs=needed(
            plan,
            build.dims,
            tokens=build.tokens,
            num_micro=build.num_micro,
            compute=build.model.dtype,
            sums=reduced_in(config, plan),
            trains=build.trains,
        ),
        idle_share=plan.stages.bubble if plan.stages else 0.0,
        time_limit=time_limit,
        on_progress=on_progress,
    )
    offloaded = _offloaded(state, places, plan) if config.zero.offload_optimizer == "cpu" else ()
    own = (
        f"attention {attention}",
        *_gathers(config, plan),
        *offloaded,
        *strategies(build, plan),
    )
    return plan, dataclasses.replace(report, notes=(*report.notes, *own))


def reduced_in(config: Config, plan: Plan) -> str:
    """The type in which replicas reduce gradients."""
    precision = config.precision
    if plan.stages is not None:  # sums over all ticks, unless ZeRO shards what is summed
        return precision.compute if plan.zero == 3 else precision.params
    once = config.batch.accumulation > 1 or precision.gradients == "float32"
    return "float32" if once and plan.zero < 2 else precision.compute


def step_on_target(mesh: Mesh, settings: str) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step of a config and its arguments as structs; runs in the compiler's process.

    Args:
        mesh: The target's devices, on the axes of the plan.
        settings: A resolved config as JSON text.
    """
    build, mesh = resolved(settings, mesh)
    return abstract_step(build, plan_of(build, mesh), mesh)


def resolved(settings: str, mesh: Mesh) -> tuple[Build, Mesh]:
    """What an entry is given, as training has it: the run, and the mesh on the config's axes.

    Args:
        settings: A resolved config as JSON text.
        mesh: Devices on the axes of the plan, which may be factors of the one tensor axis.
    """
    config, _ = parse(settings)
    build = Build.of(config)
    return build, Mesh(mesh.devices.reshape(tuple(build.sizes.values())), tuple(build.sizes))


def _offloaded(
    state: Mapping[str, Param], places: Mapping[str, Slot], plan: Plan
) -> tuple[str, ...]:
    """What the compiled memory has too much of, if the optimizer's state is to be on the host."""
    # Compiled without a device, programs have no host memory.
    kept = {path: array for path, array in state.items() if path.startswith("opt_state/")}
    held = state_bytes_per_device(kept, places, plan.mesh)
    return (
        f"the peak counts {held / GIB:,.2f} GiB of optimizer state per GPU, which "
        "zero.offload_optimizer keeps in the host's memory between steps",
    )


def _gathers(config: Config, plan: Plan) -> tuple[str, ...]:
    """How often `aggressive` gathers weights, where a step has several ways."""
    if config.communication.overlap != "aggressive" or plan.zero < 3:
        return ()
    if plan.stages is None:
        micro = config.batch.accumulation
        times = f", {micro} times a step and pass"
        return (f"weights are gathered once a micro-batch{times}",) if micro > 1 else ()
    weights, sums = held_in_stages(plan, config.precision.compute)
    return (
        f"weights of a stage are gathered once a step, {weights / GIB:,.2f} GiB per GPU beside "
        f"{sums / GIB:,.2f} GiB of their gradients; overlap='auto' gathers them in each of "
        f"{plan.stages.num_ticks} ticks and pass, and holds one layer's",
    )


def strategies(build: Build, plan: Plan) -> tuple[str, ...]:
    """Lines that compare ways to assign layers to stages of different kinds; () for one kind.

    Args:
        build: The run.
        plan: Its plan.
    """
    if not build.kinds or plan.stages is None:
        return ()
    work = work_of(build, plan)
    return table(compare(plan.stages, build.kinds, work), build.kinds)


def work_of(build: Build, plan: Plan) -> LayerWork:
    """What the layers of a run cost on one device of a stage."""
    state, config = FlatTree.of(abstract_state(build)).shapes(), build.config
    staged = state_bytes_per_device(
        state, slots(state, plan), plan.mesh, along=plan.mesh.name_of(Axis.PP)
    )
    return layer_work(
        plan,
        build.dims,
        Cluster.parse(config.target),
        tokens=build.tokens,
        seq=config.seq_len,
        remat=config.remat,
        dtype=build.model.dtype,
        stacked_bytes=staged,
    )


def refuse_too_large(config: Config, plan: Plan, target: Target, held: int) -> None:
    """Refuses a run of which what lives on each GPU all the time does not fit.

    Args:
        config: Resolved settings.
        plan: Their plan.
        target: The machine.
        held: Bytes of parameters and optimizer state on each GPU; no activation is counted.

    Raises:
        DoesNotFit: TP114, if that is more than the GPU has.
    """
    card = target.device.memory_bytes
    if held <= card:
        return
    data = config.mesh.dp * config.mesh.fsdp
    sharded = ""
    if plan.zero < 3 and data * config.mesh.cp * config.mesh.ep > 1:
        sharded = f"zero.stage=3{f' with mesh.fsdp={data}' if data > 1 else ''}, "
    raise DoesNotFit(
        f"parameters and optimizer state take {held / GIB:,.1f} GiB of each GPU, before any "
        f"activation; {target.device.name} has {card / GIB:,.1f} GiB",
        where="mesh",
        fix=f"{sharded}a larger mesh.tp, or more GPUs",
    )


def warn_across_hosts(build: Build, plan: Plan, target: Target) -> None:
    """Warns if tensor parallelism leaves the NVLink domain, with what that costs."""
    config, model = build.config, build.model
    domain = {target.domain(device) for device in range(config.mesh.tp)}
    if len(domain) == 1:
        return
    message = stream_bytes(config.batch.micro_size * config.seq_len, model.hidden_size, model.dtype)
    inside = next(n for n in range(config.mesh.tp, 0, -1) if target.domain(n - 1) == 0)
    across, within = (
        reduction_seconds(
            plan,
            build.dims,
            target,
            message_bytes=message,
            num_micro=config.batch.accumulation,
            remat=config.remat,
            size=size,
        )
        for size in (config.mesh.tp, inside)
    )
    warn(
        f"TP010 at mesh.tp: tp={config.mesh.tp} spans {len(domain)} NVLink domains of {target}; "
        f"its all-reduces take {across * 1e3:,.1f} ms a step, modelled, where tp={inside} takes "
        f"{within * 1e3:,.1f} ms",
    )
