"""What a plan stores in another form comes back as it was: vocabularies, layers in stages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

import jaxtp
from jaxtp import models
from jaxtp.config.settings import Precision
from jaxtp.errors import BadSpec, BadStages, PlanMismatch
from jaxtp.inspect.pages.plan_page import see_tp_plan
from jaxtp.placement.train_state import slots
from jaxtp.plan.decisions import Plan
from jaxtp.plan.stages import Stages
from jaxtp.plan.stored_form import Blocks, pad, read, unpad
from jaxtp.plan.trees import flatten, leaves
from jaxtp.train.update import init_state

WIDTH, INNER = 8, 16


def stack(num_layers, dtype="float32"):
    """A scanned MLP with distinct numbers, and a table whose tokens do not divide by two."""

    def numbers(*shape):
        return np.arange(1, 1 + np.prod(shape), dtype=dtype).reshape(shape)

    return {
        "embed_tokens": {"embedding": numbers(15, WIDTH)},
        "layers": {
            "norm": {"scale": numbers(num_layers, WIDTH)},
            "gate_proj": {"kernel": numbers(num_layers, WIDTH, INNER)},
            "up_proj": {"kernel": numbers(num_layers, WIDTH, INNER)},
            "down_proj": {"kernel": numbers(num_layers, INNER, WIDTH)},
        },
    }


def mesh_of(pp, tp=2):
    return jaxtp.make_mesh(pp=pp, tp=tp, devices=jax.devices()[: pp * tp])


def assert_same(tree, other):
    for (path, leaf), (_, want) in zip(leaves(tree), leaves(other), strict=True):
        assert leaf.dtype == want.dtype
        np.testing.assert_array_equal(leaf, want, err_msg=path)


@st.composite
def deals(draw):
    """Any way to assign layers to the stages of eight devices."""
    num_stages, num_rounds = draw(st.sampled_from([2, 4])), draw(st.integers(1, 3))
    num_layers = draw(st.integers(num_stages * num_rounds, 14))
    shares = [draw(st.sampled_from([1.0, 1.5, 4.0])) for _ in range(num_stages)]
    return Stages.shared(num_layers, shares, micro_batches=num_stages, num_rounds=num_rounds)


@settings(deadline=None, max_examples=40)
@given(deal=deals(), rest=st.sampled_from([(), (3,)]), dim=st.integers(0, 1))
def test_pad_and_unpad_are_inverse_in_numpy_and_jax(deal, rest, dim):
    shape = (*rest[:dim], deal.num_layers, *rest[dim:])
    dim = min(dim, len(rest))
    x = np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape)
    blocks = Blocks(dim=dim, pieces=deal.pieces, block=deal.block)
    stored = np.asarray(pad(jnp.asarray(x), (blocks,)))
    assert stored.shape[dim] == blocks.stored == deal.num_stages * deal.num_rounds * deal.block
    np.testing.assert_array_equal(unpad(stored, (blocks,)), x)
    np.testing.assert_array_equal(unpad(jnp.asarray(stored), (blocks,)), x)
    # Chunks lie at the start of their blocks, stage by stage, and zeros fill the rest.
    for i, (first, count) in enumerate(deal.pieces):
        block = np.moveaxis(stored, dim, 0)[i * deal.block : (i + 1) * deal.block]
        np.testing.assert_array_equal(block[:count], np.moveaxis(x, dim, 0)[first : first + count])
        assert not block[count:].any()
    half = slice(deal.block // 2, blocks.stored - 1)
    index = (slice(None),) * dim + (half,) + (slice(None),) * (len(rest) - dim)
    np.testing.assert_array_equal(read(x, (blocks,), index), stored[index])


@settings(deadline=None, max_examples=8)
@given(deal=deals(), dtype=st.sampled_from(["float32", "bfloat16", "int32"]))
def test_shard_then_unshard_is_the_identity(deal, dtype):
    tree = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), stack(deal.num_layers))
    mesh = mesh_of(deal.num_stages)
    plan = jaxtp.make_plan(tree, mesh, stages=deal, pad_vocab="masked")
    placed = jaxtp.shard(tree, mesh, plan=plan)
    for path, leaf in leaves(placed):
        assert leaf.shape == plan[path].stored
        assert (leaf.sharding.spec[:1] == PartitionSpec("pp")[:1]) == path.startswith("layers")
    assert_same(jaxtp.unshard(placed, plan), tree)
    # What lies in its place is not assigned a second time.
    assert_same(jaxtp.unshard(jaxtp.shard(placed, mesh, plan=plan), plan), tree)
    # Adam's moments follow, here with the parameters' own numbers.
    moments = optax.ScaleByAdamState(np.int32(7), tree, jax.tree.map(lambda x: x * 2, tree))
    state = {"params": tree, "opt_state": (moments, optax.EmptyState())}
    placed = jaxtp.shard(state, mesh, plan=plan)
    for leaf, moment in zip(
        leaves(placed["params"]), leaves(placed["opt_state"][0].mu), strict=True
    ):
        assert leaf[1].sharding == moment[1].sharding
    assert_same(jaxtp.unshard(placed, plan), state)


@pytest.mark.parametrize("source", ["one device", "mesh", "explicit"])
def test_arrays_on_devices_are_dealt_out_on_devices(source):
    tree, mesh = stack(7), mesh_of(2)
    plan = jaxtp.make_plan(tree, mesh, stages=Stages.even(7, 2, micro_batches=2, num_rounds=3))
    homes = {
        "one device": jax.devices()[0],
        "mesh": NamedSharding(mesh, PartitionSpec()),
        "explicit": NamedSharding(
            jax.make_mesh((2, 2), ("pp", "tp"), devices=jax.devices()[:4]), PartitionSpec()
        ),
    }
    placed = jaxtp.shard(jax.device_put(tree, homes[source]), mesh, plan=plan)
    assert_same(jaxtp.unshard(placed, plan), tree)


@pytest.mark.parametrize("tx", [optax.adam(0.1), optax.adafactor(0.1), optax.ema(0.9)])
@pytest.mark.parametrize("num_rounds", [1, 2])
def test_optimizer_state_follows(tx, num_rounds):
    """Made on the host and sharded, or made from placed parameters: the same state."""
    tree, mesh = stack(6), mesh_of(2)
    stages = Stages.shared(6, [1.0, 2.0], micro_batches=2, num_rounds=num_rounds)
    plan = jaxtp.make_plan(tree, mesh, stages=stages)
    state = init_state(jax.tree.map(jnp.asarray, tree), tx, Precision())
    # Moments that are zeros would not show where they lie.
    state = dataclasses.replace(state, opt_state=jax.tree.map(lambda x: x + 1, state.opt_state))
    placed = jaxtp.shard(state, mesh, plan=plan)
    assert_same(jaxtp.unshard(placed, plan), state)
    for path, leaf in leaves(placed.opt_state):
        if leaf.ndim and leaf.shape[0] > 1 and "layers" in path:
            assert leaf.sharding.spec[0] == "pp", path


def test_state_made_of_stored_parameters_is_stored_too():
    """An optimizer that keeps a copy of the parameters: their layers are not assigned twice."""
    tree, mesh = stack(8), mesh_of(2)
    plan = jaxtp.make_plan(tree, mesh, stages=Stages.even(8, 2, micro_batches=2, num_rounds=2))
    tx = optax.GradientTransformation(lambda params: {"slow": params}, optax.identity().update)
    params = jaxtp.shard(tree, mesh, plan=plan)
    state = jaxtp.init_optimizer(tx, params, plan=plan)
    assert_same(jaxtp.unshard(state, plan)["slow"], tree)

    def init():
        return init_state(jax.tree.map(jnp.asarray, tree), tx, Precision())

    born = jaxtp.init_sharded(init, None, mesh, plan=plan)
    assert_same(jaxtp.unshard(born.params, plan), tree)
    assert_same(jaxtp.unshard(born.opt_state, plan)["slow"], tree)


def test_from_one_plans_stored_form_to_another_inside_jit():
    tree = stack(7)
    wide, narrow = mesh_of(4), mesh_of(2, 4)
    before = jaxtp.make_plan(tree, wide)
    after = jaxtp.make_plan(tree, narrow, stages=Stages.even(7, 2, micro_batches=4, num_rounds=2))
    arrays = flatten(tree)
    old, new = slots(arrays, before), slots(arrays, after)
    kernel = "layers/up_proj/kernel"
    x = jaxtp.shard(tree, wide, plan=before)["layers"]["up_proj"]["kernel"]
    home = NamedSharding(narrow, after[kernel].partition_spec)
    x = jax.device_put(np.asarray(x), NamedSharding(narrow, PartitionSpec()))
    move = jax.jit(
        lambda x: pad(unpad(x, old[kernel].padding), new[kernel].padding), out_shardings=home
    )
    want = jaxtp.shard(tree, narrow, plan=after)["layers"]["up_proj"]["kernel"]
    np.testing.assert_array_equal(move(x), want)


def test_even_stages_store_nothing_differently():
    tree = stack(8)
    plan = jaxtp.make_plan(tree, {"pp": 4, "tp": 2})
    assert plan.stages == Stages.even(8, 4, micro_batches=4)
    assert not any(d.padding for d in plan.decisions)
    assert plan["layers/up_proj/kernel"].partition_spec == PartitionSpec("pp", None, "tp")
    assert plan["embed_tokens/embedding"].partition_spec == PartitionSpec()
    assert jaxtp.make_plan(tree, {"pp": 1, "tp": 2}).stages is None


def test_stages_are_in_text_json_and_page(tmp_path):
    tree = stack(7)
    plan = jaxtp.make_plan(tree, {"pp": 2, "fsdp": 2, "tp": 2}, pad_vocab="masked")
    assert Plan.from_json(plan.to_json()) == plan
    text = "2 stages of 4, 3 layers, 2 micro-batches; each idles 33.3% of the time"
    assert f"stages: {text}" in str(plan)
    assert "P(pp, fsdp, tp)" in str(plan)
    assert "stored   [8, 8, 16]" in plan.explain("layers/up_proj/kernel")
    assert "pp=2 on layer dim 0" in plan["layers/up_proj/kernel"].reasons[-1]
    assert text in see_tp_plan(plan, tmp_path / "plan.html").read_text()
    # Each stage holds four rows for its three or four layers; fsdp halves them.
    held = plan["layers/norm/scale"].bytes_per_device(plan.mesh)
    assert held == 4 * WIDTH // 2 * 4


@pytest.mark.parametrize(
    ("tree", "mesh", "options", "error", "message"),
    [
        (stack(3), {"pp": 4, "tp": 2}, {}, BadStages, r"3 layers for 4 stages.*\n.*at most pp=3"),
        (
            {"up_proj": {"kernel": np.ones((8, 16))}},
            {"pp": 2, "tp": 2},
            {},
            BadStages,
            r"TP074 at pp: pp=2, and no parameter is a stack of layers\n.*scan over layers.*pp=1",
        ),
        (
            stack(8),
            {"pp": 4, "tp": 2},
            {"stages": Stages.even(8, 2, micro_batches=4)},
            BadStages,
            r"assigned to 2 stages, the mesh pp=4 x tp=2 has 4\n.*pp=2",
        ),
        (
            stack(8),
            {"tp": 2},
            {"stages": Stages.even(8, 2, micro_batches=4)},
            BadStages,
            r"assigned to 2 stages, the mesh tp=2 has 1",
        ),
        (
            stack(8),
            {"pp": 2, "tp": 2},
            {"stages": Stages.even(9, 2, micro_batches=4)},
            BadStages,
            r"stages for 9 layers, the model has stacks of 8\n.*stages of 8",
        ),
        (
            stack(8),
            {"pp": 2, "tp": 2},
            {"overrides": {"up_proj": PartitionSpec(None, "pp")}},
            BadSpec,
            r"TP044 at layers/up_proj/kernel: the axis pp shards another dim",
        ),
    ],
)
def test_what_no_stage_can_hold_is_refused(tree, mesh, options, error, message):
    with pytest.raises(error, match=message):
        jaxtp.make_plan(tree, mesh, **options)


@pytest.mark.parametrize("num_rounds", [1, 2])
def test_a_folder_is_loaded_into_stages_and_saved_from_them(tmp_path, num_rounds, monkeypatch):
    from jaxtp.io import assemble
    from jaxtp.io.hf import load_hf, save_hf

    config = models.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, intermediate_size=32, dtype="float32",
    )  # fmt: skip
    model = models.build(config, nnx.Rngs(0))
    save_hf(model, tmp_path / "first", progress=False)
    mesh = mesh_of(2)
    stages = Stages.shared(5, [1.0, 2.0], micro_batches=2, num_rounds=num_rounds)
    plan = jaxtp.make_plan(model, mesh, config=config, stages=stages)
    # Layer by layer, and all at once.
    monkeypatch.setattr(assemble, "CHUNK_BYTES", 0 if num_rounds == 1 else 2**20)
    loaded, params = load_hf(tmp_path / "first", mesh, plan=plan, progress=False)
    assert_same(jaxtp.unshard(params, plan), nnx.state(model, nnx.Param))
    with pytest.raises(PlanMismatch, match="stored by pipeline stage"):
        save_hf(loaded, tmp_path / "none", progress=False)
    save_hf(loaded, tmp_path / "again", plan=plan, progress=False)
    first, again = (tmp_path / name / "model.safetensors" for name in ("first", "again"))
    assert first.read_bytes() == again.read_bytes()


def test_functions_that_know_no_stages_are_verified_on_them():
    def fn(params, x):
        def layer(x, p):
            inner = jax.nn.silu(x @ p["gate_proj"]["kernel"]) * (x @ p["up_proj"]["kernel"])
            return x * p["norm"]["scale"][None] + inner @ p["down_proj"]["kernel"], None

        return jax.lax.scan(layer, x, params["layers"])[0]

    tree = jax.tree.map(lambda x: x / x.size, stack(7))
    stages = Stages.even(7, 2, micro_batches=2, num_rounds=2)
    x = jax.random.normal(jax.random.key(0), (4, WIDTH))
    result = jaxtp.verify(fn, tree, (x,), mesh_of(2, tp=1), stages=stages, show=str)
    assert result.rows[-1].mesh == "pp=2 x tp=1"
