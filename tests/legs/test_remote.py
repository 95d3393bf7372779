"""Checkpoints in a bucket of Google Cloud Storage, played by an emulator over real HTTP.

    python -m pytest tests/legs/test_remote.py        about half a minute on two cores

Needs gcsfs (`jaxtp[remote]`) and gcp-storage-emulator. The emulator checks no credentials; a server
that refuses stands for an account without rights.
"""

import contextlib
import dataclasses
import http.server
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import run_folders

ROOT = Path(__file__).parents[2]
CONFIG = {
    "steps": 100_000,
    "seq_len": 16,
    "batch": {"size": 4},
    "mesh": {"tp": 2, "dp": 2},
    "precision": {"compute": "float32"},
    "run": {"checkpoint_every": 2, "eval_every": 100_000, "eval_windows": 2, "keep_last": 2},
}
WORDS = ["the", "cat", "sat", "on", "a", "mat"]


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture(scope="module", autouse=True)
def store():
    """gcsfs's view of the bucket; gcsfs and TensorStore find it by their own variables."""
    port = free_port()
    command = [sys.executable, ROOT / "tests/legs/bucket.py", str(port)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as server:
        assert server.stdout.readline() == "ready\n"
        address = f"http://localhost:{port}"
        os.environ["STORAGE_EMULATOR_HOST"] = os.environ["TENSORSTORE_GCS_HTTP_URL"] = address
        os.environ["GOOGLE_AUTH_TOKEN_FOR_TESTING"] = "any"
        os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # asks another server
        yield importlib.import_module("jaxtp.io.stores").file_system()
        server.kill()


def state(tp, number):
    import jax
    import jax.numpy as jnp

    import jaxtp

    mesh = jaxtp.make_mesh(tp=tp, devices=jax.devices()[:tp])
    kernel = jnp.arange(4096.0).reshape(64, 64) + number
    return {"kernel": jax.device_put(kernel, jax.NamedSharding(mesh, jax.P("tp")))}


def test_a_bucket_holds_checkpoints_as_a_disk_does(store):
    import jaxtp

    folder, path = "gs://bucket/library", "bucket/library"
    with jaxtp.Checkpoints(folder, keep_last=2) as checkpoints:
        assert checkpoints.steps() == []
        for number in (1, 2, 3):
            checkpoints.save(number, state(4, number), extra={"seed": number})
        assert checkpoints.steps() == [2, 3]
        with pytest.raises(jaxtp.errors.BadCheckpoint, match="step 3 does not come after"):
            checkpoints.save(3, state(4, 3))
    assert {name.split("/")[2] for name in store.find(path)} == {"2", "3"}

    def read(skipped=None):
        """The newest on another mesh; step 3 is skipped for what matches."""
        with jaxtp.Checkpoints(folder) as checkpoints:
            if skipped is None:
                return checkpoints.restore(state(2, 0))
            with pytest.warns(
                jaxtp.errors.JaxtpWarning, match=f"library/3: skipped, .*({skipped})"
            ):
                return checkpoints.restore(state(2, 0))

    restored = read()
    assert (restored.step, restored.extra) == (3, {"seed": 3})
    assert (restored.state["kernel"] == state(2, 3)["kernel"]).all()
    for file in ("state/manifest.ocdbt", "jaxtp/metadata", "state/_METADATA"):
        good = store.cat_file(f"{path}/3/{file}")
        bad = bytearray(good)
        bad[len(bad) // 2] ^= 1
        store.pipe_file(f"{path}/3/{file}", bytes(bad))
        assert read("not what was written|JSON").step == 2
        store.pipe_file(f"{path}/3/{file}", good[:-1])
        assert read("of .* bytes|not what was written|JSON").step == 2
        store.pipe_file(f"{path}/3/{file}", good)
    data = next(name for name in store.find(path) if "/3/state/ocdbt.process_0/d/" in name)
    good = store.cat_file(data)
    store.rm_file(data)
    with jaxtp.Checkpoints(folder) as checkpoints:
        with pytest.warns(jaxtp.errors.JaxtpWarning, match="has 0 of "):
            assert checkpoints.restore(state(2, 0)).step == 2
        checkpoints.save(5, state(2, 5))
        assert checkpoints.steps() == [2, 5]
    assert {name.split("/")[2] for name in store.find(path)} == {"2", "3.set-aside", "5"}
    # What a killed process leaves behind is no checkpoint, and makes room.
    store.rm_file(f"{path}/5/commit_success.txt")
    with jaxtp.Checkpoints(folder) as checkpoints:
        assert checkpoints.steps() == [2]
        with pytest.warns(jaxtp.errors.JaxtpWarning, match=r"library/5: skipped, it was never fin"):
            checkpoints.restore(state(2, 0))
        checkpoints.save(5, state(2, 6))
    assert (read().state["kernel"] == state(2, 6)["kernel"]).all()


def test_a_bucket_has_one_owner(monkeypatch):
    import jaxtp
    from jaxtp.io import stores
    from jaxtp.io.owner_files import owner_files
    from jaxtp.train import run_folder

    place = stores.as_place("gs://bucket/owned")
    files = owner_files(place)
    with run_folder.hold(place) as lease:
        lease.check(now=True)
        assert files.numbers() == [1]
        mine = run_folder._this_process(2)
        theirs = dataclasses.replace(mine, host="node7", kernel="another")
        assert files.create(2, json.dumps(dataclasses.asdict(theirs)))
        with pytest.raises(jaxtp.errors.BadRunFolder, match=r"taken over by process .* on node7"):
            lease.check(now=True)
        lease._closed.set()
    # Of many at once one takes it.
    taken = []

    def take():
        with contextlib.suppress(jaxtp.errors.RunFolderTaken):
            taken.append(run_folder._take(other, print))

    other, threads = stores.as_place("gs://bucket/contested"), []
    for _ in range(6):
        threads.append(threading.Thread(target=take))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
    assert owner_files(other).numbers() == [taken[0].number]
    # It lives as long as it beats, whatever the clocks say; then it is outlived.
    monkeypatch.setattr(run_folder, "LEASE_SECONDS", 1.5)
    monkeypatch.setattr(run_folder, "BEAT_SECONDS", 0.5)
    done = threading.Event()

    def beat():
        while not done.wait(0.3):
            files.renew(2)

    thread = threading.Thread(target=beat)
    thread.start()
    with (
        pytest.raises(jaxtp.errors.RunFolderTaken, match="on node7, since "),
        run_folder.hold(place),
    ):
        pass
    done.set()
    thread.join()
    with run_folder.hold(place) as lease:
        assert lease.owner.number == 3
        assert files.numbers() == [3]
        # Deleting its file ends it, and a heartbeat does not bring the file back.
        files.delete(3)
        with pytest.raises(jaxtp.errors.BadRunFolder, match="whoever deleted its file"):
            lease.check(now=True)
        assert files.numbers() == []
        lease._closed.set()


class Refusal(http.server.BaseHTTPRequestHandler):
    """An account without rights."""

    def refuse(self):
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "no storage.objects.list access"}}')

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = refuse

    def log_message(self, *_):
        pass


TRY = """
import sys, time
import jax, jaxtp
start = time.monotonic()
for use in (lambda c: c.steps(), lambda c: c.save(1, {"a": jax.numpy.ones(8)})):
    try:
        use(jaxtp.Checkpoints(sys.argv[1]))
    except jaxtp.errors.JaxtpError as error:
        print(str(error).replace(chr(10), " "))
print("seconds", time.monotonic() - start)
"""


def said_to(address, **variables):
    done = subprocess.run(
        [sys.executable, "-c", TRY, address],
        env=os.environ | variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    *said, seconds = done.stdout.splitlines()
    assert float(seconds.split()[1]) < 20
    return said


def test_what_a_store_refuses_is_coded():
    server = http.server.ThreadingHTTPServer(("localhost", 0), Refusal)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://localhost:{server.server_port}"
    forbidden = {"STORAGE_EMULATOR_HOST": address, "TENSORSTORE_GCS_HTTP_URL": address}
    for said, fix in (
        (said_to("gs://missing/run"), "fix: name a bucket that is there, or make it"),
        (said_to("gs://bucket/run", **forbidden), "fix: credentials for an account with roles/"),
    ):
        assert len(said) == 2
        for line, verb in zip(said, ("listed", "written"), strict=True):
            assert "TP090 at gs://" in line
            assert f"cannot be {verb}: " in line
            assert fix in line
    server.shutdown()
    server.server_close()


def test_a_run_of_two_processes_is_killed_and_continues_from_the_bucket(tmp_path):
    import jaxtp
    from jaxtp.io import stores
    from jaxtp.train import run_folder

    environment = run_folders.make(tmp_path, CONFIG, WORDS)
    command = [sys.executable, ROOT / "scripts/train.py", tmp_path / "config.json"]

    def start(count):
        own = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": "2"}
        each = [own | {"JAX_PROCESS_ID": str(i)} if count > 1 else {} for i in range(count)]
        flags = ["--run.folder", tmp_path / "a", "--run.checkpoints", "gs://bucket/a"]
        return [
            subprocess.Popen(
                [*map(str, [*command, *flags])],
                env=environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for variables in each
        ]

    def end(processes):
        found = [process.communicate(timeout=120) for process in processes]
        return [p.returncode for p in processes], *found[0]

    def losses():
        lines = (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]

    def wait_for(steps, process):
        while len(losses() if (tmp_path / "a/metrics.jsonl").exists() else []) < steps:
            assert process.poll() is None, process.communicate()
            time.sleep(0.2)

    first = start(2)
    wait_for(6, first[0])
    # Another run may not name the same bucket, whatever its own folder is.
    place = stores.as_place("gs://bucket/a")
    with pytest.raises(jaxtp.errors.RunFolderTaken, match="TP092 at gs://bucket/a: it belongs to"):
        run_folder.hold(place).__enter__()
    for process in first:
        process.kill()
    end(first)
    # On one process, from what two wrote; the steps since the last checkpoint come again.
    before = losses()
    [second] = start(1)
    # The file loses those steps' lines first.
    while "continuing after step " not in (line := second.stdout.readline()):
        assert line, second.communicate()
    assert int(line.split()[-1]) >= 2
    wait_for(len(before) + 2, second)
    second.terminate()
    codes, _, err = end([second])
    assert codes == [143], err
    after = losses()
    assert max(abs(x - y) for x, y in zip(before, after, strict=False)) < 1e-6
