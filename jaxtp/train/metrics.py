"""`metrics.jsonl`: one JSON object a step, in order, each step once, over all restarts."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtp.train.run_folder import RunFolder

METRICS_FILE = "metrics.jsonl"

Line = Mapping[str, float | None]


class MetricsFile:
    """The file of one run, written by the first process.

    Args:
        folder: The run's; made if missing.
        first_step: Steps done so far; lines of later ones are dropped.
        lease: On the folder, in the process that has it.

    Attributes:
        path: Where it is.
        kept: Lines of the steps before this start.
    """

    def __init__(self, folder: Path, first_step: int = 0, lease: RunFolder | None = None) -> None:
        self.path, self._lease = folder / METRICS_FILE, lease
        self.kept = _lines(self.path, first_step)
        self._file = None
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            # What a killed run wrote after its last checkpoint comes again, perhaps half a line.
            new = self.path.with_suffix(".new")
            new.write_text("".join(json.dumps(line) + "\n" for line in self.kept))
            os.replace(new, self.path)
            self._file = self.path.open("a", buffering=1)

    def write(self, step: int, record: Mapping[str, float]) -> Line:
        """Appends one line, and returns it; a number that is not finite is null.

        Raises:
            BadRunFolder: TP093, if another run has taken the folder over.
            OSError: With the file's name, if the disk refuses.
        """
        if self._lease is not None:
            self._lease.check()
        finite = {name: v if math.isfinite(v) else None for name, v in record.items()}
        line: Line = {"step": step, **finite}
        if self._file is not None:
            try:
                self._file.write(json.dumps(line) + "\n")
            except OSError as error:  # of a descriptor, so that it names no file
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        return line

    def check(self) -> None:
        """Raises if another run has taken the folder over, having looked at it now.

        Raises:
            BadRunFolder: TP093.
        """
        if self._lease is not None:
            self._lease.check(now=True)

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            try:
                self._file.close()
            except OSError as failed:  # a server of files may refuse what it took before only now
                # A line that could not be written is tried again; that it failed is known then.
                if error[0] is None:
                    raise OSError(failed.errno, failed.strerror, str(self.path)) from failed


def _lines(path: Path, last: int) -> list[dict[str, Any]]:
    """Lines of the steps 1 to `last`, without what a killed process left behind."""
    found: list[Any] = []
    # A disk that lost its power may leave anything.
    text = path.read_text(errors="replace") if last and path.exists() else ""
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    lines = [line for line in found if isinstance(line, dict) and type(line.get("step")) is int]
    return [line for line in lines if line["step"] <= last]
