"""What surviving costs: figures of run folders, checkpoints and long runs on this machine.

    python scripts/bench_faults.py                all sections, about two minutes on two cores
    python scripts/bench_faults.py --only folders
    python scripts/bench_faults.py --json         the same as one JSON object

How fast processes notice each other's loss is measured where that is tested, with real processes:
`pytest -s tests/legs/test_processes.py tests/legs/test_kill.py` prints it.

Expect: a folder refused and taken over within a second on one machine; folders of weights that lie
refused in milliseconds; a step that waits for a save a small share of the time that the save takes;
memory and open files of a run flat over its steps.
"""

import dataclasses
import functools
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from tables import Flag, Section, tabulate

import jaxtp
from jaxtp.errors import RunFolderTaken
from jaxtp.train.loop import Hooks, fit
from jaxtp.train.run_folder import hold

DEVICES = 4
LOOKS = 5
"""Times that a long run's memory and files are looked at; pools of threads fill before the first
two, so the last ones are compared."""

HOLD = """
import sys, time
from pathlib import Path
from jaxtp.train.run_folder import hold
with hold(Path(sys.argv[1])):
    print("ready", flush=True)
    time.sleep(600)
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """What to measure."""

    only: tuple[str, ...] = ()
    """Sections; default: all."""

    steps: int = 5000
    """Steps of the long run."""

    leaves: int = 10_000
    """Arrays of the large tree."""

    megabytes: int = 400
    """Size of the state whose save is timed."""

    json: Flag = False
    """Print one JSON object."""


def seconds(action: Callable[[], Any]) -> float:
    """What an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def folders() -> Section:
    """A folder that another process holds, and one that a killed process has left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = subprocess.Popen([sys.executable, "-c", HOLD, name], stdout=subprocess.PIPE)
        assert other.stdout is not None
        other.stdout.readline()
        said = ""

        def refused() -> None:
            nonlocal said
            try:
                with hold(folder):
                    pass
            except RunFolderTaken as error:
                said = str(error)

        refusal = seconds(refused)
        other.kill()
        other.wait()

        def taken() -> None:
            with hold(folder):
                pass

        takeover = seconds(taken)
    rows = [
        {
            "folder of": "a process that lives",
            "outcome": said.split(":")[0][:5],
            "s": f"{refusal:.3f}",
        },
        {"folder of": "a process that was killed", "outcome": "taken over", "s": f"{takeover:.3f}"},
    ]
    return Section(
        title="Run folders",
        rows=rows,
        thresholds=[
            (f"refused with {RunFolderTaken.code}", said.startswith(RunFolderTaken.code)),
            ("both within a second", max(refusal, takeover) < 1),
        ],
    )


def saves(megabytes: int) -> Section:
    """How long a step waits for a save, and how long the save takes in the background."""
    mesh = jaxtp.make_mesh(tp=DEVICES)
    width = 1024
    count = megabytes * 2**20 // (4 * width * width)
    spread = jax.NamedSharding(mesh, jax.P("tp"))

    @functools.partial(jax.jit, out_shardings=spread)
    def make(seed: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (width, width))

    state = {f"layer{i}": make(i) for i in range(count)}
    jax.block_until_ready(state)
    rows: list[dict[str, Any]] = []

    def add(name: str, step: int) -> None:
        waited = seconds(functools.partial(checkpoints.save, step, state))
        written = waited + seconds(checkpoints.wait)
        rows.append(
            {
                "save": name,
                "MB": megabytes,
                "step waits s": round(waited, 2),
                "written after s": round(written, 2),
            }
        )

    with tempfile.TemporaryDirectory() as name, jaxtp.Checkpoints(name) as checkpoints:
        add("first", 1)
        add("second", 2)
        # Before the one before is written, as on a disk that is too slow.
        checkpoints.save(3, state)
        add("while another is written", 4)
    return Section(
        title="A step that waits for a checkpoint",
        rows=rows,
        thresholds=[
            (
                "a step waits for less than half of the second save",
                2 * rows[1]["step waits s"] < rows[1]["written after s"],
            )
        ],
        notes=["a save waits for the one before it: what a step loses on a disk that is too slow"],
    )


def many_leaves(leaves: int) -> Section:
    """A tree of many small arrays, saved and restored."""
    mesh = jaxtp.make_mesh(tp=DEVICES)
    whole = jax.NamedSharding(mesh, jax.P())
    state = jax.device_put({f"leaf{i}": jnp.full(8, i, jnp.float32) for i in range(leaves)}, whole)
    with tempfile.TemporaryDirectory() as name, jaxtp.Checkpoints(name) as checkpoints:
        start = time.process_time()
        saved = seconds(lambda: (checkpoints.save(1, state), checkpoints.wait()))
        found: dict[str, Any] = {}
        restored = seconds(lambda: found.update(checkpoints.restore(state).state))
        cpu = time.process_time() - start
    is_equal = all(float(found[f"leaf{i}"][0]) == i for i in range(0, leaves, leaves // 100))
    row = {"save s": saved, "restore s": restored, "CPU s of both": cpu}
    return Section(
        title="A tree of many arrays",
        rows=[{"arrays": leaves} | {name: round(value, 1) for name, value in row.items()}],
        thresholds=[
            ("equal after the round trip", is_equal),
            ("10 ms of CPU an array for both", cpu < leaves / 100),
        ],
    )


def long_run(steps: int) -> Section:
    """Memory and open files of one process over many steps, with a checkpoint every 250."""
    mesh = jaxtp.make_mesh(tp=DEVICES)
    kernel = jax.device_put(jnp.ones((64, 64)), jax.NamedSharding(mesh, jax.P("tp")))

    @jax.jit
    def step(state: jax.Array, batch: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        new = state - 1e-3 * (state * batch.sum())
        return new, {"loss": jnp.square(new).sum(), "grad_norm": jnp.abs(new).max()}

    rows: list[dict[str, Any]] = []

    def look(line: Any) -> None:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        rows.append(
            {
                "step": int(line["step"]),
                "MiB": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20),
                "open files": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
            }
        )

    with tempfile.TemporaryDirectory() as name, jaxtp.Checkpoints(f"{name}/saved") as checkpoints:

        def look_after_saving(line: Any) -> None:
            if line["step"] % (steps // LOOKS) == 0:
                checkpoints.wait()  # a save that is under way has files open
                look(line)

        fit(
            step,
            kernel,
            lambda number: jnp.full((2, 5), 1e-3),
            steps=range(steps),
            folder=Path(name),
            hooks=Hooks[jax.Array](
                save=lambda number, state: checkpoints.save(number, {"kernel": state}),
                save_every=250,
                eval_every=steps,
                watchers=[look_after_saving],
            ),
            console=Console(quiet=True),
        )
    first, last = rows[-3], rows[-1]
    between = last["step"] - first["step"]
    return Section(
        title="A long run in fast motion",
        rows=rows,
        thresholds=[
            ("open files stay", last["open files"] <= first["open files"] + 1),
            ("threads stay", last["threads"] <= first["threads"] + 1),
            ("less than 5 kB a step", (last["MiB"] - first["MiB"]) * 2**20 < 5000 * between),
        ],
    )


def hostile() -> Section:
    """Hugging Face folders that lie: how long until each is refused, and in how much memory."""
    mesh = jaxtp.make_mesh(tp=DEVICES)
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[%d,%d]}'
    many = ",".join(f'"t{i}":{entry % (i, i + 1)}' for i in range(900_000))
    long = f'"t":{entry % (0, 1)}'.replace("[1]", str([10**18] * 100_000))
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 64)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
    fields = json.dumps({"model_type": "llama", **sizes, **heads})
    config = fields[:-1] + ', "num_hidden_layers": %s}'
    folders: dict[str, tuple[str, str]] = {
        "an empty file": (config % 2, "{}"),
        "10^9 layers": (config % 10**9, ""),
        "a key twice": (config % '2, "num_hidden_layers": 3', ""),
        "a header of 900,000 tensors": (config % 2, f"{{{many}}}"),
        "a tensor of 100,000 dims": (config % 2, f"{{{long}}}"),
        "weights that are a pipe": (config % 2, "pipe"),
    }
    rows: list[dict[str, Any]] = []
    for name, (text, header) in folders.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(text)
            weights = Path(folder) / "model.safetensors"
            if header == "pipe":
                os.mkfifo(weights)
            else:
                weights.write_bytes(len(header).to_bytes(8, "little") + header.encode() + b"x")
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            start, said = time.perf_counter(), "loaded"
            try:
                jaxtp.load_hf(folder, mesh, progress=False)
            except jaxtp.errors.JaxtpError as error:
                said = error.code
            took = time.perf_counter() - start
            more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
            rows.append({"folder": name, "outcome": said, "s": took, "MiB": more})
    del rows[0]  # imports
    thresholds = [
        ("all refused", all(row["outcome"].startswith("TP09") for row in rows)),
        ("each in a second", max(row["s"] for row in rows) < 1),
        ("in 256 MiB", max(row["MiB"] for row in rows) < 256),
    ]
    shown = [row | {"s": f"{row['s']:.3f}", "MiB": round(row["MiB"])} for row in rows]
    return Section(title="Folders that lie", rows=shown, thresholds=thresholds)


def main(arguments: Arguments) -> None:
    """Prints the sections that are asked for."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    sections: dict[str, Callable[[], Section]] = {
        "folders": folders,
        "hostile": hostile,
        "saves": functools.partial(saves, arguments.megabytes),
        "leaves": functools.partial(many_leaves, arguments.leaves),
        "long": functools.partial(long_run, arguments.steps),
    }
    chosen = {name: make for name, make in sections.items() if name in (arguments.only or sections)}
    tabulate(chosen, as_json=arguments.json, width=100)


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
