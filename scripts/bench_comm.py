"""What tensor parallelism moves, hides and holds: every step compiled by the real GPU compiler.

    python scripts/bench_comm.py                all sections
    python scripts/bench_comm.py --only floor   or replicas, overlap, bound, others, memory, gpt3
    python scripts/bench_comm.py --only gpt3 --json

No GPU is needed and nothing runs: memory, messages and their bytes are the compiler's, seconds and
hidden shares come from the model of `jaxtp.compile.schedule`. The peers of `comm_peers.py`
are compiled on the same step in the same run, against the same floor; `comm_others.py` has models
that nobody wrote for jaxtp.

Attention is cuDNN's where nvidia-cudnn-cu12 can be imported, else XLA's; the output says which.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import comm_others
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from tables import Cell, Flag, Section, tabulate

from jaxtp.compile.analysis import RUNTIME_BYTES
from jaxtp.compile.options import compile_options
from jaxtp.compile.report import Link, Report, Row
from jaxtp.config.files import changed
from jaxtp.config.presets import preset
from jaxtp.config.settings import Config
from jaxtp.hardware.gpus import LINKS
from jaxtp.hardware.links import GIB, MIB
from jaxtp.train.attention import has_cudnn
from jaxtp.train.preflight import preflight_config

Overlap = Literal["off", "auto", "aggressive"]
Peer = Literal["jaxtp", "megatron", "largest", "replicated"]

# DeepSpeed's AutoTP against manual tensor parallelism, by its authors: throughput, memory.
AUTOTP = {"AutoTP, default": ("+13.6%", "-7%"), "AutoTP, optimised": ("+49.6%", "-14%")}

SHAPES = (("llama3-8b", 4, 2048), ("llama3-70b", 2, 4096), ("gpt3-175b", 2, 2048))
"""Models, with sequences per replica and their tokens."""

AGGRESSIVE = {"communication.overlap": "aggressive"}
SEQUENCE_PARALLEL = {"communication.sequence_parallel": True}

PEERS: tuple[Peer, ...] = ("megatron", "largest", "replicated")

NOTICED_BYTES = MIB
"""Smaller messages are the few scalars per token of the cross entropy, and gradients of norms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One program to compile; equal cases are compiled once."""

    step: Config
    peer: Peer = "jaxtp"
    scheduler: Overlap = "auto"
    """The compile options of this overlap profile; the step's own `overlap` is its structure, and
    where both are one, the options are those of training."""
    fusion: bool = True


@dataclasses.dataclass(kw_only=True)
class Compiler:
    """Compiles cases, each once, and shows which one is at work."""

    console: Console
    reports: dict[str, Report] = dataclasses.field(default_factory=dict)

    def __call__(self, case: Case) -> Report:
        """The report of a case."""
        key = repr(case)
        if key not in self.reports:
            self.reports[key] = self._compile(case)
        return self.reports[key]

    def _compile(self, case: Case) -> Report:
        step = case.step
        what = f"{step.model}, tp={step.mesh.tp} on {step.target}, {case.peer}"
        columns = SpinnerColumn(), TextColumn("{task.description}")
        quiet = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=quiet) as progress:
            task = progress.add_task(what)

            def show(seconds: float) -> None:
                text = f"compile {len(self.reports) + 1}: {what}: {seconds:.0f} s"
                progress.update(task, description=text)

            entry = {} if case.peer == "jaxtp" else {"entry": f"comm_peers:{case.peer}_step"}
            options = None
            if not case.fusion or case.scheduler != step.communication.overlap:
                options = compile_options(overlap=case.scheduler, gradient_fusion=case.fusion)
            return preflight_config(step, options=options, on_progress=show, **entry)[1]


def messages(report: Report, axis: str = "tp") -> list[Row]:
    """The messages along one axis that are worth counting."""
    along = [row for row in report.collectives if axis in row.axes]
    return [row for row in along if row.num_bytes >= NOTICED_BYTES]


def cells(report: Report, floor: float | None) -> dict[str, Cell]:
    """What every table says about a program.

    Args:
        report: Of the program.
        floor: Wire bytes to compare with; the report's own floor of sequence parallelism is higher.
    """
    rows = messages(report)
    return {
        "wire GiB": round(report.wire_bytes / GIB, 3),
        "x floor": round(report.wire_bytes / floor, 4) if floor else "-",
        "types": "+".join(sorted({row.dtype for row in rows})) or "-",
        "unexpected": len(report.unexpected),
        "peak GiB": round(report.peak_bytes / GIB, 2),
        "fits": report.fits,
        "hidden": f"{report.hidden_forward:.0%}/{report.hidden_backward:.0%}/"
        f"{report.hidden_share:.1%}",
        "ms": round(report.step_seconds_modelled * 1e3, 1),
        "compile s": round(report.compile_seconds, 1),
    }


def attention() -> str:
    """The kernel that can be compiled here."""
    return "cudnn" if has_cudnn() else "xla"


def _blocks_ratio(report: Report, floor: float, layers: int) -> float:
    """Wire bytes of what runs once a layer over the floor of the blocks alone.

    A block has four all-reduces and the ends of the model two, so the blocks' share of the floor is
    4 L / (4 L + 2).
    """
    inside = sum(r.wire_bytes for r in report.collectives if "tp" in r.axes and r.count >= layers)
    return inside / (floor * 4 * layers / (4 * layers + 2))


def floor(compiler: Compiler) -> Section:
    """Blocks of three models at their true widths, forward and backward, against the floor."""
    # With half as many layers the logits make the peak of gpt3 at tp 8, and the split saves none.
    kernel, layers, rows = attention(), 8, list[dict[str, Cell]]()
    for model, batch, seq in SHAPES:
        for tp in (2, 4, 8):
            # What tp leaves over is dp; each replica has the same batch.
            step = preset(
                model,
                **{
                    # On an H100 XLA computes some of gpt3's gathers twice at tp 2, to fit.
                    "target": "h200:1x8",
                    "mesh.tp": tp,
                    "batch.size": batch * 8 // tp,
                    "seq_len": seq,
                    "layers": layers,
                    "attention": kernel,
                    # The old state stays beside the new one: the peak is that of the two passes.
                    "optimizer.name": "sgd",
                    "optimizer.clip": 0,
                    "communication.donate": False,
                    "tensor.pad_vocab": True,
                },
            )
            cut = changed(step, SEQUENCE_PARALLEL)
            cases = {"jaxtp": Case(step=step), "jaxtp, sequence": Case(step=cut)}
            cases |= {peer: Case(step=step, peer=peer) for peer in PEERS if tp == 8}
            if tp == 8:  # it cuts heads, which cuDNN refuses
                cases["largest"] = Case(step=changed(step, {"attention": "xla"}), peer="largest")
            base = compiler(cases["jaxtp"]).floor_bytes
            assert base is not None
            for name, case in cases.items():
                report = compiler(case)
                ratio = round(_blocks_ratio(report, base, layers), 4)
                head = {"model": model, "tp": tp, "plan": name, "x, blocks": ratio}
                rows.append({**head, **cells(report, base)})
    plain = [row for row in rows if row["plan"] == "jaxtp"]
    split = [row for row in rows if row["plan"] == "jaxtp, sequence"]
    blocks, ends, sequence = (
        max(row[name] for row in some)
        for some, name in ((plain, "x, blocks"), (plain, "x floor"), (split, "x floor"))
    )
    lower = all(b["peak GiB"] < a["peak GiB"] for a, b in zip(plain, split, strict=True))
    clean = all(row["types"] == "bf16" and not row["unexpected"] for row in [*plain, *split])
    return Section(
        title=f"{layers} blocks, true widths, forward and backward, {kernel} attention, h200:1x8",
        rows=rows,
        thresholds=[
            (f"blocks at most 1.00x the floor: {blocks}x", blocks <= 1.0),
            (f"with the ends at most 1.02x: {ends}x", ends <= 1.02),
            (f"sequence parallelism at most 1.25x of it: {sequence}x", sequence <= 1.25),
            ("sequence parallelism lowers the peak everywhere", lower),
            ("jaxtp: all messages bf16, no permute, all-to-all or gathered weight", clean),
        ],
        notes=[
            "peers at tp 8, largest with XLA's attention; `types` is of messages from 1 MiB on",
            "the vocabulary of gpt3-175b is padded to a multiple of tp, as Megatron-LM does",
            "replicated moves nothing along tp because each device computes everything",
            "with XLA's attention its scores make the peak, whatever sequence parallelism saves",
        ],
    )


def replicas(compiler: Compiler) -> Section:
    """32 replicas of tp 8: what crosses the network."""
    step = preset("llama3-70b", **{"target": "h200:32x8", "batch.size": 32, "seq_len": 2048})
    in_float32 = changed(step, {"precision.gradients": "float32"})
    variants = {
        "fused, bf16": Case(step=step),
        "not fused, bf16": Case(step=step, fusion=False),
        "fused, fp32": Case(step=in_float32),
    }
    rows: list[dict[str, Cell]] = []
    counts: dict[str, int] = {}
    types: dict[str, set[str]] = {}
    for name, case in variants.items():
        report = compiler(case)
        along = [row for row in report.collectives if "dp" in row.axes]
        counts[name] = sum(row.count for row in along)
        types[name] = {part for row in messages(report, "dp") for part in row.dtype.split("+")}
        rows.append(
            {
                "gradients": name,
                "reductions": counts[name],
                "dp types": "+".join(sorted(types[name])),
                "dp wire GiB": round(sum(row.wire_bytes for row in along) / GIB, 2),
                **cells(report, report.floor_bytes),
            }
        )
    slowest = max(compiler(case).compile_seconds for case in variants.values())
    fewer = 1 - counts["fused, bf16"] / counts["not fused, bf16"]
    return Section(
        title="dp 32 x tp 8, llama3-70b, 80 layers, all of the train step, h200:32x8",
        rows=rows,
        thresholds=[
            (f"compiles in under 60 s: {slowest:.0f} s", slowest < 60),
            (f"at least 40% fewer reductions with fusion: {fewer:.0%}", fewer >= 0.4),
            ("bf16 gradients are reduced in bf16", types["fused, bf16"] == {"bf16"}),
            ("fp32 gradients are reduced in fp32", types["fused, fp32"] == {"f32"}),
        ],
        notes=[
            "fp32 sums happen once, after the backward pass, and nothing hides them; bf16 sums run "
            "layer by layer",
            "Adam's state in fp32 on tp 8 takes 98.6 GiB, more than an H100; ZeRO would shard it",
        ],
    )


def deep(model: str, batch: int, kernel: str) -> Config:
    """A model with 80 layers, as llama3-70b has them, parameters and moments in bfloat16."""
    return preset(
        model,
        **{
            "batch.size": batch,
            "seq_len": 4096,
            "layers": 80,
            "attention": kernel,
            "precision.params": "bfloat16",
        },
    )


def overlap(compiler: Compiler) -> Section:
    """How much of the wire time hides at the real depth, and what each lever gives."""
    kernel = attention()
    rows: list[dict[str, Cell]] = []
    thresholds: list[tuple[str, bool]] = []
    levers: Mapping[str, tuple[Overlap, Overlap]] = {
        "default": ("auto", "auto"),
        "options only": ("auto", "aggressive"),
        "interleaving only": ("aggressive", "auto"),
        "aggressive: both": ("aggressive", "aggressive"),
    }
    for model, batch, wanted in (("llama3-70b", 2, 0.92), ("llama3-8b", 4, 0.83)):
        step = deep(model, batch, kernel)
        found = {
            name: compiler(
                Case(step=changed(step, {"communication.overlap": structure}), scheduler=scheduler)
            )
            for name, (structure, scheduler) in levers.items()
        }
        default, best = found["default"], found["aggressive: both"]
        for name, report in found.items():
            ratio = report.step_seconds_modelled / default.step_seconds_modelled
            rows.append(
                {
                    "model": model,
                    "profile": name,
                    **cells(report, default.floor_bytes),
                    "x step": round(ratio, 3),
                }
            )
        assert best.floor_bytes is not None
        # With all hidden only products are left, and those of whole batches take the least.
        waits = sum(row.exposed_seconds for row in best.collectives)
        over = (best.product_seconds + waits) / default.product_seconds
        wire = best.wire_bytes / best.floor_bytes
        hidden = best.hidden_share
        thresholds += [
            (f"{model}: at least {wanted:.0%} hidden: {hidden:.1%}", hidden >= wanted),
            (f"{model}: wire at most 1.01x the floor: {wire:.4f}x", wire <= 1.01),
        ]
        if model == "llama3-70b":
            text = f"{model}: products and waits at most 1.10x default's products: {over:.3f}x"
            thresholds.append((text, over <= 1.1))
    return Section(
        title=f"80 layers, tp 8, sequences of 4096, a train step, {kernel} attention, h100:1x8",
        rows=rows,
        thresholds=thresholds,
        notes=[
            "batch 2 (llama3-70b) and 4 (llama3-8b, made 80 layers deep); parameters and Adam's "
            "moments in bf16, so that 80 layers come near its memory",
            "hidden: forward/backward/both, modelled",
        ],
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Strategy:
    """One row of `bound`."""

    model: str
    target: str
    batch: int
    mesh: Mapping[str, int]
    limit: float
    """The most that a step may take, over the longest of its work and its links' needs."""

    params: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and moments."""

    changes: Mapping[str, object] = dataclasses.field(default_factory=dict[str, object])
    """Other settings, by their dotted names."""

    profiles: tuple[Overlap, ...] = ("auto", "aggressive")
    """Values of `communication.overlap`; `limit` is for the last one."""


STRATEGIES = (
    Strategy(
        model="llama3-70b", target="h100:8x8", batch=16, mesh={"fsdp": 8, "tp": 8}, limit=1.10
    ),
    Strategy(
        model="llama3-70b", target="h100:8x8", batch=64, mesh={"fsdp": 64, "tp": 1}, limit=1.05
    ),
    Strategy(model="llama3-8b", target="h100:8x8", batch=32, mesh={"dp": 8, "tp": 8}, limit=1.12),
    Strategy(
        model="llama3-8b",
        target="h100:8x8",
        batch=32,
        mesh={"dp": 8, "tp": 8},
        limit=1.15,
        changes=SEQUENCE_PARALLEL,
        profiles=("aggressive",),
    ),
    Strategy(
        model="llama3-8b", target="h100:2x8", batch=32, mesh={"fsdp": 16, "tp": 1}, limit=1.05
    ),
    # Two sequences a replica and micro-batch; idle ticks are work here, the bubble is 10.5%.
    Strategy(
        model="llama3-405b",
        target="h100:64x8",
        batch=256,
        mesh={"pp": 16, "fsdp": 4, "tp": 8},
        limit=1.15,
        changes={
            "pipeline.rounds": 4,
            "pipeline.micro_batches": 32,
            "communication.sequence_parallel": True,
        },
    ),
    Strategy(
        model="llama3-70b",
        target="h200:1x8",
        batch=2,
        mesh={"tp": 8},
        limit=1.01,
        params="bfloat16",
    ),
)


def bound(compiler: Compiler) -> Section:
    """Whole steps of the real depth over their bound, by default and by `aggressive`."""
    kernel, rows = attention(), list[dict[str, Cell]]()
    thresholds: list[tuple[str, bool]] = []
    for one in STRATEGIES:
        step = preset(
            one.model,
            **{
                "target": one.target,
                "batch.size": one.batch,
                "seq_len": 4096,
                "attention": kernel,
                "precision.params": one.params,
                **{f"mesh.{axis}": size for axis, size in one.mesh.items()},
                **one.changes,
            },
        )
        mesh = " x ".join(f"{axis} {size}" for axis, size in one.mesh.items())
        mesh += ", sequence" * bool(one.changes.get("communication.sequence_parallel"))
        ratio = 0.0
        for profile in one.profiles:
            case = Case(step=changed(step, {"communication.overlap": profile}), scheduler=profile)
            report = compiler(case)
            seconds = report.step_seconds_modelled
            exposed = sum(link.exposed_seconds for link in report.links)
            ratio = comm_others.over_longest(report)
            links = {link.name: link for link in report.links}
            rows.append(
                {
                    "model": one.model,
                    "mesh": f"{mesh}, {one.target}",
                    "overlap": profile,
                    "ms": round(seconds * 1e3, 1),
                    "products": round(report.product_seconds * 1e3, 1),
                    "other work": round((seconds - exposed - report.product_seconds) * 1e3, 1),
                    **{name: _link_cell(links.get(name)) for name in LINKS},
                    "x bound": round(report.bound_ratio or 0.0, 3),
                    "x longest": round(ratio, 3),
                    "peak GiB": round(report.peak_bytes / GIB, 2),
                    "fits": report.fits,
                }
            )
        text = f"{one.model}, {mesh}: at most {one.limit}x work or link: {ratio:.3f}x"
        thresholds.append((text, ratio <= one.limit))
    return Section(
        title=f"steps over their bound, sequences of 4096, {kernel} attention",
        rows=rows,
        thresholds=thresholds,
        notes=[
            "links: ms busy, exposed, needed by the strategy; Adam in float32, on H200 in bfloat16",
            "products leave out idle ticks of stages; other work has them",
            "x bound: the step over the longest of matrix products and needs",
            "x longest: over the longest of all work, elementwise included, and needs: 1.0 where "
            "nothing is exposed that need be",
        ],
    )


def _link_cell(link: Link | None) -> str:
    if link is None:
        return "-"
    times = (link.busy_seconds, link.exposed_seconds, link.needed_seconds or 0.0)
    return "/".join(f"{one * 1e3:.0f}" for one in times)


def others(_compiler: Compiler) -> Section:
    """Models that nobody wrote for jaxtp."""
    return comm_others.section()


def memory(compiler: Compiler) -> Section:
    """The aggressive profile against the step that one writes first."""
    step = preset("llama3-8b", **{"batch.size": 4, "seq_len": 4096, "attention": attention()})
    donated = changed(step, {"remat": "none"})
    naive = changed(donated, {"communication.donate": False})
    variants = {
        "naive: no donation, no remat": Case(step=naive),
        "donated": Case(step=donated),
        "default: donated, block outputs kept": Case(step=step),
        "aggressive": Case(step=changed(step, AGGRESSIVE), scheduler="aggressive"),
        "default with sequence parallelism": Case(step=changed(step, SEQUENCE_PARALLEL)),
    }
    base = compiler(variants["naive: no donation, no remat"])
    rows: list[dict[str, Cell]] = []
    for name, case in variants.items():
        report = compiler(case)
        under = 1 - report.peak_bytes / base.peak_bytes
        rows.append(
            {"profile": name, "under naive": f"{under:.0%}", **cells(report, base.floor_bytes)}
        )
    under = 1 - compiler(variants["aggressive"]).peak_bytes / base.peak_bytes
    return Section(
        title=f"memory, llama3-8b, tp 8, batch 4 x 4096, fp32 Adam, {step.attention} attention",
        rows=rows,
        thresholds=[(f"aggressive at least 30% under naive: {under:.0%}", under >= 0.3)],
    )


def _layer_seconds(report: Report) -> float:
    """Modelled seconds of one more layer: one of the later turns of the layer loops."""
    schedule = report.schedule
    work = sum(one.seconds for one in schedule.work if one.repeat > 1)
    return work + sum(one.exposed for one in schedule.windows if one.repeat > 1)


def gpt3(compiler: Compiler) -> Section:
    """Manual tensor parallelism, jaxtp's default and its aggressive profile on GPT-3's layers."""
    kernel, batch, seq, layers = attention(), 4, 2048, 19
    step = preset(
        "gpt3-175b",
        **{
            "batch.size": batch,
            "seq_len": seq,
            "layers": layers,
            "attention": kernel,
            "tensor.pad_vocab": True,
        },
    )
    full = changed(step, {"remat": "full"})
    hiding = changed(step, AGGRESSIVE)
    variants = {
        "manual TP, full recomputation": Case(step=full, peer="megatron"),
        "manual TP, block outputs kept": Case(step=step, peer="megatron"),
        "jaxtp default": Case(step=step),
        "jaxtp, options only": Case(step=step, scheduler="aggressive"),
        "jaxtp aggressive": Case(step=hiding, scheduler="aggressive"),
        "jaxtp, sequence parallelism": Case(
            step=changed(step, SEQUENCE_PARALLEL), scheduler="aggressive"
        ),
    }
    reports = {name: compiler(case) for name, case in variants.items()}
    rates = {
        name: batch / (one.step_seconds_modelled + (96 - layers) * _layer_seconds(one))
        for name, one in reports.items()
    }
    base_rate, base = next(iter(rates.values())), next(iter(reports.values()))
    rows: list[dict[str, Cell]] = [
        {
            "plan": name,
            "samples/s at 96": round(rates[name], 3),
            "throughput": f"{rates[name] / base_rate - 1:+.1%}",
            "GB per GPU": round(report.peak_bytes / 1e9, 2),
            "memory": f"{report.peak_bytes / base.peak_bytes - 1:+.1%}",
            **cells(report, report.floor_bytes),
        }
        for name, report in reports.items()
    ]
    blank = dict.fromkeys(rows[0], "")
    for name, (rate, space) in AUTOTP.items():
        rows.append({**blank, "plan": f"published: {name}", "throughput": rate, "memory": space})
    kept, default, _, best, _ = list(rates.values())[1:]
    return Section(
        title=f"gpt3-175b, {layers} of 96 layers, tp 8, batch {batch} x {seq}, {kernel} attention",
        rows=rows,
        thresholds=[
            (f"default no slower than manual: {default / kept - 1:+.1%}", default >= kept * 0.999),
            (f"aggressive faster than default: {best / default - 1:+.1%}", best > default),
        ],
        notes=[
            f"{layers} layers fit beside {RUNTIME_BYTES // GIB} GiB for CUDA, NCCL; each program "
            "is scaled to 96 by the modelled time of one of its layers",
            "manual TP: specs by hand, constraints at the residual stream, heads and MLP, donation",
            "AutoTP's figures are its authors', on other hardware, against a manual plan of theirs",
        ],
    )


SECTIONS: Mapping[str, Callable[[Compiler], Section]] = {
    "floor": floor,
    "replicas": replicas,
    "overlap": overlap,
    "bound": bound,
    "others": others,
    "memory": memory,
    "gpt3": gpt3,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to compile."""

    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False
    """Print JSON instead of tables."""

    only: Literal["", "floor", "replicas", "overlap", "bound", "others", "memory", "gpt3"] = ""
    """One section; default: all."""


def main(options: Options) -> None:
    """Compiles and tabulates, section by section."""
    compiler = Compiler(console=Console(stderr=True))
    names = [options.only] if options.only else SECTIONS
    sections = {name: functools.partial(SECTIONS[name], compiler) for name in names}
    tabulate(sections, as_json=options.as_json, width=200)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
