"""How much `load_hf` reads, holds and takes, for a synthetic checkpoint of 2 GB.

    python scripts/bench_load.py                  # 1 process x 8 devices, 2 processes x 4 devices
    python scripts/bench_load.py --json           # the same as one JSON object
    python scripts/bench_load.py --gigabytes 0.2  # smaller; needs that much disk, and memory twice

"Read" is what the kernel counted while `load_hf` ran (rchar of /proc/self/io). Simulated devices
are CPUs, so the arrays themselves are host memory; "held" is what the process needed on top of them
at its peak. The time is given as a ratio to reading the files once into new memory.

Expect: read within 2% of the process's shards, held a few chunks of 128 MiB, and a ratio of 3 to 6.
What is in it beside reading is turning the weights from PyTorch's order, on the two cores of the
machine instead of on GPUs, and about two seconds of compilation.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LAYER_BYTES = 2 * (2 * 2048 * 2048 + 2 * 2048 * 256 + 3 * 2048 * 5632 + 2 * 2048)
"""bfloat16 bytes of one layer of TinyLlama's sizes, which the checkpoint has."""
VOCAB_BYTES = 2 * 2 * 32000 * 2048


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Writes random weights in several files, as `save_hf` would."""
    import dataclasses

    import jax

    from jaxtp import models
    from jaxtp.io.hf.config import write_fields
    from jaxtp.io.hf.files import split_files, write_index
    from jaxtp.io.safetensors import write_file, write_order
    from jaxtp.models.names import storage, table_of
    from jaxtp.trees import flatten

    num_layers = max(1, round((gigabytes * 1e9 - VOCAB_BYTES) / LAYER_BYTES))
    config = dataclasses.replace(
        models.PRESETS["tinyllama-1.1b"], num_hidden_layers=num_layers, param_dtype="bfloat16"
    )
    tensors = {}
    for path, param in flatten(models.abstract(config)).items():
        how = storage(table_of(config)[path], param.shape)
        for index in np.ndindex(how.stack):
            tensors[table_of(config)[path].name.format(*index)] = (param.dtype, how.shape)
    noise = np.asarray(jax.random.normal(jax.random.key(0), (2**20,), "bfloat16"))

    def arrays(names: list[str]) -> Iterator[np.ndarray]:
        for name in names:
            yield np.resize(noise, tensors[name][1])

    files = split_files(tensors, limit=500_000_000)
    for file, names in files.items():
        chosen = {name: tensors[name] for name in names}
        write_file(folder / file, chosen, arrays(write_order(chosen)))
    write_index(folder, files, 0)
    (folder / "config.json").write_text(json.dumps(write_fields(config)))


def read_once(folder: Path) -> tuple[int, float]:
    """Bytes of all weights, and the seconds it takes to read them into memory."""
    start = time.perf_counter()
    count = sum(len(file.read_bytes()) for file in folder.glob("*.safetensors"))
    return count, time.perf_counter() - start


def measure(folder: Path, process: int, processes: int, port: int) -> dict[str, float]:
    """Loads the checkpoint in this process, as one of `processes`; what it read and held."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8 // processes)
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, process)
    import jaxtp
    from jaxtp.io.hf import load_hf

    mesh = jaxtp.make_mesh(tp=8)
    before, held_before, start = _read_bytes(), _held_bytes(), time.perf_counter()
    _, params = load_hf(folder, mesh, progress=False)
    seconds = time.perf_counter() - start
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    distinct = {
        (id(leaf), str(shard.index)): shard.data.nbytes
        for leaf in jax.tree.leaves(params)
        for shard in leaf.addressable_shards
    }
    placed = sum(shard.data.nbytes for shard in shards)
    return {
        "process": process,
        "processes": processes,
        "shard_bytes": sum(distinct.values()),
        "read_bytes": _read_bytes() - before,
        "held_bytes": _held_bytes() - held_before - placed,
        "seconds": seconds,
    }


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _held_bytes() -> int:
    """The most memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(folder: Path, processes: int) -> list[dict[str, float]]:
    """`measure` in that many new processes at once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--measure", str(folder), str(i), str(processes), str(port)],
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "JAX_PLATFORMS": "cpu"},
            text=True,
        )
        for i in range(processes)
    ]
    outputs = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("a process failed; its message is above")
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def main() -> None:
    """Prints the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, *numbers = arguments.measure
        print(json.dumps(measure(Path(folder), *map(int, numbers))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_checkpoint(folder, arguments.gigabytes)
        read_once(folder)  # into the page cache, for all alike
        total, seconds = read_once(folder)
        rows = [row for processes in (1, 2) for row in run(folder, processes)]
    for row in rows:
        row["read_ratio"] = row["read_bytes"] / row["shard_bytes"]
        row["time_ratio"] = row["seconds"] / seconds
    if arguments.json:
        print(json.dumps({"file_bytes": total, "read_once_seconds": seconds, "loads": rows}))
        return
    print(f"checkpoint of {total / 1e9:.2f} GB, read once in {seconds:.2f} s")
    print("process   its shards        read    ratio    held on top    time / read once")
    for row in rows:
        print(
            f"{row['process'] + 1} of {row['processes']}  {row['shard_bytes'] / 1e6:9.1f} MB "
            f"{row['read_bytes'] / 1e6:8.1f} MB  {row['read_ratio']:7.4f} "
            f"{row['held_bytes'] / 1e6:11.1f} MB {row['time_ratio']:15.1f}"
        )


if __name__ == "__main__":
    main()
