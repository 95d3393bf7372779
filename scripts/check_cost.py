"""Compares prices from sizes alone with the compiled program, on steps of ours.

    python scripts/check_cost.py            all 20 steps, a minute each on two cores
    python scripts/check_cost.py --limit 3

Peak memory, wire bytes along each axis, FLOPs of one device, and the step as both price it. The
compiler is XLA's for GPUs; no GPU is needed.
"""

import argparse
import os
import statistics
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from jaxtp.activations.context.blocks import LARGEST
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.presets import preset
from jaxtp.config.settings import Config
from jaxtp.cost.axis_bytes import axis_bytes
from jaxtp.cost.flops import model_flops
from jaxtp.cost.peak_memory import peak_memory
from jaxtp.cost.recomputation import recomputed_flops, reruns_of
from jaxtp.hardware.gpus import Target
from jaxtp.hardware.links import GIB
from jaxtp.train.planning import Build, model_of, plan_of
from jaxtp.train.preflight import preflight_config
from jaxtp.train.pricing import JAXTP, can_fuse, sizes_of, step_price, strategy_of

ONE, TWO, SMALL = "h100:1x8", "h100:2x8", "llama3.2-1b"
CASES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    (SMALL, ONE, {"mesh.tp": 8, "remat": "none"}),
    (SMALL, ONE, {"mesh.tp": 8}),
    (SMALL, ONE, {"mesh.tp": 8, "remat": "full"}),
    (SMALL, ONE, {"mesh.tp": 8, "remat": "dots"}),
    (SMALL, ONE, {"mesh.tp": 8, "communication.sequence_parallel": True}),
    (SMALL, ONE, {"mesh.tp": 4, "mesh.dp": 2}),
    (SMALL, ONE, {"mesh.tp": 2, "mesh.fsdp": 4, "zero.stage": 3}),
    (SMALL, ONE, {"mesh.tp": 2, "mesh.fsdp": 4, "zero.stage": 2}),
    (SMALL, ONE, {"mesh.tp": 2, "mesh.fsdp": 4, "zero.stage": 1, "batch.accumulation": 4}),
    (SMALL, ONE, {"mesh.tp": 1, "mesh.fsdp": 8, "zero.stage": 3}),
    (SMALL, ONE, {"mesh.tp": 1, "mesh.fsdp": 8, "zero.stage": 3, "remat": "full"}),
    (SMALL, ONE, {"mesh.tp": 1, "mesh.fsdp": 8, "zero.stage": 1, "remat": "none"}),
    (SMALL, ONE, {"mesh.tp": 1, "mesh.dp": 8, "batch.accumulation": 2}),
    (SMALL, ONE, {"mesh.tp": 2, "mesh.pp": 4, "batch.accumulation": 8}),
    (SMALL, ONE, {"mesh.tp": 2, "mesh.pp": 4, "batch.accumulation": 8, "remat": "full"}),
    (SMALL, TWO, {"mesh.tp": 8, "mesh.fsdp": 2, "zero.stage": 3}),
    ("llama3-8b", TWO, {"mesh.tp": 8, "mesh.fsdp": 2, "zero.stage": 3}),
    ("llama3-8b", TWO, {"mesh.tp": 1, "mesh.fsdp": 16, "zero.stage": 3, "remat": "full"}),
    ("gpt2-large", ONE, {"mesh.tp": 4, "mesh.dp": 2, "seq_len": 1024}),
    ("gpt2-xl", ONE, {"mesh.tp": 1, "mesh.fsdp": 8, "zero.stage": 3, "seq_len": 1024}),
)
"""Preset, target, and settings: meshes, ZeRO stages, accumulation, stages, remat policies."""


def config_of(model: str, target: str, changes: Mapping[str, Any]) -> Config:
    """The resolved run of a case; one sequence a GPU and micro-batch."""
    devices = Target.parse(target).num_devices
    size = devices * int(changes.get("batch.accumulation", 1))
    return resolve(preset(model, target=target, **{**changes, "batch.size": size}), devices)


def flops_of(config: Config) -> float:
    """FLOPs of one device, idle ticks of stages included, because the program runs them."""
    build = Build.of(config)
    plan, dims, tokens = plan_of(build), build.dims, build.tokens
    sizes = {"tokens": tokens, "seq": config.seq_len}
    step = model_flops(plan, dims, **sizes)
    flops = step.full
    head = 6 * dims.vocab_size * dims.hidden_size * tokens
    blocks = flops - head + recomputed_flops(config.remat, plan, dims, **sizes)
    # Under the mask cuDNN leaves out half of the scores, and tiles those in which nothing is seen.
    pieces = config.seq_len / LARGEST
    seen = 0.5 if can_fuse(config) else (pieces + 1) / (2 * pieces)
    if can_fuse(config) or config.seq_len >= JAXTP.tiles_from:
        # Of two products forward and four backward either runs one again in its backward pass.
        again = reruns_of(config.remat, plan).attention
        blocks -= step.attention * (1 - 3.5 / 3 * seen + again * (1 - seen) / 3)
    stages = plan.stages
    idle = 1.0 if stages is None else stages.num_ticks / (stages.num_rounds * stages.micro_batches)
    # A head that tp does not divide runs whole on each of its devices.
    repeats = config.mesh.tp if dims.vocab_size % config.mesh.tp else 1
    return (blocks * idle + head * repeats) / plan.mesh.num_devices


def compare(
    model: str, target: str, changes: Mapping[str, Any]
) -> tuple[str, float, float, float, float]:
    """A line on one case, and modelled over compiled: memory, the worst axis, FLOPs, the step."""
    config = config_of(model, target, changes)
    _, report = preflight_config(config)
    sizes, strategy = sizes_of(model_of(config), config.seq_len), strategy_of(config)
    memory = float(peak_memory(sizes, strategy, JAXTP).total)
    sent = axis_bytes(sizes, strategy)
    wires = {axis: own / report.wire_bytes_by_axes[axis] for axis, own in sent.items()}
    flops = flops_of(config) / report.flops_per_device
    peak = memory / report.peak_bytes
    step = float(step_price(config, Target.parse(target)).total) / report.step_seconds_modelled
    line = " ".join(f"{key.split('.')[-1]}={value}" for key, value in changes.items())
    text = " ".join(f"{axis} {ratio:.3f}" for axis, ratio in wires.items())
    worst = max(wires.values(), key=lambda ratio: abs(ratio - 1), default=1.0)
    return (
        f"{model:12s} {target:8s} {line:55s} {report.peak_bytes / GIB:7.2f} GiB {peak:6.3f}  "
        f"{text:24s} FLOPs {flops:.3f} step {step:.3f}",
        peak,
        worst,
        flops,
        step,
    )


def main() -> None:
    """Prints the table and the means."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--limit", type=int, default=len(CASES))
    cases = CASES[: parser.parse_args().limit]
    print("modelled over compiled: peak memory, wire bytes by axis, FLOPs of one device, step")
    found: list[tuple[float, ...]] = []
    for case in cases:
        line, *ratios = compare(*case)
        print(line, flush=True)
        found.append(tuple(ratios))
    means = [statistics.mean(abs(one - 1) for one in column) for column in zip(*found, strict=True)]
    print(
        f"mean error: memory {means[0]:.1%}, wire bytes of the worst axis {means[1]:.1%}, "
        f"FLOPs {means[2]:.1%}, step {means[3]:.1%}"
    )


if __name__ == "__main__":
    main()
