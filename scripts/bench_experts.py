"""Published mixtures of experts on clusters that are not there: what their experts cost.

    python scripts/bench_experts.py
    python scripts/bench_experts.py --json --only mixtral-8x7b

Each step is compiled by the real GPU compiler with 2 and with 4 layers, experts on ep and ZeRO 3
over the rest; all layers are alike, so what two more add gives the rest. `x FLOPs` are matrix FLOPs
of a device against 4/3 of the model's, whose tokens have `chosen` experts each and whose layers are
recomputed; `x formula` are the bytes of all-to-alls against tokens x chosen x capacity x hidden
size x 2: two in each pass and one in the recomputation, which needs no way back, and the weights of
the tokens beside each way there. Times and MFU are modelled, `over bound` is the time over the
longest of products and links; `published` is the best MFU that others measured on H100 with this
model, in the precision that they used. Tokens beyond the capacity are dropped.
"""

import dataclasses
import json
from typing import Annotated, Any

import tyro
from rich.console import Console
from tables import Flag, Section, shown

from jaxtp import models
from jaxtp.compile.report import Report
from jaxtp.config.settings import Batch, Config, Experts, Mesh
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB
from jaxtp.models.llama import LlamaConfig
from jaxtp.train.preflight import preflight_config

FEW, MORE = 2, 4
"""Layers with experts that are compiled."""

EXCHANGES, WEIGHTS = 5, 3
"""All-to-alls of a layer: two forward, the way there recomputed, two backward; those of weights go
there, again when recomputed, and their gradient back."""

RECOMPUTED = 4 / 3
"""FLOPs with the forward pass run twice over those without."""

SEQ = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A model on a cluster."""

    model: str
    target: str
    mesh: Mesh
    micro_size: int
    published: str = ""


NODES = Mesh(ep=8, fsdp=8, dp=1)
RUNS = (
    Run(model="mixtral-8x7b", target="h100:8x8", mesh=NODES, micro_size=8),
    Run(
        model="qwen3-30b-a3b",
        target="h100:8x8",
        mesh=NODES,
        micro_size=8,
        published="0.12 FP8",  # Megatron-Bridge, 16 GPUs: 241 of 1,979 TFLOP/s
    ),
    Run(
        model="gpt-oss-120b",
        target="h100:8x8",
        mesh=NODES,
        micro_size=4,
        published="0.165 BF16",  # Megatron-Bridge, 64 GPUs: 163 of 989 TFLOP/s
    ),
    Run(
        model="deepseek-v3",
        target="h100:32x8",
        mesh=Mesh(ep=128, fsdp=2, dp=1),
        micro_size=1,
        published="0.17 FP8",  # Megatron-Bridge, 1,024 GPUs: 338 of 1,979 TFLOP/s
    ),
)


def compiled(run: Run, layers: int) -> Report:
    """The step of so many layers."""
    config = Config(
        model=run.model,
        layers=layers,
        seq_len=SEQ,
        target=run.target,
        mesh=run.mesh,
        batch=Batch(micro_size=run.micro_size),
        experts=Experts(capacity_factor=1.0, drop_tokens=True),
        remat="block_outputs",
    )
    return preflight_config(config)[1]


def row_of(run: Run) -> dict[str, Any]:
    """One line of the table."""
    config, target = models.config_of(run.model), Target.parse(run.target)
    assert isinstance(config, LlamaConfig)
    dense = config.first_k_dense_replace
    few, more = compiled(run, dense + FEW), compiled(run, dense + MORE)
    peak = target.num_devices * target.device.peak_flops

    def of_all(value: Any) -> float:
        each = (value(more) - value(few)) / (MORE - FEW)
        return value(few) + each * (config.num_hidden_layers - dense - FEW)

    def model_flops(report: Report) -> float:
        assert report.mfu_modelled is not None
        return report.mfu_modelled * report.step_seconds_modelled * peak

    def bound_of(report: Report) -> float:
        assert report.bound_seconds is not None
        return report.bound_seconds

    sent = sum(one.wire_bytes for one in more.collectives if one.kind == "all-to-all")
    tokens, ep = run.micro_size * SEQ, run.mesh.ep
    rows = tokens * config.num_experts_per_tok
    each = EXCHANGES * config.hidden_size * 2 + WEIGHTS * 4
    formula = MORE * rows * each * (ep - 1) / ep
    seconds = of_all(lambda report: report.step_seconds_modelled)
    flops = of_all(model_flops)
    return {
        "model": run.model,
        "target": run.target,
        "mesh": " ".join(f"{axis}={size}" for axis, size in run.mesh.sizes.items() if size > 1),
        "tokens a GPU": tokens,
        "x FLOPs": round(
            of_all(lambda r: r.flops_per_device) * target.num_devices / flops / RECOMPUTED, 3
        ),
        "x formula": round(sent / formula, 3),
        "peak GiB": round(of_all(lambda report: report.peak_bytes) / GIB, 1),
        "of": round(more.card_bytes / GIB, 1),
        "step ms": round(seconds * 1e3, 1),
        "over bound": round(seconds / of_all(bound_of), 3),
        "MFU": round(flops / peak / seconds, 3),
        "published": run.published,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What to run."""

    only: Annotated[tuple[str, ...], tyro.conf.arg(help="models; default: all")] = ()
    json: Flag = False
    """Print the rows as JSON."""


def main() -> None:
    """Prints the table, and whether it is what it is held to."""
    options = tyro.cli(Options, description=__doc__)
    rows = [row_of(run) for run in RUNS if not options.only or run.model in options.only]
    section = Section(
        title=f"Experts, {SEQ} tokens a sequence",
        rows=rows,
        thresholds=[
            ("FLOPs <= 1.15 x the model's", all(row["x FLOPs"] <= 1.15 for row in rows)),
            ("all-to-alls send what the formula says", all(row["x formula"] == 1 for row in rows)),
            ("fits", all(row["peak GiB"] <= row["of"] for row in rows)),
        ],
    )
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        for part in shown(section):
            Console(width=140).print(part)
    raise SystemExit(not all(reached for _, reached in section.thresholds))


if __name__ == "__main__":
    main()
