"""Pipeline stages: the numbers of one layer after the other, the idle ticks, what is compiled."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rounding import bound

from jaxtp.activations.by_name import constrain, use_plan
from jaxtp.activations.context.one_device import on_each_device
from jaxtp.compile.deviceless import preflight
from jaxtp.errors import BadConfig, BadStages, JaxtpWarning, SizeMismatch
from jaxtp.layers.stacked import scan_layers
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh
from jaxtp.models import LlamaConfig, abstract, cross_entropy
from jaxtp.placement.arrays import shard, shard_batch
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.plan.stages import Stages
from jaxtp.rules.planner import make_plan
from jaxtp.train.step import jit_step
from jaxtp.train.update import make_update

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
    """A plan of the toy; `cut` is sharded over fsdp as ZeRO stage 3 does."""
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
                role="replicated",
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
STAGED = plan_for(DP, EVEN(5, 2))
CASES = {
    "5 layers over 2": (EVEN(5, 2), FSDP, 16, "full", {}),
    "7 layers over 4": (EVEN(7, 4), {"tp": 2}, 8, "block_outputs", {}),
    "2 rounds of 6 layers": (EVEN(6, 2, num_rounds=2), DP, 8, "dots", {}),
    "3 micro-batches": (
        EVEN(4, 2, micro_batches=3), {"dp": 2, "fsdp": 2, "tp": 1}, 24, "none", {},
    ),
    "3 rows on 2 stages": (EVEN(4, 2, micro_batches=3), DP, 6, "none", {}),
    "1 and 5 layers": (Stages(layers=((1, 5),), micro_batches=4), DP, 8, "none", {}),
    "zero 3": (EVEN(5, 2), FSDP, 8, "full", {"cut": True, "sequence_parallel": True}),
    "zero 3, gathered once": (
        EVEN(5, 2), FSDP, 16, "full", {"cut": True, "overlap": "aggressive"},
    ),
    "rounds, gathered once": (
        EVEN(7, 2, num_rounds=2), {"dp": 2, "fsdp": 2, "tp": 1}, 16, "none",
        {"cut": True, "overlap": "aggressive"},
    ),
    "sequence parallel": (EVEN(4, 2), DP, 8, "stage", {"sequence_parallel": True}),
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
    # The loss adds sines of both signs: it is held to their size, 1, and not to what they leave.
    np.testing.assert_allclose(got[0], value, rtol=0, atol=bound(x.size))
    close(got[1], (by_params, *by_inputs))


@pytest.mark.parametrize(
    "stages", [EVEN(7, 4), Stages(layers=((1, 5), (2, 1)), micro_batches=4)], ids=["7", "rounds"]
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


@pytest.mark.parametrize("remat", ["none", "block_outputs"])
def test_no_tick_keeps_a_copy_of_the_weights(remat):
    width, stages = 256, Stages.even(4, 2, micro_batches=16, num_rounds=2)
    mesh = make_mesh(pp=2, tp=4)
    decision = dataclasses.replace(STAGED["out"], path="w", spec=(("pp",), (), ()))
    plan = Plan(mesh=MeshShape.of(mesh), decisions=(decision,), stages=stages)
    w = jax.ShapeDtypeStruct((4, width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((16, 1, width), jnp.float32)

    def loss(w, x):
        def layer(x, w, _):
            return x + jnp.tanh(x @ w.astype(x.dtype))

        return scan_layers(layer, x, w, remat=remat).sum()

    with use_plan(plan, mesh):
        compiled = jax.jit(jax.grad(loss)).lower(w, x).compile()
    of_a_stage = 2 * width * width * 4
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < 5 * of_a_stage
        < stages.num_ticks * of_a_stage
    )


@pytest.mark.parametrize("masked", [True, False])
def test_attention_of_each_device_s_heads_in_a_stage_has_the_numbers_of_all(masked):
    random = np.random.default_rng(0)
    q, k, v = (np.float32(random.normal(size=(4, 6, heads, 8))) for heads in (4, 2, 2))
    ids = np.cumsum(random.random((4, 6)) < 0.3, 1)
    mask = ids[:, None, :, None] == ids[:, None, None, :] if masked else None

    def total(q, k, v, mask):
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=True)
        return jnp.sum(jnp.sin(on_each_device(attend, mask)(q, k, v)))

    run = jax.value_and_grad(total, (0, 1, 2))
    want = run(q, k, v, mask)
    plan, mesh = plan_for(DP, EVEN(4, 2)), make_mesh(pp=2, **DP)
    with use_plan(plan, mesh):
        of_a_stage = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            axis_names={"pp"},
            check_vma=False,
        )
        traced = str(jax.make_jaxpr(of_a_stage)(q, k, v, mask))
        got = jax.jit(of_a_stage)(q, k, v, mask)
    assert traced.count("shard_map[") > 1
    close(jax.device_get(got), jax.device_get(want))


# What cannot be


def trace(plan, batch, num_rows):
    params = {
        name: jax.ShapeDtypeStruct((num_rows, *shape), jnp.float32)
        for name, (shape, _) in SPECS.items()
    }
    x, context = inputs(batch)
    with use_plan(plan, make_mesh(pp=2, **DP)):
        jax.eval_shape(lambda p: scan_layers(layer, x, p, context=context), params)


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
        16, 6, BadStages, "no parameter has its layers sharded over pp", "stack the layers",
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
        scan_layers(layer, jnp.ones((1, 1, 1)), {"w": jnp.ones((1, 1))}, remat="stages")


LLAMA = LlamaConfig(
    vocab_size=1024,
    hidden_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=1024,
    remat="block_outputs",
)


def test_layers_in_stages_are_not_interleaved_and_say_so():
    mesh = make_mesh(pp=2, **DP)
    plan = make_plan(abstract(LLAMA), mesh, config=LLAMA)
    graph, params = nnx.split(shard(abstract(LLAMA), mesh, plan=plan))
    tokens = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    plan = dataclasses.replace(plan, overlap="aggressive")
    with (
        use_plan(plan, mesh),
        pytest.warns(JaxtpWarning, match="TP073.*stages: .*, 16 of 0.00781 MiB"),
    ):
        jax.eval_shape(lambda p, t: nnx.merge(graph, p)(t), params, tokens)


def test_a_step_that_scans_stages_by_itself_is_refused():
    plan, mesh, traced = plan_for(DP, EVEN(4, 2)), make_mesh(pp=2, **DP), []

    def step(params, x, run=scan_layers):
        traced.append(run)
        context = inputs(16)[1]
        grads = jax.grad(lambda w: run(layer, x, w, context=context).sum())(params)
        return jax.tree.map(lambda w, grad: w - grad, params, grads)

    def by_hand(body, x, params, *, context):
        return jax.lax.scan(lambda x, w: (body(x, w, context), None), x, params)[0]

    params, (x, _) = placed(toy(4), plan, mesh), inputs(16)
    own = functools.partial(step, run=by_hand)
    with pytest.raises(BadStages, match=r"TP074.*the step runs none.*\n  fix: .*scan_layers"):
        jit_step(own, params, mesh, plan=plan).lower(params, x)
    jit_step(step, params, mesh, plan=plan).lower(params, x)
    assert traced == [by_hand, scan_layers]  # the check costs no second trace


def test_micro_batches_beside_those_of_the_stages_are_refused():
    with pytest.raises(BadStages, match="2 micro-batches, each of 4"):
        make_update(None, None, None, STAGED, None, num_micro=2)


# What the GPU compiler makes of it


def gradient_step(mesh, rows, tokens, overlap="auto"):
    """Gradient descent on LLAMA in 2 stages for 8 micro-batches of `rows` sequences a replica."""
    stages = Stages.even(LLAMA.num_hidden_layers, mesh.shape["pp"], micro_batches=8)
    plan = make_plan(abstract(LLAMA), mesh, config=LLAMA, stages=stages)
    plan = dataclasses.replace(plan, overlap=overlap)
    graph, params = nnx.split(shard(abstract(LLAMA), mesh, plan=plan))
    batch = plan.mesh.batch_ways * stages.micro_batches * rows
    batch = shard_batch(jax.ShapeDtypeStruct((batch, tokens + 1), jnp.int32), mesh)

    def step(params, batch):
        def loss(params):
            return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch[:, 1:])

        with use_plan(plan, mesh):
            grads = jax.grad(loss)(params)
        return jax.tree.map(lambda w, grad: w - 0.1 * grad, params, grads)

    places = jax.tree.map(lambda w: w.sharding, params)
    return jax.jit(step, donate_argnums=0, out_shardings=places), (params, batch)


def test_the_compiled_program_moves_what_a_pipeline_must_and_nothing_else():
    rows, tokens, layers = 2, 256, 2
    report = preflight(
        "test_stacked:gradient_step",
        target="h100:1x8",
        mesh={"pp": 2, "dp": 2, "tp": 2},
        keywords={"rows": rows, "tokens": tokens},
    )
    assert any("idle ticks" in note for note in report.notes)
    # (kind, axes) -> {bytes of a message: times}
    found = {}
    for row in report.collectives:
        if row.num_bytes > 2**17:
            of_kind = found.setdefault((row.kind, row.axes), Counter())
            of_kind[row.num_bytes] += row.count
    width, micro, ticks = LLAMA.hidden_size, 8, 9
    message = rows * tokens * width * 2
    ends = message * micro
    # A layer's elements on one device: q, o, k, v and the MLP's three; and two norms, whole on tp.
    weights = width * (2 * 512 + 2 * 256 + 3 * 1024) // 2 + 2 * width
    assert found.pop(("collective-permute", ("pp",))) == {message: 2 * ticks}
    assert found.pop(("all-reduce", ("tp",))) == {
        message: 4 * ticks * layers,
        ends // 2: 2,  # lookup and head, half the batch on each stage
    }
    assert found.pop(("all-gather", ("pp",))) == {ends: 2}
    assert found.pop(("reduce-scatter", ("pp",))) == {ends: 2}
    # Summed over all ticks in float32, then reduced.
    by_dp = found.pop(("all-reduce", ("dp",)))
    assert set(by_dp.values()) == {1}
    assert sum(by_dp) == layers * weights * 4
    tables = 2 * LLAMA.vocab_size * width // 2 * 2
    assert found.pop(("all-reduce", ("pp", "dp"))) == {tables: 1}
    assert not found


def test_aggressive_stages_gather_and_reduce_each_weight_once_a_step():
    report = preflight(
        "test_stacked:gradient_step",
        target="h100:1x8",
        mesh={"pp": 2, "fsdp": 4, "tp": 1},
        keywords={"rows": 1, "tokens": 128, "overlap": "aggressive"},
    )
    width = LLAMA.hidden_size
    layers = 2 * width * (2 * 512 + 2 * 256 + 3 * 1024) * 2
    moved = Counter()
    for row in report.collectives:
        if row.axes == ("fsdp",) and row.num_bytes > 2**17:
            assert row.dtype == "bf16"
            moved[row.kind] += row.num_bytes * row.count
    tables = 2 * LLAMA.vocab_size * width * 2
    assert moved["all-gather"] == layers + tables
    assert moved["reduce-scatter"] == layers + tables
    assert not moved["all-reduce"]
