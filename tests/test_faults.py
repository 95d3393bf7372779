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


JaxError = jax.errors.JaxRuntimeError
LOST = [  # as XLA's collectives, its coordination service and Orbax word it
    JaxError("INTERNAL: NCCL operation ncclGroupEnd() failed: unhandled system error"),
    JaxError("Gloo: Connection closed by peer"),
    ValueError("UNKNOWN: Gloo all-reduce failed: [pair.cc:534] Connection closed by peer [::1]"),
    RuntimeError("NCCL operation async_err failed: remote process exited or there was a network"),
    ValueError("DEADLINE_EXCEEDED: Barrier timed out. Id: wait_at_end::0"),
    JaxError("UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats): 3"),
    JaxError("ABORTED: The tasks have crashed. Check the task logs for an earlier error"),
    RuntimeError("UNAVAILABLE: Socket closed"),
]


@pytest.mark.parametrize("error", LOST, ids=str)
def test_a_lost_process_is_tp002_whatever_the_type_of_its_error(error):
    with (
        pytest.raises(CommunicationTimeout, match="TP002 at step 3: JAX reports") as caught,
        jaxtp.watchdog(0, first_step=3),
    ):
        raise OSError("the checkpoint's thread has failed") from error
    assert str(error)[:40] in str(caught.value)


OTHERS = [
    JaxError("RESOURCE_EXHAUSTED: out of memory"),
    ValueError("a barrier option of 3"),
    ConnectionResetError("[Errno 104] Connection reset by peer"),  # a download, say
    RuntimeError("Connection reset by peer"),
    TypeError("gloo is no dtype"),
]


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, jaxtp.watchdog(0):
        raise error
    assert caught.value is error
