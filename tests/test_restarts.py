"""Survival of one process: divergence, signals, metrics over restarts, starting again."""

import io
import json
import os
import signal
import sys

import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxtp import errors
from jaxtp.errors import CommunicationTimeout, TrainingDiverged
from jaxtp.train.loop import Hooks, fit
from jaxtp.train.metrics import MetricsFile
from jaxtp.train.restarts import FINAL, Preemption, supervise


def train(folder, losses, *, first_step=0, saved=None, more=None, spike_factor=0, **hooks):
    """Trains on given losses; the state counts the steps. `more` are other numbers of the last."""

    def step(state, batch):
        is_last = state + 1 == len(losses)
        metrics = {"loss": losses[state], "grad_norm": 1.0}
        return state + 1, metrics | ((is_last and more) or {})

    return fit(
        step,
        first_step,
        lambda number: jnp.zeros((2, 5)),
        steps=range(first_step, len(losses)),
        folder=folder,
        hooks=Hooks(
            save=None if saved is None else lambda number, state: saved.append(number),
            save_every=2,
            **hooks,
        ),
        spike_factor=spike_factor,
        console=Console(file=io.StringIO()),
    )


def steps(folder):
    text = (folder / "metrics.jsonl").read_text()
    return [json.loads(line)["step"] for line in text.splitlines()]


STEADY = [2.0, 2.2, 1.8] * 5


@pytest.mark.parametrize(
    ("losses", "options", "text"),
    [
        (
            [*STEADY, 6.1],
            {"spike_factor": 3},
            r"6\.1000 at step 16, more than run\.spike_factor=3 ",
        ),
        ([*STEADY, float("nan")], {}, r"the loss is nan at step 16; it was 1\.8000 before"),
        ([*STEADY, 2.0], {"more": {"grad_norm": float("inf")}}, "norm of the gradients is inf"),
    ],
)
def test_diverged_step_is_logged_and_not_saved(tmp_path, losses, options, text):
    saved = []
    with pytest.raises(TrainingDiverged, match=rf"TP131 at {tmp_path}/metrics\.jsonl: .*{text}"):
        train(tmp_path, losses, saved=saved, **options)
    assert saved == [2, 4, 6, 8, 10, 12, 14]
    assert steps(tmp_path)[-1] == 16


@pytest.mark.parametrize(
    ("losses", "options"),
    [
        ([*STEADY, 5.9, 2.0], {"spike_factor": 3}),
        ([*STEADY, 600.0], {"spike_factor": 0}),
        ([9.0, 0.1, 9.0, 0.1], {"spike_factor": 3}),  # too early to tell
        ([*STEADY, 2.0], {"more": {"grad_norm": float("inf"), "loss_scale": 2.0}}),
    ],
)
def test_what_is_no_divergence(tmp_path, losses, options):
    train(tmp_path, losses, **options)
    assert steps(tmp_path) == list(range(1, len(losses) + 1))


def test_spikes_are_judged_by_the_steps_before_a_restart(tmp_path):
    train(tmp_path, STEADY)
    with pytest.raises(TrainingDiverged, match="at step 16, more than"):
        train(tmp_path, [*STEADY, 9.0], first_step=15, spike_factor=3)


def test_parameters_that_the_update_broke_are_not_saved(tmp_path):
    def step(state, batch):
        scale = jnp.where(state["count"] == 3, jnp.inf, 1)
        params = {"a": {"kernel": state["params"]["a"]["kernel"] * scale}}
        new = {"params": params, "opt_state": jnp.inf, "count": state["count"] + 1}
        return new, {"loss": 1.0, "grad_norm": 1.0}

    saved = []
    state = {"params": {"a": {"kernel": jnp.ones(3)}}, "opt_state": jnp.inf, "count": 0}
    with pytest.raises(TrainingDiverged, match="not finite after step 4: a/kernel"):
        fit(
            step,
            state,
            lambda number: jnp.zeros((2, 5)),
            steps=range(8),
            folder=tmp_path,
            hooks=Hooks(save=lambda number, state: saved.append(number), save_every=2),
            console=Console(file=io.StringIO()),
        )
    assert saved == [2]


def test_metrics_have_each_step_once(tmp_path):
    train(tmp_path, [4.0, 3.0, 2.0, 1.0])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # killed here
    train(tmp_path, [4.0, 3.0, 2.5, 1.0, 0.5], first_step=2)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    with MetricsFile(tmp_path, 4) as log:
        assert [line["loss"] for line in log.kept] == [4, 3, 2.5, 1]
    train(tmp_path, [4.0])
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_signal_saves_after_the_step_and_ends(tmp_path, name, code):
    number = getattr(signal, name)
    before = signal.getsignal(number)

    def watch(line):
        if line["step"] == 4:
            os.kill(os.getpid(), number)
            # A second Ctrl-C ends the process at once; a second SIGTERM is the same wish again.
            if name == "SIGINT":
                assert signal.getsignal(number) == before
            else:
                os.kill(os.getpid(), number)

    saved = []
    with Preemption() as preemption:
        train(tmp_path, STEADY, saved=saved, stop=preemption, watchers=[watch])
    assert (saved, preemption.exit_code) == ([2, 4, 5], code)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    assert signal.getsignal(number) == before


def test_nobody_asked(tmp_path):
    saved = []
    with Preemption() as preemption:
        train(tmp_path, [1.0, 1.0, 1.0], saved=saved, stop=preemption)
    assert (saved, preemption.exit_code) == ([2, 3], 0)


CHILD = """
import os, pathlib, signal, sys
log = pathlib.Path(sys.argv[1])
log.write_text(log.read_text() + "x" if log.exists() else "x")
end = sys.argv[2:][min(len(log.read_text()), len(sys.argv) - 2) - 1]
os.kill(os.getpid(), signal.SIGKILL) if end == "kill" else sys.exit(int(end))
"""


@pytest.mark.parametrize(
    ("ends", "max_restarts", "starts", "code"),
    [
        (["kill", "75", "1", "0"], 9, 4, 0),
        (["kill"], 2, 3, 137),
        (["2"], 9, 1, 2),
        (["kill", "143"], 9, 2, 143),
        (["1"], 0, 1, 1),
    ],
)
def test_a_run_is_started_again_where_that_may_help(tmp_path, ends, max_restarts, starts, code):
    said = []
    command = [sys.executable, "-c", CHILD, str(tmp_path / "log"), *ends]
    assert supervise(command, max_restarts, wait=0.01, say=said.append) == code
    assert len((tmp_path / "log").read_text()) == starts
    assert len(said) == starts - 1
    if starts > 2:
        assert said[:2] == [
            "the run ended with 137; start 2 follows in 0.01 s",
            f"the run ended with {ends[1] if ends[1:] else 137}; start 3 follows in 0.02 s",
        ]


def test_supervisor_passes_the_signal_on(tmp_path):
    child = "import signal, sys; signal.signal(15, lambda *_: sys.exit(143)); signal.pause()"
    code = (
        "import sys, threading, os, signal\n"
        "from jaxtp.train.restarts import supervise\n"
        "threading.Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        f"sys.exit(supervise([sys.executable, '-c', {child!r}], 3, say=print))"
    )
    assert supervise([sys.executable, "-c", code], 0, say=print) == 143


def test_exit_codes_say_whether_to_start_again():
    retried = {cls for cls in errors.JaxtpError.registry.values() if cls.exit_code not in FINAL}
    assert CommunicationTimeout in retried
    assert all(cls.exit_code == 75 for cls in retried)
    assert TrainingDiverged.exit_code in FINAL
