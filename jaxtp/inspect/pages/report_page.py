"""A compiled step as a page: a heat map of its communication and its schedule as a timeline."""

import dataclasses
import html
from collections import defaultdict
from collections.abc import Callable

from jaxtp.compile.report import Report
from jaxtp.compile.schedule import ComputeWindow, Window
from jaxtp.hardware.gpus import LINKS
from jaxtp.inspect.pages.html import Node, Section

WIDTH = 1200
"""Pixels of the timeline."""

LANE = 32
"""Pixels from one lane to the next."""


def report_sections(report: Report) -> tuple[Section, ...]:
    """What a page says about a compiled step."""
    lines = str(report).splitlines()
    facts = tuple(Node(line) for line in lines[: _table_begins(lines)])
    unexpected = tuple(Node(f"{p}: {cause}", "note") for p, cause in report.unexpected.items())
    beats = (
        "Work above, NVLink and the network below, over one step. A line is where later turns of a "
        "loop are left out. Red is time that the device waits. All of it is modelled."
    )
    return (
        Section("The compiled step", "", (*facts, *unexpected)),
        Section("Communication", "MiB sent per GPU and step.", drawing=heat_map(report)),
        Section("Schedule", beats, drawing=timeline(report)),
    )


def _table_begins(lines: list[str]) -> int:
    return next((i for i, line in enumerate(lines) if line.startswith("collective ")), len(lines))


def heat_map(report: Report) -> str:
    """A table of sites by axis and kind, coloured by the bytes one device sends."""
    cells: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    columns: dict[str, None] = {}
    for row in report.collectives:
        column = f"{' x '.join(row.axes)} {row.kind}"
        way = "backward" if row.backward else "forward"
        columns[column] = None
        cells[f"{row.site} {row.source} ({way})"][column] += row.wire_bytes
    most = max((v for r in cells.values() for v in r.values()), default=1.0) or 1.0
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join(
        f"<tr><th>{html.escape(site)}</th>{''.join(_cell(row[c], most) for c in columns)}</tr>"
        for site, row in cells.items()
    )
    return f'<table class="heat"><tr><th>site</th>{head}</tr>{body}</table>'


def _cell(sent: float, most: float) -> str:
    if not sent:
        return "<td></td>"
    lightness = 96 - 46 * sent / most
    return f'<td style="background:hsl(12 85% {lightness:.0f}%)">{sent / 2**20:,.2f}</td>'


def timeline(report: Report) -> str:
    """An SVG with a lane of work and one for each link; one turn stands for a loop."""
    schedule = report.schedule
    bars = [_product(p) for p in schedule.work] + [_window(w) for w in schedule.windows]
    height = 4 + LANE * (1 + len(LINKS))
    place, gaps, total = _axis([(b.start, b.start + b.seconds) for b in bars])
    scale = WIDTH / total
    marks = "".join(
        f'<line x1="{x * scale:.1f}" x2="{x * scale:.1f}" y1="0" y2="{height}" class="gap"/>'
        for x in gaps
    )
    drawn = "".join(_rect(b, place(b.start) * scale, b.seconds * scale) for b in bars)
    waits = "".join(
        _rect(b, place(b.start + b.seconds - b.waits) * scale, b.waits * scale, "#d9534f")
        for b in bars
        if b.waits
    )
    return (
        f'<svg width="{WIDTH}" height="{height + 18}" class="timeline" role="img">'
        f'{drawn}{waits}{marks}<text x="0" y="{height + 14}">0</text>'
        f'<text x="{WIDTH}" y="{height + 14}" text-anchor="end">'
        f"{schedule.seconds * 1e3:.2f} ms in all, loops once</text></svg>"
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Bar:
    """One rectangle: seconds of one run, on a lane, with the text that the pointer shows."""

    start: float
    seconds: float
    waits: float
    y: int
    colour: str
    text: str


def _axis(
    spans: list[tuple[float, float]],
) -> tuple[Callable[[float], float], list[float], float]:
    """Modelled seconds -> seconds on paper, where what is drawn nowhere is left out.

    Nothing is drawn where a loop's later turns are, because one turn stands for all of them.

    Returns:
        The mapping, the places on paper where time was left out, and the length of the paper.
    """
    cuts: list[tuple[float, float]] = []
    reached = 0.0
    for start, end in sorted(spans):
        if start > reached:
            cuts.append((reached, start))
        reached = max(reached, end)

    def place(t: float) -> float:
        return t - sum(min(t, b) - a for a, b in cuts if a < t)

    return place, [place(b) for a, b in cuts if a > 0], max(place(reached), 1e-9)


def _product(p: ComputeWindow) -> _Bar:
    colour = "#7aa2d6" if p.flops else "#cbd5e1"
    text = f"{p.op_name or p.name}: {p.seconds * 1e3:.3f} ms, {p.repeat} times"
    return _Bar(p.start, p.seconds, 0.0, 4, colour, text)


def _window(w: Window) -> _Bar:
    one = w.collective
    text = (
        f"{w.link}: {one.kind} {one.num_bytes / 2**20:.1f} MiB {one.site}: "
        f"{w.seconds * 1e3:.3f} ms, {w.exposed * 1e3:.3f} ms exposed, {w.repeat} times"
    )
    lane = 4 + LANE * (1 + LINKS.index(w.link))
    return _Bar(w.start, w.seconds, min(w.exposed, w.seconds), lane, "#86c79b", text)


def _rect(bar: _Bar, x: float, width: float, colour: str = "") -> str:
    return (
        f'<rect x="{x:.2f}" y="{bar.y}" width="{max(width, 0.3):.2f}" height="26" '
        f'fill="{colour or bar.colour}"><title>{html.escape(bar.text)}</title></rect>'
    )
