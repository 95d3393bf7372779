"""A compiled step held to limits: an assertion for a user's own CI."""

from jaxtp.compile.report import Report, Row
from jaxtp.errors import CheckFailed, DoesNotFit, Problems, join
from jaxtp.errors.arguments import FLAG, checked, number


@checked(
    max_ratio=number(0).or_none(),
    max_peak_bytes=number(0).or_none(),
    min_hidden_share=number(0, 1).or_none(),
    allow_unexpected=FLAG,
    must_fit=FLAG,
)
def check(
    report: Report,
    *,
    max_ratio: float | None = None,
    max_peak_bytes: int | None = None,
    min_hidden_share: float | None = None,
    allow_unexpected: bool = False,
    must_fit: bool = True,
) -> None:
    """Raises if a compiled step crosses a limit; returns nothing if it does not.

    Args:
        report: From `jaxtp.preflight`.
        max_ratio: Wire bytes along the tensor axes over the floor; the report needs `floor_bytes`.
        max_peak_bytes: Memory of one device, in bytes.
        min_hidden_share: Share of the communication time, 0 to 1, that must pass beside work
            (modelled).
        allow_unexpected: Whether collectives that tensor parallelism does not need may appear.
        must_fit: Whether the peak must be within the GPU's memory.

    Raises:
        CheckFailed: TP115, with the limit, the measured value and the collectives behind it.
        DoesNotFit: TP114, if the step needs more memory than the GPU has.
        BadConfig: TP020, for a limit that is no number, or a switch that is no bool.
    """
    if not hasattr(report, "collectives"):
        raise CheckFailed(
            f"report is a {type(report).__name__}", fix="check(jaxtp.preflight(...), ...)"
        )
    problems = Problems()
    tensor = [row for row in report.collectives if set(row.axes) & set(report.tensor_axes)]
    if must_fit and not report.fits:
        over = report.peak_bytes - report.card_bytes
        problems.add(
            DoesNotFit(
                f"{report.peak_bytes:,} bytes per GPU, {over:,} more than the GPU's "
                f"{report.card_bytes:,}",
                where=report.target,
                fix="raise tp or fsdp, lower the batch, donate the state, or recompute more",
            )
        )
    if max_ratio is not None:
        if report.ratio is None:
            problems.add(_failed("the report has no floor to compare with", report, "floor_bytes="))
        elif report.ratio > max_ratio:
            text = (
                f"wire bytes {report.ratio:.3f}x the floor, limit {max_ratio:g}: {_worst(tensor)}"
            )
            problems.add(_failed(text, report, "see what is unexpected, or raise max_ratio"))
    if max_peak_bytes is not None and report.peak_bytes > max_peak_bytes:
        text = f"peak {report.peak_bytes:,} bytes per GPU, limit {max_peak_bytes:,}"
        problems.add(_failed(text, report, "lower the batch or recompute more"))
    if min_hidden_share is not None and report.hidden_share < min_hidden_share:
        exposed = sorted(tensor, key=lambda row: -row.exposed_seconds)
        text = (
            f"{report.hidden_share:.1%} of the communication is hidden (modelled), "
            f"limit {min_hidden_share:.1%}: {_worst(exposed)}"
        )
        problems.add(_failed(text, report, 'overlap="aggressive", or a larger batch'))
    if not allow_unexpected and report.unexpected:
        listed = join((f"{place} ({cause})" for place, cause in report.unexpected.items()), 3)
        problems.add(_failed(f"unexpected collectives: {listed}", report, "change the plan there"))
    problems.raise_any()


def _failed(what: str, report: Report, fix: str) -> CheckFailed:
    return CheckFailed(what, where=report.target, fix=fix)


def _worst(rows: list[Row]) -> str:
    return join((f"{row.count} x {row.kind} at {row.site or row.source}" for row in rows), 3)
