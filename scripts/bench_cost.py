"""Prices published training runs from their sizes alone, and scores the prices.

    python scripts/bench_cost.py tests/data/runs/sample.csv --json predictions.json

Takes any table with those columns. Every row is predicted from what was known before the run; a row
that cannot be described gets its reason instead of a guess. Printed, for each source: rows with a
measured time, share of them predicted, mean absolute error of the step time, geometric mean of
predicted over measured, mean error of the peak memory; and *regret*: what the mesh that the
predictions call fastest costs over the best one measured, in every set of runs of one model, GPU
count, batch and sequence under three or more meshes.
"""

import argparse
import collections
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from published_runs import (
    CannotDescribe,
    Row,
    describe,
    measured_seconds,
    number,
    read_rows,
)

from jaxtp.cost.habits import HABITS
from jaxtp.cost.peak_memory import peak_memory
from jaxtp.cost.step import price

SET_KEYS = (
    "source", "model", "params_b", "layers", "hidden", "heads", "seq", "gpus", "gpu_type",
    "global_batch", "precision", "recompute",
)  # fmt: skip
"""Columns that runs of one set share."""

Prediction = Mapping[str, float | str | None]


def predict(row: Row) -> Prediction:
    """Seconds of a step and GiB at the peak, or why neither is known."""
    try:
        run = describe(row)
    except CannotDescribe as error:
        return {"step_s": None, "peak_gib": None, "why": str(error)}
    habits = HABITS[run.habits]
    seconds = price(run.model, run.strategy, run.wires, habits).total
    peak = peak_memory(run.model, run.strategy, habits).total
    return {"step_s": float(seconds), "peak_gib": float(peak) / 2**30}


def by_source(rows: Sequence[Row], said: Mapping[str, Prediction]) -> list[str]:
    """One line a source."""
    found: dict[str, list[tuple[float, float | None, float | None]]] = {}
    for row in rows:
        if (true := measured_seconds(row)) is None:
            continue
        one = said[row["id"]]
        peak, want = one["peak_gib"], number(row, "peak_mem_gib")
        memory = abs(float(peak) - want) / want if peak and want else None
        guess = one["step_s"]
        name = row["source"].split(" (")[0][:58]
        found.setdefault(name, []).append((true, float(guess) if guess else None, memory))
    lines: list[str] = []
    for name, items in sorted(found.items()):
        got = [(true, guess) for true, guess, _ in items if guess]
        memory = [one for _, _, one in items if one is not None]
        error = _mean(abs(guess - true) / true for true, guess in got)
        bias = _mean(math.log(guess / true) for true, guess in got)
        lines.append(
            f"{name:60s} rows {len(items):4d} covered {len(got) / len(items):4.0%} "
            f"mape {_show(error, '6.1%')} bias {_show(bias, '.2f', math.exp)} "
            f"memory {_show(_mean(memory), '.1%')} ({len(memory)})"
        )
    return lines


def regrets(rows: Sequence[Row], said: Mapping[str, Prediction]) -> list[str]:
    """One line for sets on one node, and one for larger ones."""
    sets: dict[tuple[str, ...], list[tuple[float, float | None]]] = collections.defaultdict(list)
    for row in rows:
        if (true := measured_seconds(row)) is not None:
            guess = said[row["id"]]["step_s"]
            key = tuple(row[name] for name in SET_KEYS)
            sets[key].append((true, float(guess) if guess else None))
    lines: list[str] = []
    for where, small in (("one node", True), ("several nodes", False)):
        found: list[float] = []
        worst: list[float] = []
        for key, items in sets.items():
            whole = [(guess, true) for true, guess in items if guess]
            on_one = int(float(key[SET_KEYS.index("gpus")] or 0)) <= 8
            if len(whole) < max(3, len(items)) or on_one != small:
                continue
            best, fastest = min(true for _, true in whole), min(guess for guess, _ in whole)
            # Equal predictions choose at random.
            chosen = [true for guess, true in whole if guess <= fastest * (1 + 1e-9)]
            found.append(statistics.mean(chosen) / best)
            worst.append(max(true for _, true in whole) / best)
        if found:
            lines.append(
                f"regret, {where}: {len(found)} sets, mean {statistics.mean(found):.3f}, max "
                f"{max(found):.3f}; the worst choice costs {statistics.median(worst):.2f} at the "
                "median"
            )
    return lines


def _mean(values: "Sequence[float] | collections.abc.Iterable[float]") -> float | None:
    listed = list(values)
    return statistics.mean(listed) if listed else None


def _show(
    value: float | None, form: str, change: Callable[[float], float] = lambda value: value
) -> str:
    return "-" if value is None else format(change(value), form)


def main() -> None:
    """Predicts, writes and scores."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--json", type=Path, help="write the predictions here")
    args = parser.parse_args()
    rows = read_rows(args.runs)
    said = {row["id"]: predict(row) for row in rows}
    if args.json:
        args.json.write_text(json.dumps(said, indent=1))
    print(*by_source(rows, said), *regrets(rows, said), sep="\n")
    reasons = collections.Counter(str(one["why"]) for one in said.values() if "why" in one)
    for why, count in reasons.most_common():
        print(f"not predicted: {count} rows: {why}")


if __name__ == "__main__":
    main()
