"""The probe finds the device that is wrong or slow."""

import json
import time

import jax.numpy as jnp
import pytest

import jaxtp
from jaxtp.cli import commands
from jaxtp.errors import UnhealthyDevice


def test_healthy_devices():
    health = jaxtp.probe(size=64)
    assert [reading.device for reading in health.readings] == list(range(8))
    assert health.wrong == health.slow == ()
    assert all(min(r.product_seconds, r.collective_seconds) > 0 for r in health.readings)
    assert "probed 8 devices, 0 wrong, 0 slow" in str(health)
    health.refuse_wrong()


def test_a_slow_device_is_named():
    def tamper(device, what, result):
        if device.id == 3 and what == "product":
            time.sleep(0.5)
        return result

    # Simulated devices share two cores, so the limit is far above what sharing does to them.
    health = jaxtp.probe(size=64, slow_ratio=200, tamper=tamper)
    assert [reading.device for reading in health.slow] == [3]
    assert "SLOW product" in str(health)
    assert "device 3 (cpu, process 0 on " in str(health)
    health.refuse_wrong()


@pytest.mark.parametrize("kind", ["product", "collective"])
def test_a_wrong_device_is_named(kind):
    def tamper(device, what, result):
        wrong = device.id == 5 and what == kind
        return result.at[(0,) * result.ndim].add(1) if wrong else jnp.asarray(result)

    health = jaxtp.probe(size=64, tamper=tamper)
    assert [reading.wrong for reading in health.readings] == [""] * 5 + [kind] + [""] * 2
    with pytest.raises(
        UnhealthyDevice, match=f"TP016: wrong results from device 5 .* in its {kind}"
    ):
        health.refuse_wrong()


def test_command(capsys):
    commands.main(["probe", "--size", "64"])
    assert "probed 8 devices" in capsys.readouterr().out
    commands.main(["probe", "--size", "64", "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 8
