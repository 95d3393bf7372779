"""The communication of a step that runs, here on simulated devices."""

import jax
import jax.numpy as jnp
import pytest

import jaxtp
from jaxtp.compile import running_step
from jaxtp.train.step import jit_step


@pytest.fixture(scope="module")
def report():
    mesh = jaxtp.make_mesh(dp=2, tp=4)
    params = {"up": {"kernel": jnp.ones((32, 64))}, "down": {"kernel": jnp.ones((64, 32))}}
    plan = jaxtp.make_plan(params, mesh)
    state = jaxtp.shard(params, mesh, plan=plan)

    def loss(params, batch):
        return jnp.sum(jnp.tanh(batch @ params["up"]["kernel"]) @ params["down"]["kernel"])

    def update(params, batch):
        grads = jax.grad(loss)(params, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    step = jit_step(update, state, mesh, plan=plan)
    found = running_step.report_step(step, state, jnp.ones((8, 32)))
    step(state, jnp.ones((8, 32)))  # the report donated nothing
    return found


def test_a_running_step_lists_its_reductions(report):
    assert report.mesh == {"dp": 2, "tp": 4}
    assert report.wire_bytes_by_axes.keys() <= {"dp", "tp", "dp x tp"}
    gradients = [row for row in report.collectives if row.axes == ("dp",)]
    # Both gradients, float32: (32 x 64 + 64 x 32) / 4 elements, and half of a ring of two each way.
    assert sum(row.wire_bytes for row in gradients) == pytest.approx(2 * 32 * 64 / 4 * 4, rel=0.01)
    assert {row.dtype for row in gradients} == {"f32"}


def test_a_cpu_is_said_to_move_other_bytes(report):
    assert "runs on cpu, which moves other bytes" in report.notes[0]
    assert "all-reduce" in report.communication()
    assert "other bytes" in report.communication()


@pytest.mark.parametrize(
    ("value", "asked"), [(None, False), ("0", False), ("", False), ("1", True)]
)
def test_the_environment_asks(monkeypatch, value, asked):
    monkeypatch.delenv(running_step.VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(running_step.VARIABLE, value)
    assert running_step.is_asked() is asked
