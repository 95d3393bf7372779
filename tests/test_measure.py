"""The measured description of a machine: rehearsed on simulated devices, taken as a target."""

import jax

from jaxtp.cli.commands import main
from jaxtp.hardware.gpus import DeviceKind, Target
from jaxtp.hardware.links import TABLE_BYTES
from jaxtp.train.mesh_search import search


def test_what_is_measured_is_a_target_with_the_rates_of_this_machine(tmp_path, capsys):
    machine = tmp_path / "machine.json"
    main(["probe", "--measure", str(machine)])
    capsys.readouterr()
    kind = DeviceKind.from_json(machine.read_text())
    # No CPU multiplies a fiftieth as fast as the data sheet says of a GPU.
    assert 0 < kind.matmul_flops < kind.peak_flops / 50
    assert kind.memory_share == kind.link_share == 1.0
    here = jax.local_device_count()
    assert (kind.host_gpus, kind.nvlink_domain) == (here, here)
    assert all(len(row) == len(TABLE_BYTES) for by in kind.tables.values() for row in by.values())
    one, two = Target.parse(str(machine)), Target.parse(f"{machine}:2x{here}")
    assert (one.num_devices, two.num_devices) == (here, 2 * here)
    found = search("llama-tiny", target=f"{machine}:2x{here}", batch=32, seq=64, compile_best=0)
    assert found.rows[0].candidate.seconds > 0
