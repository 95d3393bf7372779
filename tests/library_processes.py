"""One of two processes of a program that uses jaxtp as a library: `MODE PROCESS PORT`.

It prints the sum of its batch, or the code of the error that ends it.
"""

import sys

import jax
import numpy as np
from jax.sharding import PartitionSpec

import jaxtp

ROWS = np.arange(32, dtype=np.float32).reshape(4, 8)


def main(mode, process, port):
    jaxtp.initialize(f"localhost:{port}", 2, process, cpu_devices=2, timeout=60)
    params = {name: {"kernel": np.full((8, 8), 0.1, np.float32)} for name in ("up", "down")}
    if mode == "params":
        params["up"]["kernel"] *= 1 + process
    overrides = {"up": PartitionSpec()} if mode == "plan" and process else None
    mesh = jaxtp.make_mesh(tp=1 if mode == "local" else 2, dp=-1)
    plan = jaxtp.make_plan(params, mesh, overrides=overrides)
    state = jaxtp.shard(params, mesh, plan=plan)
    if mode == "seed":
        keys = jax.random.split(jax.random.key(process))
        jaxtp.init_sharded(lambda: {"w": jax.random.normal(keys[0], (8, 8))}, None, mesh)
    step = jaxtp.jit_step(
        lambda s, b: (jax.tree.map(lambda x: x + 1, s), b["x"].sum()), state, mesh
    )
    batch = {"x": ROWS + process if mode == "batch" else ROWS, "positions": np.arange(8)[None]}
    if mode == "local":
        batch = jaxtp.shard_batch(batch | {"x": ROWS[2 * process :][:2]}, mesh, local=True)
        assert batch["positions"].shape == (1, 8)
        assert batch["x"].shape == (4, 8)
    for _ in range(2):
        state, total = step(state, batch)
    sys.stdout.write(f"sum {float(total)}\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    except jaxtp.JaxtpError as err:
        sys.stdout.write(f"{err.code} {err.what}\n".replace(":\n", ": "))
