"""Any Flax tree to paths and back; specs in one spelling."""

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

from jaxtp.errors import BadSpec, BadTree
from jaxtp.plan import specs, trees


class Tied(nnx.Module):
    def __init__(self):
        self.embed = nnx.Embed(16, 4, rngs=nnx.Rngs(0))
        self.head = self.embed
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=nnx.Rngs(1))])


class Boxed(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "tp"))
        return nn.Dense(8, kernel_init=init)(x)


def boxed_params():
    return Boxed().init(jax.random.key(0), jnp.ones((1, 4)))["params"]


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (boxed_params, ["Dense_0/bias", "Dense_0/kernel"]),
        (lambda: flax.core.freeze(boxed_params()), ["Dense_0/bias", "Dense_0/kernel"]),
        (lambda: nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))), ["bias", "kernel"]),
        (lambda: {"a": (jnp.ones(2), [jnp.ones(3)])}, ["a/0", "a/1/0"]),
        (lambda: {"value": {"kernel": jnp.ones(2)}}, ["value/kernel"]),
        (lambda: {"value": jnp.ones(2)}, ["value"]),
        (lambda: {"a": {"value": jnp.ones(2)}}, ["a/value"]),
    ],
)
def test_paths(tree, paths):
    assert list(trees.flatten(tree())) == paths


def test_a_tied_module_is_written_once_and_stays_tied():
    model = Tied()
    paths = list(trees.flatten(model))
    assert [p for p in paths if p.endswith("embedding")] == ["embed/embedding"]
    doubled = trees.map_with_path(lambda _, x: 2 * x, model)
    assert doubled.head is doubled.embed
    np.testing.assert_array_equal(doubled.embed.embedding[...], 2 * model.embed.embedding[...])


def test_train_state_keeps_its_type_and_its_parameters_are_found():
    state = TrainState.create(apply_fn=Boxed().apply, params=boxed_params(), tx=optax.adam(1e-3))
    assert list(trees.flatten(trees.parameters(state))) == ["Dense_0/bias", "Dense_0/kernel"]
    assert "opt_state/0/mu/Dense_0/kernel" in trees.flatten(state)
    same = trees.map_with_path(lambda _, x: x, state)
    assert type(same) is TrainState
    assert jax.tree.structure(same) == jax.tree.structure(state)


def test_annotations_are_read_from_linen_and_nnx():
    assert trees.flatten(boxed_params())["Dense_0/kernel"].annotation == (None, "tp")
    variable = nnx.Param(jnp.zeros((4, 8)), out_sharding=("a", "b"), eager_sharding=False)
    assert trees.flatten({"w": variable})["w"].annotation == ("a", "b")


def test_shapes_dtypes_and_bytes():
    tree = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16),
        "n": 3,
        "k": jax.random.key(0),
        "h": np.zeros((2,), np.int8),
    }
    found = trees.flatten(tree)
    assert found["w"].shape == (3, 4)
    assert found["w"].num_bytes == 24
    assert found["n"].shape == ()
    assert found["k"].num_bytes == 8
    assert found["h"].num_bytes == 2


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({}, "no arrays"),
        ({"a": {"name": "text"}}, "at a/name: a leaf of type str"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "at a/b: two leaves have the same path"),
    ],
)
def test_trees_that_cannot_be_read(tree, text):
    with pytest.raises(BadTree, match=text):
        trees.flatten(tree)


@pytest.mark.parametrize(
    ("spec", "rank", "want"),
    [
        (P("tp"), 2, (("tp",), ())),
        (P("tp", None), 2, (("tp",), ())),
        (P(("a", "b"), None, "c"), 3, (("a", "b"), (), ("c",))),
        (P(), 0, ()),
        (P(("a",)), 1, (("a",),)),
    ],
)
def test_canonical_specs_compare_equal(spec, rank, want):
    assert specs.canonical(spec, rank) == want
    assert specs.canonical(specs.partition_spec(want), rank) == want


def test_rank_zero_is_always_the_empty_spec():
    assert specs.partition_spec(()) == P()
    assert specs.partition_spec(((), ())) == P()


def test_specs_that_cannot_be():
    with pytest.raises(BadSpec, match="3 entries for an array of 2 dims"):
        specs.canonical(P(None, None, "tp"), 2)
    with pytest.raises(BadSpec, match=r"at w: .* uses a mesh axis twice"):
        specs.canonical(P("tp", "tp"), 2, "w")
