"""The train loop: steps, a progress bar, evaluation, one line of metrics per step."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxtp.train import run_folder
from jaxtp.train.guard import Guard
from jaxtp.train.metrics import Line, MetricsFile

State = TypeVar("State")
Metrics = Mapping[str, jax.Array]


def fit(
    step: Callable[[State, Any], tuple[State, Metrics]],
    state: State,
    batches: Callable[[int], Any],
    *,
    num_steps: int,
    folder: Path,
    first_step: int = 0,
    evaluate: Callable[[State], float] | None = None,
    eval_every: int = 100,
    save: Callable[[int, State], None] | None = None,
    save_every: int = 0,
    stop: Callable[[int], bool] | None = None,
    spike_factor: float = 0,
    measure: Callable[[float], Mapping[str, float]] = lambda _: {},
    watchers: Sequence[Callable[[Line], None]] = (),
    console: Console | None = None,
) -> State:
    """Trains up to step `num_steps`, or until it is asked to stop, and returns the last state.

    Writes one JSON object a step to `folder/metrics.jsonl`: step (from 1), every scalar that `step`
    returns (loss, grad_norm, lr), tokens_per_s (over all devices), step_seconds (the first step's
    includes compilation), what `measure` adds, validation_loss where evaluated, and under a loss
    scale skipped_steps (how many so far had no update). A number that is not finite is null.

    The folder belongs to this run until it returns, see `jaxtp.train.run_folder`.

    Args:
        step: `(state, batch) -> (state, {"loss": ..., ...})`; may donate the state.
        state: Where to begin.
        batches: Step number from 0 -> its batch, placed: `(batch, seq + 1)` token ids, or a dict
            with such `tokens`. Called for the next step while the devices compute this one.
        num_steps: The last step's number.
        folder: Run folder; made if missing.
        first_step: Steps that the state has behind it; the file keeps their lines and no others.
        evaluate: State -> validation loss, every `eval_every` steps and after the last.
        eval_every: Steps between evaluations, and between printed lines.
        save: Called with the number of steps done and the state, every `save_every` steps, after
            the last, and before stopping; never with a state that has diverged.
        save_every: Steps between saves; 0 saves nothing.
        stop: Called with the number of steps done after each one; True ends the loop after a save.
        spike_factor: How many times its recent median a loss may be, see `Guard`; 0 allows all.
        measure: More numbers for a line, from the seconds that its step took; see `Meter`.
        watchers: Called with each line of `metrics.jsonl`.
        console: Where the bar and the lines go; default: standard output.

    Raises:
        TrainingDiverged: TP131, at the first step whose loss or gradient is not finite, whose loss
            is too far above the last ones, or whose parameters are not finite when it is to save;
            and after 20 steps in a row whose gradients overflow at one loss scale.
        RunFolderTaken: TP092, if the folder belongs to another run that still lives.
        BadRunFolder: TP093, if the folder cannot be written to, or was taken over.
    """
    with (
        run_folder.hold(folder) as lease,
        MetricsFile(folder, first_step, lease) as log,
        _progress(console) as bar,
    ):
        guard = Guard(str(log.path), spike_factor, log.kept)
        task = bar.add_task("compiling", total=num_steps, completed=first_step)
        batch = batches(first_step)
        for number in range(first_step + 1, num_steps + 1):
            start, tokens = time.perf_counter(), _num_tokens(batch)
            state, metrics = step(state, batch)
            batch = batches(number)
            record = {name: float(value) for name, value in metrics.items()}  # waits for the step
            seconds = time.perf_counter() - start
            record |= {"tokens_per_s": tokens / seconds, "step_seconds": seconds}
            record |= measure(seconds)
            problem = guard.problem(number, record)
            if "loss_scale" in record:
                record["skipped_steps"] = guard.num_skipped
            is_due = _is_due(number, eval_every, num_steps)
            if evaluate is not None and is_due and problem is None:
                record["validation_loss"] = evaluate(state)
            line = log.write(number, record)
            for watch in watchers:
                watch(line)
            if problem is not None:
                raise problem
            bar.update(task, advance=1, description=_describe(record))
            if is_due:
                bar.console.print(f"step {number:>5} of {num_steps}  {_describe(record)}")
            is_asked = stop is not None and stop(number)
            is_saved = save_every and (is_asked or _is_due(number, save_every, num_steps))
            if save is not None and is_saved:
                guard.check_parameters(number, state)
                log.check()
                save(number, state)
                bar.console.print(f"step {number:>5} of {num_steps}  checkpoint")
            if is_asked:
                break
    return state


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
    for name in ("mfu", "mfu_modelled"):
        text += f"  {name} {record[name]:.1%}" if name in record else ""
    if "memory_gb" in record:
        text += f"  {record['memory_gb']:.3g} GB"
    if "validation_loss" in record:
        text += f"  validation loss {record['validation_loss']:.4f}"
    return text
