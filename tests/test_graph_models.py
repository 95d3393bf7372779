"""Findings on small models: right, whatever the names and the sizes."""

import random

import jax
import pytest
from graph_flax_models import MODELS
from graph_models import DISTINCT, EQUAL, SINGLE

from jaxtp.rules.graph import analyse

SIZES = {"distinct": DISTINCT, "equal": EQUAL, "single": SINGLE}


def read(fn, params, inputs, sizes):
    """The analysis; people's models promote ranks, which the harness forbids elsewhere."""
    with jax.numpy_rank_promotion("allow"):
        return analyse(fn, params, *inputs, min_vocab=sizes.vocab)


def found(analysis):
    """What the analysis splits, in the form of `Case.expected`."""
    return {
        path: (f.dim, f.units, f.pieces) if f.pieces else (f.dim, f.units)
        for path, f in analysis.findings.items()
        if f.dim is not None
    }


def scramble(tree, seed):
    """A flat dict with random keys, what they stood for, and how to get the tree back."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    draw = random.Random(seed)
    names = {}
    for path, _leaf in leaves:
        names[f"{draw.getrandbits(64):016x}"] = jax.tree_util.keystr(
            path, simple=True, separator="/"
        )
    flat = {key: leaf for key, (_path, leaf) in zip(names, leaves, strict=True)}
    order = list(names)
    return (
        flat,
        names,
        lambda flat: jax.tree_util.tree_unflatten(structure, [flat[k] for k in order]),
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_findings_equal_the_experts(name, size):
    sizes = SIZES[size]
    case = MODELS[name](sizes)
    analysis = read(case.fn, case.params, case.inputs, sizes)
    assert not analysis.unreached
    assert found(analysis) == case.expected, str(analysis)
