"""What a line of metrics says about speed and memory beside tokens per second."""

import jax

from jaxtp.compile.running_step import is_gpu, target_of
from jaxtp.cost.flops import model_flops
from jaxtp.hardware.clusters import Cluster
from jaxtp.train.pricing import step_price
from jaxtp.train.setup import Setup


class Meter:
    """Model FLOPs utilisation, on GPUs, and memory of a run.

    Attributes:
        flops: FLOPs of one step, recomputation left out, attention in full.
    """

    def __init__(self, setup: Setup) -> None:
        self.flops = _flops(setup)
        self._peak: float | None = None
        if is_gpu(setup.mesh):
            self._peak = target_of(setup.mesh).device.peak_flops * setup.mesh.devices.size

    def __call__(self, seconds: float) -> dict[str, float]:
        """`mfu`, which says nothing on a CPU and is left out there; and `memory_gb`.

        Args:
            seconds: What the step took.
        """
        found = {} if self._peak is None else {"mfu": self.flops / (seconds * self._peak)}
        return {**found, "memory_gb": memory_bytes() / 1e9}


def modelled_line(setup: Setup) -> str:
    """What one step should take on the config's target, or on the GPUs that there are.

    Raises:
        BadTarget: TP116, for a target that is no machine.
        BadTopology: TP012, for a GPU of unknown kind.
    """
    config = setup.config
    target = Cluster.parse(config.target).smallest if config.target else target_of(setup.mesh)
    seconds = float(step_price(config, target).total)
    share = _flops(setup) / (seconds * target.device.peak_flops * setup.mesh.devices.size)
    return f"{seconds * 1e3:,.3g} ms on {target}, MFU {share:.1%}, modelled from sizes alone"


def _flops(setup: Setup) -> float:
    build = setup.build
    seq = build.config.seq_len
    return model_flops(setup.plan, build.dims, tokens=build.tokens, seq=seq).full


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
