"""What a line of metrics says about speed and memory beside tokens per second."""

import jax

from jaxtp import models
from jaxtp.compile.running_step import is_gpu, target_of
from jaxtp.config.settings import Config
from jaxtp.hardware.gpus import Target
from jaxtp.plan.decisions import Plan
from jaxtp.train.preset import model_flops, recomputation, stream_bytes
from jaxtp.train.setup import Setup


class Meter:
    """Model FLOPs utilisation and memory of a run.

    Attributes:
        flops: FLOPs of one step, recomputation left out, attention in full.
        target: The machine whose data sheet the utilisation is a share of.
    """

    def __init__(self, setup: Setup) -> None:
        config, self._devices = setup.config, setup.mesh.devices
        tokens = config.batch.size * config.seq_len
        self.flops = model_flops(setup.model, setup.plan, tokens=tokens, seq=config.seq_len).full
        self.target = target_of(setup.mesh)
        self._on_gpu = is_gpu(setup.mesh)
        self._seconds = modelled_seconds(config, setup.model, setup.plan, self.target, self.flops)

    def __call__(self, seconds: float) -> dict[str, float]:
        """`mfu` on GPUs, `mfu_modelled` elsewhere; and `memory_gb` of the fullest local device.

        Args:
            seconds: What the step took.
        """
        name = "mfu" if self._on_gpu else "mfu_modelled"
        taken = seconds if self._on_gpu else self._seconds
        peak = self.target.device.peak_flops * self._devices.size
        return {name: self.flops / (taken * peak), "memory_gb": memory_bytes() / 1e9}


def memory_bytes() -> int:
    """Bytes in use on the fullest local device.

    On GPUs the allocator's peak so far. On CPUs, which count nothing, the arrays alive between two
    steps.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [found["peak_bytes_in_use"] for found in stats if "peak_bytes_in_use" in found]
    if peaks:
        return max(peaks)
    held = dict.fromkeys(jax.local_devices(), 0)
    for array in jax.live_arrays():
        for piece in array.addressable_shards if not array.is_deleted() else ():
            held[piece.device] += piece.data.nbytes
    return max(held.values())


def modelled_seconds(
    config: Config, model: models.Config, plan: Plan, target: Target, flops: float
) -> float:
    """Seconds of a step on `target` from sizes alone: nothing is compiled, nothing overlaps.

    (products + tensor parallelism's all-reduces) / (1 - bubble): products at the rate that large
    ones sustain, recomputation included; four all-reduces of the residual stream a layer (DESIGN
    2). What data parallelism moves is left out. `jaxtp preflight` compiles, and knows better.

    Args:
        config: Resolved settings.
        model: The model.
        plan: Its plan.
        target: The machine.
        flops: FLOPs of one step without recomputation.
    """
    products = (
        recomputation(config.remat) * flops / plan.mesh.num_devices / target.device.matmul_flops
    )
    num_bytes = stream_bytes(model, config.batch.micro_size * config.seq_len)
    count = 4 * model.num_hidden_layers * config.batch.accumulation / config.mesh.pp
    group = [range(config.mesh.tp)]
    reductions = count * target.collective_seconds("all-reduce", num_bytes, group)
    bubble = plan.stages.bubble if plan.stages else 0
    return (products + (reductions if config.mesh.tp > 1 else 0)) / (1 - bubble)
