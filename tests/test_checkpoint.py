"""Checkpoints: equal after a round trip, onto another mesh too; refused with what differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtp.errors import BadCheckpoint
from jaxtp.io.checkpoint import restore, save
from jaxtp.mesh.build import make_mesh


def tree_on(mesh, *spec):
    kernel = jnp.arange(64, dtype=jnp.float32).reshape(8, 8)
    count = jnp.int32(3)
    return {
        "kernel": jax.device_put(kernel, NamedSharding(mesh, PartitionSpec(*spec))),
        "state": (jax.device_put(count, NamedSharding(mesh, PartitionSpec())), 7),
    }


def test_round_trip_onto_another_mesh(tmp_path):
    saved = tree_on(make_mesh(tp=4, dp=2), "tp")
    save(tmp_path / "checkpoint", saved)
    like = tree_on(make_mesh(tp=8), None, "tp")
    like["kernel"] = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=like["kernel"].sharding)
    restored = restore(tmp_path / "checkpoint", like)
    jax.tree.map(np.testing.assert_array_equal, restored, saved)
    assert restored["kernel"].sharding == like["kernel"].sharding


def test_other_paths_and_shapes_are_named(tmp_path):
    save(tmp_path / "checkpoint", tree_on(make_mesh(tp=8), "tp"))
    other = {"kernel": jnp.zeros((8, 4)), "state": (jnp.int32(0), 7), "bias": jnp.zeros(8)}
    with pytest.raises(BadCheckpoint, match=r"bias \[8\], kernel \[8, 4\], kernel \[8, 8\]") as e:
        restore(tmp_path / "checkpoint", other)
    assert e.value.where == str(tmp_path / "checkpoint")


def test_what_is_no_checkpoint_is_refused(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadCheckpoint, match=r"TP090 at .*: no checkpoint"):
            restore(folder, {"a": jnp.zeros(1)})


def test_nothing_is_overwritten(tmp_path):
    with pytest.raises(BadCheckpoint, match="the folder exists"):
        save(tmp_path, {"a": jnp.zeros(1)})
