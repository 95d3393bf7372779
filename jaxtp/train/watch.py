"""What watches a run besides `metrics.jsonl`: TensorBoard, and a profile of a few steps."""

import atexit
import dataclasses
import importlib
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxtp.errors import BadConfig

Watcher = Callable[[Mapping[str, float | None]], None]

COMMUNICATION = re.compile(r"all-reduce|all-gather|reduce-scatter|all-to-all|collective|nccl", re.I)
"""Names of operations that move data between devices."""

CONTAINERS = ("while", "conditional", "call")
"""Operations that only run others, which count themselves."""

PROFILED = range(3, 6)
"""Steps that are traced: the first compiles, the second may still allocate."""


def tensorboard_module() -> Any:
    """The package that writes TensorBoard's files.

    Raises:
        BadConfig: TP020, if it is not installed.
    """
    try:
        return importlib.import_module("tensorboardX")
    except ImportError:
        raise BadConfig(
            "tensorboardX is not installed",
            where="run.tensorboard",
            fix='pip install "jaxtp[tensorboard]"',
        ) from None


def tensorboard(folder: Path) -> Watcher:
    """Writes each number of a line as a scalar.

    Raises:
        BadConfig: TP020, if no writer is installed.
    """
    writer = tensorboard_module().SummaryWriter(str(folder), flush_secs=10)
    # Its thread dies with the process, and what it has not written yet with it.
    atexit.register(writer.close)

    def watch(line: Mapping[str, float | None]) -> None:
        for name, value in line.items():
            if name != "step" and value is not None:
                writer.add_scalar(name, value, line["step"])

    return watch


class Profiler:
    """Traces steps `PROFILED`; a watcher for `fit`, called after each step.

    Attributes:
        folder: Where the trace goes; TensorBoard and Perfetto open it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._seen = 0
        self._running = False

    def __call__(self, line: Mapping[str, float | None]) -> None:
        """Starts the trace before the first profiled step, and stops it after the last."""
        self._seen += 1
        if self._seen + 1 == PROFILED.start:
            jax.profiler.start_trace(self.folder)
            self._running = True
        elif self._seen + 1 == PROFILED.stop:
            self.stop()

    def stop(self) -> None:
        """Ends the trace if the run was shorter than it."""
        if self._running:
            jax.profiler.stop_trace()
            self._running = False


@dataclasses.dataclass(frozen=True, slots=True)
class TimedOperation:
    """Runs of one operation in a trace, over all devices.

    Attributes:
        name: The operation, without the number at its end.
        count: Runs.
        seconds: Time in all of them, summed over devices.
        share: Of the time of all operations.
    """

    name: str
    count: int
    seconds: float
    share: float

    @property
    def is_communication(self) -> bool:
        """Whether it moves data between devices."""
        return COMMUNICATION.search(self.name) is not None


def operations(folder: Path) -> list[TimedOperation]:
    """The operations of the newest trace below a folder, the longest first; `[]` without one."""
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        return []
    seconds: defaultdict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    with warnings.catch_warnings():
        # Reading makes jaxlib create types that warn; where warnings are errors, it would abort.
        warnings.simplefilter("ignore", DeprecationWarning)
        for name, nanoseconds in _events(traces[-1]):
            seconds[name] += nanoseconds / 1e9
            counts[name] += 1
    total = sum(seconds.values())
    return [
        TimedOperation(n, counts[n], s, s / total) for n, s in sorted(seconds.items(), key=_longest)
    ]


def _longest(item: tuple[str, float]) -> float:
    return -item[1]


def _events(trace: Path) -> Iterator[tuple[str, float]]:
    """Name and nanoseconds of everything in a trace that XLA marks with an operation's name."""
    data = jax.profiler.ProfileData.from_file(str(trace))
    for line in (line for plane in data.planes for line in plane.lines):
        for event in line.events:
            name = re.sub(r"[.\d]+$", "", str(dict(event.stats).get("hlo_op", "")))
            if name and name not in CONTAINERS:
                yield name, event.duration_ns


def table(found: list[TimedOperation], limit: int = 12) -> str:
    """The longest operations and the share of communication, as text."""
    communication = sum(op.share for op in found if op.is_communication)
    rows = [f"  {'operation':<40} {'runs':>8} {'ms':>10} {'share':>7}"]
    rows += [
        f"  {op.name[:40]:<40} {op.count:>8,} {op.seconds * 1e3:>10.2f} {op.share:>7.1%}"
        for op in found[:limit]
    ]
    head = f"operations of {len(PROFILED)} steps, communication {communication:.1%} of their time:"
    return "\n".join((head, *rows))
