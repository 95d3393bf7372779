"""One train state as different meshes and plans store it, for tests of checkpoints."""

import functools

import jax
import numpy as np
import optax
from flax import nnx

import jaxtp
from jaxtp import models
from jaxtp.config.settings import Precision
from jaxtp.plan.stages import Stages
from jaxtp.train.update import init_state

# Nothing divides: the vocabulary needs padding, five layers make uneven stages.
CONFIG = models.LlamaConfig(
    vocab_size=61,
    hidden_size=32,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    intermediate_size=64,
    num_experts=4,
    num_experts_per_tok=2,
)
TX = optax.adam(1e-3)

TARGETS = {
    "tp8": ({"tp": 8}, {"pad_vocab": True}),
    "tp4 dp2": ({"tp": 4, "dp": 2}, {}),
    "fsdp4 tp2": ({"tp": 2, "fsdp": 4}, {"zero": 3, "pad_vocab": True}),
    "fsdp4 tp2, ZeRO 1": ({"tp": 2, "fsdp": 4}, {"zero": 1}),
    "pp2 tp4": ({"tp": 4, "pp": 2}, {"pad_vocab": True}),
    "pp2 tp4 in rounds": (
        {"tp": 4, "pp": 2},
        {"stages": Stages.even(5, 2, micro_batches=2, num_rounds=2)},
    ),
    "ep2 cp2 tp2, ZeRO 3": ({"ep": 2, "cp": 2, "tp": 2}, {"zero": 3}),
    "1 device": ({"tp": 1, "devices": 1}, {}),
}


@functools.cache
def logical():
    """A train state on the host, all of its numbers different."""
    _, params = nnx.split(models.abstract(CONFIG))
    numbers = np.random.default_rng(0)

    def fill(leaf):
        return numbers.integers(1, 9) if leaf.ndim == 0 else numbers.normal(size=leaf.shape)

    state = jax.eval_shape(lambda params: init_state(params, TX, Precision()), params)
    return jax.tree.map(lambda leaf: np.asarray(fill(leaf), leaf.dtype), state)


@functools.cache
def placed(name):
    """The state on a mesh, and its plan."""
    sizes, options = TARGETS[name]
    devices = jax.devices()[: sizes.get("devices", 8)]
    mesh = jaxtp.make_mesh(**sizes | {"devices": devices})
    plan = jaxtp.make_plan(models.abstract(CONFIG), mesh, config=CONFIG, strict=False, **options)
    return jaxtp.shard(logical(), mesh, plan=plan), plan
