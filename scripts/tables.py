"""Sections of a benchmark: a table each, what it is held to, and what a reader must know."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from jaxtp.cli.host import has_no_gpu, start_quietly

Cell = Any  # str, float, int or bool
Flag = tyro.conf.FlagCreatePairsOff[bool]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A table, the thresholds it is held to, and what a reader must know."""

    title: str
    rows: Sequence[Mapping[str, Cell]]
    thresholds: Sequence[tuple[str, bool]]
    notes: Sequence[str] = ()


def shown(section: Section) -> Iterator[Table | str]:
    """A section for a terminal."""
    table = Table(title=section.title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in section.rows[0]:
        left = isinstance(section.rows[0][column], str)
        table.add_column(column, justify="left" if left else "right", no_wrap=True)
    for row in section.rows:
        table.add_row(*(str(cell) for cell in row.values()))
    yield table
    for text, reached in section.thresholds:
        yield f"{'reached    ' if reached else 'NOT REACHED'}  {text}"
    for note in section.notes:
        yield f"note         {note}"


def tabulate(sections: Mapping[str, Callable[[], Section]], *, as_json: bool, width: int) -> None:
    """Prints each section as soon as it is there, or all of them as one JSON object.

    Args:
        sections: Name -> what makes it, in order.
        as_json: Print JSON.
        width: Least width of the tables, in characters.
    """
    if has_no_gpu():
        start_quietly()
    console = Console(width=max(Console().width, width), highlight=False, markup=False)
    found: dict[str, Section] = {}
    for name, make in sections.items():
        found[name] = make()
        for part in shown(found[name]) if not as_json else ():
            console.print(part)
    if as_json:
        print(json.dumps({name: dataclasses.asdict(one) for name, one in found.items()}, indent=1))
