"""One of two processes that load a checkpoint together and save it again; run by `test_hf`.

    python hf_processes.py FIXTURE OUT PROCESS PORT

Prints JSON: bytes that it read, bytes of its devices' distinct shards, the error of its logits.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxtp
from jaxtp.io.hf import load_hf, save_hf


def main(folder, out, process, port):
    jaxtp.initialize(f"localhost:{port}", 2, int(process), cpu_devices=8, timeout=60)

    read, real = [], os.preadv
    os.preadv = lambda *arguments: read.append(real(*arguments)) or read[-1]
    model, params = load_hf(folder, jaxtp.make_mesh(tp=8), pad_vocab=True, progress=False)
    save_hf(model, out, progress=False)

    distinct = {
        (str(path), str(shard.index)): shard.data.nbytes
        for path, leaf in jax.tree.leaves_with_path(params)
        for shard in leaf.addressable_shards
    }
    expected = np.load(Path(folder) / "expected.npz")
    whole = jax.NamedSharding(jax.tree.leaves(params)[0].sharding.mesh, jax.P())
    tokens = jax.device_put(jnp.asarray(expected["tokens"], jnp.int32), whole)
    graph = nnx.graphdef(model)
    run = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens), out_shardings=whole)
    logits = np.asarray(run(params, tokens).addressable_data(0))
    error = np.abs(logits[..., :99] - expected["logits"]).max()
    print(json.dumps([sum(read), sum(distinct.values()), float(error)]))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
