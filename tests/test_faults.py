"""The watchdog of one process; those of several are in the leg."""

import subprocess
import sys
import time

import jax
import pytest

import jaxtp
from jaxtp.errors import CommunicationTimeout
from jaxtp.processes import faults

STUCK = """
import atexit, time, jax, jaxtp
jax.config.update("jax_num_cpu_devices", 2)
atexit.register(lambda: print("atexit"))
print("before")
with jaxtp.watchdog(1.0, jaxtp.make_mesh(tp=2), first_step=5) as done:
    for number in (5, 6):
        done(number)
    time.sleep(60)
"""


def test_a_step_that_takes_too_long_ends_the_process():
    start = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, check=False, timeout=60
    )
    assert time.monotonic() - start < 40
    assert run.returncode == 75
    assert run.stdout == "before\n"
    assert "TP002 at step 7: not done after 1 s\n  mesh tp=2 over 1 process\n" in run.stderr
    assert "process 0: here" in run.stderr
    assert "step 6 done 1." in run.stderr
    assert "<string>:9" in run.stderr  # where the main thread sleeps
    assert "NCCL_DEBUG=WARN" in run.stderr


def test_steps_in_time_leave_no_trace():
    place = faults.run.place
    with jaxtp.watchdog(0.2) as done:
        for number in range(1, 6):
            time.sleep(0.1)
            done(number)
        assert faults.run.place == "step 6"
    time.sleep(0.3)
    assert faults.run.place == place


@pytest.mark.parametrize(
    "text", ["NCCL operation failed: unhandled system error", "Gloo: Connection closed by peer"]
)
def test_an_error_of_communication_becomes_tp002(text):
    with (
        pytest.raises(CommunicationTimeout, match="TP002 at step 3: JAX reports"),
        jaxtp.watchdog(0, first_step=3),
    ):
        raise jax.errors.JaxRuntimeError(text)


def test_other_errors_stay_what_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of memory"), jaxtp.watchdog(0):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
