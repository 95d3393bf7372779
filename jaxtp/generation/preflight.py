"""Generation compiled for GPUs that are not there: does it fit, and how fast may it be.

Prefill and decode are two programs; the second is that of `jaxtp.generate`, one token of every row.
The floor of a token is what no program can do without: every weight but the token table once, the
cache once, and two all-reduces a layer, at the rates that the same model of the hardware gives.
"""

import collections
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxtp import models
from jaxtp.compile.analysis import analyse
from jaxtp.compile.collectives import find
from jaxtp.compile.compiler import Program, compile_for
from jaxtp.compile.hlo import parse
from jaxtp.compile.options import PREFLIGHT, CompileOptions, probe
from jaxtp.compile.report import Report
from jaxtp.compile.traffic import Traffic, traffic
from jaxtp.cost.products import COMPILED_MEMORY_SHARE
from jaxtp.errors import DoesNotFit
from jaxtp.generation.programs import (
    Progress,
    Setting,
    loop_options,
    prompt_program,
    token_program,
)
from jaxtp.generation.sampling import Sampling
from jaxtp.generation.workload import Workload
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB
from jaxtp.mesh.build import plan_mesh
from jaxtp.models.cache import cache_shape
from jaxtp.models.quantized import is_quantized
from jaxtp.placement.arrays import shard
from jaxtp.plan.decisions import Plan
from jaxtp.plan.specs import Spec, partition_spec
from jaxtp.plan.trees import itemsize

ENTRY = "jaxtp.generation.preflight:program_on_target"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """One compiled program.

    Attributes:
        report: Memory and collectives.
        traffic: What one device reads and writes, and the modelled seconds.
    """

    report: Report
    traffic: Traffic


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """What generation on one target will do. Bytes are those of one device.

    Attributes:
        workload: What was asked.
        target: Of what machine, as text.
        plan: Where parameters lie.
        weight_bytes: Of the parameters.
        table_bytes: The part of them that a token reads a row of: an untied token table.
        cache_bytes: Of the cache.
        card_bytes: Memory of one GPU.
        prefill: Prompts into the cache, and the first token.
        decode: One more token of every row.
        floor_bytes: What a token must read.
        floor_seconds: What a token must take, see the module.
        largest_batch: Rows that fit at this context, by the compiled peak's own growth.
        largest_context: Tokens that fit at this batch, likewise.
    """

    workload: Workload
    target: str
    plan: Plan
    weight_bytes: int
    table_bytes: int
    cache_bytes: int
    card_bytes: int
    prefill: Phase
    decode: Phase
    floor_bytes: float
    floor_seconds: float
    largest_batch: int
    largest_context: int

    @property
    def read_ratio(self) -> float:
        """Bytes of weights and cache that a token reads over what it must read of them."""
        return self.decode.traffic.stored_bytes / self.floor_bytes

    @property
    def time_ratio(self) -> float:
        """Modelled seconds of a token over its floor."""
        return self.decode.traffic.seconds / self.floor_seconds

    @property
    def rest_ratio(self) -> float:
        """Peak of decoding over weights and cache."""
        return self.decode.report.peak_bytes / (self.weight_bytes + self.cache_bytes)

    def to_json(self) -> str:
        """Everything as JSON text, reports included."""
        traffic = {p: dataclasses.asdict(getattr(self, p).traffic) for p in ("prefill", "decode")}
        reports = {p: getattr(self, p).report.to_dict() for p in ("prefill", "decode")}
        plain = ("weight_bytes", "cache_bytes", "card_bytes", "floor_bytes", "floor_seconds")
        more = ("largest_batch", "largest_context", "read_ratio", "time_ratio", "rest_ratio")
        data = {
            "target": self.target,
            "workload": dataclasses.asdict(self.workload),
            **{name: getattr(self, name) for name in (*plain, *more)},
            "traffic": traffic,
            "reports": reports,
        }
        return json.dumps(data, indent=1)

    def __str__(self) -> str:
        asked, decode, prefill = self.workload, self.decode, self.prefill
        step = decode.traffic.seconds
        prompt = asked.context - asked.new_tokens
        card = self.card_bytes / GIB

        def memory(phase: Phase) -> str:
            peak = phase.report.peak_bytes
            rest = peak - self.weight_bytes - self.cache_bytes
            verdict = "fits" if phase.report.fits else "DOES NOT FIT"
            return (
                f"peak {peak / GIB:.2f} of {card:.2f} GiB per GPU, {verdict}: weights "
                f"{self.weight_bytes / GIB:.2f}, cache {self.cache_bytes / GIB:.2f}, rest "
                f"{rest / GIB:.2f}"
            )

        lines = [
            f"generation    {asked.model} on {self.target}, {self.plan.mesh}, {asked.batch} rows, "
            f"{prompt} + {asked.new_tokens} tokens, {asked.weights}",
            f"largest       {self.largest_batch} rows at this context; "
            f"{self.largest_context:,} tokens at this batch",
            f"prefill       {memory(prefill)}",
            f"              {prefill.traffic.seconds * 1e3:,.1f} ms modelled, "
            f"{asked.batch * prompt / prefill.traffic.seconds:,.0f} tokens/s",
            *_collectives(prefill.report),
            f"decode        {memory(decode)}",
            f"              {step * 1e3:,.3f} ms a token modelled, {self.time_ratio:.3f}x the "
            f"floor of {self.floor_seconds * 1e3:,.3f}; {asked.batch / step:,.0f} tokens/s in all",
            f"              reads {decode.traffic.stored_bytes / GIB:.3f} GiB stored, "
            f"{self.read_ratio:.3f}x the floor, and {decode.traffic.passed_bytes / GIB:.3f} GiB of "
            f"what it has just written; {decode.traffic.collective_seconds * 1e3:,.3f} ms are "
            "collectives",
            *_collectives(decode.report),
            "note          modelled: instructions one after the other, memory at "
            f"{COMPILED_MEMORY_SHARE:.0%} of its bandwidth, collectives as NCCL was measured",
        ]
        return "\n".join(lines)


def _collectives(report: Report) -> list[str]:
    """One line for all that are alike: layers that are not in a loop have each their own."""
    counts: collections.Counter[str] = collections.Counter()
    for row in report.collectives:
        axes, size = " x ".join(row.axes), row.num_bytes / 1024
        counts[f"{row.kind} along {axes}, {row.dtype} {size:,.1f} KiB  {row.site}"] += row.count
    return [f"  {count:>5} x     {text}" for text, count in counts.items()]


def preflight_generation(
    workload: Workload,
    target: Target | str,
    *,
    entry: str = ENTRY,
    time_limit: float = 900.0,
    on_progress: Callable[[float], None] = lambda _: None,
) -> GenerationReport:
    """Compiles prefill and decode for a machine that is not there, and says what they will do.

    Args:
        workload: What is asked of which model.
        target: The machine, e.g. `h200:1x8`.
        entry: What makes a program from mesh, settings and phase, `module:function`; another one
            than `program_on_target` is held to the same floor.
        time_limit: Seconds that the compiler may take for each program.
        on_progress: Called a few times a second with the seconds so far.

    Raises:
        DoesNotFit: TP114, before compiling, if weights and cache alone are larger than a GPU.
        BadTarget: TP116, for a malformed target or one that does not fit tp and batch.
        JaxtpError: whatever `make_plan` and the compiler raise.
    """
    machine = Target.of(target)
    plan, config = workload.plan(machine.num_devices), workload.config
    weights, cache = plan.bytes_per_device, cache_bytes(workload, plan)
    card = machine.device.memory_bytes
    if weights + cache > card:
        most = max(card - weights, 0) * workload.batch * workload.context // cache
        raise DoesNotFit(
            f"weights take {weights / GIB:,.1f} GiB and the cache {cache / GIB:,.1f} GiB of each "
            f"GPU; {machine.device.name} has {card / GIB:,.1f}",
            where="tp",
            fix=f"a larger tp, or batch x context of {most:,} tokens at most",
        )
    phases = {
        phase: _compiled(workload, phase, plan, machine, entry, time_limit, on_progress)
        for phase in ("prefill", "decode")
    }
    table = 0 if getattr(config, "tie_word_embeddings", True) else _table_bytes(plan)
    floor_bytes, floor_seconds = token_floor(workload, plan, machine)
    fixed = max(p.report.peak_bytes for p in phases.values()) - cache
    # Temporaries of a prompt grow with its rows and tokens, as the cache does.
    growing = max(fixed - weights, 0) + cache
    room = (card - weights) / growing
    return GenerationReport(
        workload=workload,
        target=str(machine),
        plan=plan,
        weight_bytes=weights,
        table_bytes=table,
        cache_bytes=cache,
        card_bytes=card,
        prefill=phases["prefill"],
        decode=phases["decode"],
        floor_bytes=floor_bytes,
        floor_seconds=floor_seconds,
        largest_batch=int(workload.batch * room),
        largest_context=int(workload.context * room),
    )


def token_floor(workload: Workload, plan: Plan, machine: Target) -> tuple[float, float]:
    """Bytes that a device must read for one token of every row, and the seconds it must take.

    Args:
        workload: What is asked.
        plan: Where parameters lie.
        machine: Whose memory and links.
    """
    config = workload.config
    table = 0 if getattr(config, "tie_word_embeddings", True) else _table_bytes(plan)
    read = float(plan.bytes_per_device - table + cache_bytes(workload, plan))
    message = workload.batch // plan.mesh.batch_ways * config.hidden_size
    group = [tuple(range(plan.mesh.tp_size))]
    reduced = machine.collective_seconds("all-reduce", message * itemsize(config.dtype), group)
    waits = 2 * config.num_hidden_layers * reduced if plan.mesh.tp_size > 1 else 0.0
    return read, read / (COMPILED_MEMORY_SHARE * machine.device.hbm_bandwidth) + waits


def cache_bytes(workload: Workload, plan: Plan) -> int:
    """Bytes of the cache on one device."""
    ways = plan.mesh.batch_ways * plan.mesh.ways(planned_cache(workload.config, plan)[2])
    shape = cache_shape(workload.config, workload.batch, workload.context)
    return sum(x.size * x.dtype.itemsize // ways for x in jax.tree.leaves(shape))


def _table_bytes(plan: Plan) -> int:
    return sum(d.bytes_per_device(plan.mesh) for d in plan.decisions if "embed" in d.path)


def _compiled(
    workload: Workload,
    phase: str,
    plan: Plan,
    machine: Target,
    entry: str,
    time_limit: float,
    on_progress: Callable[[float], None],
) -> Phase:
    mesh = dict(plan.mesh.sizes)
    settings = json.dumps(dataclasses.asdict(workload))
    program = Program(mesh=mesh, entry=entry, keywords={"settings": settings, "phase": phase})
    loop = loop_options(quantized=is_quantized(workload.config))
    asked: Mapping[str, Any] = loop if phase == "decode" else {}
    used: CompileOptions = probe({**PREFLIGHT, **asked})
    compiled = compile_for(
        program, machine, used.options, time_limit=time_limit, on_progress=on_progress
    )
    report = analyse(
        compiled.text,
        compiled.memory,
        machine,
        mesh,
        tensor_axes=plan.mesh.tp,
        options=used,
        compile_seconds=compiled.seconds,
    )
    module = parse(compiled.text)
    return Phase(report=report, traffic=traffic(module, find(module, mesh), machine))


def program_on_target(
    mesh: Mesh,
    settings: str,
    phase: str,
    *,
    constrained: bool = True,
    cache_spec: Callable[[Plan], Spec] | None = None,
) -> tuple[Any, tuple[Any, ...]]:
    """A jitted program and its arguments as structs; runs in the compiler's process.

    Args:
        mesh: The target's devices, on the axes of the plan.
        settings: A `Workload` as JSON text.
        phase: "prefill" or "decode".
        constrained: Whether the plan's activation constraints hold inside.
        cache_spec: Where the cache lies, from the plan, if not where the plan wants it.
    """
    workload = Workload(**json.loads(settings))
    plan = workload.plan(mesh.devices.size)
    whole = Mesh(
        mesh.devices.reshape([n for _, n in plan.mesh.whole]), [a for a, _ in plan.mesh.whole]
    )
    placed = plan_mesh(whole, plan.mesh)
    graph, params = nnx.split(shard(models.abstract(workload.config), whole, plan=plan))
    drawn = Sampling(temperature=workload.temperature, top_k=workload.top_k, top_p=workload.top_p)
    setting = Setting(
        graph=graph,
        plan=plan if constrained else None,
        mesh=placed if constrained else None,
        sampling=drawn.kind,
        end_tokens=(0,),
        prompt_slots=workload.context - workload.new_tokens,
        new_slots=workload.new_tokens,
        quantized=is_quantized(workload.config),
    )
    spec = (cache_spec or functools.partial(planned_cache, workload.config))(plan)
    state = _progress(workload, plan, placed, spec)
    numbers = jax.tree.map(lambda x: jax.ShapeDtypeStruct((), x.dtype), drawn.numbers)
    if phase == "prefill":
        tokens = (workload.batch, setting.prompt_slots)
        prompts = _struct(placed, tokens, jnp.int32, (plan.mesh.batch,))
        return prompt_program(setting), (
            params, prompts, state.first, state.done, state.keys, numbers,
        )  # fmt: skip
    places = jax.tree.map(lambda x: x.sharding, state)
    limit = _struct(placed, (), jnp.int32, ())
    return token_program(setting, places), (params, state, limit, numbers)


def _struct(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: tuple[Any, ...]) -> Any:
    sharding = NamedSharding(mesh, partition_spec(spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def planned_cache(config: Any, plan: Plan) -> Spec:
    """The spec of keys and values, (layers, batch, kv heads, slots, head width)."""
    heads = plan.axes_for(config.cached_heads[:1])
    return ((), plan.mesh.batch, heads, (), ())


def _progress(workload: Workload, plan: Plan, mesh: Mesh, spec: Spec) -> Progress:
    """The state of decoding as structs."""
    config, batch = workload.config, workload.batch
    rows = plan.mesh.batch
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)).dtype
    new = (batch, workload.new_tokens)
    cache = jax.tree.map(
        lambda x: _struct(mesh, x.shape, x.dtype, spec),
        cache_shape(config, batch, workload.context),
    )
    return Progress(
        cache=cache,
        tokens=_struct(mesh, new, jnp.int32, (rows,)),
        nats=_struct(mesh, new, jnp.float32, (rows,)),
        num_new=_struct(mesh, (batch,), jnp.int32, (rows,)),
        done=_struct(mesh, (batch,), jnp.bool_, (rows,)),
        step=_struct(mesh, (), jnp.int32, ()),
        first=_struct(mesh, (batch,), jnp.int32, (rows,)),
        keys=_struct(mesh, (batch,), key, (rows,)),
    )
