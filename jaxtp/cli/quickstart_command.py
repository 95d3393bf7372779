"""`jaxtp quickstart`: a small Llama, trained on the sources of this Python's standard library.

Expect, with the defaults on two CPU cores, about two minutes and a validation loss of about 1.5
nats per byte, where byte frequencies alone give 3.1 and pairs of bytes 2.3.
"""

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from jaxtp import models
from jaxtp.compile import running_step
from jaxtp.config.files import load
from jaxtp.io.checkpoints import Checkpoints
from jaxtp.mesh.build import make_mesh
from jaxtp.placement.arrays import shard_batch
from jaxtp.placement.init import init_sharded
from jaxtp.plan.decisions import Plan
from jaxtp.rules.planner import make_plan
from jaxtp.train import data
from jaxtp.train.loop import Hooks, fit
from jaxtp.train.metrics import METRICS_FILE
from jaxtp.train.optimizer import build_optimizer
from jaxtp.train.step import jit_step

CONFIG, _ = load(Path(__file__).with_name("quickstart.toml"))
TrainState = tuple[models.Decoder, nnx.Optimizer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Trains a small Llama on Python sources, on simulated devices."""

    dp: int = CONFIG.mesh.dp
    """Replicas."""

    tp: int = CONFIG.mesh.tp
    """Devices along the tensor axis."""

    steps: int = CONFIG.steps
    """Training steps."""

    batch_size: int = CONFIG.batch.size
    """Windows in a batch, over all devices."""

    seq_len: int = CONFIG.seq_len
    """Bytes that the model reads of a window."""

    learning_rate: float = CONFIG.optimizer.learning_rate
    """Peak of the schedule: linear warm-up over a tenth of the steps, then cosine to a tenth."""

    eval_windows: int = CONFIG.run.eval_windows
    """Windows of the validation text to judge by, the baselines included."""

    seed: int = CONFIG.seed
    """Of the parameters and of the batches."""

    folder: Path = Path("runs")
    """Where run folders go."""


DEFAULTS = Settings()


def loss_fn(model: models.Decoder, tokens: jax.Array) -> jax.Array:
    """Nats per byte of predicting each token from those before it."""
    return models.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def quickstart(settings: Annotated[Settings, tyro.conf.arg(name="")] = DEFAULTS) -> None:
    """Train a small Llama on 8 simulated devices: a tour.

    Args:
        settings: Of the run.
    """
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", settings.dp * settings.tp)  # before a backend starts
    folder = settings.folder / time.strftime("quickstart-%Y%m%d-%H%M%S")

    # The model is single-device code; the mesh and the plan are all that parallelism takes.
    mesh = make_mesh(dp=settings.dp, tp=settings.tp)
    plan = make_plan(models.abstract(CONFIG.model), mesh, strict=True)
    print(f"{plan}\n")

    tx, schedule = optimizer_of(settings)

    def init() -> models.Decoder:
        return models.build(CONFIG.model, nnx.Rngs(settings.seed))

    def step_fn(state: TrainState, tokens: jax.Array) -> tuple[TrainState, dict[str, jax.Array]]:
        model, optimizer = state
        loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
        lr = jnp.asarray(schedule(optimizer.step[...]))
        optimizer.update(model, grads)
        return state, {"loss": loss, "grad_norm": optax.tree.norm(grads), "lr": lr}

    state: TrainState = init_sharded(init, tx, mesh, plan=plan)
    step = jit_step(step_fn, state, mesh, plan=plan)

    # Text that every machine has; validation files share nothing with training files.
    corpus = data.standard_library()
    held_out = data.fixed_windows(corpus.validation, settings.eval_windows, settings.seq_len)
    batches = data.Batches(corpus.train, settings.batch_size, settings.seq_len, settings.seed)
    print(
        f"training on {corpus.num_files[0]} files of the standard library, "
        f"{corpus.train.size:,} bytes; validating on {corpus.num_files[1]} others"
    )
    validation_loss = nnx.jit(loss_fn)
    validation_batch = shard_batch(held_out, mesh)

    def evaluate(state: TrainState) -> float:
        return float(validation_loss(state[0], validation_batch))

    def batch(number: int) -> jax.Array:
        return shard_batch(batches[number], mesh)

    if running_step.is_asked():
        table = running_step.report_step(step, state, batch(0), tensor_axes=plan.mesh.tp)
        print(f"\nwhat one step moves\n{table.communication()}\n")
    state = fit(
        step,
        state,
        batch,
        steps=range(settings.steps),
        folder=folder,
        hooks=Hooks(evaluate=evaluate, eval_every=max(1, settings.steps // 8)),
    )
    report(evaluate(state), corpus.train, held_out)
    print_sample(state[0])
    save_and_compare(folder / "checkpoints", settings.steps, state, plan)
    print(NEXT.format(folder=folder, metrics=METRICS_FILE))


def optimizer_of(settings: Settings) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer of quickstart.toml, its schedule stretched over these steps."""
    stretched = dataclasses.replace(
        CONFIG.optimizer,
        learning_rate=settings.learning_rate,
        warmup_steps=settings.steps // 10,
    )
    return build_optimizer(stretched, settings.steps)


def report(loss: float, train: data.Tokens, held_out: np.ndarray) -> None:
    """Prints the validation loss against two baselines on the very same bytes."""
    unigram, bigram = (f(train, held_out) for f in (data.unigram_entropy, data.bigram_entropy))
    num_bytes = held_out[:, 1:].size
    print(f"\nnats per byte on {num_bytes:,} bytes of files that training never saw:")
    print(f"  byte frequencies, counted on the training text   {unigram:.3f}")
    print(f"  pairs of bytes, counted on the training text     {bigram:.3f}")
    print(f"  the model                                        {loss:.3f}")
    print(f"  below the frequencies by                         {unigram - loss:.3f}")


def print_sample(model: models.Decoder) -> None:
    """Prints a piece of Python-like text that the model makes up."""
    prompt = jnp.asarray([list(b"class Reader:\n    def __init__(self, ")])
    tokens = models.generate(model, prompt, 90, temperature=0.7)
    text = bytes(np.asarray(tokens[0], np.uint8)).decode(errors="replace")
    text = "".join(c if c.isprintable() or c == "\n" else "." for c in text)
    print("\na sample:\n\n" + "\n".join(f"  | {line}" for line in text.splitlines()))


def save_and_compare(folder: Path, step: int, state: TrainState, plan: Plan) -> None:
    """Saves model and optimizer, reads them back, and compares every number."""
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, state, plan=plan)
        restored = checkpoints.restore(state, plan=plan)
    before, after = (jax.tree.leaves(nnx.state(tree)) for tree in (state, restored.state))
    for saved, read in zip(before, after, strict=True):
        np.testing.assert_array_equal(read, saved)
    print(f"\ncheckpoint in {folder}: restored, all {len(before)} arrays equal")


NEXT = """metrics in {folder}/{metrics}, one line a step

what to try next
  jaxtp quickstart --tp 8 --dp 1    the same losses; the plan lays 4 kv heads on 8 devices
  jaxtp quickstart --help           all settings
  README.md, "In your own program"  tensor parallelism for your own model
"""
