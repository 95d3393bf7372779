"""The line that shows that a long command is at work."""

import contextlib
from collections.abc import Callable, Generator

from rich.console import Console


@contextlib.contextmanager
def seconds_line(what: str) -> Generator[Callable[[float], None]]:
    """A line on standard error that counts seconds, where that is a terminal."""
    console = Console(stderr=True)
    with console.status(what) as status:
        yield lambda seconds: status.update(f"{what}: {seconds:.0f} s")
