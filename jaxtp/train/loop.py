"""The train loop: steps, a progress bar, evaluation, one line of metrics per step."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxtp.io import stores
from jaxtp.train import run_folder
from jaxtp.train.guard import Guard
from jaxtp.train.metrics import Line, MetricsFile

State = TypeVar("State")
Metrics = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hooks(Generic[State]):
    """What happens between steps.

    Attributes:
        evaluate: State -> validation loss, every `eval_every` steps and after the last.
        eval_every: Steps between evaluations, and between printed lines.
        save: Called with the number of steps done and the state, every `save_every` steps, after
            the last, and before stopping; never with a state that has diverged.
        save_every: Steps between saves; 0 saves nothing.
        stop: Called with the number of steps done after each one; True ends the loop after a save.
        measure: More numbers for a line, from the seconds that its step took; see `Meter`.
        watchers: Called with each line of `metrics.jsonl`.
        blocking: Whether each step is waited for before the next one starts, as a profile needs.
    """

    evaluate: Callable[[State], float] | None = None
    eval_every: int = 100
    save: Callable[[int, State], None] | None = None
    save_every: int = 0
    stop: Callable[[int], bool] | None = None
    measure: Callable[[float], Mapping[str, float]] = lambda _: {}
    watchers: Sequence[Callable[[Line], None]] = ()
    blocking: bool = False


def fit(
    step: Callable[[State, Any], tuple[State, Metrics]],
    state: State,
    batches: Callable[[int], Any],
    *,
    steps: range,
    folder: Path,
    hooks: Hooks[State] | None = None,
    spike_factor: float = 0,
    console: Console | None = None,
) -> State:
    """Trains up to the last step, or until it is asked to stop, and returns the last state.

    Writes one JSON object a step to `folder/metrics.jsonl`: step (from 1), every scalar that `step`
    returns (loss, grad_norm, lr), tokens_per_s (over all devices), step_seconds (since the step
    before was done; the first one's include compilation), what `measure` adds, validation_loss
    where evaluated, and under a loss scale skipped_steps (how many so far had no update). A number
    that is not finite is null.

    The devices never wait for a line: while they compute one step, the one before is written. Only
    evaluations and saves wait.

    The folder belongs to this run until it returns, see `jaxtp.train.run_folder`.

    Args:
        step: `(state, batch) -> (state, {"loss": ..., ...})`; may donate the state.
        state: Where to begin.
        batches: Step number from 0 -> its batch, placed: `(batch, seq + 1)` token ids, or a dict
            with such `tokens`. Called for the next step while the devices compute this one.
        steps: From the steps that the state has behind it, whose lines the file keeps and no
            others, to the last step's number: `range(0, 100)` are a hundred steps.
        folder: Run folder; made if missing.
        hooks: What happens between steps.
        spike_factor: How many times its recent median a loss may be, see `Guard`; 0 allows all.
        console: Where the bar and the lines go; default: standard output.

    Raises:
        TrainingDiverged: TP131, one step after a loss or gradient that is not finite, or a loss
            that is too far above the last ones; if parameters are not finite when they are to be
            saved; and after 20 steps in a row whose gradients overflow at one loss scale.
        RunFolderTaken: TP092, if the folder belongs to another run that still lives.
        BadRunFolder: TP093, if the folder cannot be written to, or was taken over.
    """
    stores.refuse_address(folder)
    hooks = hooks or Hooks()
    with (
        run_folder.hold(folder) as lease,
        MetricsFile(folder, steps.start, lease) as log,
        _progress(console) as bar,
    ):
        book = _Book(log, bar, steps, hooks, spike_factor)
        batch = batches(steps.start)
        for number in range(steps.start + 1, steps.stop + 1):
            tokens = _num_tokens(batch)
            state, metrics = step(state, batch)
            batch = batches(number)
            book.enter(number, metrics, tokens)
            is_due = _is_due(number, hooks.eval_every, steps.stop)
            is_asked = hooks.stop is not None and hooks.stop(number)
            is_saved = hooks.save_every and (
                is_asked or _is_due(number, hooks.save_every, steps.stop)
            )
            if is_due or is_asked or is_saved or hooks.blocking:
                book.settle(state, is_due)
            if hooks.save is not None and is_saved:
                book.guard.check_parameters(number, state)
                log.check()
                hooks.save(number, state)
                book.say(f"step {number:>5} of {steps.stop}  checkpoint")
            if is_asked:
                break
    return state


@dataclasses.dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    metrics: Metrics
    tokens: int


class _Book:
    """Lines of steps, each written while the devices compute the next one."""

    def __init__(
        self,
        log: MetricsFile,
        bar: Progress,
        steps: range,
        hooks: Hooks[Any],
        spike_factor: float,
    ) -> None:
        self.guard = Guard(str(log.path), spike_factor, log.kept)
        self._log, self._bar, self._hooks, self._last = log, bar, hooks, steps.stop
        self._task = bar.add_task("compiling", total=steps.stop, completed=steps.start)
        self._open: _Entry | None = None
        self._since = time.perf_counter()

    def enter(self, number: int, metrics: Metrics, tokens: int) -> None:
        """Takes a step that has been started, and writes the line of the one before."""
        if self._open is not None:
            self._write(self._open)
        self._open = _Entry(number, metrics, tokens)

    def settle(self, state: Any, is_due: bool) -> None:
        """Waits for the newest step and writes its line, with an evaluation where one is due."""
        entry, self._open = self._open, None
        assert entry is not None
        record = self._write(entry, state if is_due else None)
        if is_due:
            self.say(f"step {entry.number:>5} of {self._last}  {_describe(record)}")
        # What an evaluation takes is no step's.
        self._since = time.perf_counter()

    def say(self, text: str) -> None:
        """Prints a line above the bar; what was done meanwhile is no step's time."""
        # Not wrapped: what is piped is read by programs.
        self._bar.console.print(text, soft_wrap=True)
        self._since = time.perf_counter()

    def _write(self, entry: _Entry, judged: Any = None) -> Mapping[str, float]:
        record = {name: float(value) for name, value in entry.metrics.items()}  # waits for it
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        record |= {"tokens_per_s": entry.tokens / seconds, "step_seconds": seconds}
        record |= self._hooks.measure(seconds)
        problem = self.guard.problem(entry.number, record)
        if "loss_scale" in record:
            record["skipped_steps"] = self.guard.num_skipped
        if judged is not None and self._hooks.evaluate is not None and problem is None:
            record["validation_loss"] = self._hooks.evaluate(judged)
        line = self._log.write(entry.number, record)
        for watch in self._hooks.watchers:
            watch(line)
        if problem is not None:
            raise problem
        self._bar.update(self._task, completed=entry.number, description=_describe(record))
        return record


def _is_due(number: int, every: int, last: int) -> bool:
    return number % every == 0 or number == last


def _num_tokens(batch: Any) -> int:
    """Tokens of a batch that are predicted, over all devices."""
    tokens = batch["tokens"] if isinstance(batch, Mapping) else batch
    return tokens.shape[0] * (tokens.shape[1] - 1)


def _progress(console: Console | None) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def _describe(record: Mapping[str, float]) -> str:
    text = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s"
    if "mfu" in record:
        text += f"  mfu {record['mfu']:.1%}"
    if "memory_gb" in record:
        text += f"  {record['memory_gb']:.3g} GB"
    if "validation_loss" in record:
        text += f"  validation loss {record['validation_loss']:.4f}"
    return text
