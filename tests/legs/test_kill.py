"""Training survives being killed anywhere: the end is, bit for bit, that of a run left in peace.

Twenty times the process gets SIGKILL: after a random step, while a checkpoint is being written,
when its metadata appear, when its folder gets its name and older ones go. The points are random but
seeded; what the process is doing at that moment is up to the machine, and is printed.
"""

import collections
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import run_folders

ROOT = Path(__file__).parents[2]
STEPS, EVERY, KILLS = 100, 2, 20
CONFIG = {
    "model": "llama-tiny",
    "steps": STEPS,
    "seq_len": 16,
    "batch": {"size": 4},
    "mesh": {"tp": 2, "fsdp": 2, "dp": 1},
    "zero": {"stage": 1},
    "optimizer": {"learning_rate": 1e-2},
    "run": {"checkpoint_every": EVERY, "eval_every": 1000, "eval_windows": 2, "keep_last": 2},
}
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "it", "run"]


class Runs:
    """Starts scripts/train.py, with compiled programs kept between starts."""

    def __init__(self, root):
        self.root = root
        self.environment = run_folders.make(root, CONFIG, WORDS)

    def start(self, name, *flags, folder="", prefix=()):
        """Starts a run in a folder, by default the one of its own name, where its output goes."""
        (self.root / name).mkdir(exist_ok=True)
        command = [*prefix, sys.executable, "scripts/train.py", self.root / "config.json", *flags]
        with (self.root / name / "out").open("w") as out:
            return subprocess.Popen(
                [*command, "--run.folder", self.root / (folder or name)],
                cwd=ROOT,
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def said(self, name):
        return (self.root / name / "out").read_text()

    def finish(self, name, *flags):
        code = self.start(name, *flags).wait()
        assert code == 0, self.said(name)
        return self.said(name)

    def checkpoints(self, name):
        """Names of what lies in the folder of checkpoints."""
        folder = self.root / name / "checkpoints"
        return {path.name for path in folder.iterdir()} if folder.exists() else set()

    def steps(self, name):
        return sorted(int(n) for n in self.checkpoints(name) if n.isdigit())

    def lines(self, name):
        file = self.root / name / "metrics.jsonl"
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    made = Runs(tmp_path_factory.mktemp("runs"))
    made.finish("peace")
    return made


def unfinished(runs, since=0.0):
    """Folders of checkpoints without their final names, made after a point in time."""
    folder = runs.root / "killed" / "checkpoints"
    found = [folder / name for name in runs.checkpoints("killed") if "tmp" in name]
    return [path for path in found if path.exists() and path.stat().st_ctime > since]


def after_step(runs, chance):
    """Anywhere from the second step after the start to a few later."""
    wanted = chance.randint(2, 5)
    fresh = set(runs.lines("killed"))
    return lambda: len(set(runs.lines("killed")) - fresh) >= wanted, chance.uniform(0, 0.03)


def while_saving(runs, chance):
    """A folder for the next checkpoint is there, without its final name."""
    now = time.time()
    return lambda: bool(unfinished(runs, now)), chance.uniform(0, 0.05)


def in_metadata(runs, chance):
    """One of the JSON files of an unfinished checkpoint is there."""
    wanted = chance.choice(("jaxtp*", "*/metadata", "*/_METADATA", "*/sizes.json", "*/_sharding"))
    now = time.time()
    return lambda: any(any(folder.glob(wanted)) for folder in unfinished(runs, now)), 0


def at_the_rename(runs, chance):
    """A checkpoint has just got its name; older ones are being deleted."""
    before = set(runs.steps("killed"))
    return lambda: bool(set(runs.steps("killed")) - before), chance.uniform(0, 0.01)


POINTS = (after_step, while_saving, in_metadata, at_the_rename)


def numbers(folder):
    """Every array of a checkpoint by path."""
    handler = ocp.StandardCheckpointHandler()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    metadata = dict(handler.metadata(folder / "state"))
    like = {p: jax.ShapeDtypeStruct(m.shape, m.dtype, sharding=device) for p, m in metadata.items()}
    return handler.restore(folder / "state", args=ocp.args.StandardRestore(like))


@pytest.mark.timeout(900)
def test_twenty_kills_change_nothing(runs):
    chance = random.Random(0)
    points = list(itertools.islice(itertools.cycle(POINTS), KILLS))
    chance.shuffle(points)
    left, lost = collections.Counter(), 0
    for point in points:
        steps = runs.steps("killed")
        is_reached, pause = point(runs, chance)
        process = runs.start("killed")
        while not is_reached():
            assert process.poll() is None, runs.said("killed")
            time.sleep(0.0005)
        time.sleep(pause)
        process.kill()
        assert process.wait() == -signal.SIGKILL
        # It had gone on after the newest complete checkpoint, without finding fault with any.
        said = runs.said("killed")
        expected = [str(steps[-1])] if steps else []
        assert re.findall(r"continuing after step (\d+)", said) == expected
        assert all("never finished" in line for line in said.splitlines() if "skipped" in line)
        left["an unfinished checkpoint" if unfinished(runs) else "complete ones only"] += 1
        done = [json.loads(line)["step"] for line in runs.lines("killed") if line.endswith("}")]
        newest = (runs.steps("killed") or [0])[-1]
        lost = max(lost, done[-1] - newest)
    said = runs.finish("killed")
    print(f"\n{KILLS} kills left {dict(left)}; at most {lost} steps were lost")  # noqa: T201
    assert left["an unfinished checkpoint"] >= 5
    # A save every two steps, one more under way, one more step done.
    assert lost <= 2 * EVERY + 1

    expected, found = (
        numbers(runs.root / n / "checkpoints" / str(STEPS)) for n in ("peace", "killed")
    )
    assert expected.keys() == found.keys()
    for path in expected:
        np.testing.assert_array_equal(found[path], expected[path], err_msg=path)
    losses = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, runs.lines(n))]
        for n in ("peace", "killed")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == STEPS
    assert runs.checkpoints("killed") == {str(STEPS - EVERY), str(STEPS)}


def child_of(process):
    listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(listed[0]) if listed else 0


def wait_until(is_so, runs, name):
    for _ in range(6000):
        if is_so():
            return
        time.sleep(0.01)
    raise AssertionError(runs.said(name))


def test_supervised_run_comes_back_by_itself_and_stops_when_asked(runs):
    name = "supervised"
    process = runs.start(name, "--run.max_restarts", "2", "--steps", "100000")
    wait_until(lambda: len(runs.lines(name)) >= 5, runs, name)
    os.kill(child_of(process), signal.SIGKILL)
    wait_until(lambda: "continuing after step" in runs.said(name), runs, name)
    before = runs.steps(name)[-1]
    wait_until(lambda: len(runs.lines(name)) >= before + 3, runs, name)
    # A second run in the same folder is refused, and changes nothing there.
    second = runs.start("second", "--steps", "100000", folder=name)
    assert second.wait() == 75
    assert f"still lives: process {child_of(process)} on " in runs.said("second")
    assert f"fix: another run.folder; or end that run (kill {child_of(process)} on " in runs.said(
        "second"
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143, runs.said(name)
    said = runs.said(name)
    assert "the run ended with 137; start 2 follows in 1 s" in said
    assert f"continuing after step {before}\n" in said
    assert "stopped because it was asked to; the same command continues" in said
    steps = [json.loads(line)["step"] for line in runs.lines(name)]
    assert steps == list(range(1, len(steps) + 1))
    assert runs.steps(name)[-1] == steps[-1]


# Real disks: a small one in memory, in a mount namespace of the run's own.
DISKS = {
    "full, metrics": (
        "mount -t tmpfs -o size=64k none $D && head -c 40000 /dev/zero > $D/other",
        ["--run.checkpoint_every", "0"],
        ("TP093", "No space left on device", "fix: make room on the disk"),
    ),
    "full, checkpoint": (
        "mount -t tmpfs -o size=200k none $D",
        [],
        ("TP090", "cannot be written", "fix: make room on the disk"),
    ),
    "read-only": (
        "mount -t tmpfs -o ro,size=64k none $D",
        [],
        ("TP093", "Read-only file system", "fix: mount the disk for writing"),
    ),
    "gone": (
        "(until [ -s $D/metrics.jsonl ]; do sleep 0.1; done; sleep 1; mv $D $D.moved) & true",
        ["--run.checkpoint_every", "0"],
        ("TP093", "No such file or directory", "fix: the folder has been moved or deleted"),
    ),
}


@pytest.mark.parametrize("disk", DISKS)
def test_a_disk_that_refuses_ends_a_run_for_good(runs, disk):
    prepare, flags, texts = DISKS[disk]
    (runs.root / "disk").mkdir(exist_ok=True)
    script = f'D={runs.root / "disk"}; {prepare}; exec "$@"'
    prefix = ["unshare", "--map-root-user", "--mount", "bash", "-c", script, "bash"]
    flags = [*flags, "--run.max_restarts", "3", "--steps", "100000"]
    process = runs.start("disk-out", *flags, folder="disk", prefix=prefix)
    assert process.wait(120) == 2, runs.said("disk-out")
    said = runs.said("disk-out")
    assert all(text in said for text in texts), said
    assert "follows in" not in said  # no restart
    # Orbax logs what its own threads meet.
    assert "Traceback" not in said or disk == "full, checkpoint"
    assert "Event loop is closed" not in said
    assert ("make room" in said) == ("full" in disk)


def test_run_goes_on_in_pipeline_stages(runs):
    shutil.copytree(runs.root / "peace", runs.root / "moved")
    flags = "--mesh.pp 2 --mesh.tp 4 --mesh.fsdp 1 --zero.stage 0 --pipeline.micro_batches 2"
    said = runs.finish("moved", *flags.split(), "--steps", str(STEPS + 4))
    assert f"continuing after step {STEPS}\n" in said
    assert "  mesh.pp was 1, is 2\n" in said
    losses = [json.loads(line)["loss"] for line in runs.lines("moved")]
    assert len(losses) == STEPS + 4
    assert max(losses[-4:]) < losses[0] / 2
