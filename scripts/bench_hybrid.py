"""Pipeline stages of several kinds of GPU, and models of up to a trillion parameters, on paper.

    python scripts/bench_hybrid.py                   mixed and simulated, a minute or two
    python scripts/bench_hybrid.py --only sizes      70B, 405B and 1T compiled for 64 to 512 H100s
    python scripts/bench_hybrid.py --only gpt3       GPT-3 175B on 64 H100s, by hand and by jaxtp
    python scripts/bench_hybrid.py --json

mixed      modelled step time of even, COMPUTE_FIRST and MEMORY_FIRST layers on A100s and H100s
simulated  the same three measured on two CPU devices, one of which does the work of each layer
           three times over; only ratios within one run mean anything
sizes      what the GPU compiler says of whole steps, memory against the formula of Korthikanti et
           al. 2022 (arXiv 2205.05198)
gpt3       specs by hand against jaxtp, its aggressive profile, and its default at twice the batch

No GPU is needed.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tables import Cell, Flag, Section, tabulate

import jaxtp
from jaxtp.activations.by_name import use_plan
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.settings import Batch, Communication, Config, Mesh, Pipeline, Tensor, Zero
from jaxtp.cost.stage_balance import STRATEGIES, LayerWork, compare, deal, step_seconds
from jaxtp.errors import DoesNotFit
from jaxtp.hardware.gpus import KINDS
from jaxtp.hardware.links import GIB
from jaxtp.layers.stacked import scan_layers
from jaxtp.mesh.build import plan_mesh
from jaxtp.plan.stages import Stages
from jaxtp.train.planning import Build, plan_of
from jaxtp.train.preflight import preflight_config, work_of

CLUSTERS = ("a100-80:1x8+h100:1x8", "a100-40:1x8+h200:1x8")


def mixed() -> Section:
    """Llama-3-8B in four stages, two of each kind."""
    rows: list[dict[str, Cell]] = []
    gains: list[float] = []
    for target in CLUSTERS:
        config = Config(
            model="llama3-8b",
            seq_len=4096,
            remat="full",
            target=target,
            mesh=Mesh(tp=4, pp=4),
            batch=Batch(size=32, accumulation=16),
            zero=Zero(stage=0, partition_activations=True),
            pipeline=Pipeline(allow_heterogeneous=True),
        )
        build = Build.of(resolve(config, 16))
        plan = plan_of(build)
        assert plan.stages is not None
        even, *others = compare(plan.stages, build.kinds, work_of(build, plan))
        gains.append(even.step_seconds / others[0].step_seconds)
        rows += [
            {
                "cluster": target,
                "layers": d.strategy,
                "of each stage": d.stages.layers_text,
                "s a step": round(d.step_seconds, 2),
                "x even": round(even.step_seconds / d.step_seconds, 2),
                "GB of layers": round(d.held_bytes / 1e9, 1),
            }
            for d in (even, *others)
        ]
    return Section(
        title="llama3-8b, 4 stages x tp 4, 16 micro-batches of 2 x 4096 tokens, modelled",
        rows=rows,
        thresholds=[
            (f"COMPUTE_FIRST over even, {target}: {gain:.2f}", gain > 1.2)
            for target, gain in zip(CLUSTERS, gains, strict=True)
        ],
        notes=[
            "a step is ticks x (slowest chunk + 2 permutes) + head, see "
            "jaxtp.cost.stage_balance.step_seconds",
            "GB of layers: one program runs everywhere, so each GPU stores as many as the longest "
            "stage; MEMORY_FIRST assigns layers by memory and saves none by itself",
        ],
    )


LAYERS, WIDTH, ROWS, MICRO_BATCHES = 16, 256, 256, 8
SLOW = 3
"""How often a device of the slow kind does its work: an H100's FLOP/s over an A100's, rounded."""


def simulated() -> Section:
    """Gradients of a stack of MLPs in two stages, the first of a kind a third as fast."""
    slow = dataclasses.replace(KINDS["a100-40"], matmul_flops=1 / SLOW)
    kinds = (slow, dataclasses.replace(KINDS["h100"], matmul_flops=1.0))
    unit = LayerWork(layer_flops=1.0, end_flops=0, layer_bytes=0, permute_seconds=0)
    steps: dict[str, Callable[[], object]] = {}
    modelled: dict[str, float] = {}
    text: dict[str, str] = {}
    for strategy in STRATEGIES:
        stages = deal(strategy, LAYERS, kinds, micro_batches=MICRO_BATCHES)
        modelled[strategy] = step_seconds(stages, kinds, unit)
        text[strategy] = stages.layers_text
        steps[strategy] = slowed_step(stages)
    measured = fastest(steps)
    rows: list[dict[str, Cell]] = [
        {
            "layers": strategy,
            "of each stage": text[strategy],
            "measured x even": round(measured["even"] / measured[strategy], 2),
            "modelled x even": round(modelled["even"] / modelled[strategy], 2),
        }
        for strategy in STRATEGIES
    ]
    gain = measured["even"] / measured["compute_first"]
    return Section(
        title=f"{LAYERS} layers in 2 stages, the first {SLOW} x slower, {MICRO_BATCHES} "
        "micro-batches, on simulated devices",
        rows=rows,
        thresholds=[(f"more layers on the faster stage: {gain:.2f} x even", gain > 1.15)],
        notes=[
            "the fastest of five turns; forward and backward, every layer recomputed",
            "the model takes an idle core for each device; where both share one, all work together "
            "counts: (8 x 3 + 8) / (4 x 3 + 12) = 1.33 x even",
        ],
    )


def slowed_step(stages: Stages) -> Callable[[], object]:
    """A compiled pass over the batch, forward and backward, in which stage 0 is slow."""
    mesh = jaxtp.make_mesh(pp=2, tp=1, devices=jax.devices()[:2])
    draw = np.random.default_rng(0).standard_normal
    layers = {
        "norm": {"scale": np.ones((LAYERS, WIDTH), np.float32)},
        "up_proj": {"kernel": draw((LAYERS, WIDTH, WIDTH), np.float32) / 16},
        "down_proj": {"kernel": draw((LAYERS, WIDTH, WIDTH), np.float32) / 16},
    }
    plan = jaxtp.make_plan({"layers": layers}, mesh, stages=stages)
    own_mesh = plan_mesh(mesh, plan.mesh)
    params = jaxtp.shard({"layers": layers}, mesh, plan=plan)
    x = jnp.asarray(draw((MICRO_BATCHES, ROWS, WIDTH), np.float32))

    def work(x: jax.Array, row: Any) -> jax.Array:
        inner = jax.nn.gelu((x * row["norm"]["scale"][None, None]) @ row["up_proj"]["kernel"])
        return inner @ row["down_proj"]["kernel"]

    def again(x: jax.Array, row: Any) -> jax.Array:
        first = work(x, row)
        rest = functools.reduce(lambda y, _: work(y, row), range(SLOW - 1), first)
        return first + 0.0 * rest  # which no compiler may leave out: 0 x inf is no number

    def layer(x: jax.Array, row: Any, _: Any) -> jax.Array:
        is_slow = jax.lax.axis_index("pp") == 0
        return x + jax.lax.cond(is_slow, again, work, x, row)

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(scan_layers(layer, x, params["layers"], remat="full") ** 2)

    def step(params: Any, x: jax.Array) -> Any:
        with use_plan(plan, own_mesh):
            return jax.grad(loss)(params, x)

    # One thread a device: both would otherwise share all of them.
    options = {"xla_cpu_multi_thread_eigen": False}
    compiled = jax.jit(step).lower(params, x).compile(compiler_options=options)
    return lambda: jax.block_until_ready(compiled(params, x))


def fastest(steps: Mapping[str, Callable[[], object]], turns: int = 5) -> dict[str, float]:
    """Seconds of the fastest run of each step; they take turns, so that load hits all alike."""
    found = dict.fromkeys(steps, float("inf"))
    for turn in range(turns + 1):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn:  # the first one warms up
                found[name] = min(found[name], time.perf_counter() - start)
    return found


_70B = Config(
    model="llama3-70b",
    target="h100:8x8",
    seq_len=4096,
    mesh=Mesh(fsdp=8, tp=8),
    batch=Batch(size=8),
    zero=Zero(stage=3, partition_activations=True),
)
_405B = Config(
    model="llama3-405b",
    target="h100:64x8",
    seq_len=8192,
    mesh=Mesh(pp=16, fsdp=4, tp=8),
    batch=Batch(size=128),
    pipeline=Pipeline(micro_batches=32),
    zero=Zero(stage=1, partition_activations=True),
)
TOO_LARGE = "70B, dp 8 x tp 8"
"""The one run that no GPU holds; any other that is refused, or this one if it fits, is a defect."""

H100S: Mapping[str, Config] = {
    "70B, fsdp 8 x tp 8": _70B,
    TOO_LARGE: dataclasses.replace(
        _70B, mesh=Mesh(dp=8, tp=8), zero=Zero(stage=0, partition_activations=True)
    ),
    "405B, GPipe": _405B,
    "405B, 4 rounds": dataclasses.replace(_405B, pipeline=Pipeline(micro_batches=32, rounds=4)),
    "1T, fsdp 64 x tp 8": Config(
        model="gpt-1t",
        target="h100:64x8",
        seq_len=2048,
        mesh=Mesh(fsdp=64, tp=8),
        batch=Batch(size=512),
        zero=Zero(stage=3, partition_activations=True),
    ),
}
"""Whole runs; every layer is recomputed."""


def formula_bytes(config: Config) -> float:
    """Bytes on one GPU of a Llama without stages, everything sharded and recomputed.

    16 bytes a parameter for float32 parameters, gradients and two moments. Of every layer its
    input, 2sbh/t (Korthikanti et al. 2022, table 2). Of one layer what its backward pass needs,
    2 sb (4h + 2h + 2h kv/a + 3f) / t and the scores, 5as^2b/t (the same, section 4.1, for an MLP
    with a gate); and its weights, gathered in bfloat16.
    """
    build = Build.of(config)
    model: Any = build.model
    plan = plan_of(build)
    ways, tp = plan.mesh.num_devices, config.mesh.tp
    num_params = sum(int(np.prod(d.shape)) for d in plan.decisions)
    in_layer = sum(int(np.prod(d.shape[1:])) for d in plan.decisions if "layers" in d.path)
    tokens, width = config.batch.micro_size * config.seq_len, model.hidden_size
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    inner = 6 * width + 2 * width * kv_heads / heads + 3 * model.intermediate_size
    saved = 2 * tokens * width * model.num_hidden_layers
    layer = 2 * tokens * inner + 5 * heads * config.seq_len * tokens
    return 16 * num_params / ways + (saved + layer + 2 * in_layer) / tp


def sizes() -> Section:
    """The GPU compiler on whole steps for 64 to 512 H100s."""
    rows: list[dict[str, Cell]] = []
    thresholds: list[tuple[str, bool]] = []
    for name, given in H100S.items():
        config = dataclasses.replace(given, remat="full", attention="xla")
        row: dict[str, Cell] = {"run": f"{name}, {config.target}"}
        try:
            plan, report = preflight_config(config)
        except DoesNotFit as error:
            rows.append({**row, **dict.fromkeys(RUN_COLUMNS, "-"), "fits": "refused"})
            thresholds.append((f"{name} refused before compiling: {error.what}", name == TOO_LARGE))
            continue
        rows.append(
            {
                **row,
                "bubble": f"{plan.stages.bubble:.1%}" if plan.stages else "-",
                "peak GiB": round(report.peak_bytes / GIB, 1),
                "fits": str(report.fits),
                "s a step": round(report.step_seconds_modelled, 2),
                "MFU": f"{report.mfu_modelled:.1%}",
                "compiled in s": round(report.compile_seconds),
            }
        )
        what = "does not fit" if name == TOO_LARGE else "fits"
        thresholds.append((f"{name} {what}", report.fits == (name != TOO_LARGE)))
        if name.startswith("70B"):
            ratio = report.peak_bytes / formula_bytes(resolve(config, 64))
            thresholds.append((f"{name}: peak {ratio:.3f} x the formula", ratio <= 1.15))
    return Section(
        title="complete steps, every layer recomputed, XLA's attention",
        rows=rows,
        thresholds=thresholds,
        notes=[
            "seconds and MFU are modelled from the scheduled program, idle ticks of stages included"
        ],
    )


RUN_COLUMNS = ("bubble", "peak GiB", "fits", "s a step", "MFU", "compiled in s")


def gpt3() -> Section:
    """GPT-3 175B, tp 8 x fsdp 8: by hand, by jaxtp, and with the aggressive profile."""
    plain = Config(
        model="gpt3-175b",
        target="h100:8x8",
        seq_len=2048,
        remat="full",
        attention="xla",
        mesh=Mesh(tp=8, fsdp=8),
        batch=Batch(size=32),
        zero=Zero(stage=3),
        tensor=Tensor(pad_vocab=True),
    )
    cut = Communication(sequence_parallel=True)
    default = dataclasses.replace(plain, remat="block_outputs", communication=cut)
    hiding = dataclasses.replace(plain, communication=Communication(overlap="aggressive"))
    twice = Batch(size=64)
    by_hand = "comm_peers:megatron_step"
    variants = {
        "manual": (plain, by_hand),
        "manual, twice the batch": (dataclasses.replace(plain, batch=twice), by_hand),
        "default": (default, ""),
        "default, twice the batch": (dataclasses.replace(default, batch=twice), ""),
        "aggressive": (hiding, ""),
    }
    reports = {
        name: preflight_config(config, **({"entry": entry} if entry else {}))[1]
        for name, (config, entry) in variants.items()
    }
    rates = {
        name: variants[name][0].batch.size / report.step_seconds_modelled
        for name, report in reports.items()
    }
    base, held = rates["manual"], reports["manual"].peak_bytes
    best = max(rates[name] for name in reports if reports[name].fits)
    return Section(
        title="gpt3-175b on 64 H100s, tp 8 x fsdp 8, 2048 tokens a sequence",
        rows=[
            {
                "plan": name,
                "sequences": variants[name][0].batch.size,
                "samples/s": round(rates[name], 2),
                "throughput": f"{rates[name] / base - 1:+.1%}",
                "GB per GPU": round(report.peak_bytes / 1e9, 1),
                "memory": f"{report.peak_bytes / held - 1:+.1%}",
                "fits": report.fits,
                "MFU": f"{report.mfu_modelled:.1%}",
            }
            for name, report in reports.items()
        ],
        thresholds=[
            ("default faster than manual", rates["default"] > base),
            ("default in less memory", reports["default"].peak_bytes < held),
            ("aggressive faster than default", rates["aggressive"] > rates["default"]),
            ("twice the batch fits by default", reports["default, twice the batch"].fits),
            (f"best that fits over manual: {best / base - 1:+.1%}", best > base * 1.136),
        ],
        notes=[
            "manual: specs by hand, no sequence parallelism, every layer recomputed",
            "default: sequence parallelism, block outputs kept; aggressive: manual's memory, with "
            "the scheduler's options for overlap",
            "AutoTP's authors report +13.6% and +49.6% over their manual plan, in 7% and 14% less "
            "memory, on other hardware",
        ],
    )


SECTIONS: Mapping[str, Callable[[], Section]] = {
    "mixed": mixed,
    "simulated": simulated,
    "sizes": sizes,
    "gpt3": gpt3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to show."""

    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
    """Print JSON instead of tables."""

    only: Literal["", "mixed", "simulated", "sizes", "gpt3"] = ""
    """One section; default: mixed and simulated."""


def main(options: Options) -> None:
    """Models, measures and tabulates, section by section."""
    jax.config.update("jax_num_cpu_devices", 2)
    names = [options.only] if options.only else ("mixed", "simulated")
    tabulate({name: SECTIONS[name] for name in names}, as_json=options.as_json, width=160)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
