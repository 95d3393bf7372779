"""A small training run on any mesh, for comparison with the same run on one device."""

import dataclasses
import functools

import jax
import numpy as np
from flax import nnx

import jaxtp
from jaxtp import models
from jaxtp.config.settings import Optimizer, Precision
from jaxtp.plan.stages import Stages
from jaxtp.train.language import NextToken
from jaxtp.train.optimizer import build_optimizer
from jaxtp.train.step import jit_step
from jaxtp.train.update import init_state, make_update, to_host

FLOAT32 = Precision(compute="float32")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 5,  # over 2 stages 3 and 2, over 4 stages 2, 1, 1 and 1
    "num_attention_heads": 8,
    "dtype": "float32",
}
MODELS = {
    "llama": models.LlamaConfig(num_key_value_heads=4, head_dim=4, intermediate_size=64, **SIZES),
    "gpt2": models.GPTConfig(max_position_embeddings=16, **SIZES),
}
BATCH, SEQ, STEPS = 32, 16, 3


def rows(meshes):
    """Llama on every mesh with each ZeRO stage and one or four micro-batches; GPT-2 with the ends.

    What a stage of ZeRO shards and what micro-batches add up is the same code for any model; what
    differs between models meets each mesh in both. Without an axis of ZeRO there is nothing to
    shard, and the programs of all stages are one.
    """
    found = []
    for model in MODELS:
        for mesh in meshes:
            stages = (0, 1, 2, 3) if "fsdp" in mesh else (0,)
            pairs = [(zero, num_micro) for zero in stages for num_micro in (1, 4)]
            chosen = pairs if model == "llama" else [pairs[0], pairs[-1]]
            found += [(model, mesh, *pair) for pair in chosen]
    return found


def batch(step, size=BATCH):
    tokens = np.random.default_rng(step).integers(0, SIZES["vocab_size"], (size, SEQ + 1))
    return {"tokens": tokens.astype(np.int32)}


@functools.cache
def host_params(config):
    """The first parameters, on the host: made once, so that no run compiles how to make them."""
    return jaxtp.unshard(nnx.split(models.build(config))[1])


def prepare(
    name,
    mesh,
    *,
    zero=0,
    num_micro=1,
    precision=FLOAT32,
    offload=False,
    sequence_parallel=False,
    overlap="auto",
):
    """The plan, the state and the step of a run, on a mesh of devices.

    A pipeline has micro-batches anyway, and `num_micro` times as many as stages.
    """
    config = MODELS[name]
    if overlap == "aggressive":
        config = dataclasses.replace(config, remat="block_outputs")
    stages, num_stages = None, mesh.shape.get("pp", 1)
    if num_stages > 1:
        num_layers = config.num_hidden_layers
        stages = Stages.even(num_layers, num_stages, micro_batches=num_stages * num_micro)
        num_micro = 1
    settings = Optimizer(learning_rate=1e-2, weight_decay=0.1, options={"eps": 1e-5})
    tx, schedule = build_optimizer(settings, 10)
    abstract = models.abstract(config)
    plan = jaxtp.make_plan(abstract, mesh, config=config, zero=zero, stages=stages)
    plan = dataclasses.replace(plan, sequence_parallel=sequence_parallel, overlap=overlap)
    state = init_state(host_params(config), tx, precision)
    state = jaxtp.shard(state, mesh, plan=plan)
    state = to_host(state) if offload else state
    update = make_update(
        NextToken(nnx.split(abstract)[0]),
        tx,
        schedule,
        plan,
        mesh,
        num_micro=num_micro,
        precision=precision,
        offload=offload,
    )
    return plan, state, jit_step(update, state, mesh, plan=plan)


def train(name, mesh, **options):
    """`STEPS` steps: losses, gradient norms and the parameters after them, on the host."""
    plan, state, step = prepare(name, mesh, **options)
    losses, norms = [], []
    for number in range(STEPS):
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    assert step.jitted._cache_size() == 1
    return np.array(losses), np.array(norms), jaxtp.unshard(state.params, plan)


@functools.cache
def reference(name):
    """The run on one device, with the whole batch at once."""
    return train(name, jaxtp.make_mesh(tp=1, devices=jax.devices()[:1]))


# float32 sums in another order. AdamW divides a gradient by its own size, and so makes steps out of
# the noise in gradients that are zero (GPT-2's key biases): an eps of 1e-5 keeps these small.
TOLERANCE = {"rtol": 0, "atol": 3e-5}


def check(name, sizes, **options):
    """A run on a mesh of these sizes equals the one on one device."""
    got, want = train(name, jaxtp.make_mesh(**sizes), **options), reference(name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), got, want)
