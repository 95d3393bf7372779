"""Pipeline stages: the numbers of one layer after the other, the idle ticks, what is compiled."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxtp.activations import constrain, use_plan
from jaxtp.errors import BadConfig, BadStages, SizeMismatch
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh
from jaxtp.pipeline import scan_layers
from jaxtp.plan import ParamDecision, Plan
from jaxtp.stages import Stages

WIDTH, INNER, TOKENS = 8, 16, 6
SPECS = {
    "into": ((WIDTH, INNER), ((), (), ("tp",))),
    "out": ((INNER, WIDTH), ((), ("tp",), ())),
    "scale": ((WIDTH,), ((), ())),
}


def layer(x, params, context):
    """Tokens of one segment mix; NaN for a sequence of zeros, which only idle ticks have."""
    h = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) * params["scale"][None, None]
    h = h + context["shift"]
    seen = jnp.tril(context["segments"][:, :, None] == context["segments"][:, None, :])
    h = constrain(jnp.einsum("bts,bsd->btd", seen / seen.sum(-1, keepdims=True), h), "block_input")
    inner = jnp.tanh(constrain(h @ params["into"], "mlp")) * context["gain"]
    return x + constrain(inner @ params["out"], "residual")


def toy(num_layers):
    random = np.random.default_rng(0)
    draw = functools.partial(random.normal, 0.0, 0.5)
    shapes = {name: (num_layers, *shape) for name, (shape, _) in SPECS.items()}
    return {name: np.float32(draw(shape) + (name == "scale")) for name, shape in shapes.items()}


def inputs(batch):
    random = np.random.default_rng(1)
    context = {
        "segments": np.cumsum(random.random((batch, TOKENS)) < 0.3, 1),
        "gain": np.float32(random.normal(size=(batch, TOKENS, 1))),
        "shift": np.float32(random.normal(size=(1, TOKENS, 1))),  # the same for all rows
        "absent": None,
    }
    return np.float32(random.normal(size=(batch, TOKENS, WIDTH))), context


def stored(w, stages):
    """An array stacked over layers, in the form that stages have it."""
    rows = [(w[first : first + count], stages.block - count) for first, count in stages.pieces]
    return np.concatenate([np.pad(w, [(0, n)] + [(0, 0)] * (w.ndim - 1)) for w, n in rows])


def plan_for(sizes, stages, *, cut=False, **changes):
    """A plan of the toy; `cut` over fsdp as ZeRO stage 3 does."""
    decisions = []
    for name, (shape, spec) in SPECS.items():
        spec = (("pp",), *spec[1:])
        if cut and name != "scale":
            spec = tuple(axes or ("fsdp",) for axes in spec)
        decisions.append(
            ParamDecision(
                path=name,
                shape=(stages.num_layers, *shape),
                dtype="float32",
                spec=spec,
                role="whole",
                reasons=("-",),
            )
        )
    shape = MeshShape.of({"pp": stages.num_stages, **sizes})
    return Plan(mesh=shape, decisions=tuple(decisions), stages=stages, **changes)


def placed(params, plan, mesh):
    return {
        name: jax.device_put(stored(w, plan.stages), NamedSharding(mesh, plan[name].partition_spec))
        for name, w in params.items()
    }


def loss_of(context, remat, x, params):
    out = scan_layers(layer, x, params, context=context, remat=remat)
    return jnp.sum(jnp.sin(out + jnp.arange(out.shape[0])[:, None, None]))


def close(got, want):
    """Equal up to the order in which fp32 sums are taken."""
    jax.tree.map(
        lambda g, w: np.testing.assert_allclose(g, w, rtol=0, atol=1e-5 * np.abs(w).max()),
        got,
        want,
    )


EVEN = functools.partial(Stages.even, micro_batches=4)
DP, FSDP = {"dp": 2, "tp": 2}, {"fsdp": 2, "tp": 2}
CASES = {
    "even": (EVEN(4, 2), DP, 16, "none", {}),
    "5 layers over 2": (EVEN(5, 2), FSDP, 16, "full", {}),
    "7 layers over 4": (EVEN(7, 4), {"tp": 2}, 8, "block_outputs", {}),
    "2 rounds": (EVEN(8, 2, num_rounds=2), DP, 16, "dots", {}),
    "2 uneven rounds": (EVEN(6, 2, num_rounds=2), DP, 8, "stage", {}),
    "3 micro-batches": (
        EVEN(4, 2, micro_batches=3), {"dp": 2, "fsdp": 2, "tp": 1}, 24, "none", {},
    ),
    "3 rows on 2 stages": (EVEN(4, 2, micro_batches=3), DP, 6, "none", {}),
    "1 and 5 layers": (Stages(layers=((1, 5),), micro_batches=4), DP, 8, "none", {}),
    "zero 3": (EVEN(5, 2), FSDP, 8, "full", {"cut": True, "sequence_parallel": True}),
    "sequence parallel": (EVEN(4, 2), DP, 8, "stage", {"sequence_parallel": True}),
    "8 stages": (EVEN(8, 8, micro_batches=8), {"tp": 1}, 8, "none", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_stages_give_the_numbers_of_one_layer_after_the_other(case):
    stages, sizes, batch, remat, changes = CASES[case]
    params, (x, context) = toy(stages.num_layers), inputs(batch)
    plan = plan_for(sizes, stages, **changes)
    mesh = make_mesh(pp=stages.num_stages, **sizes)

    def loss(params, x, gain):
        given = {**context, "gain": gain}
        out = scan_layers(layer, x, params, context=given, remat=remat)
        return jnp.sum(jnp.sin(out + jnp.arange(batch)[:, None, None]))

    run = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
    value, (by_params, *by_inputs) = run(params, x, context["gain"])
    by_params = {name: stored(np.asarray(w), stages) for name, w in by_params.items()}
    with use_plan(plan, mesh):
        got = run(placed(params, plan, mesh), x, context["gain"])
    close(got, (value, (by_params, *by_inputs)))


@pytest.mark.parametrize(
    "stages",
    [EVEN(7, 4), EVEN(5, 2, num_rounds=2), Stages(layers=((1, 5), (2, 1)), micro_batches=4)],
)
def test_every_layer_runs_once_for_each_micro_batch_and_idle_ticks_run_none(stages):
    ran = []

    def numbered(x, params, context):
        del context
        jax.debug.callback(lambda *found: ran.append(tuple(map(int, found))), params, x[0, 0, 0])
        return x + 1000

    sizes = {"tp": 8 // stages.num_stages}
    plan, mesh = plan_for(sizes, stages), make_mesh(pp=stages.num_stages, **sizes)
    x = np.arange(8, dtype=np.float32)[:, None, None]
    with use_plan(plan, mesh):
        out = jax.jit(lambda x, numbers: scan_layers(numbered, x, numbers))(
            x, stored(np.arange(stages.num_layers), stages)
        )
    jax.effects_barrier()
    np.testing.assert_array_equal(out, x + 1000 * stages.num_layers)
    # Each layer finds what all layers in front of it have added to the first row of a micro-batch.
    want = [(n, 1000 * n + row) for n in range(stages.num_layers) for row in range(0, 8, 2)]
    assert sorted(ran) == want


# What cannot be


def trace(plan, batch, num_rows):
    params = {
        name: jax.ShapeDtypeStruct((num_rows, *shape), jnp.float32)
        for name, (shape, _) in SPECS.items()
    }
    x, context = inputs(batch)
    with use_plan(plan, make_mesh(pp=2, **DP)):
        jax.eval_shape(lambda p: scan_layers(layer, x, p, context=context), params)


STAGED = plan_for(DP, EVEN(5, 2))
REFUSALS = {
    "a batch that does not divide": (
        STAGED, 12, 6, SizeMismatch, "12 sequences for 2 replicas x 4", "multiple of 8",
    ),
    "layers in the model's order": (
        STAGED, 16, 5, BadStages, "have 5 rows; 2 stages x 1 rounds of at most 3 .* in 6", "shard",
    ),
    "layers that are not stacked": (
        dataclasses.replace(
            STAGED,
            decisions=tuple(
                dataclasses.replace(d, spec=((), *d.spec[1:])) for d in STAGED.decisions
            ),
        ),
        16, 6, BadStages, "no parameter has its layers split over pp", "stack the layers",
    ),
    "another number of stages": (
        dataclasses.replace(STAGED, stages=EVEN(5, 4)),
        16, 8, BadStages, "4 stages on the mesh", "pp=4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refuses_before_anything_compiles(case):
    plan, batch, num_rows, error, what, fix = REFUSALS[case]
    with pytest.raises(error, match=rf"(?s){error.code}.*{what}.*fix: .*{fix}"):
        trace(plan, batch, num_rows)


def test_remat_is_a_known_policy():
    with pytest.raises(BadConfig, match=r"TP020 at remat: .*\n  fix: stage"):
        scan_layers(layer, jnp.ones((1, 1, 1)), {}, remat="stages")
