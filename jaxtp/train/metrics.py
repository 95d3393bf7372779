"""`metrics.jsonl`: one JSON object a step, in order, each step once, over all restarts."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

METRICS_FILE = "metrics.jsonl"

Line = Mapping[str, float | None]


class MetricsFile:
    """The file of one run, written by the first process.

    Attributes:
        path: Where it is.
        kept: Lines of the steps before this start.
    """

    def __init__(self, folder: Path, first_step: int = 0) -> None:
        self.path = folder / METRICS_FILE
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
        """Appends one line, and returns it; a number that is not finite is null."""
        finite = {name: v if math.isfinite(v) else None for name, v in record.items()}
        line: Line = {"step": step, **finite}
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
        return line

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def _lines(path: Path, last: int) -> list[dict[str, Any]]:
    """Lines of the steps 1 to `last`, without what a killed process left behind."""
    found: list[dict[str, Any]] = []
    text = path.read_text() if last and path.exists() else ""
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return [line for line in found if line["step"] <= last]
