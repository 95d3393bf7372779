"""`jaxtp probe`: whether every device computes and exchanges rightly, and how fast."""

from typing import Annotated

import jax
import tyro

from jaxtp.processes.device_health import probe as run_probe
from jaxtp.processes.startup import initialize


def probe(
    size: int | None = None,
    slow_ratio: float | None = None,
    cpu_devices: int | None = None,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Test every device of this machine, or of all processes that a launcher starts with it.

    Args:
        size: Rows and columns of the matrices that are multiplied.
        slow_ratio: Times the median from which a device counts as slow.
        cpu_devices: Devices to simulate where there is no GPU.
        as_json: Print all times as data.
    """
    initialize(cpu_devices=cpu_devices)
    health = run_probe(size=size, slow_ratio=slow_ratio)
    if jax.process_index() == 0:
        print(health.to_json() if as_json else health)
    health.refuse_wrong()
