"""A compiled step as a page: a heat map of its communication and its schedule as a timeline.

Stage in: a `Report`. Stage out: sections.
"""

import html
from collections import defaultdict

from jaxtp.view.page import Node, Section
from jaxtp.xla.report import Report
from jaxtp.xla.schedule import Product, Window

WIDTH = 1200
"""Pixels of the timeline."""


def report_sections(report: Report) -> tuple[Section, ...]:
    """What a page says about a compiled step."""
    lines = str(report).splitlines()
    facts = tuple(Node(line) for line in lines[: _table_begins(lines)])
    unexpected = tuple(Node(f"{p}: {cause}", "note") for p, cause in report.unexpected.items())
    beats = (
        "Matrix products above, collectives below, over one step; later turns of a loop are one "
        "block. Red is time that the device waits. All of it is modelled, not measured."
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
        cells[f"{row.site or row.source or 'unnamed'} ({way})"][column] += row.wire_bytes
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
    """An SVG with a lane of matrix products and a lane of collectives."""
    schedule = report.schedule
    ends = [w.start + w.seconds * w.repeat for w in schedule.windows]
    ends += [p.start + p.seconds * p.repeat for p in schedule.products]
    scale = WIDTH / max((*ends, schedule.seconds, 1e-9))
    work = "".join(_product(p, scale) for p in schedule.products)
    wire = "".join(_window(w, scale) for w in schedule.windows)
    return (
        f'<svg width="{WIDTH}" height="84" class="timeline" role="img">'
        f'{work}{wire}<text x="0" y="80">0</text>'
        f'<text x="{WIDTH}" y="80" text-anchor="end">{schedule.seconds * 1e3:.2f} ms</text></svg>'
    )


def _product(p: Product, scale: float) -> str:
    kind = "#7aa2d6" if p.flops else "#cbd5e1"
    text = f"{p.op_name or p.name}: {p.seconds * 1e3:.3f} ms, {p.repeat} times"
    return _bar(p.start, p.seconds * p.repeat, 4, kind, text, scale)


def _window(w: Window, scale: float) -> str:
    one = w.collective
    text = (
        f"{one.kind} {one.num_bytes / 2**20:.1f} MiB {one.site}: {w.seconds * 1e3:.3f} ms, "
        f"{w.exposed * 1e3:.3f} ms exposed, {w.repeat} times"
    )
    total, exposed = w.seconds * w.repeat, w.exposed * w.repeat
    hidden = _bar(w.start, total, 36, "#86c79b", text, scale)
    waits = _bar(w.start + total - exposed, exposed, 36, "#d9534f", text, scale) if exposed else ""
    return hidden + waits


def _bar(start: float, seconds: float, y: int, colour: str, text: str, scale: float) -> str:
    return (
        f'<rect x="{start * scale:.2f}" y="{y}" height="26" '
        f'width="{max(seconds * scale, 0.3):.2f}" '
        f'fill="{colour}"><title>{html.escape(text)}</title></rect>'
    )
