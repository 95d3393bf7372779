"""What a search found: the meshes of one run on one machine, and the table of them."""

import dataclasses
import json
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxtp.compile.report import Report
from jaxtp.config.settings import Config
from jaxtp.cost.candidates import POLICIES, SETTINGS
from jaxtp.cost.ranking import EQUAL_WITHIN, EXPECTED_ERROR, USABLE_MEMORY, Candidate, Ranking
from jaxtp.errors import BadUsage, DoesNotFit, JaxtpError
from jaxtp.errors.arguments import Kind, number, whole
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB
from jaxtp.plan.table import WIDTH
from jaxtp.train.mesh_advice import Pricing, advice, mesh_text

OWN_SETTINGS = ("mesh.dp", "mesh.fsdp", "mesh.tp", "batch.accumulation", "zero.stage")
"""What is searched for a model of one's own: not cp, ep or `overlap="aggressive"`, which
`parallelize` also runs; pipeline stages are those of jaxtp's models, recomputation its own."""

OWN_ERROR = "against the compiler 13% below to 33% above on three models"
"""How far modelled steps of models of one's own are off: Llama-3.2-1B, GPT-2 and a vision
transformer, given as functions, against `jaxtp.preflight` (docs/choosing-a-mesh.md)."""


HEAD = ("", "mesh", "step", "compiled", "MFU", "memory", "state", "tp", "data", "bubble")
"""Columns of the table."""

PREALLOCATED = 0.75
"""Share of a GPU's memory that JAX takes when it starts, and stays within (docs.jax.dev, GPU memory
allocation)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What a search is asked for, whatever the model; fields as the arguments of `search`.

    Raises:
        BadUsage: TP132, for what is no count, or no bandwidth.
    """

    limit: int
    compile_best: int
    network: float
    time_limit: float
    on_progress: Callable[[str, float], None]

    def __post_init__(self) -> None:
        kinds = {
            "limit": whole(1),
            "compile_best": whole(0),
            "network": Kind(number(0).accepts, "bytes/s; 0 for the data sheet's"),
        }
        for name, kind in kinds.items():
            kind.raising(BadUsage).check(name, getattr(self, name))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One mesh of the table.

    Attributes:
        candidate: Its price.
        config: Settings that run it, for `scripts/train.py`; None for a model of one's own.
        report: Its compiled step, where it was compiled.
        refusal: Why jaxtp refused it, where it did; the code first.
    """

    candidate: Candidate
    config: Config | None
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

    @property
    def tight(self) -> str:
        """What a compiled step leaves, where that is less than a GPU needs besides."""
        if self.report is None or not self.report.fits:
            return ""
        spare, card = self.report.card_bytes - self.report.peak_bytes, self.report.card_bytes
        need = (1 - USABLE_MEMORY) * card
        if spare >= need:
            return ""
        return (
            f"tight: it leaves {spare / GIB:.1f} GiB, and CUDA's context and NCCL take up to "
            f"{need / GIB:.1f}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The meshes of one run on one machine, best first.

    Attributes:
        target: The machine.
        model: What is trained.
        batch: Sequences of the global batch.
        seq: Tokens of one sequence; 0 where only the model knows.
        rows: One entry a mesh, with the best settings for it.
        ranking: All candidates as arrays.
        pricing: How the model is priced on any machine.
        notes: What is to be said about all of it.
    """

    target: Target
    model: str
    batch: int
    seq: int
    rows: tuple[Found, ...]
    ranking: Ranking
    pricing: Pricing
    notes: tuple[str, ...] = ()

    @property
    def is_own(self) -> bool:
        """Whether it is of a model of one's own, known by its function alone."""
        return self.rows[0].config is None

    @property
    def best(self) -> Found:
        """The first mesh, if it runs.

        Raises:
            DoesNotFit: TP114, if no mesh fits.
        """
        first = self.rows[0]
        if first.candidate.fits and not first.refusal:
            return first
        less = "zero.offload_optimizer=cpu (in a config)"
        if self.is_own:
            less = "recomputation in the function (jax.checkpoint)"
        raise DoesNotFit(
            f"{self.model} fits on no mesh of {self.target}: the nearest {first.verdict}",
            fix=f"more GPUs, a smaller batch, or {less}",
        )

    def to_json(self) -> str:
        """The table as data."""
        rows = [
            {
                **dataclasses.asdict(row.candidate),
                "compiled_bytes": row.report.peak_bytes if row.report else None,
                "tight": row.tight,
                "verdict": row.verdict,
                "config": chosen(row),
            }
            for row in self.rows
        ]
        head = {
            "target": str(self.target), "model": self.model, "batch": self.batch,
            "seq": self.seq, "candidates": len(self.ranking),
            "expected_error": None if self.is_own else EXPECTED_ERROR,
        }  # fmt: skip
        return json.dumps({**head, "meshes": rows}, indent=1)

    def __str__(self) -> str:
        return "\n".join((*_head(self), *_table(self.rows), *_foot(self)))


def machine_of(target: str, network: float) -> Target:
    """The machine that is searched, perhaps with another network; bytes/s a GPU, 0 for its own."""
    machine = Target.parse(target)
    if not network:
        return machine
    device = dataclasses.replace(machine.device, nic_bandwidth=network)
    return dataclasses.replace(machine, device=device)


def rows_of(ranking: Ranking, config: Callable[[Candidate], Config | None]) -> list[Found]:
    """The best candidate of each mesh, in order, with why each lost to the first."""
    best = ranking.candidate(int(ranking.order[0]))
    rows: list[Found] = []
    for index in ranking.by_mesh():
        candidate = ranking.candidate(index, best=best if rows else None)
        rows.append(Found(candidate=candidate, config=config(candidate)))
    return rows


def compiled_rows(
    ranking: Ranking,
    rows: Sequence[Found],
    asked: Asked,
    compiled: Callable[[Found, Callable[[float], None]], Report],
) -> tuple[Found, ...]:
    """The first rows, with the best that run and fit compiled, and in front.

    Those that turn out not to run, or not to fit, are at the end, whatever the limit.

    Args:
        ranking: All candidates.
        rows: As priced.
        asked: How many to compile and to keep, and who is told.
        compiled: The report on a row; takes what is called with the seconds so far.
    """
    count = asked.compile_best
    done: list[Found] = []
    lost: list[Found] = []
    for row in rows:
        if len(done) == count or len(lost) == 2 * count or not row.candidate.fits:
            break
        what = mesh_text(row.candidate)
        try:
            report = compiled(row, lambda seconds, what=what: asked.on_progress(what, seconds))
        except JaxtpError as error:
            lost.append(dataclasses.replace(row, refusal=str(error).splitlines()[0]))
            continue
        row = dataclasses.replace(row, report=report)
        (done if report.fits else lost).append(row)
    kept = [*done, *rows[len(done) + len(lost) :]][: asked.limit]
    return tuple(_against_the_first(ranking, [*kept, *lost]))


def _against_the_first(ranking: Ranking, rows: Sequence[Found]) -> Iterator[Found]:
    """The rows with why each lost to the first of them, which compiling may have changed."""
    best = rows[0].candidate
    yield dataclasses.replace(rows[0], candidate=dataclasses.replace(best, reason=_alone(best)))
    for row in rows[1:]:
        reason = ranking.reason(row.candidate, best)
        yield dataclasses.replace(row, candidate=dataclasses.replace(row.candidate, reason=reason))


def _alone(first: Candidate) -> str:
    return "" if first.fits else first.reason


def chosen(row: Found) -> dict[str, int | str | bool]:
    """The searched settings of a row, by dotted name."""
    found: dict[str, int | str | bool] = {}
    if row.config is None:
        return {name: row.candidate.settings[SETTINGS[name]] for name in OWN_SETTINGS}
    for name in SETTINGS:
        value: Any = row.config
        for part in name.split("."):
            value = getattr(value, part)
        found[name] = value
    return found


def settings_text(settings: Mapping[str, int], *, own: bool) -> str:
    """What is chosen besides the mesh, without what is off.

    Args:
        settings: Field of `Strategy` -> value.
        own: Whether it is of a model of one's own, whose recomputation is not chosen.
    """
    s, policies = settings, {int(value): name for name, value in POLICIES.items()}
    words = [f"{s['micro_batches']}x{s['micro_batch']}"]
    words += [] if own else [f"remat {policies[s['recompute']]}"]
    words += [f"zero {s['zero']}"] * (s["zero"] > 0)
    words += [f"{s['rounds']} rounds"] * (s["rounds"] > 1)
    hides = "two halves" if s["tp"] > 1 else "gathered ahead"
    words += ["sp"] * bool(s["sequence_parallel"]) + [hides] * bool(s["interleaved"])
    return ", ".join(words)


def _wrapped(text: str, indent: int = 0) -> list[str]:
    """A sentence as lines of at most `WIDTH` columns."""
    spaces = " " * indent
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=spaces,
        subsequent_indent=spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _head(result: Search) -> list[str]:
    fits = int(result.ranking.fits.sum())
    error = f"+-{EXPECTED_ERROR:.0%} on published runs of other models"
    return [
        *_wrapped(
            f"{result.model} on {result.target}, batch {result.batch}"
            f"{f' x {result.seq} tokens' if result.seq else ''}: "
            f"{len(result.ranking):,} candidates priced, {fits:,} fit"
        ),
        *_wrapped(
            f"steps are modelled{f'; {OWN_ERROR}' if result.is_own else f', {error}'}; meshes "
            f"within {EQUAL_WITHIN:.0%} of each other count as equal, the simpler one first"
        ),
        "",
    ]


def _table(rows: Sequence[Found]) -> list[str]:
    """Two or three lines a mesh: its figures, then its settings and why it is not the first."""
    figures = [_figures(number, row) for number, row in enumerate(rows, 1)]
    used = [i for i in range(len(HEAD)) if any(line[i] for line in figures)]
    widths = [max(len(line[i]) for line in (HEAD, *figures)) for i in used]

    def joined(line: Sequence[str]) -> str:
        number, mesh, *cells = (line[i] for i in used)
        right = (cell.rjust(width) for cell, width in zip(cells, widths[2:], strict=True))
        return "  ".join((f"{number:>2s} {mesh:{widths[1]}s}", *right))

    lines = [joined(HEAD)]
    for row, line in zip(rows, figures, strict=True):
        chosen_here = settings_text(row.candidate.settings, own=row.config is None)
        text = "; ".join(filter(None, (chosen_here, row.tight, row.verdict)))
        lines += [joined(line), *_wrapped(text, indent=3)]
    return lines


def _figures(number: int, row: Found) -> tuple[str, ...]:
    """The cells of one mesh, as in `HEAD`; empty where nothing was compiled."""
    one, report = row.candidate, row.report
    waits = (
        one.parts["tensor"],
        one.parts["gathers"] + one.parts["gradients"],
        one.parts["bubble"],
    )
    return (
        str(number),
        mesh_text(one),
        _time(one.seconds),
        _time(report.step_seconds_modelled) if report else "",
        f"{one.mfu:.1%}",
        f"{report.peak_bytes / GIB:.1f} C" if report else f"{one.memory_bytes / GIB:.1f}",
        f"{one.state_bytes / GIB:.1f}",
        *(f"{part / one.seconds:.1%}" for part in waits),
    )


def _time(seconds: float) -> str:
    return f"{seconds:.3f}s" if seconds >= 1 else f"{seconds * 1e3:.1f}ms"


def _preallocated(result: Search) -> Iterator[str]:
    """What to set so that JAX takes as much of a GPU as the first mesh needs."""
    first = result.rows[0]
    peak = first.report.peak_bytes if first.report else first.candidate.memory_bytes
    share = peak / result.target.device.memory_bytes
    if PREALLOCATED < share <= 1:
        fraction = min(math.ceil(100 * share + 1), 99) / 100
        yield (
            f"the first mesh fills {share:.0%} of a GPU, of which JAX takes {PREALLOCATED:.0%} by "
            f"itself: run with XLA_CLIENT_MEM_FRACTION={fraction:.2f}"
        )


def _foot(result: Search) -> list[str]:
    compiled = "C: compiled, not modelled; compiled: the step on the compiler's own schedule; "
    said = (
        f"memory in GiB per GPU; {compiled * any(row.report for row in result.rows)}"
        "state: parameters, gradients, moments; tp, data, bubble: shares of the step that wait for "
        "them",
        *_preallocated(result),
        *result.notes,
        *advice(result.ranking, result.pricing, result.target, result.rows[0].candidate),
    )
    return ["", *(line for text in said for line in _wrapped(text))]
