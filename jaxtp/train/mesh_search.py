"""Which mesh: every way to spread a run over a machine, priced, and the best few compiled."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxtp.compile.report import Report
from jaxtp.config.presets import preset
from jaxtp.config.settings import Batch, Config
from jaxtp.cost.candidates import POLICIES, SETTINGS, candidates
from jaxtp.cost.ranking import EQUAL_WITHIN, EXPECTED_ERROR, Candidate, Ranking, rank
from jaxtp.cost.strategy import AXES, ModelSizes
from jaxtp.errors import BadUsage, DoesNotFit, JaxtpError, join
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB
from jaxtp.models import LlamaConfig
from jaxtp.train.mesh_advice import advice, mesh_text
from jaxtp.train.planning import model_of
from jaxtp.train.preflight import preflight_config
from jaxtp.train.pricing import JAXTP, fused_on, sizes_of, wires_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One mesh of the table.

    Attributes:
        candidate: Its price.
        config: Settings that run it, for `scripts/train.py`.
        report: Its compiled step, where it was compiled.
        refusal: Why jaxtp refused it, where it did; the code first.
    """

    candidate: Candidate
    config: Config
    report: Report | None = None
    refusal: str = ""

    @property
    def verdict(self) -> str:
        """Why it is where it is in the table."""
        if self.refusal:
            return self.refusal
        if self.report is not None and not self.report.fits:
            over = (self.report.peak_bytes - self.report.card_bytes) / GIB
            return f"compiled, and does not fit by {over:,.1f} GiB"
        return self.candidate.reason


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The meshes of one run on one machine, best first.

    Attributes:
        target: The machine.
        model: What is trained.
        batch: Sequences of the global batch.
        seq: Tokens of one sequence.
        rows: One entry a mesh, with the best settings for it.
        ranking: All candidates as arrays.
        sizes: The model, as it is priced.
    """

    target: Target
    model: str
    batch: int
    seq: int
    rows: tuple[Found, ...]
    ranking: Ranking
    sizes: ModelSizes

    @property
    def best(self) -> Found:
        """The first mesh, if it runs.

        Raises:
            DoesNotFit: TP114, if no mesh fits.
        """
        first = self.rows[0]
        if first.candidate.fits and not first.refusal:
            return first
        raise DoesNotFit(
            f"{self.model} fits on no mesh of {self.target}: the nearest {first.verdict}",
            fix="more GPUs, a smaller batch.size, or zero.offload_optimizer=cpu",
        )

    def to_json(self) -> str:
        """The table as data."""
        rows = [
            {
                **dataclasses.asdict(row.candidate),
                "compiled_bytes": row.report.peak_bytes if row.report else None,
                "verdict": row.verdict,
                "config": chosen(row.config),
            }
            for row in self.rows
        ]
        head = {
            "target": str(self.target), "model": self.model, "batch": self.batch,
            "seq": self.seq, "candidates": len(self.ranking), "expected_error": EXPECTED_ERROR,
        }  # fmt: skip
        return json.dumps({**head, "meshes": rows}, indent=1)

    def __str__(self) -> str:
        return "\n".join((*_head(self), *_table(self.rows), *_foot(self)))


def run_of(run: Config | str, *, target: str = "", batch: int = 0, seq: int = 0) -> Config:
    """The run to search a mesh for.

    Args:
        run: Settings, or a preset's name.
        target: The machine, instead of the settings'; by default h100:1x8.
        batch: Sequences of the global batch, instead of the settings'.
        seq: Tokens of one sequence, instead of the settings'.

    Raises:
        BadUsage: TP132, without a batch.
    """
    config = preset(run) if isinstance(run, str) else run
    # Mesh, accumulation and stages are what is searched; of a preset the batch is not meant either.
    size = batch or (0 if isinstance(run, str) else config.batch.size)
    if not size:
        raise BadUsage("no batch", where="batch", fix="sequences of the global batch")
    return dataclasses.replace(
        config,
        target=target or config.target or "h100:1x8",
        seq_len=seq or config.seq_len,
        batch=Batch(size=size),
    )


def search(
    run: Config | str,
    *,
    target: str = "",
    batch: int = 0,
    seq: int = 0,
    fixed: Mapping[str, Any] | None = None,
    limit: int = 12,
    compile_best: int = 3,
    network: float = 0.0,
    time_limit: float = 900.0,
    on_progress: Callable[[str, float], None] = lambda *_: None,
) -> Search:
    """The best meshes for a run, with what each of the others would cost.

    Candidates are priced from sizes alone; the best are compiled by the real compiler, so that
    their memory and collectives are facts. One that jaxtp refuses, or that does not fit once it is
    compiled, makes room for the next.

    Args:
        run: Settings, of which `model`, `target`, `seq_len`, `batch.size` and all that is not
            searched are taken; or a preset's name.
        target: The machine, instead of the settings'; by default h100:1x8.
        batch: Sequences of the global batch, instead of the settings'.
        seq: Tokens of one sequence, instead of the settings'.
        fixed: Setting -> value that every candidate has, e.g. `{"mesh.tp": 8}`.
        limit: Meshes in the result.
        compile_best: How many to compile; 0 for prices alone.
        network: Bytes/s that each GPU sends out of its NVLink domain, instead of the data sheet's.
        time_limit: Seconds that the compiler may take for each.
        on_progress: Called with what is done and the seconds so far.

    Raises:
        BadTarget: TP116, without a target.
        BadUsage: TP132, if no candidate is left, or a setting cannot be fixed.
        BadConfig: TP020, for an unknown model.
    """
    config = run_of(run, target=target, batch=batch, seq=seq)
    machine, model_config = Target.parse(config.target), model_of(config)
    if network:
        device = dataclasses.replace(machine.device, nic_bandwidth=network)
        machine = dataclasses.replace(machine, device=device)
    sizes = sizes_of(model_config, config.seq_len)
    wires = wires_of(machine)
    found = candidates(
        sizes,
        machine.num_devices,
        config.batch.size,
        fixed=_fields(fixed or {}),
        domain=wires.domain,
        interleaves=isinstance(model_config, LlamaConfig),
    )
    found = dataclasses.replace(found, fused=fused_on(config, found))
    ranking = rank(sizes, found, wires, JAXTP, memory_bytes=machine.device.memory_bytes)
    best = ranking.candidate(int(ranking.order[0]))
    rows: list[Found] = []
    for index in ranking.by_mesh():
        candidate = ranking.candidate(index, best=best if rows else None)
        rows.append(Found(candidate=candidate, config=config_for(config, candidate)))
    rows = _compiled(rows, compile_best, time_limit, on_progress)
    return Search(
        target=machine,
        model=config.model,
        batch=config.batch.size,
        seq=config.seq_len,
        rows=tuple(rows[:limit]),
        ranking=ranking,
        sizes=sizes,
    )


def _compiled(
    rows: Sequence[Found],
    count: int,
    time_limit: float,
    on_progress: Callable[[str, float], None],
) -> list[Found]:
    """The rows with the best `count` that run and fit compiled, and in front."""
    done: list[Found] = []
    lost: list[Found] = []
    for row in rows:
        if len(done) == count or len(lost) == 2 * count or not row.candidate.fits:
            break
        what = mesh_text(row.candidate)
        try:
            _, report = preflight_config(
                row.config,
                time_limit=time_limit,
                on_progress=lambda seconds, what=what: on_progress(what, seconds),
            )
        except JaxtpError as error:
            lost.append(dataclasses.replace(row, refusal=str(error).splitlines()[0]))
            continue
        row = dataclasses.replace(row, report=report)
        (done if report.fits else lost).append(row)
    return [*done, *rows[len(done) + len(lost) :], *lost]


def config_for(config: Config, candidate: Candidate) -> Config:
    """Settings that run a candidate.

    Args:
        config: All that was not searched.
        candidate: What was.
    """
    s = candidate.settings
    names = {int(value): name for name, value in POLICIES.items()}
    overlap = "aggressive" if s["interleaved"] else "auto"
    rounds = {"rounds": s["rounds"]} if s["pp"] > 1 else {"rounds": 1}
    return dataclasses.replace(
        config,
        remat=names[s["recompute"]],
        mesh=dataclasses.replace(config.mesh, **{axis: s[axis] for axis in AXES}),
        batch=dataclasses.replace(
            config.batch, micro_size=s["micro_batch"], accumulation=s["micro_batches"]
        ),
        pipeline=dataclasses.replace(config.pipeline, micro_batches=0, **rounds),
        zero=dataclasses.replace(config.zero, stage=s["zero"]),
        communication=dataclasses.replace(
            config.communication, sequence_parallel=bool(s["sequence_parallel"]), overlap=overlap
        ),
    )


def _fields(fixed: Mapping[str, Any]) -> dict[str, int]:
    """Fixed settings as fields of `Strategy`.

    Raises:
        BadUsage: TP132, for a setting that is not searched.
    """
    unknown = sorted(set(fixed) - set(SETTINGS))
    if unknown:
        raise BadUsage(
            f"{join(unknown)} is not searched", where="fix", fix=f"one of {join(SETTINGS, 20)}"
        )
    words = {name: int(policy) for name, policy in POLICIES.items()}
    words |= {"aggressive": 1, "auto": 0, "off": 0, "true": 1, "false": 0}
    values: dict[str, int] = {}
    for name, value in fixed.items():
        text = str(value).lower()
        try:
            values[SETTINGS[name]] = words[text] if text in words else int(text)
        except ValueError:
            raise BadUsage(
                f"{name}={value}", where="fix", fix=f"a number, or one of {join(words, 20)}"
            ) from None
    return values


def chosen(config: Config) -> dict[str, int | str | bool]:
    """The searched settings of a config, by dotted name."""
    found: dict[str, int | str | bool] = {}
    for name in SETTINGS:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


def settings_text(candidate: Candidate, remat: str) -> str:
    """What is chosen besides the mesh, without what is off."""
    s = candidate.settings
    words = [f"{s['micro_batches']}x{s['micro_batch']}", f"remat {remat}"]
    words += [f"zero {s['zero']}"] * (s["zero"] > 0)
    words += [f"{s['rounds']} rounds"] * (s["rounds"] > 1)
    words += ["sp"] * bool(s["sequence_parallel"]) + ["two halves"] * bool(s["interleaved"])
    return ", ".join(words)


def _head(result: Search) -> tuple[str, ...]:
    fits = int(result.ranking.fits.sum())
    return (
        f"{result.model} on {result.target}, batch {result.batch} x {result.seq} tokens: "
        f"{len(result.ranking):,} candidates priced, {fits:,} fit",
        f"steps are modelled, +-{EXPECTED_ERROR:.0%} on published runs of other models; meshes "
        f"within {EQUAL_WITHIN:.0%} of each other count as equal, the simpler one first",
        "",
    )


def _table(rows: Sequence[Found]) -> list[str]:
    lines = [
        f"{'':2s} {'mesh':26s} {'step':>8s} {'MFU':>5s} {'memory':>9s} {'state':>7s} "
        f"{'tp':>6s} {'data':>6s} {'bubble':>6s}  settings; why it is not the first"
    ]
    for number, row in enumerate(rows, 1):
        one, total = row.candidate, row.candidate.seconds
        data = one.parts["gathers"] + one.parts["gradients"]
        memory = f"{one.memory_bytes / GIB:.1f}"
        if row.report is not None:
            memory = f"{row.report.peak_bytes / GIB:.1f} C"
        text = settings_text(one, row.config.remat)
        if row.report is not None:
            text += f"; {row.report.step_seconds_modelled:.3f}s as compiled"
        lines.append(
            f"{number:2d} {mesh_text(one):26s} {total:7.3f}s {one.mfu:5.1%} {memory:>9s} "
            f"{one.state_bytes / GIB:7.1f} {one.parts['tensor'] / total:6.1%} "
            f"{data / total:6.1%} {one.parts['bubble'] / total:6.1%}  {text}"
            + (f"; {row.verdict}" if row.verdict else "")
        )
    return lines


def _foot(result: Search) -> tuple[str, ...]:
    lines = [
        "",
        "memory in GiB per GPU, C: compiled, not modelled; state: parameters, gradients, moments; "
        "tp, data, bubble: shares of the step that wait for them",
        *advice(result.ranking, result.sizes, result.target, result.rows[0].candidate),
    ]
    return tuple(lines)
