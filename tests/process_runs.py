"""One process of a run of several, started by `test_processes`: what is tested needs real ones.

python process_runs.py RUN ADDRESS NUM_PROCESSES PROCESS [OPTION ...]
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp

import jaxtp
from jaxtp.processes.startup import gather

STEPS = 1000
FAULT_STEP = 5


def initialize(address, num_processes, process, **options):
    jaxtp.initialize(
        address, num_processes, process, cpu_devices=8, heartbeat_timeout=4.0, **options
    )


def join(*run, timeout="20"):
    """Starts, agrees and ends."""
    initialize(*run, timeout=float(timeout))
    assert (jax.process_count(), jax.device_count()) == (run[1], 8)


def launched():
    """Leaves all to the launcher's environment, agrees and ends."""
    jaxtp.initialize(cpu_devices=8, timeout=60.0, heartbeat_timeout=4.0)
    assert (jax.process_count(), jax.device_count()) == (2, 8)
    assert set(gather("x", os.getpid())) == {0, 1}


def steps(*run, fault="", culprit="1", seconds="0"):
    """Steps with a collective each; the culprit dies, stops, sleeps or raises in one of them."""
    initialize(*run)
    mesh = jaxtp.make_mesh(tp=8)
    sharding = jax.NamedSharding(mesh, jax.P("tp"))
    step = jax.jit(lambda x: x / x.sum(), out_shardings=sharding)
    x = jax.device_put(jnp.ones(8), sharding)
    # Loops of users have no watchdog.
    has_watchdog = float(seconds) >= 0
    unwatched = contextlib.nullcontext(lambda _: None)
    with jaxtp.watchdog(float(seconds), mesh) if has_watchdog else unwatched as done:
        for number in range(1, STEPS + 1):
            if number == FAULT_STEP and jax.process_index() == int(culprit):
                print(f"fault at {time.time()}", flush=True)  # noqa: T201
                FAULTS[fault]()
            x = jax.block_until_ready(step(x))
            done(number)
            time.sleep(0.05)


def alone_at_last(*run):
    """Process 1 ends well, and process 0 works on for a while, in ways that are no wait for it."""
    initialize(*run)
    mesh = jaxtp.make_mesh(tp=8)
    sharding = jax.NamedSharding(mesh, jax.P("tp"))
    x = jax.jit(lambda x: x / x.sum())(jax.device_put(jnp.ones(8), sharding))
    jax.block_until_ready(x)
    if jax.process_index() == 0:
        time.sleep(2)
        threading.Event().wait(2)
        subprocess.run(["sleep", "2"], check=True)
        own = jnp.ones((512, 512))
        end = time.monotonic() + 2
        while time.monotonic() < end:
            own = jax.jit(lambda x: x @ x / 512)(own)
        print(f"sum {float(own.sum())}")  # noqa: T201


def disagree(*run, flag="", setting=""):
    """Process 1 has another flag of jax or another setting."""
    is_other = run[2] == 1
    if flag and is_other:
        jax.config.update(flag, True)
    initialize(*run)
    jaxtp.agree({"steps": setting if is_other else "100"})


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep():
    time.sleep(1000)


def fail():
    raise RuntimeError("no more text")


def leave(status=3):
    sys.exit(status)


def raise_exit():
    raise SystemExit(3)


FAULTS = {
    "kill": die,
    "stop": freeze,
    "sleep": sleep,
    "raise": fail,
    "exit": leave,
    "system-exit": raise_exit,
    "end": lambda: leave(0),
}

if __name__ == "__main__":
    name, *run = sys.argv[1:]
    options = dict(option.split("=") for option in run[3:])
    globals()[name](*run[:1], *map(int, run[1:3]), **options)
