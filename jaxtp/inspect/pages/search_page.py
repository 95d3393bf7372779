"""All candidates of a search as a page: step time against memory, the front marked."""

import html
from collections.abc import Sequence

from jaxtp.inspect.pages.html import Section, page

WIDTH, HEIGHT, MARGIN = 900, 480, 60
"""Pixels of the drawing, and of the space for its axes."""

MAX_POINTS = 6000
"""Points drawn; more are thinned out evenly, the front is kept."""


def search_html(
    title: str,
    table: str,
    seconds: Sequence[float],
    gib: Sequence[float],
    labels: Sequence[str],
    limit_gib: float,
) -> str:
    """One self-contained page.

    Args:
        title: Heading.
        table: The text form, shown as it is.
        seconds: Modelled step of each candidate.
        gib: Modelled peak of each, in GiB.
        labels: What each one is, shown under the pointer.
        limit_gib: What may be used of a GPU.
    """
    sections = (
        Section(
            "Step time against memory",
            "Each point is one way to run the step. Dark: nothing is both faster and smaller. "
            "Right of the line: does not fit.",
            drawing=scatter(seconds, gib, labels, limit_gib),
        ),
        Section("Meshes", "", drawing=f"<pre>{html.escape(table)}</pre>"),
    )
    return page(title, sections)


def front(seconds: Sequence[float], gib: Sequence[float]) -> list[int]:
    """Candidates that no other one beats in both, by memory.

    >>> front([3.0, 1.0, 2.0, 2.5], [1.0, 3.0, 2.0, 2.5])
    [0, 2, 1]
    """
    found: list[int] = []
    for index in sorted(range(len(gib)), key=lambda i: (gib[i], seconds[i])):
        if not found or seconds[index] < seconds[found[-1]]:
            found.append(index)
    return found


def scatter(
    seconds: Sequence[float], gib: Sequence[float], labels: Sequence[str], limit_gib: float
) -> str:
    """The drawing, SVG: up to three times the limit, and four times the fastest step."""
    right, top = 3 * limit_gib, 4 * min(seconds)
    inside = [i for i, size in enumerate(gib) if size <= right and seconds[i] <= top]
    marked = front([seconds[i] for i in inside], [gib[i] for i in inside])
    best = {inside[i] for i in marked}
    step = max(1, len(inside) // MAX_POINTS)
    drawn = [*(i for i in inside[::step] if i not in best), *sorted(best)]

    def x(value: float) -> float:
        return MARGIN + value / right * (WIDTH - MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - value / top * (HEIGHT - MARGIN)

    points = "".join(
        f'<circle cx="{x(gib[i]):.1f}" cy="{y(seconds[i]):.1f}" r="{4 if i in best else 2}" '
        f'fill="{"#1d4ed8" if i in best else "#cbd5e1"}"><title>{html.escape(labels[i])}</title>'
        "</circle>"
        for i in drawn
    )
    ticks = "".join(
        f'<text x="{x(right * k / 6):.0f}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">'
        f"{right * k / 6:.0f}</text>"
        f'<text x="{MARGIN - 8}" y="{y(top * k / 6) + 4:.0f}" text-anchor="end">'
        f"{top * k / 6:.2f}</text>"
        for k in range(7)
    )
    line = x(limit_gib)
    return (
        f'<svg width="{WIDTH + 20}" height="{HEIGHT}" role="img">'
        f'<line x1="{line:.1f}" x2="{line:.1f}" y1="0" y2="{HEIGHT - MARGIN}" stroke="#b91c1c"/>'
        f'{points}{ticks}<text x="{WIDTH / 2}" y="{HEIGHT - 14}" text-anchor="middle">GiB per GPU'
        f'</text><text x="4" y="14">seconds a step</text></svg>'
    )
