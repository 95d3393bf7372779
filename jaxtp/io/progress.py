"""Progress of long reads and writes."""

import contextlib
from collections.abc import Callable, Generator

import jax


@contextlib.contextmanager
def byte_bar(title: str, total: int, show: bool) -> Generator[Callable[[int], None]]:
    """A bar on stderr in the first process; yields the function that moves it on, in bytes."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(
        *columns,
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not show or jax.process_index() != 0,
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
