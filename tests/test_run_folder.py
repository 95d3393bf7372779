"""A run folder has one owner; real processes hold it here, other machines are played by files."""

import dataclasses
import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxtp import Checkpoints
from jaxtp.errors import BadConfig, BadRunFolder, RunFolderTaken
from jaxtp.io import disk, stores
from jaxtp.train import run_folder
from jaxtp.train.guard import Guard
from jaxtp.train.metrics import MetricsFile
from jaxtp.train.run_folder import hold

HOLD = """
import sys, time
from pathlib import Path
from jaxtp.train import run_folder
run_folder.BEAT_SECONDS = 0.2
with run_folder.hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """A process that holds `tmp_path`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def owners(folder):
    return sorted(path.name for path in folder.glob("*owner*"))


def test_a_living_owner_is_named_and_a_dead_one_outlived_at_once(tmp_path, other):
    with pytest.raises(RunFolderTaken) as caught, hold(tmp_path):
        pass
    text = str(caught.value)
    assert f"TP092 at {tmp_path}: it belongs to a run that still lives: process {other.pid}" in text
    assert os.uname().nodename in text
    assert f"kill {other.pid} on " in text
    assert caught.value.exit_code == 75
    other.send_signal(signal.SIGSTOP)  # it lives still
    with pytest.raises(RunFolderTaken), hold(tmp_path):
        pass
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet forgotten
    start = time.monotonic()
    with hold(tmp_path) as lease:
        assert time.monotonic() - start < 1
        assert lease.owner.number == 2
        assert owners(tmp_path) == ["owner-000002.json"]
    assert owners(tmp_path) == []


def test_an_owner_whose_file_is_deleted_ends_by_itself(tmp_path, other):
    [name] = owners(tmp_path)
    (tmp_path / name).unlink()
    with hold(tmp_path):
        assert other.wait(10) == 2
        err = other.stderr.read()
        assert f"TP093 at {tmp_path}: this run does not own the folder any more" in err
        assert f"taken over by process {os.getpid()} on " in err or "whoever deleted" in err
        assert owners(tmp_path) == ["owner-000001.json"]


def test_blocks_may_be_nested(tmp_path):
    with hold(tmp_path) as outer:
        with hold(tmp_path) as inner:
            assert inner is outer
        assert owners(tmp_path) != []


def elsewhere(folder, **fields):
    """Makes a folder another machine's."""
    owner = run_folder._this_process(7)
    owner = dataclasses.replace(owner, host="node7", kernel="another", **fields)
    path = folder / "owner-000007.json"
    path.write_text(json.dumps(dataclasses.asdict(owner)))
    return path


def test_an_owner_on_another_machine_lives_as_long_as_it_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(run_folder, "BEAT_SECONDS", 0.5)
    path, stopped, said = elsewhere(tmp_path), threading.Event(), []

    def beat():
        while not stopped.wait(0.5):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with pytest.raises(RunFolderTaken, match="on node7, since "), hold(tmp_path, say=said.append):
        pass
    stopped.set()
    thread.join()
    with hold(tmp_path, say=said.append) as lease:
        assert lease.owner.number == 8
    assert len(said) == 2
    assert "belonged to process" in said[0]
    assert "on node7: waiting up to 1.5 s" in said[0]
    # Silent for long: nobody waits.
    os.utime(elsewhere(tmp_path), (time.time() - 100,) * 2)
    with hold(tmp_path, say=said.append):
        assert len(said) == 2


def test_of_many_that_outlive_one_owner_one_wins(tmp_path):
    for _ in range(5):
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        os.utime(elsewhere(tmp_path), (0, 0))
        won, refused = [], []

        def take(won=won, refused=refused):
            try:
                won.append(run_folder._take(tmp_path, print))
            except RunFolderTaken as error:
                refused.append(error)

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(won), len(refused)) == (1, 7)
        assert owners(tmp_path) == [f"owner-{won[0].number:06d}.json"]


def test_what_a_frozen_owner_finds_when_it_wakes(tmp_path):
    with hold(tmp_path / "a") as lease:
        lease.check(now=True)
        shutil.copy(elsewhere(tmp_path), tmp_path / "a")
        with pytest.raises(BadRunFolder, match=r"taken over by process \d+ on node7"):
            lease.check(now=True)
        lease._closed.set()
    with hold(tmp_path / "b") as lease:
        lease._closed.set()
        (tmp_path / "b").rename(tmp_path / "c")
        with pytest.raises(BadRunFolder, match="No such file or directory\n  fix: the folder has"):
            lease.check(now=True)


def test_disks_that_refuse_are_coded(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRunFolder, match=r"TP093 at .*/file/run: cannot be written: Not a dir"):
        hold(tmp_path / "file" / "run").__enter__()

    def fill():
        with hold(tmp_path), open("/dev/full", "w") as file:
            file.write("x")

    with pytest.raises(BadRunFolder, match=r"cannot be written: No space left .*\n.*make room on"):
        fill()
    assert owners(tmp_path) == []
    with pytest.raises(FileNotFoundError), hold(tmp_path):
        open("/nowhere")  # noqa: SIM115


def test_metrics_that_are_refused_when_the_file_is_closed(tmp_path):
    """As a server of files does with what it took before; here the file is closed already."""
    path = tmp_path / "metrics.jsonl"

    def write():
        with MetricsFile(tmp_path) as log:
            log.write(1, {"loss": 1.0})
            links = {int(link.name): link for link in Path("/proc/self/fd").iterdir()}
            (number,) = (n for n, link in links.items() if os.path.realpath(link) == str(path))
            os.close(number)

    with pytest.raises(OSError, match=r"Bad file descriptor: '.*metrics\.jsonl'"):
        write()


def test_metrics_outlive_a_write_that_the_disk_breaks_off(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def write():
        with run_folder.hold(tmp_path) as lease, MetricsFile(tmp_path, 0, lease) as log:
            log.write(1, {"loss": 1.0})
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
            log.write(2, {"loss": 0.5})

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.raises(BadRunFolder, match=r"too large \(.*jsonl\)\n  fix: raise the limit of"):
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_text().endswith('\n{"step": ')
    # And whatever else a disk may leave behind.
    path.write_bytes(path.read_bytes() + b'\n\0\0\xff\n{}\n7\n{"step": null}\n{"step": 2}\n')
    with MetricsFile(tmp_path, 2) as log:
        assert log.kept == [{"step": 1, "loss": 1.0}, {"step": 2}]
        assert Guard("here", 2.0, log.kept).problem(3, {"loss": 1.0}) is None


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.ENOENT, errno.EIO, errno.EBUSY]
)
def test_room_is_asked_for_only_where_it_lacks(number):
    text = os.strerror(number)
    for error in (OSError(number, text), ValueError(f"INTERNAL: Error opening: {text}")):
        assert "make room" not in disk.remedy(error)
        assert re.search(r"run\.folder|put it back", disk.remedy(error))
    full = ValueError(f"RESOURCE_EXHAUSTED: Error writing: {os.strerror(errno.ENOSPC)}")
    assert disk.remedy(full).startswith("make room on the disk")


@pytest.mark.parametrize("address", [Path("s3://bucket/run"), "az://bucket/b"])
def test_stores_that_orbax_cannot_write_to_are_refused(address):
    for use in (Checkpoints, lambda folder: hold(Path(folder)).__enter__()):
        with pytest.raises(BadRunFolder, match=r"TP093 at (s3|az):/.*only for gs.*\n.*fix: mount"):
            use(address)
    with pytest.raises(BadRunFolder, match="TP093 at gs://: names no bucket"):
        Checkpoints("gs://")


def test_metrics_need_a_file_system():
    with pytest.raises(BadRunFolder, match=r"TP093 at gs:/.*line by line.*\n.*--run\.checkpoints"):
        stores.refuse_address(Path("gs://bucket/run"))
    stores.refuse_address("/runs/a:/b")


def test_a_store_needs_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(BadConfig, match=r'TP020.*gcsfs is not.*\n.*pip install "jaxtp\[remote\]"'):
        Checkpoints("gs://bucket/run")
