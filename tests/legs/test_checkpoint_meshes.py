"""Saved on each mesh, restored on each other, with the plan of the target: every bit is equal."""

import jax
import numpy as np
import pytest
from stored_states import TARGETS, logical, placed

import jaxtp
from jaxtp import Checkpoints
from jaxtp.plan.trees import leaves

UP = "params/layers/mlp/experts/up_proj/kernel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of the state as each mesh stores it."""
    root = tmp_path_factory.mktemp("checkpoints")
    for name in TARGETS:
        state, plan = placed(name)
        with Checkpoints(root / name) as checkpoints:
            checkpoints.save(1, state, plan=plan)
    return root


def test_plans_store_the_same_arrays_in_different_forms():
    shapes = {
        name: {
            path: leaf.shape for path, leaf in leaves(placed(name)[0]) if path.startswith("params/")
        }
        for name in TARGETS
    }
    layers = {name: found[UP][0] for name, found in shapes.items()}
    assert (layers["tp8"], layers["pp2 tp4"], layers["pp2 tp4 in rounds"]) == (5, 6, 8)
    vocabs = {name: found["params/embed_tokens/embedding"][0] for name, found in shapes.items()}
    assert (vocabs["tp8"], vocabs["tp4 dp2"], vocabs["fsdp4 tp2"]) == (64, 61, 62)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", TARGETS)
def test_bits_are_equal(folder, source, target):
    like, plan = placed(target)
    restored = Checkpoints(folder / source).restore(like, plan=plan)
    assert restored.plan == placed(source)[1]
    for leaf, wanted in zip(jax.tree.leaves(restored.state), jax.tree.leaves(like), strict=True):
        assert (leaf.shape, leaf.sharding) == (wanted.shape, wanted.sharding)
    jax.tree.map(np.testing.assert_array_equal, jaxtp.unshard(restored.state, plan), logical())
