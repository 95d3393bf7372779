"""Several real processes over gloo: the numbers of one, and a coded end for every fault.

python -m pytest tests/legs/test_processes.py        about four minutes on two cores
"""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_folders

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "process_runs.py"
STEPS, EVERY = 6, 3
CONFIG = {
    "steps": STEPS,
    "seq_len": 16,
    "batch": {"size": 4},
    "mesh": {"tp": 4, "dp": 2},
    "precision": {"compute": "float32"},
    "run": {"checkpoint_every": EVERY, "eval_every": EVERY, "eval_windows": 2},
}
NUMBERS = ("loss", "grad_norm", "validation_loss")

HEARTBEAT = 4.0  # of process_runs.py, in seconds
SLACK = 5.0  # two busy cores
WORDS = ["the", "cat", "sat", "on", "a", "mat"]


class Runs:
    """Starts programs as one process or as several, with compiled programs kept between starts."""

    def __init__(self, root):
        self.root = root
        self.environment = run_folders.make(root, CONFIG, WORDS)

    def start(self, command, cwd=ROOT, **variables):
        return subprocess.Popen(
            [*map(str, command)],
            cwd=cwd,
            env=self.environment | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def train(self, folder, *flags, count=1, each=({}, {}), more=((), ()), cwds=(ROOT, ROOT)):
        """Processes of scripts/train.py; `each` and `more` are one's own variables and flags."""
        command = [sys.executable, ROOT / "scripts/train.py", self.root / "config.json"]
        command += ["--run.folder", self.root / folder, *flags]
        address, together = f"localhost:{free_port()}", []
        for i in range(count):
            own = {"JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(i), **each[i]}
            own["JAX_COORDINATOR_ADDRESS"] = address
            own = own if count > 1 else {}
            together.append(self.start([*command, *more[i]], cwds[i], **own))
        return together

    def metrics(self, folder):
        path = self.root / folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def free_port():
    # Where the roster's port, 4096 below, is no ephemeral one of the other processes here.
    while True:
        port = random.randrange(20000, 32000)
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port


def finish(processes, limit=150):
    """(exit code, standard output, standard error) of each; none outlives the limit."""
    end = time.monotonic() + limit
    try:
        results = [p.communicate(timeout=max(1, end - time.monotonic())) for p in processes]
    finally:
        for process in processes:
            process.kill()
    return [(p.returncode, out, err) for p, (out, err) in zip(processes, results, strict=True)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def alone(runs):
    """The metrics of one process with eight devices."""
    [(code, _, err)] = finish(runs.train("alone"))
    assert code == 0, err
    return runs.metrics("alone")


@pytest.fixture(scope="module")
def together(runs):
    """The metrics of two processes with four devices each."""
    (code, out, err), (other, quiet, _) = finish(runs.train("together", count=2))
    assert (code, other) == (0, 0), err
    assert "2 processes on 1 host, 8 devices\n" in out
    assert "probed 8 devices, 0 wrong" in out
    # The second repeats nothing of it. What it has are gloo's lines, and the threads that write
    # them do not wait for each other.
    said = {line for line in out.splitlines() if "ranks" not in line}
    assert len(said) > 10
    assert said & set(quiet.splitlines()) <= {""}
    return runs.metrics("together")


def differences(one, other):
    assert [line["step"] for line in one] == [line["step"] for line in other]
    return {
        name: max(abs(x[name] - y[name]) for x, y in zip(one, other, strict=True) if name in x)
        for name in NUMBERS
    }


def test_two_processes_train_and_evaluate_as_one(alone, together):
    found = differences(alone, together)
    print("one process against two:", found)  # noqa: T201
    assert len(together) == STEPS
    assert found["loss"] < 1e-6
    assert found["validation_loss"] < 1e-6
    assert found["grad_norm"] < 1e-5


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_what_some_processes_saved_others_resume(runs, alone, together, before, after):
    source, folder = {1: "alone", 2: "together"}[before], f"from{before}to{after}"
    shutil.copytree(runs.root / source, runs.root / folder)
    shutil.rmtree(runs.root / folder / "checkpoints" / str(STEPS))
    results = finish(runs.train(folder, count=after))
    assert [code for code, _, _ in results] == [0] * after, results[0][2]
    assert f"continuing after step {EVERY}" in results[0][1]
    found = differences({1: alone, 2: together}[before], runs.metrics(folder))
    print(f"{before} processes, resumed by {after}:", found)  # noqa: T201
    assert found["loss"] < 1e-6
    assert found["validation_loss"] < 1e-6


FAULTS = [
    # what happens in step 5, to whom, of how many, step_timeout in s (-1: no watchdog), s until the
    # others have ended
    ("kill", 1, 2, 0, 0),
    ("kill", 0, 2, 0, 0),
    ("kill", 2, 4, 0, 0),
    ("kill", 1, 4, -1, 0),
    ("stop", 1, 2, 0, HEARTBEAT),
    # And 2 s for a look at the table, which process 0 does not give.
    ("stop", 0, 2, 0, HEARTBEAT + 2),
    ("raise", 1, 2, 0, 0),
    ("raise", 0, 2, 0, 0),
    ("exit", 1, 4, -1, 0),
    ("exit", 0, 2, -1, 0),
    ("system-exit", 1, 2, -1, 0),
    ("system-exit", 0, 4, -1, 0),
    # It ends with 0 while the others wait for it.
    ("end", 1, 4, -1, 0),
    ("end", 0, 2, 0, 0),
    ("sleep", 1, 2, 2, 2),
]


@pytest.mark.parametrize(("fault", "culprit", "count", "step_timeout", "seconds"), FAULTS)
def test_a_lost_process_ends_the_others_in_bounded_time(
    runs, fault, culprit, count, step_timeout, seconds
):
    options = [f"fault={fault}", f"culprit={culprit}", f"seconds={step_timeout}"]
    address = f"localhost:{free_port()}"
    command = [sys.executable, WORKER, "steps", address, count]
    together = [runs.start([*command, i, *options]) for i in range(count)]
    others = [process for i, process in enumerate(together) if i != culprit]
    took, codes = 0.0, set()
    try:
        # The culprit's last line says when.
        while not (line := together[culprit].stdout.readline()).startswith("fault at"):
            assert line, together[culprit].stderr.read()
        for other in others:
            codes.add(other.wait(60))
            took = time.time() - float(line.split()[-1])
        if fault == "stop":
            together[culprit].send_signal(signal.SIGCONT)
        if fault != "sleep":
            codes.add(f"culprit {together[culprit].wait(30)}")
    finally:
        for process in together:
            process.kill()
        errors = [process.communicate()[1] for process in together]
    print(f"{fault} {culprit} of {count}: the others ended after {took:.1f} s")  # noqa: T201
    assert took < seconds + SLACK
    # JAX's own abort is 20 ms behind when process 0 dies, and may win on a busy machine.
    aborted = {-signal.SIGABRT} if culprit == 0 and fault == "kill" else set()
    codes_of = {"kill": -signal.SIGKILL, "stop": 75, "raise": 1, "exit": 3, "sleep": 75, "end": 75}
    own = codes_of.get(fault, 3 if sys.version_info >= (3, 12) else 75)
    assert codes - aborted <= {75, f"culprit {own}"}
    for err in (err for i, err in enumerate(errors) if i != culprit):
        assert "Traceback" not in err
        if step_timeout >= 0:
            assert "TP002 at step 5: " in err
            assert f"mesh tp=8 over {count} processes" in err
        assert "TP002 at " in err
        assert "NCCL_DEBUG=WARN" in err
        assert f"process {culprit}" in err
        if fault == "raise":
            assert "it failed with no more text" in err
        if fault == "exit":
            assert "it failed with exit code 3" in err
        if fault == "end":
            assert f"process {culprit} ended without an error, and this one waits" in err
        if fault == "sleep":
            assert "in sleep" in err


def test_a_process_may_work_on_when_the_others_have_ended(runs):
    command = [sys.executable, WORKER, "alone_at_last", f"localhost:{free_port()}", 2]
    (code, out, err), (other, _, _) = finish([runs.start([*command, i]) for i in (0, 1)])
    assert (code, other) == (0, 0), err
    assert "sum 262144.0" in out


@pytest.mark.parametrize("there", [0, 1])
def test_a_process_that_never_starts_is_named(runs, there):
    start = time.monotonic()
    [(code, _, err)] = finish(
        [
            runs.start(
                [sys.executable, WORKER, "join", f"localhost:{free_port()}", 2, there, "timeout=4"]
            )
        ]
    )
    assert time.monotonic() - start < 4 + 2 * SLACK  # with the start of Python
    assert code == 75
    missing = "process 1 of 2 did not come in 4 s" if there == 0 else "did not reach process 0"
    assert f"TP002 at start-up: {missing}" in err or missing in err


def test_a_coordinators_port_that_is_taken_is_refused_by_all(runs):
    with socket.create_server(("", free_port())) as other:
        address = f"localhost:{other.getsockname()[1]}"
        both = finish([runs.start([sys.executable, WORKER, "join", address, 2, i]) for i in (0, 1)])
    tried = {err.rpartition("such as ")[2].strip() for _, _, err in both}
    for code, _, err in both:
        assert code == 2
        assert "TP015: process 0 cannot listen on port" in err
    [address] = tried
    both = finish([runs.start([sys.executable, WORKER, "join", address, 2, i]) for i in (0, 1)])
    assert [code for code, _, _ in both] == [0, 0]


@pytest.mark.parametrize(
    ("variables", "flags", "difference"),
    [
        ({}, ("--steps", "7"), "steps: 6 on process 0, 7 on process 1"),
        (
            {"JAX_DEFAULT_MATMUL_PRECISION": "highest"},
            (),
            "jax_default_matmul_precision: None on process 0, highest on process 1",
        ),
        (
            {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"},
            (),
            "XLA_FLAGS:  on process 0, --xla_cpu_enable_fast_math=true on process 1",
        ),
    ],
)
def test_processes_that_differ_end_before_the_first_step(runs, variables, flags, difference):
    start = time.monotonic()
    both = finish(runs.train("differ", count=2, each=({}, variables), more=((), flags)))
    assert time.monotonic() - start < 60
    for code, _, err in both:
        assert code == 2
        assert "TP014: the processes differ in 1 facts" in err
        assert difference in err
    assert runs.metrics("differ") == []


def test_other_text_behind_the_same_path_is_noticed(runs):
    cwds = [runs.root / "a", runs.root / "b"]
    for cwd in cwds:
        shutil.copytree(runs.root / "text", cwd / "text")
    with (cwds[1] / "text" / "7.txt").open("a") as file:
        file.write(".")
    both = finish(runs.train("differ", "--data.files", "text/*.txt", count=2, cwds=cwds))
    for code, _, err in both:
        assert code == 2
        assert "TP014: the processes differ in 1 facts" in err
        assert "SHA-256 of the text: " in err
    assert runs.metrics("differ") == []


def test_processes_that_diverge_test_their_devices(runs):
    both = finish(runs.train("diverge", "--optimizer.learning_rate", "1e30", count=2))
    for code, _, err in both:
        assert code == 2
        assert "TP131" in err
    assert both[0][1].count("probed 8 devices, 0 wrong") == 2  # at the start and at the end


def test_processes_of_one_host_measure_its_links_and_no_network(runs):
    """As one process per GPU is started: what they exchange says nothing of the NICs."""
    machine, address = runs.root / "machine.json", f"localhost:{free_port()}"
    command = [sys.executable, "-m", "jaxtp.cli.commands", "probe", "--cpu-devices", "2"]
    command += ["--measure", machine]
    shared = {"JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": address}
    both = [runs.start(command, **shared, JAX_PROCESS_ID=number) for number in "01"]
    for code, _, err in finish(both):
        assert code == 0, err
    kind = json.loads(machine.read_text())
    assert (kind["host_gpus"], kind["nvlink_domain"]) == (2, 2)
    assert list(kind["tables"]["all-reduce"]) == ["2"]
    assert kind["network_share"] < 1  # the data sheet's


def test_supervised_processes_start_again_after_one_is_killed(runs, together):
    both = runs.train("again", "--run.max_restarts", "2", "--run.checkpoint_every", "1", count=2)
    while len(runs.metrics("again")) < 2:
        time.sleep(0.1)
        assert both[0].poll() is None
    children = Path(f"/proc/{both[1].pid}/task/{both[1].pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    (code, out, err), (other, _, _) = finish(both)
    assert (code, other) == (0, 0), err
    assert "TP002" in err
    assert "the run ended with 75; start 2 follows" in out
    # The same processes resume bit by bit.
    assert set(differences(together, runs.metrics("again")).values()) == {0}


def test_a_run_goes_on_with_the_nodes_that_are_left(runs):
    """Four processes, three after one is lost, then four again: the curve is that of four."""
    flags = ["--mesh.tp", "2", "--mesh.dp", "4", "--batch.size", "12"]
    flags += ["--steps", "12", "--run.checkpoint_every", "2", "--run.eval_windows", "12"]
    environment = [{"JAX_NUM_CPU_DEVICES": "2"}] * 4
    (code, _, err), *_ = finish(
        runs.train("calm", *flags, count=4, each=environment, more=[()] * 4, cwds=[ROOT] * 4),
        limit=400,  # four processes compile it
    )
    assert code == 0, err

    def start(count):
        arguments = {"more": [()] * 4, "cwds": [ROOT] * 4}
        return runs.train("elastic", *flags, count=count, each=environment, **arguments)

    def lose_one(processes, lost, step):
        while len(runs.metrics("elastic")) < step:
            time.sleep(0.05)
            assert processes[0].poll() is None, processes[0].communicate()
        processes[lost].kill()
        results = finish(processes)
        assert [code for i, (code, _, _) in enumerate(results) if i != lost] == [75] * (
            len(processes) - 1
        )
        names = [path.name for path in (runs.root / "elastic" / "checkpoints").iterdir()]
        return results[0][1], max(int(name) for name in names if name.isdigit())

    _, newest = lose_one(start(4), 3, 4)
    saved = [newest]
    out, newest = lose_one(start(3), 1, 7)
    assert "6 of 8 devices are there: continuing on 6, mesh dp=3, tp=2; the batch stays 12 =" in out
    assert "  mesh.dp was 4, is 3\n" in out
    continued = [int(out.partition("continuing after step ")[2].split()[0])]
    saved.append(newest)
    results = finish(start(4))
    assert [code for code, _, _ in results] == [0] * 4, results[0][2]
    out = results[0][1]
    assert "devices are there" not in out
    assert "  mesh.dp was 3, is 4\n" in out
    continued.append(int(out.partition("continuing after step ")[2].split()[0]))
    assert continued == saved
    found = differences(runs.metrics("calm"), runs.metrics("elastic"))
    print(f"4 processes, 3 after step {saved[0]}, 4 after step {saved[1]}:", found)  # noqa: T201
    assert found["loss"] < 1e-5
    assert found["validation_loss"] < 1e-5


def test_a_process_that_no_mesh_needs_ends_and_the_others_go_on(runs, together):
    shutil.copytree(runs.root / "together", runs.root / "spare")
    environment = [{"JAX_NUM_CPU_DEVICES": "2"}] * 3
    results = finish(
        runs.train(
            "spare", "--steps", "8", count=3, each=environment, more=[()] * 3, cwds=[ROOT] * 3
        )
    )
    assert [code for code, _, _ in results] == [0] * 3, results[0][2]
    line = "6 of 8 devices are there: continuing on 4, mesh dp=2, tp=2; the batch stays 4 = 2 x 1 "
    assert line in results[0][1]
    assert f"process 2 has nothing to do: {line}" in results[2][1]
    assert [line["step"] for line in runs.metrics("spare")] == list(range(1, 9))


def test_open_mpi_is_left_to_jax(runs):
    launcher = {
        "OMPI_MCA_orte_hnp_uri": f"{random.randrange(4096)}.0;tcp://127.0.0.1:9",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    }
    both = [
        runs.start(
            [sys.executable, WORKER, "launched"],
            **launcher,
            OMPI_COMM_WORLD_RANK=str(i),
            OMPI_COMM_WORLD_LOCAL_RANK=str(i),
        )
        for i in range(2)
    ]
    for code, _, err in finish(both):
        assert code == 0, err


def test_slurm_script_saves_before_the_limit_and_queues_again(runs):
    """`srun` and `scontrol` are stand-ins: two local processes with Slurm's variables."""
    tools = runs.root / "tools"
    tools.mkdir()
    (tools / "srun").write_text(
        """#!/bin/bash
while [[ "$1" == --* ]]; do shift; done
export SLURM_NTASKS=2 SLURM_STEP_NODELIST=localhost SLURM_STEP_TASKS_PER_NODE=2 SLURM_NODEID=0
for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & tasks+=($!); done
trap 'kill -TERM "${tasks[@]}"' TERM
while kill -0 "${tasks[@]}" 2>/dev/null; do wait "${tasks[0]}"; code=$?; done
exit $code
"""
    )
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {runs.root}/queued\n')
    for tool in ("srun", "scontrol"):
        (tools / tool).chmod(0o755)
    job = runs.start(
        ["bash", "scripts/slurm_train.sbatch", runs.root / "config.json"]
        + ["--run.folder", runs.root / "slurm", "--steps", "2000", "--run.eval_every", "2000"],
        PATH=f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        SLURM_JOB_ID=str(random.randrange(4096)),
    )
    while len(runs.metrics("slurm")) < 2:
        time.sleep(0.1)
        assert job.poll() is None
    job.send_signal(signal.SIGUSR1)
    [(code, out, err)] = finish([job])
    assert code == 143, err
    last = runs.metrics("slurm")[-1]["step"]
    saved = {int(p.name) for p in (runs.root / "slurm" / "checkpoints").glob("[0-9]*")}
    assert last in saved
    assert "stopped because it was asked to" in out
    assert (runs.root / "queued").read_text().startswith("requeue ")


@pytest.mark.parametrize("mode", ["local", "batch", "params", "plan", "seed"])
def test_a_library_program_compares_what_its_processes_give(mode):
    """What differs is said by all, a seed of `init_sharded` too; local rows make a global batch."""
    script = Path(__file__).parents[1] / "library_processes.py"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, str(script), mode, number, port], stdout=subprocess.PIPE, text=True
        )
        for number in ("0", "1")
    ]
    said = [process.communicate(timeout=120)[0].splitlines()[-1] for process in running]
    if mode == "local":
        assert said == ["sum 496.0"] * 2
    else:
        assert all(line.startswith("TP014 ") for line in said), said
