"""A plan as tables: text of at most 100 columns, and HTML for notebooks.

A row is a parameter, repeated layers folded. Reasons that do not fit end in "..."; `plan.explain`
has all of them.
"""

import html
import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns of a table: what a terminal, a review and a printed page show without breaking lines."""

LEAST_REASON = 14
"""Columns that a reason gets in any case. Paths come first, since `explain` and overrides need all
of them: one is shortened, in the middle, only where a row would not fit even so."""

HEAD = ("parameter", "shape", "spec", "role", "MB/device", "reason")
Row = tuple[str, ...]


def text_table(rows: Sequence[Row]) -> list[str]:
    """Lines of at most `WIDTH` columns, as long as the columns between path and reason let them."""
    rows = [HEAD, *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    others = sum(widths[1:]) + 2 * 5
    widths[0] = min(widths[0], max(24, WIDTH - LEAST_REASON - others))
    left = max(LEAST_REASON, WIDTH - widths[0] - others)
    lines: list[str] = []
    for name, *middle, reason in rows:
        shown = (_middle_cut(name, widths[0]), *middle)
        padded = (cell.ljust(width) for cell, width in zip(shown, widths, strict=True))
        lines.append("  ".join((*padded, _end_cut(reason, left))).rstrip())
    return lines


def note_lines(note: str) -> list[str]:
    """A note of a plan, broken into lines."""
    return textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ", break_long_words=False)


def html_table(summary: str, notes: Sequence[str], rows: Sequence[Row]) -> str:
    """The plan for a notebook: what the text table has, reasons in full."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in HEAD)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    listed = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return (
        f"<p>{html.escape(summary)}</p>"
        + (f"<ul>{listed}</ul>" if listed else "")
        + f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )


def _middle_cut(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    front = (width - 3) // 2
    return f"{text[:front]}...{text[len(text) - (width - 3 - front) :]}"


def _end_cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3].rstrip()}..."
