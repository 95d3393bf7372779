"""Refits the constants of the cost model on published runs, and prints how far they carry.

    python scripts/fit_cost.py RUNS.csv                  the constants, and the error of each source
    python scripts/fit_cost.py RUNS.csv --leave-out      the same with each source left out in turn

Every constant has a meaning and a prior: what it is in the code now, within the factor given here.
The fit moves it from there only as far as the runs demand; sources count alike, however many rows
they have. Nothing is written: constants are rounded by hand into `jaxtp/hardware/gpus.py`
(shares of the data sheet) and `jaxtp/cost` (the rest).
"""

import argparse
import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from published_runs import CannotDescribe, Run, describe, measured_seconds, read_rows
from scipy.optimize import least_squares

from jaxtp.cost import block, products, step
from jaxtp.cost.habits import HABITS, Habits
from jaxtp.cost.step import price
from jaxtp.cost.strategy import Strategy
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import KINDS

KIND_OF = {"a100": "a100-80", "h100": "h100", "b200": "b200"}
"""Family of GPUs -> the kind whose constants it is fitted as."""

FACTORS: Mapping[str, float] = {
    "matmul_flops": 1.1, "memory_share": 1.2, "attention_share": 1.35, "network_share": 1.5,
    "traffic": 1.35, "launch_seconds": 1.35, "step_seconds": 1.6, "attention": 1.35,
    "overlaps_gathers": 1.2, "overlaps_tensor": 1.35,
}  # fmt: skip
"""One standard deviation of the prior, by constant."""

BY_FRAMEWORK: Mapping[str, tuple[str, ...]] = {
    "megatron-deepspeed": ("traffic", "launch_seconds"),
    "megatron-deepspeed-zero": ("launch_seconds",),
    "megatron-core": ("traffic",),
    "fsdp": ("traffic", "attention", "overlaps_gathers"),
    "torchtitan": ("traffic", "attention"),
    "torchtitan-eager": ("traffic",),
    "torchtitan-async": ("overlaps_tensor",),
    "pax": ("traffic", "step_seconds"),
    "pax-te": ("traffic",),
}
"""What is fitted of each framework's habits."""

SHARED = (
    (block, "BACKWARD_LAUNCHES", 1.2), (block, "RANK_JITTER", 1.5), (products, "FILL_DEPTH", 1.5),
    (step, "HEAD_BYTES", 1.3), (step, "ENDS_LAUNCHES", 1.5), (products, "MISALIGNED", 1.3),
    (block, "HOST_OVERLAP", 1.5), (block, "SOFTMAX_LAUNCHES", 1.5),
)  # fmt: skip
"""What all share: module, constant, factor of its prior."""

Values = Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Runs of one model, framework and machine, priced together."""

    source: str
    run: Run
    strategy: Strategy
    seconds: NDArray[np.float64]


def groups_of(path: Path) -> list[Group]:
    """The rows that can be priced and have a time."""
    found: dict[tuple[object, ...], list[tuple[Run, float]]] = collections.defaultdict(list)
    for row in read_rows(path):
        seconds = measured_seconds(row)
        try:
            run = describe(row)
        except CannotDescribe:
            continue
        if seconds is not None:
            device = (run.wires.device.name, run.wires.device.nic_bandwidth, run.wires.domain)
            source = row["source"].split(" (")[0][:40]
            found[(source, run.model, run.habits, device)].append((run, seconds))
    fields = [field.name for field in dataclasses.fields(Strategy)]
    return [
        Group(
            str(key[0]),
            items[0][0],
            Strategy(
                **{f: np.array([getattr(run.strategy, f) for run, _ in items]) for f in fields}
            ),
            np.array([seconds for _, seconds in items]),
        )
        for key, items in found.items()
    ]


def priors() -> dict[str, tuple[float, float]]:
    """Name of each fitted constant -> its value in the code, and the factor of its prior."""
    found: dict[str, tuple[float, float]] = {}
    for family, kind in KIND_OF.items():
        for name in ("matmul_flops", "memory_share", "attention_share", "network_share"):
            found[f"{family}.{name}"] = float(getattr(KINDS[kind], name)), FACTORS[name]
    for framework, names in BY_FRAMEWORK.items():
        for name in names:
            found[f"{framework}.{name}"] = getattr(HABITS[framework], name), FACTORS[name]
    for module, name, factor in SHARED:
        found[f"all.{name}"] = float(getattr(module, name)), factor
    return found


def log_ratios(groups: Iterable[Group], values: Values) -> list[NDArray[np.float64]]:
    """ln(predicted / measured) of every run, group by group."""
    for module, name, _ in SHARED:
        setattr(module, name, values[f"all.{name}"])
    by_owner: dict[str, dict[str, float]] = collections.defaultdict(dict)
    for key, value in values.items():
        owner, _, name = key.rpartition(".")
        by_owner[owner][name] = min(value, 1.0) if name.startswith("overlaps") else value
    found: list[NDArray[np.float64]] = []
    for group in groups:
        device = group.run.wires.device
        # Of kinds that no other source has run on nothing is fitted.
        own = by_owner.get(device.name.split("-")[0], {})
        wires = Wires(dataclasses.replace(device, **own), group.run.wires.domain)
        habits: Habits = dataclasses.replace(
            HABITS[group.run.habits], **by_owner.get(group.run.habits, {})
        )
        total = price(group.run.model, group.strategy, wires, habits).total
        found.append(np.log(total / group.seconds))
    return found


def fit(groups: Sequence[Group], rounds: int) -> dict[str, float]:
    """Constants that fit these runs, priors included."""
    known = priors()
    names, start = list(known), np.log([value for value, _ in known.values()])
    width = np.log([factor for _, factor in known.values()])
    sizes = collections.Counter[str]()
    for group in groups:
        sizes[group.source] += len(group.seconds)

    def residuals(point: NDArray[np.float64]) -> NDArray[np.float64]:
        ratios = log_ratios(groups, dict(zip(names, np.exp(point), strict=True)))
        # Five runs' worth of evidence a source; a run is expected to be 5 % off.
        scaled = [
            ratio / 0.05 * math.sqrt(min(1.0, 5 / sizes[group.source]))
            for group, ratio in zip(groups, ratios, strict=True)
        ]
        return np.concatenate([*scaled, (point - start) / width])

    result = least_squares(
        residuals, start, loss="soft_l1", f_scale=2.0, diff_step=1e-3, max_nfev=rounds
    )
    return dict(zip(names, np.exp(result.x).tolist(), strict=True))


def errors(groups: Sequence[Group], values: Values) -> dict[str, float]:
    """Mean absolute error of each source."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for group, ratio in zip(groups, log_ratios(groups, values), strict=True):
        found[group.source] += np.abs(np.expm1(ratio)).tolist()
    return {source: statistics.mean(items) for source, items in sorted(found.items())}


def main(show: Callable[[str], None] = print) -> None:
    """Fits and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--leave-out", action="store_true", help="fit once without each source")
    parser.add_argument("--rounds", type=int, default=6, help="steps of the solver")
    args = parser.parse_args()
    groups = groups_of(args.runs)
    start = {name: value for name, (value, _) in priors().items()}
    now = errors(groups, start)
    values = fit(groups, args.rounds)
    fitted = errors(groups, values)
    for name, value in values.items():
        show(f"{name:40s} {start[name]:12.4g} -> {value:12.4g}")
    left: dict[str, float] = {}
    for source in now if args.leave_out else ():
        others = [group for group in groups if group.source != source]
        left[source] = errors(groups, fit(others, args.rounds))[source]
    show(f"{'error of the step time':42s} {'in the code':>12s} {'refitted':>9s} {'left out':>9s}")
    for source, error in now.items():
        out = f"{left[source]:9.1%}" if source in left else f"{'-':>9s}"
        show(f"{source:42s} {error:12.1%} {fitted[source]:9.1%} {out}")


if __name__ == "__main__":
    main()
