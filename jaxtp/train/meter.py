"""What a line of metrics says about speed and memory beside tokens per second."""

import jax

from jaxtp.compile.running_step import is_gpu, target_of
from jaxtp.cost.flops import model_flops
from jaxtp.cost.step_time import modelled_seconds
from jaxtp.rules.model_dims import ModelDims
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
        dims = ModelDims.of(setup.model)
        self.flops = model_flops(setup.plan, dims, tokens=tokens, seq=config.seq_len).full
        self.target = target_of(setup.mesh)
        self._on_gpu = is_gpu(setup.mesh)
        self._seconds = modelled_seconds(
            setup.plan,
            dims,
            self.target,
            tokens=tokens,
            seq=config.seq_len,
            num_micro=config.batch.accumulation,
            remat=config.remat,
            dtype=setup.model.dtype,
        )

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
