"""The train loop: steps, a progress bar, evaluation, one line of metrics per step.

Stage in: a state, a jitted step, batches by step number. Stage out: the trained state, and
`metrics.jsonl` in the run folder.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jaxtp.errors import TrainingDiverged

State = TypeVar("State")
Metrics = Mapping[str, jax.Array]

METRICS_FILE = "metrics.jsonl"


def fit(
    step: Callable[[State, jax.Array], tuple[State, Metrics]],
    state: State,
    batches: Callable[[int], jax.Array],
    *,
    num_steps: int,
    folder: Path,
    evaluate: Callable[[State], float] | None = None,
    eval_every: int = 100,
    console: Console | None = None,
) -> State:
    """Trains for `num_steps` steps and returns the last state.

    Writes one JSON object a step to `folder/metrics.jsonl`: step (from 1), every scalar that `step`
    returns (loss, grad_norm, lr), tokens_per_s (over all devices), step_seconds (the first step's
    includes compilation), and validation_loss where evaluated. A number that is not finite is null.

    Args:
        step: `(state, batch) -> (state, {"loss": ..., ...})`; may donate the state.
        state: Where to begin.
        batches: Step number from 0 -> its batch, `(batch, seq + 1)` token ids, placed. Called for
            the next step while the devices compute this one.
        num_steps: How many steps.
        folder: Run folder; made if missing.
        evaluate: State -> validation loss, every `eval_every` steps and after the last.
        eval_every: Steps between evaluations, and between printed lines.
        console: Where the bar and the lines go; default: standard output.

    Raises:
        TrainingDiverged: TP131, at the first step whose loss is not finite.
    """
    folder.mkdir(parents=True, exist_ok=True)
    last_loss = math.nan
    with (folder / METRICS_FILE).open("w", buffering=1) as log, _progress(console) as bar:
        task = bar.add_task("compiling", total=num_steps)
        batch = batches(0)
        for number in range(1, num_steps + 1):
            start, tokens = time.perf_counter(), batch.shape[0] * (batch.shape[1] - 1)
            state, metrics = step(state, batch)
            batch = batches(number)
            record = {name: float(value) for name, value in metrics.items()}  # waits for the step
            seconds = time.perf_counter() - start
            record |= {"tokens_per_s": tokens / seconds, "step_seconds": seconds}
            is_finite = math.isfinite(record["loss"])
            is_due = number % eval_every == 0 or number == num_steps
            if evaluate is not None and is_due and is_finite:
                record["validation_loss"] = evaluate(state)
            finite = {name: v if math.isfinite(v) else None for name, v in record.items()}
            log.write(json.dumps({"step": number, **finite}) + "\n")
            if not is_finite:
                raise TrainingDiverged(
                    f"the loss is {record['loss']} at step {number}; it was {last_loss:.4f} before",
                    where=str(folder / METRICS_FILE),
                    fix="lower the learning rate, lengthen its warm-up or clip gradients harder",
                )
            last_loss = record["loss"]
            bar.update(task, advance=1, description=_describe(record))
            if is_due:
                bar.console.print(f"step {number:>5} of {num_steps}  {_describe(record)}")
    return state


def _progress(console: Console | None) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=console)


def _describe(record: Mapping[str, float]) -> str:
    text = f"loss {record['loss']:.4f}  {record['tokens_per_s']:,.0f} tokens/s"
    if "validation_loss" in record:
        text += f"  validation loss {record['validation_loss']:.4f}"
    return text
