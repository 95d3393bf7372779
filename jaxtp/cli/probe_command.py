"""`jaxtp probe`: whether every device computes and exchanges rightly, and how fast."""

import sys
from typing import Annotated

import jax
import tyro

from jaxtp.config.named_files import write_text
from jaxtp.processes.device_health import probe as run_probe
from jaxtp.processes.measure import measure as measure_machine
from jaxtp.processes.startup import initialize


def probe(
    size: int | None = None,
    slow_ratio: float | None = None,
    cpu_devices: int | None = None,
    measure: str = "",
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Test every device of this machine, or of all processes that a launcher starts with it.

    Args:
        size: Rows and columns of the matrices that are multiplied.
        slow_ratio: Times the median from which a device counts as slow.
        cpu_devices: Devices to simulate where there is no GPU.
        measure: Also measure products, memory and collectives, and write what was found to this
            file, which --target takes: machine.json for this host, machine.json:HOSTSxGPUS.
        as_json: Print all times as data.
    """
    initialize(cpu_devices=cpu_devices)
    health = run_probe(size=size, slow_ratio=slow_ratio)
    if jax.process_index() == 0:
        print(health.to_json() if as_json else health)
    health.refuse_wrong()
    if measure:
        kind = measure_machine()
        if jax.process_index() == 0:
            write_text(measure, kind.to_json())
            across = "measured" if kind.network_share == 1 else "the data sheet's: one host"
            print(
                f"wrote {measure}: products {kind.matmul_flops / 1e12:,.1f} TFLOP/s, memory "
                f"{kind.hbm_bandwidth / 1e9:,.0f} GB/s, network {kind.nic_bandwidth / 1e9:,.1f} "
                f"GB/s a GPU ({across})",
                file=sys.stderr,
            )
