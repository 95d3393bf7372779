"""Which mesh to generate on: every split of a machine into tp and dp, the best few compiled."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxtp.errors import BadTarget, BadUsage, DoesNotFit, JaxtpError
from jaxtp.generation.preflight import (
    GenerationReport,
    cache_bytes,
    preflight_generation,
    token_floor,
)
from jaxtp.generation.workload import Workload
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One way to split a machine.

    Attributes:
        workload: What is asked, with this tp.
        dp: Replicas.
        floor_seconds: What a token of every row must take.
        held_bytes: Weights and cache of one device.
        card_bytes: Memory of one GPU.
        report: The compiled programs, where they were compiled.
        refusal: Why the compiler or the plan refused it; "" where neither did.
    """

    workload: Workload
    dp: int
    floor_seconds: float
    held_bytes: int
    card_bytes: int
    report: GenerationReport | None = None
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """Whether weights and cache do, or, once compiled, the whole program."""
        if self.report is None:
            return self.held_bytes <= self.card_bytes and not self.refusal
        return self.report.prefill.report.fits and self.report.decode.report.fits

    @property
    def seconds(self) -> float:
        """Of one token of every row: as compiled, or the floor."""
        return self.report.decode.traffic.seconds if self.report else self.floor_seconds

    def __str__(self) -> str:
        peak = f"{self.held_bytes / GIB:.1f}"
        if self.report is not None:
            peak = f"{self.report.decode.report.peak_bytes / GIB:.1f} C"
        text = self.refusal
        if not text and not self.fits:
            text = f"does not fit by {(self.held_bytes - self.card_bytes) / GIB:,.1f} GiB"
        if not text and self.report is not None:
            text = f"{self.report.time_ratio:.2f}x the floor, prefill "
            text += f"{self.report.prefill.traffic.seconds * 1e3:,.0f} ms"
        rate = self.workload.batch / self.seconds
        mesh = f"tp={self.workload.tp:<4d} dp={self.dp:<4d}"
        return f"{mesh} {self.seconds * 1e3:9.3f} ms {rate:10,.0f} {peak:>9s}  {text}".rstrip()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Splits:
    """All splits of a machine, fastest first.

    Attributes:
        workload: What is asked.
        target: The machine.
        rows: Those that fit first, by the seconds of a token.
    """

    workload: Workload
    target: Target
    rows: tuple[Split, ...]

    @property
    def best(self) -> Split:
        """The first split.

        Raises:
            DoesNotFit: TP114, if none fits.
        """
        first = self.rows[0]
        if first.fits:
            return first
        over = min((row.held_bytes - row.card_bytes) / GIB for row in self.rows)
        raise DoesNotFit(
            f"{self.workload.model} fits on no split of {self.target}; the nearest lacks "
            f"{over:,.1f} GiB a GPU",
            fix="more GPUs, fewer rows or a shorter context",
        )

    def __str__(self) -> str:
        asked = self.workload
        return "\n".join(
            (
                f"generation by {asked.model} on {self.target}, {asked.batch} rows of "
                f"{asked.context:,} tokens, {asked.weights}",
                "a token of every row is modelled: its floor, or where memory is marked C the "
                "compiled program",
                "",
                f"{'mesh':15s} {'token':>12s} {'tokens/s':>10s} {'GiB/GPU':>9s}",
                *map(str, self.rows),
            )
        )


def search_generation(
    workload: Workload,
    target: Target | str,
    *,
    compile_best: int = 2,
    time_limit: float = 900.0,
    on_progress: Callable[[str, float], None] = lambda *_: None,
) -> Splits:
    """The best splits of a machine into tp and dp to generate on.

    Priced by the floor of a token (`jaxtp.generation.preflight`); the best few are compiled, and
    ordered among themselves by what the compiled programs take.

    Args:
        workload: What is asked; its tp does not count.
        target: The machine.
        compile_best: How many to compile.
        time_limit: Seconds that the compiler may take for each program.
        on_progress: Called with what is compiled and the seconds so far.

    Raises:
        BadTarget: TP116, if no split divides the rows, or for a malformed target.
        BadConfig: TP020, for an unknown model.
        BadUsage: TP132, for fewer than none to compile.
    """
    if compile_best < 0:
        raise BadUsage(
            f"compile_best is {compile_best}", where="compile_best", fix="splits, 0 or more"
        )
    machine = Target.of(target)
    rows = _priced(workload, machine)
    if not rows:
        heads = workload.config.num_attention_heads
        raise BadTarget(
            f"no tp divides {machine.num_devices} devices and {heads} heads so that its replicas "
            f"divide {workload.batch} rows",
            where="batch",
            fix="other rows, or another number of devices",
        )
    done: list[Split] = []
    for row in [row for row in rows if row.fits][:compile_best]:
        what = f"tp={row.workload.tp} dp={row.dp}"
        try:
            report = preflight_generation(
                row.workload,
                machine,
                time_limit=time_limit,
                on_progress=lambda seconds, what=what: on_progress(what, seconds),
            )
            done.append(dataclasses.replace(row, report=report))
        except JaxtpError as error:
            done.append(dataclasses.replace(row, refusal=str(error).splitlines()[0]))
    tried = {row.workload.tp for row in done}
    rest = [row for row in rows if row.workload.tp not in tried]
    return Splits(workload=workload, target=machine, rows=tuple((*sorted(done, key=_order), *rest)))


def _order(row: Split) -> tuple[bool, float]:
    return not row.fits, row.seconds if row.fits else row.held_bytes


def _priced(workload: Workload, machine: Target) -> Sequence[Split]:
    found: list[Split] = []
    devices, heads = machine.num_devices, workload.config.num_attention_heads
    most = min(devices, machine.device.nvlink_domain)
    for tp in (n for n in range(1, most + 1) if devices % n == 0 == heads % n):
        one = dataclasses.replace(workload, tp=tp)
        try:
            plan = one.plan(devices)
        except JaxtpError:  # the rows do not divide
            continue
        _, seconds = token_floor(one, plan, machine)
        found.append(
            Split(
                workload=one,
                dp=devices // tp,
                floor_seconds=seconds,
                held_bytes=plan.bytes_per_device + cache_bytes(one, plan),
                card_bytes=machine.device.memory_bytes,
            )
        )
    return sorted(found, key=_order)
