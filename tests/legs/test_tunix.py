"""Published NNX models of google-tunix, unmodified.

    python -m pytest tests/legs/test_tunix.py

Needs the packages of `constraints-legs.txt` beside the oldest stack. Two layers at published widths
are traced abstractly and compiled for four H100; two layers at tiny widths are run on simulated
devices.
"""

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import published
import pytest
from flax import nnx
from published import Published

from jaxtp.plan import trees

pytestmark = [
    pytest.mark.timeout(1800),
    # Names that mislead are no surprise here, and the package speaks about its own future.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(autouse=True)
def ranks_are_promoted():
    """As NumPy does, and the package expects."""
    with jax.numpy_rank_promotion("allow"):
        yield


# Tree -> module, class, preset.
MODELS = {
    "gemma_2b": ("gemma", "Gemma", "gemma_2b"),
    "gemma3_1b": ("gemma3", "Gemma3", "gemma3_1b_pt"),
    "llama3_1_8b": ("llama3", "Llama3", "llama3p1_8b"),
    "qwen2_5_7b": ("qwen2", "Qwen2", "qwen2p5_7b"),
    "qwen3_8b": ("qwen3", "Qwen3", "qwen3_8b"),
    "qwen3_30b_a3b": ("qwen3", "Qwen3", "qwen3_30b_a3b"),
}
# How its configurations spell the sizes.
SIZES = {
    "embed_dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_heads": "num_heads",
    "num_kv_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "num_embed": "vocab_size",
    "num_experts": "num_experts",
}


@functools.cache
def build(name, *, small=False):
    """A model without weights, and what experts say about it."""
    tree = published.labels(f"tunix_{name}")
    package, cls, preset = MODELS[name]
    module = importlib.import_module(f"tunix.models.{package}.model")
    own = getattr(module.ModelConfig, preset)()
    own = dataclasses.replace(own, num_layers=tree["config"]["num_layers"])
    if small:
        config = published.tiny(tree["config"])
        config["num_experts"] = 8 if config.get("num_experts") else None
        fields = {f.name for f in dataclasses.fields(own)}
        sizes = {theirs: config[ours] for theirs, ours in SIZES.items() if theirs in fields}
        exact = dict.fromkeys({"dtype", "param_dtype"} & fields, jnp.float32)
        own = dataclasses.replace(own, **sizes, **exact)
    model = nnx.eval_shape(lambda: getattr(module, cls)(own, rngs=nnx.Rngs(0)))
    state, rebuild = trees.as_pytree(model)
    structure = jax.tree.structure(state)
    params = dict(trees.leaves(state))
    if not small:
        assert {path: list(x.shape) for path, x in params.items()} == tree["params"]

    def call(flat, tokens, positions, mask):
        return rebuild(structure.unflatten([flat[path] for path in params]))(
            tokens, positions, None, mask
        )[0]

    return Published(call=call, params=params, inputs=inputs_of(small)), tree


def inputs_of(small):
    """Token ids, positions and the attention mask: structs, or for a tiny model arrays."""
    batch, length = (4, 16) if small else (8, 128)
    if not small:
        ids = jax.ShapeDtypeStruct((batch, length), jnp.int32)
        return ids, ids, jax.ShapeDtypeStruct((batch, length, length), bool)
    ids = np.random.default_rng(1).integers(0, 1000, (batch, length), np.int32)
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), ids.shape)
    causal = np.broadcast_to(np.tri(length, dtype=bool), (batch, length, length))
    return ids, positions, causal


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_plan_of_scrambled_names_is_the_experts(name, tp):
    found = published.verdicts_on_scrambled(*build(name), tp)
    assert set(found) <= {"agree", "acceptable"}, found
    assert found["agree"] > 0


@every_model
def test_the_plan_is_the_experts_or_moves_no_more(name):
    published.check_against_expert(*build(name))


@every_model
def test_sharded_is_unsharded(name):
    published.check_sharded_is_unsharded(build(name, small=True)[0])
