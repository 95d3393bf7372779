"""Optimizers by name, schedules, clipping, loss scaling, packed losses, micro-batches."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hybrid_runs import MODELS, batch, prepare, reference, train
from small_models import drawn

import jaxtp
from jaxtp import models
from jaxtp.config.settings import Optimizer, Precision
from jaxtp.errors import BadConfig, TrainingDiverged
from jaxtp.train.guard import MOST_SKIPPED, Guard
from jaxtp.train.language import NextToken, positions, predicted
from jaxtp.train.loop import fit
from jaxtp.train.optimizer import build_optimizer, build_schedule
from jaxtp.train.update import LossScale, init_state, make_update, to_host


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0, 0.5, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.6, 0.2]),
        ("cosine", [0, 0.5, 1, 0.6, 0.2]),
    ],
)
def test_schedules_rise_and_fall(schedule, expected):
    settings = Optimizer(learning_rate=1, schedule=schedule, warmup_steps=10, end_share=0.2)
    rate = build_schedule(settings, 50)
    found = [float(rate(step)) for step in (0, 5, 10, 30, 50)]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_decay_leaves_masked_parameters_alone():
    tx, _ = build_optimizer(Optimizer(weight_decay=0.5, learning_rate=0.1, schedule="constant"), 9)
    params = {"norm": {"scale": jnp.ones(2)}, "fc": {"kernel": jnp.ones((2, 2))}}
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_allclose(updates["norm"]["scale"], 0)
    np.testing.assert_allclose(updates["fc"]["kernel"], -0.05)


def test_clipping_is_by_the_norm_of_everything():
    tx, _ = build_optimizer(Optimizer(name="sgd", clip=1, learning_rate=1, schedule="constant"), 9)
    params = {"a": jnp.zeros(3), "b": jnp.zeros((2, 2))}
    updates, _ = tx.update(jax.tree.map(lambda x: x + 10, params), tx.init(params), params)
    assert float(optax.tree.norm(updates)) == pytest.approx(1)


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "sgd", "lamb", "rmsprop", "muon"])
def test_any_optimizer_by_name(name):
    tx, _ = build_optimizer(Optimizer(name=name), 5)
    params = {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    state = tx.init(params)
    updates, _ = tx.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.isfinite(x).all()), updates))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamww"}, r"TP020 at optimizer\.name: .*'adamww'\n  fix: adamw"),
        ({"options": {"beta1": 0.9}}, r"TP020 at optimizer\.options\.beta1: adamw takes no beta1"),
        ({"name": "sgd", "weight_decay": 0.1}, "sgd has no weight decay\n  fix: 0, or .*adamw"),
    ],
)
def test_what_optax_does_not_have_is_refused(settings, message):
    with pytest.raises(BadConfig, match=message):
        build_optimizer(Optimizer(**settings), 5)


def test_packed_documents_do_not_see_each_other():
    graph, params = nnx.split(models.abstract(MODELS["llama"]))
    loss, params = NextToken(graph), drawn(params)
    total = jax.jit(loss.total)
    first, second = batch(0, 1)["tokens"][:, :8], batch(1, 1)["tokens"][:, :7]
    alone = [{"tokens": jnp.asarray(x)} for x in (first, second)]
    packed = {
        "tokens": jnp.concatenate([first, second, np.zeros((1, 2), np.int32)], axis=1),
        "segments": jnp.asarray([[1] * 8 + [2] * 7 + [0] * 2]),
    }
    np.testing.assert_array_equal(
        positions(packed["segments"])[0], [*range(8), *range(7), *range(2)]
    )
    assert float(loss.count(packed)) == 7 + 6
    assert not predicted(packed["segments"])[0, 7]
    expected = sum(float(total(params, one)) for one in alone)
    assert float(total(params, packed)) == pytest.approx(expected, rel=1e-5)
    empty = {"tokens": packed["tokens"], "segments": jnp.zeros_like(packed["segments"])}
    assert (float(total(params, empty)), float(loss.count(empty))) == (0, 1)


def test_bfloat16_keeps_a_float32_master():
    config = dataclasses.replace(MODELS["llama"], dtype="bfloat16")
    state = init_state(nnx.split(models.build(config))[1], optax.adam(1e-3), Precision())
    assert state.loss_scale is None
    types = {leaf.dtype for leaf in jax.tree.leaves((state.params, state.opt_state[0].mu))}
    assert types == {jnp.dtype("float32")}


FLOAT16 = Precision(compute="float16", loss_scale_window=2)


def test_loss_scale_halves_on_overflow_and_grows_back():
    mesh = jaxtp.make_mesh(tp=4, dp=2)
    _, state, step = prepare("llama", mesh, precision=FLOAT16)
    state = dataclasses.replace(state, loss_scale=LossScale(jnp.float32(2e38), jnp.int32(1)))
    before = jaxtp.unshard(state.params)
    state, metrics = step(state, batch(0))
    assert float(metrics["loss_scale"]) == pytest.approx(2e38)
    assert not np.isfinite(float(metrics["loss"]))
    # Nothing moved, not even the optimizer; the next scale is half of this one.
    jax.tree.map(np.testing.assert_array_equal, jaxtp.unshard(state.params), before)
    assert int(state.num_updates) == 0
    assert float(state.loss_scale.scale) == pytest.approx(1e38)

    state = dataclasses.replace(state, loss_scale=LossScale(jnp.float32(8), jnp.int32(0)))
    scales = []
    for number in range(3):
        state, metrics = step(state, batch(number))
        scales.append(float(state.loss_scale.scale))
    assert scales == [8, 16, 16]
    assert int(state.num_updates) == 3


def test_loss_scale_changes_no_number():
    # float32 stands in for float16, which products on CPUs do not know.
    scaled = train("llama", jaxtp.make_mesh(tp=4, dp=2), precision=FLOAT16)
    for a, b in zip(jax.tree.leaves(reference("llama")), jax.tree.leaves(scaled), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


def test_fixed_loss_scale_stays():
    precision = dataclasses.replace(FLOAT16, loss_scale=4.0)
    _, state, step = prepare("llama", jaxtp.make_mesh(tp=8), precision=precision)
    for number in range(3):
        state, _ = step(state, batch(number))
    assert float(state.loss_scale.scale) == 4


class Overflowing:
    """A loss of 1 whose gradients are 1e30 everywhere, so that their norm is infinite."""

    def total(self, params, batch):
        zeros = [(x - jax.lax.stop_gradient(x)).sum() for x in jax.tree.leaves(params)]
        return 1.0 + 1e30 * sum(zeros)

    def count(self, batch):
        return jnp.float32(1)


@pytest.mark.parametrize(("fixed", "steps"), [(0.0, 15 + MOST_SKIPPED), (4.0, MOST_SKIPPED)])
def test_steps_that_overflow_at_one_scale_end_the_run(tmp_path, fixed, steps):
    mesh, precision = jaxtp.make_mesh(tp=8), dataclasses.replace(FLOAT16, loss_scale=fixed)
    params = {"mlp": {"up_proj": jnp.ones((4, 8)), "down_proj": jnp.ones((8, 4))}}
    plan, (tx, schedule) = jaxtp.make_plan(params, mesh), build_optimizer(Optimizer(), 200)
    state = jaxtp.shard(init_state(params, tx, precision), mesh, plan=plan)
    step = jax.jit(make_update(Overflowing(), tx, schedule, plan, mesh, precision=precision))
    with pytest.raises(TrainingDiverged, match=r"of 20 steps in a row, .* scale of [14],"):
        fit(step, state, lambda _: jnp.zeros((2, 5)), steps=range(200), folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["skipped_steps"] for line in lines] == list(range(1, steps + 1))
    # A restart goes on counting.
    assert Guard("", lines=lines).num_skipped == steps


def test_offloaded_state_stays_on_the_host_and_changes_no_number():
    mesh = jaxtp.make_mesh(tp=4, fsdp=2)
    plan, state, step = prepare("llama", mesh, zero=1, offload=True)
    assert plan.zero == 1
    for number in range(3):
        state, metrics = step(state, batch(number))
        moments = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
        assert {leaf.sharding.memory_kind for leaf in moments} == {"pinned_host"}
        assert {p.sharding.memory_kind for p in jax.tree.leaves(state.params)} == {"device"}
        assert float(metrics["loss"]) == pytest.approx(reference("llama")[0][number], abs=3e-5)
    assert step.jitted._cache_size() == 1
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5),
        jaxtp.unshard(state.params),
        reference("llama")[2],
    )


def test_offload_needs_memory_that_the_devices_reach(monkeypatch):
    config = MODELS["llama"]
    state = init_state(nnx.split(models.build(config))[1], optax.adam(1e-3), Precision())
    monkeypatch.setattr("jaxtp.train.update.HOST", "unreachable")
    with pytest.raises(BadConfig, match=r"TP020 at zero\.offload_optimizer: .*, not unreachable"):
        to_host(state)
