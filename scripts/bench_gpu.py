"""What one real GPU does with a preset, beside what preflight said it would do.

    python scripts/bench_gpu.py                        # llama3.2-1b, the largest batch that fits
    python scripts/bench_gpu.py --batch 8 --json       # the same as one JSON object
    python scripts/bench_gpu.py --rehearse             # on the CPU, tiny: no figure means anything

Needs one NVIDIA GPU with `jax[cuda12]`, and no attention: a few minutes. It

1. measures the chip's tensor cores and memory, and saves them as a description file for later
   preflights (`jaxtp preflight --target gpu.json:1x8`);
2. compiles the train step (AdamW, float32 parameters, bfloat16 arithmetic) by preflight for that
   description, in a process that sees no GPU, for its peak of memory and modelled seconds;
3. trains on random tokens and measures seconds, tokens/s, MFU and the peak that the allocator saw.

It fails if the measured peak is more than 10% away from the predicted one.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tyro

import jaxtp
from jaxtp.compile.report import Report
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.presets import preset
from jaxtp.config.settings import Config
from jaxtp.cost.flops import StepFlops, model_flops
from jaxtp.errors import BadTarget, BadTopology, CheckFailed, DoesNotFit
from jaxtp.hardware.gpus import KINDS, DeviceKind, kind_of
from jaxtp.hardware.links import GIB
from jaxtp.train.config_step import abstract_step
from jaxtp.train.planning import Build, plan_of
from jaxtp.train.preflight import preflight_config

Flag = tyro.conf.FlagCreatePairsOff[bool]

BATCHES = (32, 16, 8, 4, 2, 1)
MEMORY_SHARE = 0.9
"""Of the GPU's memory, that the predicted peak may fill: CUDA and the allocator want the rest."""
PEAK_TOLERANCE = 0.1
WARM_STEPS = 3


def main(
    model: str = "llama3.2-1b",
    batch: int = 0,
    seq: int = 2048,
    steps: int = 20,
    save: Path = Path("gpu.json"),
    as_json: Annotated[Flag, tyro.conf.arg(name="json")] = False,
    rehearse: Flag = False,
) -> None:
    """Measures one GPU.

    Args:
        model: A preset of 1 to 3 billion parameters.
        batch: Sequences; 0 takes the largest power of two that preflight lets fit.
        seq: Tokens of a sequence.
        steps: Measured steps, after three that are not.
        save: Where the description of this GPU goes.
        as_json: Print one JSON object instead of lines.
        rehearse: Run the whole script on the CPU with a tiny model.
    """
    if rehearse:
        jax.config.update("jax_platforms", "cpu")
        model, batch, seq, steps = "llama-tiny", 2, 64, 3
    elif jax.default_backend() != "gpu":
        raise BadTarget(
            f"jax runs on {jax.default_backend()} here", fix="pip install 'jax[cuda12]' and a GPU"
        )
    say: Callable[[str], None] = (lambda _: None) if as_json else print
    kind = describe(jax.devices()[0], side=256 if rehearse else 8192)
    save.write_text(kind.to_json())
    say(
        f"{kind.description}: {_tera(kind.matmul_flops)} of {_tera(kind.peak_flops)} in matrix "
        f"products, {kind.hbm_bandwidth / 1e12:.2f} TB/s; saved as {save}"
    )

    config, report = choose(model, batch, seq, f"{save}:1x1", "xla" if rehearse else "cudnn")
    say(
        f"predicted: peak {report.peak_bytes / GIB:.2f} GiB at batch {config.batch.size} x {seq}, "
        f"{report.step_seconds_modelled * 1e3:,.1f} ms a step (modelled)"
    )

    seconds, peak = measure(config, steps)
    found = results(config, kind, report, seconds, peak)
    print(_json(found) if as_json else _text(found))
    if peak is not None and abs(found["peak_ratio"] - 1) > PEAK_TOLERANCE:
        raise CheckFailed(
            f"peak memory is {found['peak_ratio']:.3f} of the predicted one",
            fix=f"report it, with {save} and the versions that jaxtp preflight prints",
        )


def describe(device: Any, side: int) -> DeviceKind:
    """The kind of a live GPU, with the arithmetic and memory that were measured on it.

    A chip without a row in `KINDS` gets the row of the nearest compute capability; its peak is then
    what was measured.

    Args:
        device: A jax device.
        side: Rows and columns of the matrices to multiply.
    """
    flops, bandwidth = matmul_flops(side), memory_bandwidth(side * side)
    try:
        base = kind_of(device.device_kind)
    except BadTopology:
        major = int(float(getattr(device, "compute_capability", 9)))
        near = {8: "a100-80", 9: "h100", 10: "b200"}.get(major, "b200" if major > 10 else "a100-80")
        base = dataclasses.replace(KINDS[near], peak_flops=flops)
    stats = device.memory_stats() or {}
    # The allocator's limit is a share of the card; what it leaves is not lost to other processes.
    limit = int(stats.get("bytes_limit", base.memory_bytes))
    return dataclasses.replace(
        base,
        name="local",
        description=device.device_kind,
        matmul_flops=flops,
        hbm_bandwidth=bandwidth,
        memory_bytes=max(limit, base.memory_bytes),
    )


def matmul_flops(side: int) -> float:
    """FLOP/s of bfloat16 products of two square matrices, `2 side^3` each."""
    num_products = 16
    x = jnp.full((side, side), 1 / side, jnp.bfloat16)

    @jax.jit
    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, num_products, lambda _, y: y @ x, x)

    return 2 * side**3 * num_products / _fastest(chain, x)


def memory_bandwidth(size: int) -> float:
    """Bytes/s of reading and writing an array of `size` float32."""
    add = jax.jit(lambda x: x + 1)
    return 2 * 4 * size / _fastest(add, jnp.zeros(size, jnp.float32))


def _fastest(call: Callable[[jax.Array], jax.Array], x: jax.Array, repeats: int = 5) -> float:
    """Seconds of the fastest of some calls; the first one, which compiles, is not among them."""
    call(x).block_until_ready()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def choose(model: str, batch: int, seq: int, target: str, attention: str) -> tuple[Config, Report]:
    """The step to run and its preflight: the given batch, or the largest that fits.

    Raises:
        DoesNotFit: TP114, if not even one sequence does.
    """
    for size in (batch,) if batch else BATCHES:
        config = preset(
            model,
            **{
                "target": target,
                "mesh.tp": 1,
                "batch.size": size,
                "seq_len": seq,
                "attention": attention,
            },
        )
        report = preflight_config(config)[1]
        if batch or report.peak_bytes <= MEMORY_SHARE * report.card_bytes:
            return resolve(config, 1), report
    raise DoesNotFit(
        f"{model} with one sequence of {seq} tokens takes {report.peak_bytes / GIB:.1f} GiB",
        fix="a smaller model or shorter sequences",
    )


def measure(config: Config, steps: int) -> tuple[list[float], int | None]:
    """Seconds of each step on random tokens, and the peak of device memory in bytes.

    The peak is None where the backend does not count, as on CPUs.
    """
    mesh = jaxtp.make_mesh(tp=1, dp=1, devices=jax.devices()[:1])
    build = Build.of(config)
    step, structs = abstract_step(build, plan_of(build, mesh), mesh)
    places = jax.tree.map(lambda leaf: leaf.sharding, structs)

    def fill(leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            most = 2 if leaf.ndim == 0 else build.model.vocab_size
            return jax.random.randint(key, leaf.shape, 0, most, leaf.dtype)
        # Positive, for second moments are under a root.
        return 0.02 * jnp.abs(jax.random.normal(key, leaf.shape, leaf.dtype))

    @jax.jit
    def random() -> list[jax.Array]:
        leaves = jax.tree.leaves(structs)
        keys = jax.random.split(jax.random.key(0), len(leaves))
        return [fill(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]

    tree = jax.tree.unflatten(jax.tree.structure(structs), random())
    state, batch = jax.tree.map(jax.device_put, tree, places)
    del tree
    seconds = []
    for _ in range(WARM_STEPS + steps):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
        seconds.append(time.perf_counter() - start)
    stats = jax.devices()[0].memory_stats() or {}
    return seconds[WARM_STEPS:], stats.get("peak_bytes_in_use")


def results(
    config: Config, kind: DeviceKind, report: Report, seconds: list[float], peak: int | None
) -> dict[str, Any]:
    """Every figure by name."""
    median, tokens = statistics.median(seconds), config.batch.size * config.seq_len
    flops = flops_of(config)
    return {
        "device": kind.description,
        "model": config.model,
        "batch": config.batch.size,
        "seq": config.seq_len,
        "step_seconds": median,
        "step_seconds_spread": (max(seconds) - min(seconds)) / median,
        "step_seconds_modelled": report.step_seconds_modelled,
        "tokens_per_s": tokens / median,
        "model_flops_full": flops.full,
        "model_flops_causal": flops.causal,
        "mfu_full": flops.full / median / kind.peak_flops,
        "mfu_causal": flops.causal / median / kind.peak_flops,
        "peak_flops": kind.peak_flops,
        "peak_bytes": peak,
        "peak_bytes_predicted": report.peak_bytes,
        "peak_ratio": math.nan if peak is None else peak / report.peak_bytes,
    }


def flops_of(config: Config) -> StepFlops:
    """Model FLOPs of a step, recomputation left out."""
    build = Build.of(config)
    plan = plan_of(build, {"tp": 1})
    return model_flops(plan, build.dims, tokens=build.tokens, seq=config.seq_len)


def _tera(flops: float) -> str:
    return f"{flops / 1e12:,.1f} TFLOP/s"


def _json(found: dict[str, Any]) -> str:
    return json.dumps({k: None if v != v else v for k, v in found.items()}, indent=1)


def _text(found: dict[str, Any]) -> str:
    lines = [
        f"measured: {found['step_seconds'] * 1e3:,.1f} ms a step, median "
        f"(spread {found['step_seconds_spread']:.1%}), {found['tokens_per_s']:,.0f} tokens/s",
        "MFU = model FLOPs / (seconds x data sheet peak); model FLOPs = 6 x matrix parameters x "
        "tokens + 12 x seq x heads x head width x tokens x layers",
        f"MFU {found['mfu_full']:.1%} with attention counted in full, "
        f"{found['mfu_causal']:.1%} with half of it",
    ]
    if found["peak_bytes"] is None:
        return "\n".join((*lines, "peak memory: this backend does not count it"))
    peak, predicted = found["peak_bytes"] / GIB, found["peak_bytes_predicted"] / GIB
    ratio = found["peak_ratio"]
    return "\n".join(
        (*lines, f"peak memory {peak:.2f} GiB, predicted {predicted:.2f} GiB ({ratio:.3f} of it)")
    )


if __name__ == "__main__":
    try:
        tyro.cli(main, description=__doc__)
    except jaxtp.JaxtpError as error:
        sys.exit(str(error))
