"""How much `load_hf` reads, holds and takes, for a synthetic checkpoint of 2 GB.

    python scripts/bench_load.py                  # 1 process x 8 devices, 2 processes x 4 devices
    python scripts/bench_load.py --json           # the same as one JSON object
    python scripts/bench_load.py --gigabytes 0.2  # needs that much disk, and twice that memory

"Read" is what the kernel counted while `load_hf` ran (rchar of /proc/self/io). Simulated devices
are CPUs, so the arrays themselves are host memory; "kept" is what the process needed on top of them
at its peak. The time is given as a ratio to reading the files once into new memory.

Expect: read within 2% of the process's shards, held a few chunks of 64 MiB, and a ratio of 3 to 6.
What is in it beside reading is turning the weights from PyTorch's order, on the two cores of the
machine instead of on GPUs, and about two seconds of compilation.
"""

import argparse
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def make_checkpoint(folder: Path, gigabytes: float) -> None:
    """Writes a Llama of about that size with random bfloat16 weights, in several files."""
    import jax

    from jaxtp import models
    from jaxtp.io.hf import save_hf

    def model_of(num_layers: int) -> models.Llama:
        config = dataclasses.replace(
            models.PRESETS["tinyllama-1.1b"],
            vocab_size=32000 if gigabytes >= 1 else 1024,
            num_hidden_layers=num_layers,
            param_dtype="bfloat16",
        )
        return models.abstract(config)

    def bytes_of(num_layers: int) -> int:
        return sum(leaf.size * 2 for leaf in jax.tree.leaves(model_of(num_layers)))

    layer_bytes = bytes_of(2) - bytes_of(1)
    num_layers = max(1, 1 + round((gigabytes * 1e9 - bytes_of(1)) / layer_bytes))
    noise = np.asarray(jax.random.normal(jax.random.key(0), (2**20,), "bfloat16"))
    model = jax.tree.map(lambda leaf: np.resize(noise, leaf.shape), model_of(num_layers))
    save_hf(model, folder, file_bytes=500_000_000, progress=False)


def read_once(folder: Path) -> tuple[int, float]:
    """Bytes of all weights, and the seconds it takes to read them into memory."""
    start = time.perf_counter()
    count = sum(len(file.read_bytes()) for file in folder.glob("*.safetensors"))
    return count, time.perf_counter() - start


def measure(folder: Path, process: int, processes: int, port: int) -> dict[str, float]:
    """Loads the checkpoint in this process, as one of `processes`; what it read and kept."""
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
    """The most memory that this program has had, in bytes; ru_maxrss has that of its parent too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


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
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="1 and/or 2")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        folder, *numbers = arguments.measure
        print(json.dumps(measure(Path(folder), *map(int, numbers))))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        make_checkpoint(folder, arguments.gigabytes)
        read_once(folder)  # into the page cache, for all alike
        total, seconds = read_once(folder)
        rows = [row for processes in arguments.processes for row in run(folder, processes)]
    for row in rows:
        row["read_ratio"] = row["read_bytes"] / row["shard_bytes"]
        row["time_ratio"] = row["seconds"] / seconds
    if arguments.json:
        print(json.dumps({"file_bytes": total, "read_once_seconds": seconds, "loads": rows}))
        return
    print(f"checkpoint of {total / 1e9:.2f} GB, read once in {seconds:.2f} s")
    print("process   its shards        read    ratio    kept on top    time / read once")
    for row in rows:
        print(
            f"{row['process'] + 1} of {row['processes']}  {row['shard_bytes'] / 1e6:9.1f} MB "
            f"{row['read_bytes'] / 1e6:8.1f} MB  {row['read_ratio']:7.4f} "
            f"{row['held_bytes'] / 1e6:11.1f} MB {row['time_ratio']:15.1f}"
        )


if __name__ == "__main__":
    main()
