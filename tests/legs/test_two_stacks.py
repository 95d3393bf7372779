"""A checkpoint that one stack writes, the other reads, bit for bit: oldest to newest and back.

JAXTP_PYTHONS="A/bin/python B/bin/python" python -m pytest tests/legs/test_two_stacks.py
"""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = os.environ.get("JAXTP_PYTHONS", "").split()
RUN = """
import sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_num_cpu_devices", 8)
import jaxtp
what, folder, tp = sys.argv[1], sys.argv[2], int(sys.argv[3])
mesh = jaxtp.make_mesh(tp=tp, dp=8 // tp)
keys = jax.random.split(jax.random.key(0))
mlp = {
    "up_proj": jax.random.normal(keys[0], (64, 256)),
    "down_proj": jax.random.normal(keys[1], (256, 64)),
}
plan = jaxtp.make_plan({"mlp": mlp}, mesh)
state = {
    "params": jaxtp.shard({"mlp": mlp}, mesh, plan=plan),
    "rng": jax.random.key(7),
    "step": jnp.int32(5),
    "half": jnp.arange(16, dtype=jnp.bfloat16),
}
def numbers(tree):
    keyed = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if keyed(x) else x) for x in jax.tree.leaves(tree)]
with jaxtp.Checkpoints(folder) as checkpoints:
    if what == "write":
        checkpoints.save(1, state, plan=plan)
    else:
        restored = checkpoints.restore(state, plan=plan)
        for found, expected in zip(numbers(restored.state), numbers(state), strict=True):
            np.testing.assert_array_equal(found, expected)
        print("written by jax", restored.origin["versions"]["jax"], "read by", jax.__version__)
"""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_one_stack_writes_the_other_reads(tmp_path, order):
    assert len(PYTHONS) == 2, "JAXTP_PYTHONS names two interpreters"
    for what, index, tp in (("write", order[0], 8), ("read", order[1], 2)):
        done = subprocess.run(
            [PYTHONS[index], "-c", RUN, what, tmp_path / "checkpoints", str(tp)],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    print(done.stdout)  # noqa: T201
