"""ZeRO over the fsdp axis: which dims it shards, and where optimizer state then lies."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxtp
from jaxtp import models
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.settings import Batch, Config, Mesh, Zero
from jaxtp.cost.memory import state_bytes_per_device
from jaxtp.errors import BadConfig, DoesNotFit
from jaxtp.hardware.gpus import Target
from jaxtp.placement.train_state import slots
from jaxtp.plan.trees import FlatTree
from jaxtp.train import planning
from jaxtp.train.config_step import abstract_state
from jaxtp.train.preflight import preflight_config, warn_across_hosts

MESH = {"fsdp": 2, "tp": 4}


def shapes(**arrays):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in arrays.items()}


def plan_of(model, mesh=MESH, **options):
    return jaxtp.make_plan(models.abstract(model), mesh, **options)


def test_every_stage_cuts_the_same_dims_of_different_things():
    kernel = "layers/mlp/up_proj/kernel"
    specs = {}
    for stage in (0, 1, 2, 3):
        plan = plan_of("llama-tiny", zero=stage)
        assert plan.zero == stage
        specs[stage] = (plan[kernel].spec, plan[kernel].state_spec)
        assert jaxtp.Plan.from_json(plan.to_json()) == plan
    whole, cut = ((), (), ("tp",)), ((), ("fsdp",), ("tp",))
    assert specs == {0: (whole, ()), 1: (whole, cut), 2: (whole, cut), 3: (cut, ())}

    text = plan_of("llama-tiny", zero=1).explain(kernel)
    assert "state    P(-, fsdp, tp)" in text
    assert "fsdp=2 on dim 1 of optimizer state" in text
    assert "fsdp=2 on dim 1" in plan_of("llama-tiny")._repr_html_()


def test_tokens_along_cp_are_data_to_parameters():
    """With fsdp, or without it where a stage is asked for."""
    kernel = "layers/mlp/up_proj/kernel"
    both = plan_of("llama-tiny", {"fsdp": 2, "cp": 2, "tp": 2})
    assert both[kernel].spec == ((), ("fsdp", "cp"), ("tp",))
    alone = [plan_of("llama-tiny", {"cp": 4, "tp": 2}, **kw) for kw in ({}, {"zero": 1})]
    assert [plan[kernel].state_spec for plan in alone] == [(), ((), ("cp",), ("tp",))]


@pytest.mark.parametrize(
    ("mesh", "over", "left"),
    [
        ({"ep": 3, "fsdp": 8, "tp": 1}, ("fsdp",), "ep=3"),
        ({"fsdp": 8, "ep": 3, "tp": 1}, ("fsdp",), "ep=3"),
        ({"fsdp": 2, "cp": 3, "ep": 4, "tp": 2}, ("fsdp", "ep"), "cp=3"),
        ({"fsdp": 6, "cp": 4, "ep": 5, "tp": 1}, ("cp",), "fsdp=6, ep=5"),
    ],
    ids=str,
)
def test_axes_that_do_not_divide_leave_the_others_to_shard(mesh, over, left):
    plan = jaxtp.make_plan(shapes(w=(1024, 4096)), mesh, zero=3, overrides={"w": P(None, "tp")})
    assert plan["w"].spec == (over, ("tp",))
    assert plan["w"].reasons[-1].endswith(f"on dim 0, not divisible over {left} as well")


def test_without_the_axis_nothing_changes():
    plan = plan_of("llama-tiny", {"dp": 2, "tp": 4}, zero=3)
    assert plan.zero == 0
    assert plan == plan_of("llama-tiny", {"dp": 2, "tp": 4}, zero=0)
    with pytest.raises(BadConfig, match="no ZeRO stage 4"):
        plan_of("llama-tiny", zero=4)


@pytest.mark.parametrize("model", ["llama3-70b", "gpt3-175b"])
def test_memory_is_the_formula_and_layers_are_never_cut(model):
    plan = plan_of(model, {"fsdp": 8, "tp": 8}, pad_vocab="masked")
    for d in plan.decisions:
        if d.path.startswith(("layers/", "h/")):
            assert d.spec[0] == (), d.path
    # What is replicated over fsdp adds next to nothing.
    assert plan.bytes_per_device < 1.02 * plan.num_bytes / 64


def scanned(params, x):
    """An MLP with residual, one layer after another; nothing in its names or norms says so."""

    def layer(x, w):
        return x + jax.nn.relu(x @ w["a"]) @ w["b"], None

    return jax.lax.scan(layer, x, params)[0]


@pytest.mark.parametrize("layers", [64, 6])
def test_a_scan_shows_which_dim_counts_layers(layers):
    """The dataflow sees the stack that names cannot: fsdp leaves it alone, pp assigns it."""
    tree, x = shapes(a=(layers, 32, 48), b=(layers, 48, 32)), jnp.ones((4, 32))
    plan = jaxtp.make_plan(tree, MESH, fn=scanned, inputs=(x,))
    assert plan["a"].partition_spec == P(None, "fsdp", "tp")
    assert plan["b"].partition_spec == P(None, "tp", "fsdp")
    plan = jaxtp.make_plan(tree, {"pp": 2, "tp": 4}, fn=scanned, inputs=(x,))
    assert plan["a"].partition_spec == P("pp", None, "tp")
    assert plan.stages is not None
    assert plan.stages.num_layers == layers


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (256, 512), P(None, "fsdp")),  # the largest dim
        (P(None, "tp"), (256, 512), P("fsdp", "tp")),  # another dim than the tensor axis
        (P(None, "tp"), (255, 512), P(None, ("tp", "fsdp"))),  # the same where no other divides
        (P(None, "tp"), (255, 516), P(None, "tp")),  # 516 / 4 is odd
        (P("fsdp"), (256, 512), P("fsdp")),  # given by the user
    ],
)
def test_dim_is_free_then_large_then_shared(spec, shape, expected):
    plan = jaxtp.make_plan(shapes(w=shape), MESH, overrides={"w": spec})
    assert plan["w"].partition_spec == expected


def test_small_leaves_stay_whole():
    plan = jaxtp.make_plan(
        shapes(kernel=(512, 512), bias=(512,), table=(1024, 2)),
        MESH,
        overrides={"kernel|bias|table": P()},
    )
    assert plan["kernel"].partition_spec == P("fsdp")
    assert plan["bias"].partition_spec == P()
    assert plan["bias"].reasons[-1].endswith("fsdp=2: replicated, small")
    assert plan["table"].partition_spec == P("fsdp")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_optimizer_state_lies_where_the_stage_wants_it(stage):
    mesh = jaxtp.make_mesh(fsdp=2, tp=4)
    plan = plan_of("llama-tiny", mesh, zero=stage)
    module, optimizer = jaxtp.init_sharded(
        lambda: models.build("llama-tiny"), optax.adamw(1e-3), mesh, plan=plan
    )
    kernel = module.layers.mlp.up_proj.kernel[...]
    moment = nnx.to_pure_dict(nnx.state(optimizer))["opt_state"][0]["mu"]
    moment = moment["layers"]["mlp"]["up_proj"]["kernel"]
    cut, whole = P(None, "fsdp", "tp"), P(None, None, "tp")
    assert kernel.sharding.spec == (cut if stage == 3 else whole)
    assert moment.sharding.spec == (cut if stage else whole)

    # The same for a state that exists already, as a tuple and as a TrainState.
    again = jaxtp.shard((module, optimizer), mesh, plan=plan)
    for old, new in zip(
        jax.tree.leaves(nnx.state((module, optimizer))),
        jax.tree.leaves(nnx.state(again)),
        strict=True,
    ):
        assert old.sharding.is_equivalent_to(new.sharding, old.ndim)
    params = {"layers": {"mlp": {"up_proj": {"kernel": jnp.ones((4, 128, 384))}}}}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params)}
    specs = jaxtp.state_specs(state, narrow(plan))
    assert specs["params"]["layers"]["mlp"]["up_proj"]["kernel"] == (cut if stage == 3 else whole)
    assert specs["opt_state"][0].mu["layers"]["mlp"]["up_proj"]["kernel"] == (
        cut if stage else whole
    )


def narrow(plan):
    """The plan of one kernel alone."""
    return jaxtp.Plan(
        mesh=plan.mesh, decisions=(plan["layers/mlp/up_proj/kernel"],), zero=plan.zero
    )


def compiled(mesh, stage, accumulation=1):
    """The GPU compiler's program of a small run on 8 H100, and its collectives over the batch."""
    config = Config(
        target="h100:1x8",
        seq_len=256,
        batch=Batch(size=16, accumulation=accumulation),
        mesh=mesh,
        zero=Zero(stage=stage),
    )
    plan, report = preflight_config(config)
    rows = [c for c in report.collectives if set(c.axes) == set(plan.mesh.batch)]
    return report, [c for c in rows if c.num_bytes > 16_000]


LAYERS = 4  # of llama-tiny


def test_stage_3_gathers_and_scatters_layer_by_layer_in_bfloat16():
    report, rows = compiled(Mesh(tp=4, fsdp=2), 3)
    gathers = [c for c in rows if c.kind == "all-gather" and c.count == LAYERS]
    assert {c.backward for c in gathers} == {False, True}
    scatters = [c for c in rows if c.kind == "reduce-scatter" and c.count == LAYERS]
    assert scatters
    assert all(c.backward for c in scatters)
    assert not [c for c in rows if c.kind == "all-reduce"]
    assert {c.dtype for c in gathers + scatters} == {"bf16"}
    assert report.alias_bytes == pytest.approx(report.argument_bytes, rel=0.02)


def test_stage_2_scatters_gradients_and_gathers_once():
    _, rows = compiled(Mesh(tp=4, dp=2), 2)
    assert [c for c in rows if c.kind == "reduce-scatter" and c.count == LAYERS]
    assert not [c for c in rows if c.kind == "all-reduce"]
    gathers = [c for c in rows if c.kind == "all-gather"]
    assert sum(c.count for c in gathers) == 1  # the new parameters


def test_micro_batches_share_one_reduction():
    _, rows = compiled(Mesh(tp=4, dp=2), 0, accumulation=4)
    (reduction,) = rows
    assert (reduction.kind, reduction.dtype, reduction.count) == ("all-reduce", "f32", 1)


def test_tensor_axis_across_hosts_has_a_price():
    config = Config(model="llama3-8b", target="h100:2x8", mesh=Mesh(tp=16), batch=Batch(size=1))
    build = planning.Build.of(resolve(config, 16))
    plan = planning.plan_of(build)
    with pytest.warns(jaxtp.JaxtpWarning, match=r"tp=16 spans 2 NVLink domains .* ms a step, mod"):
        warn_across_hosts(build, plan, Target.parse(config.target))


def test_what_cannot_fit_is_refused_before_it_is_compiled():
    config = Config(
        model="llama3-70b", target="h100:8x8", mesh=Mesh(tp=8, dp=8), batch=Batch(size=8)
    )
    # 70.6 billion parameters x 12 bytes (float32, two moments) / 8.
    with pytest.raises(DoesNotFit, match=r"TP114 at mesh: .* take 98\.\d GiB .*\n.*mesh\.fsdp=8"):
        preflight_config(dataclasses.replace(config, zero=Zero(stage=0)))
    # Devices that share a sequence share the state too, and are no replicas.
    along = dataclasses.replace(config, mesh=Mesh(tp=8, cp=8), batch=Batch(size=1))
    with pytest.raises(DoesNotFit, match=r"TP114 .*\n.*zero\.stage=3, a larger mesh\.tp"):
        preflight_config(along)
    # The same with ZeRO-3: 1/8 of that.
    sharded = planning.Build.of(resolve(dataclasses.replace(config, zero=Zero(stage=3)), 64))
    plan = planning.plan_of(sharded)
    state = FlatTree.of(abstract_state(sharded)).shapes()
    held = state_bytes_per_device(state, slots(state, plan), plan.mesh)
    assert held == pytest.approx(12 * 70.55e9 / 64, rel=2e-3)
