"""Training runs that others measured and published, as sizes and strategies that jaxtp prices.

In: rows of a table with the columns of `tests/data/runs/sample.csv`. Out: what the cost model
takes, or the reason why a row says too little. Nothing is read from a row but what was known before
the run: no time, no rate, no note.
"""

import csv
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path

from jaxtp.cost.strategy import ModelSizes, Recompute, Strategy
from jaxtp.cost.wire import Wires
from jaxtp.hardware.gpus import KINDS, DeviceKind

Row = Mapping[str, str]

GPT2_VOCAB = 50257
"""Tokens of GPT-2, of runs that do not say their vocabulary."""


ARCHITECTURES: Mapping[str, Mapping[str, int]] = {
    "deepseekv2": {
        "head_dim": 192, "value_dim": 128, "query_latent": 1536, "kv_latent": 512, "rotary_dim": 64,
        "shared": 2, "dense_layers": 1, "dense_ffn": 12288,
    },
    "deepseekv3": {
        "head_dim": 192, "value_dim": 128, "query_latent": 1536, "kv_latent": 512, "rotary_dim": 64,
        "shared": 1, "dense_layers": 3, "dense_ffn": 18432,
    },
    "gptoss": {"head_dim": 64},
    "qwen3": {"head_dim": 128},
}  # fmt: skip
"""Beginning of a model's name, letters and digits alone -> what its published config says and the
columns of a table of runs do not; `shared`: shared experts."""


class CannotDescribe(Exception):
    """A row that says too little, or of something that is not priced."""


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """One row, ready to be priced."""

    model: ModelSizes
    strategy: Strategy
    habits: str
    wires: Wires


def read_rows(path: Path) -> list[Row]:
    """The rows of a table."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def number(row: Row, key: str) -> float | None:
    """A cell as a number, or None where it is empty."""
    try:
        return float(row.get(key) or "")
    except ValueError:
        return None


def measured_seconds(row: Row) -> float | None:
    """Seconds of one step, as published, or from tokens/s."""
    if step := number(row, "step_s"):
        return step
    batch, seq, gpus = (number(row, key) for key in ("global_batch", "seq", "gpus"))
    rate = number(row, "tokens_per_s_per_gpu")
    return batch * seq / (rate * gpus) if rate and batch and seq and gpus else None


def device_kind(row: Row) -> DeviceKind:
    """The data sheet that a row's GPU goes by."""
    name = row["gpu_type"].lower()
    nic = {}
    if found := re.search(r"(\d+) ?gbps", row["interconnect"].lower()):
        nic = {"nic_bandwidth": float(found[1]) * 1e9 / 8 / 8}
    elif "omni-path" in row["interconnect"].lower():
        nic = {"nic_bandwidth": 4 * 100e9 / 8 / 8}
    for key in ("gb300", "b300", "gb200", "b200", "h200", "h100"):
        if key in name:
            break
    else:
        if "a100" not in name:
            raise CannotDescribe(f"no data sheet of {row['gpu_type']!r}")
        key = "a100-40" if "40" in name else "a100-80"
    kind = KINDS[key]
    if "hbm2e" in name and key == "h100":
        kind = dataclasses.replace(
            kind, name="h100-500w", hbm_bandwidth=2.4e12, memory_bytes=96 * 10**9
        )
    return dataclasses.replace(kind, **nic)


def habits_of(row: Row) -> str:
    """Which of HABITS a row's framework and source have."""
    text = f"{row['framework']} {row['source']}".lower()
    if "paxml" in text:
        te = "-te" if row["precision"].startswith("TE") else ""
        return ("pax-2023" if "2023 version" in text else "pax") + te
    if "torchtitan" in text:
        base = "torchtitan" if "compile" in row["framework"] else "torchtitan-eager"
        return f"{base}-async" if "async" in row["framework"].lower() else base
    if "fsdp" in text:
        return "fsdp"
    if "te 2" in text or "simumax" in text:
        return "megatron-core"
    if "megatron-core" in text or "nemo" in text or "bridge" in text:
        return "megatron-core-overlapped"
    if "deepspeed" in text:
        if row["fsdp/zero"]:
            return "megatron-deepspeed-zero"
        return "megatron-deepspeed"
    if "megatron" in text:
        return "megatron"
    raise CannotDescribe(f"no habits of {row['framework']!r}")


def sizes(row: Row) -> ModelSizes:
    """The model of a row."""
    found = {k: number(row, k) for k in ("layers", "hidden", "ffn", "heads", "kv_heads", "seq")}
    missing = [k for k in ("layers", "hidden", "seq") if not found[k]]
    if missing:
        raise CannotDescribe(f"no {', '.join(missing)}")
    whole = {name: int(value or 0) for name, value in found.items()}
    hidden = whole["hidden"]
    heads = whole["heads"] or _likely_heads(hidden, int(number(row, "tp") or 1))
    text = row["model"].lower()
    # GPT models have an MLP of four widths, and no gate.
    gated = "llama" in text or whole["ffn"] not in (0, 4 * hidden)
    experts, chosen = (int(number(row, k) or 0) for k in ("experts", "top_k"))
    if experts and not chosen:
        raise CannotDescribe("no top_k")
    name = "".join(re.findall(r"[a-z0-9]", text))
    known = dict(next((v for k, v in ARCHITECTURES.items() if name.startswith(k)), {}))
    known.setdefault("head_dim", hidden // heads)
    shared = known.pop("shared", 0)
    return ModelSizes(
        **known,
        experts=experts,
        chosen=chosen,
        shared_ffn=shared * whole["ffn"],
        layers=whole["layers"],
        hidden=hidden,
        ffn=whole["ffn"] or 4 * hidden,
        heads=heads,
        kv_heads=whole["kv_heads"] or heads,
        vocab=int(number(row, "vocab") or GPT2_VOCAB),
        seq=whole["seq"],
        gated=gated,
        tied=not gated,
        positions=0 if gated else whole["seq"],
        dropout=not gated,
    )


def _likely_heads(hidden: int, tp: int) -> int:
    """Heads of a model that says none: of the numbers that tp divides, nearest to 128 wide."""
    whole = [heads for heads in range(tp, hidden + 1, tp) if hidden % heads == 0] or [1]
    return min(whole, key=lambda heads: abs(math.log(hidden / heads / 128)))


def recompute_of(row: Row) -> Recompute:
    """What a row computes again."""
    text = row["recompute"].lower()
    if text.startswith("full"):
        return Recompute.FULL
    if "dots" in text:
        return Recompute.DOTS
    if "torchtitan" in row["source"]:
        return Recompute.OPS
    if "selective" in text or "megatron-core" in row["framework"].lower():
        return Recompute.ATTENTION
    if "paxml" in row["framework"].lower():
        return Recompute.FULL if (number(row, "params_b") or 0) > 50 else Recompute.NONE
    return Recompute.NONE


def strategy_of(row: Row) -> Strategy:
    """The mesh and batch of a row."""
    values = {k: int(number(row, k) or 1) for k in ("tp", "pp", "vpp", "cp", "ep")}
    gpus, batch = number(row, "gpus"), number(row, "global_batch")
    if not gpus or not batch:
        raise CannotDescribe("no gpus or global batch")
    data = int(gpus) // (values["tp"] * values["pp"] * values["cp"])
    if data % values["ep"]:
        raise CannotDescribe(f"ep={values['ep']} over {data} data-parallel devices")
    micro = int(number(row, "micro_batch") or 1)
    per_rank = batch / data
    if per_rank < micro:
        micro = max(1, int(per_rank))
    zero = row["fsdp/zero"].lower()
    stage = 0
    if found := re.search(r"zero ?(\d)", zero):
        stage = int(found[1])
    elif "fsdp" in zero:
        stage = 3
    elif "bridge" in row["framework"].lower():
        stage = 1  # its recipes have the distributed optimizer on
    return Strategy(
        dp=1 if stage else data // values["ep"],
        fsdp=data // values["ep"] if stage else 1,
        ep=values["ep"],
        tp=values["tp"],
        pp=values["pp"],
        rounds=values["vpp"],
        cp=values["cp"],
        micro_batch=micro,
        micro_batches=max(1, round(per_rank / micro)),
        zero=stage,
        recompute=int(recompute_of(row)),
        sequence_parallel="sequence parallel" in f"{row['recompute']} {row['framework']}".lower()
        or habits_of(row) in ("megatron-core-overlapped",)
        or "torchtitan" in row["source"],
    )


def describe(row: Row) -> Run:
    """What the cost model takes for one row.

    Raises:
        CannotDescribe: with the reason.
    """
    precision = row["precision"].lower()
    if any(word in precision for word in ("fp8", "fp4", "mx")):
        raise CannotDescribe(f"{row['precision']}: only 16-bit products are priced")
    device, gpus = device_kind(row), int(number(row, "gpus") or 0)
    wires = Wires(device, min(device.nvlink_domain, gpus))
    return Run(sizes(row), strategy_of(row), habits_of(row), wires)
