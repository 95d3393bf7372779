"""What a token of generation reads, sends and takes: every program by the real GPU compiler.

    python scripts/bench_generate.py                    all sections
    python scripts/bench_generate.py --only floor       or quantized, error, naive, simulated
    python scripts/bench_generate.py --layers 4 --json

floor      8B on h100:1x8 and 70B on h200:1x8 at batch 1, 16 and 64 against the floor of a token
quantized  8B and 70B with int8 kernels against the floor of those, and what is left of the time
error      log-probabilities of integer kernels against those of floats, on the tests' checkpoints
naive      the same step with its cache replicated, sharded along the width of a head, or without
           the plan's constraints
simulated  tokens/s of `jaxtp.generate` on 8 simulated CPU devices against one, and host time a
           token: both share the same cores, so the ratio says what partitioning costs and nothing
           about GPUs

For the first two no GPU is needed and nothing runs. Seconds are modelled (`jaxtp.compile.traffic`):
instructions one after the other, memory at the rate that copies reach, collectives as NCCL was
measured.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import tyro
from rich.console import Console
from tables import Cell, Flag, Section, tabulate

from jaxtp.generation.preflight import (
    ENTRY,
    GenerationReport,
    preflight_generation,
    program_on_target,
)
from jaxtp.generation.workload import Workload
from jaxtp.hardware.links import GIB

SHAPES = (("llama3-8b", "h100:1x8"), ("llama3-70b", "h200:1x8"))
BATCHES = (1, 16, 64)
CONTEXT = 2048

FIXTURES = Path(__file__).parents[1] / "tests" / "fixtures" / "hf"

Kind = Literal["none", "int8", "int4"]

MOST_READ = 1.05
"""Weights and cache read over their size: nothing twice."""

MOST_SECONDS = 1.10
"""A token's modelled seconds over its floor."""

MOST_REST = 1.05
"""Peak memory over weights and cache."""


def replicated_cache(mesh: Any, settings: str, phase: str) -> Any:
    """The programs with the cache replicated on every device."""
    everywhere = functools.partial(program_on_target, constrained=False)
    return everywhere(mesh, settings, phase, cache_spec=lambda _: ((),) * 5)


def cut_heads(mesh: Any, settings: str, phase: str) -> Any:
    """The programs with the cache sharded along the width of a head."""
    naive = functools.partial(program_on_target, constrained=False)
    return naive(mesh, settings, phase, cache_spec=lambda plan: ((),) * 4 + (plan.mesh.tp,))


def unconstrained(mesh: Any, settings: str, phase: str) -> Any:
    """The programs with weights and cache by the plan, and nothing said inside."""
    return program_on_target(mesh, settings, phase, constrained=False)


NAIVE: Mapping[str, str] = {
    "jaxtp": ENTRY,
    "cache replicated": "bench_generate:replicated_cache",
    "cache along head width": "bench_generate:cut_heads",
    "no constraints": "bench_generate:unconstrained",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile."""

    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
    """Print JSON instead of tables."""

    only: Literal["", "floor", "quantized", "error", "naive", "simulated"] = ""
    """One section; default: all."""

    layers: int = 0
    """Layers to compile; 0 is all of them."""


@functools.cache
def report(
    model: str, target: str, batch: int, layers: int, entry: str, kind: Kind = "none"
) -> GenerationReport:
    """Of one program; each is compiled once."""
    work = Workload(model=model, batch=batch, context=CONTEXT, layers=layers, quantize=kind)
    with Console(stderr=True).status(f"{model} on {target}, {batch} rows"):
        return preflight_generation(work, target, entry=entry)


def cells(found: GenerationReport) -> dict[str, Cell]:
    """What every table says about a decode program."""
    decode, layers = found.decode, found.workload.config.num_hidden_layers
    # Those of the lookup and of the head come once; layers are a loop, or each has its own.
    inside = collections.Counter(
        {kind: count - count % layers for kind, count in _counts(found).items()}
    )
    sent = sum(row.wire_bytes for row in decode.report.collectives)
    return {
        "messages a layer": inside.total() / layers,
        "of them all-reduces": inside["all-reduce"] / layers,
        "wire MiB": round(sent / 2**20, 2),
        "reads GiB": round(decode.traffic.stored_bytes / GIB, 3),
        "x floor": round(found.read_ratio, 3),
        "passed GiB": round(decode.traffic.passed_bytes / GIB, 3),
        "peak GiB": round(decode.report.peak_bytes / GIB, 2),
        "x weights+cache": round(found.rest_ratio, 3),
        "ms a token": round(decode.traffic.seconds * 1e3, 3),
        "x floor ": round(found.time_ratio, 3),
        "tokens/s": round(found.workload.batch / decode.traffic.seconds),
    }


def _counts(found: GenerationReport) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for row in found.decode.report.collectives:
        counts[row.kind] += row.count
    return counts


def floor(options: Options) -> Section:
    """Two models at their real widths against the floor of a token."""
    found = {
        (model, batch): report(model, target, batch, options.layers, ENTRY)
        for model, target in SHAPES
        for batch in BATCHES
    }
    rows: list[dict[str, Any]] = [
        {"model": m, "rows": batch, **cells(one)} for (m, batch), one in found.items()
    ]
    ratios: dict[str, tuple[str, float]] = {
        "weights and cache read once": ("x floor", MOST_READ),
        "modelled time of a token": ("x floor ", MOST_SECONDS),
        "peak memory": ("x weights+cache", MOST_REST),
    }
    thresholds = [
        (f"{what}: at most {most}x, largest {max(row[key] for row in rows)}",
         all(row[key] <= most for row in rows))
        for what, (key, most) in ratios.items()
    ]  # fmt: skip
    two = all(row["messages a layer"] == row["of them all-reduces"] == 2 for row in rows)
    return Section(
        title=f"decode, bf16, tp 8, {CONTEXT} tokens of context",
        rows=rows,
        thresholds=[("two all-reduces a layer and nothing else", two), *thresholds],
        notes=["passed: read of what was just written, activations and scores; L2 has much of it"],
    )


def quantized(options: Options) -> Section:
    """Two models with int8 kernels, against their own floor and beside their floats."""
    rows: list[dict[str, Cell]] = []
    for model, target in SHAPES:
        for batch in BATCHES:
            floats = report(model, target, batch, options.layers, ENTRY)
            found = report(model, target, batch, options.layers, ENTRY, "int8")
            part = round(found.decode.traffic.seconds / floats.decode.traffic.seconds, 3)
            rows.append({"model": model, "rows": batch, **cells(found), "of bf16": part})
    read = max(row["x floor"] for row in rows)
    return Section(
        title=f"decode, int8 kernels, tp 8, {CONTEXT} tokens of context",
        rows=rows,
        thresholds=[
            (f"integers and cache read once: at most {MOST_READ}x, largest {read}",
             read <= MOST_READ),
            ("all-reduces alone, two a layer",
             all(row["messages a layer"] == row["of them all-reduces"] == 2 for row in rows)),
        ],
        notes=["layers are not in a loop: each has a message of its own"],
    )  # fmt: skip


def error(options: Options) -> Section:
    """The checkpoints of the tests, random weights, in float32."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import numpy as np

    import jaxtp
    from jaxtp import models
    from jaxtp.models.registry import FAMILIES

    mesh = jaxtp.make_mesh(tp=1, devices=jax.devices()[:1])
    rows: list[dict[str, Cell]] = []
    for family in FAMILIES:
        types: dict[str, Any] = {"dtype": "float32", "param_dtype": "float32"}
        model, _ = jaxtp.load_hf(FIXTURES / family, mesh, progress=False, **types)
        tokens = np.load(FIXTURES / family / "expected.npz")["tokens"]
        want = jax.nn.log_softmax(model(tokens))
        for kind in ("int8", "int4"):
            got = jax.nn.log_softmax(models.quantize(model, kind)(tokens))
            off = np.abs(np.asarray(got - want))
            stays = float(np.mean(got.argmax(-1) == want.argmax(-1)))
            rows.append(
                {
                    "family": family,
                    "kernels": kind,
                    "mean nats": round(float(off.mean()), 4),
                    "largest": round(float(off.max()), 3),
                    "likeliest token stays": round(stays, 3),
                }
            )
    return Section(title="log-probabilities of integer kernels", rows=rows, thresholds=[], notes=[])


def naive(options: Options) -> Section:
    """The 8B step at 16 rows by four ways."""
    model, target = SHAPES[0]
    found = {
        name: report(model, target, 16, options.layers, entry) for name, entry in NAIVE.items()
    }
    best = found["jaxtp"].decode.traffic.seconds
    others = {n: one.decode.traffic.seconds / best for n, one in found.items() if n != "jaxtp"}
    return Section(
        title=f"{model} on {target}, 16 rows, {CONTEXT} tokens",
        rows=[{"cache": name, **cells(one)} for name, one in found.items()],
        thresholds=[(f"{n}: {x:.2f}x the time of jaxtp", x >= 1) for n, x in others.items()],
    )


def simulated(options: Options) -> Section:
    """`jaxtp.generate` on 8 CPU devices and on one."""
    jax.config.update("jax_platforms", "cpu")
    import jaxtp
    from jaxtp import models

    config = models.config_of("llama-tiny")
    prompts = [[1 + i, 2, 3] for i in range(8)]

    def seconds(model: Any, new: int, **options: Any) -> tuple[float, float]:
        """Wall time and CPU time of this thread, the least of three calls; the first compiles."""
        took: list[tuple[float, float]] = []
        for _ in range(4):
            wall, own = time.perf_counter(), time.thread_time()
            jaxtp.generate(model, prompts, max_new_tokens=new, **options)
            took.append((time.perf_counter() - wall, time.thread_time() - own))
        return min(one[0] for one in took[1:]), min(one[1] for one in took[1:])

    rows: list[dict[str, Cell]] = []
    for tp in (1, 8):
        mesh = jaxtp.make_mesh(tp=tp, devices=jax.devices()[:tp])
        model = jaxtp.shard(models.build(config), mesh, config=config)
        (few, _), (many, _) = seconds(model, 16), seconds(model, 128)
        looks = {"on_tokens": lambda _: None}
        (_, few_own), (_, many_own) = seconds(model, 16, **looks), seconds(model, 128, **looks)
        rate = 8 * 112 / (many - few)
        rows.append(
            {
                "tp": tp,
                "tokens/s": round(rate),
                "of one device": round(rate / rows[0]["tokens/s"], 3) if rows else 1.0,
                "host us a token": round((many_own - few_own) / 112 * 1e6, 1),
            }
        )
    return Section(
        title="llama-tiny, 8 rows, simulated devices on the same CPU cores",
        rows=rows,
        thresholds=[],
        notes=[
            "a ratio of CPUs: all devices share the cores, so it says what partitioning costs",
            "one loop on the devices: the host has nothing to do for a token; host us is what this "
            "thread takes to look at the rows, every 8 tokens as in a stream",
        ],
    )


SECTIONS: Mapping[str, Callable[[Options], Section]] = {
    "floor": floor,
    "quantized": quantized,
    "error": error,
    "naive": naive,
    "simulated": simulated,
}


def main(options: Options) -> None:
    """Compiles and tabulates, section by section."""
    jax.config.update("jax_num_cpu_devices", 8)
    names = [options.only] if options.only else SECTIONS
    sections = {name: functools.partial(SECTIONS[name], options) for name in names}
    tabulate(sections, as_json=options.as_json, width=200)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
