"""Experts work on the tokens that chose them: the numbers of the plain loop over experts."""

import collections
import dataclasses
import functools

import compiled_programs as programs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from rounding import assert_close, bound
from small_models import drawn

import jaxtp
from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse
from jaxtp.compile.instruction_work import matmul_flops
from jaxtp.compile.options import PREFLIGHT
from jaxtp.config.settings import Precision
from jaxtp.errors import SizeMismatch
from jaxtp.layers import experts as layer_experts
from jaxtp.layers.experts import Capacity
from jaxtp.models import moe
from jaxtp.models.llama import LlamaConfig
from jaxtp.plan.stages import Stages
from jaxtp.train.language import NextToken
from jaxtp.train.update import init_state, make_update

BATCH, SEQ, EXPERTS, CHOSEN = 8, 8, 8, 2
CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=4,
    intermediate_size=16,
    dtype="float32",
    num_experts=EXPERTS,
    num_experts_per_tok=CHOSEN,
    n_shared_experts=1,
    router_aux_loss_coef=0.01,
    router_z_loss_coef=0.001,
)
TOKENS = np.random.default_rng(0).integers(0, 48, (BATCH, SEQ + 1)).astype(np.int32)
MICRO_BATCHES = 2
TERMS = BATCH * SEQ * CONFIG.hidden_size
"""Of the longest sums, for `rounding.bound`: a learning rate of 1 carries the rounding of an update
into all that follow, norms of gradients and parameters alike."""


def plain_loop(h_BTD, weights_BTK, index_BTK, experts, gate, capacity, *, groups=1):
    """Every expert on every token; what finds no room in its group of sequences counts nothing."""
    num_experts = len(experts.gate_EDF)
    is_chosen_GAE = jax.nn.one_hot(index_BTK, num_experts, dtype=jnp.int32).reshape(
        groups, -1, num_experts
    )
    rank_GA = jnp.sum((jnp.cumsum(is_chosen_GAE, axis=1) - 1) * is_chosen_GAE, axis=-1)
    rank_BTK = rank_GA.reshape(index_BTK.shape)
    num_tokens = h_BTD.shape[0] * h_BTD.shape[1] // groups
    size = capacity.of(num_tokens, index_BTK.shape[-1], num_experts)
    kept_BTK = (rank_BTK < size) | (not capacity.drops)
    out_BTD = 0
    for e in range(num_experts):
        inner_BTF = gate(h_BTD @ experts.gate_EDF[e], h_BTD @ experts.up_EDF[e])
        weight_BT = jnp.sum(weights_BTK * kept_BTK * (index_BTK == e), axis=-1)
        out_BTD += inner_BTF @ experts.down_EFD[e] * weight_BT[..., None]
    return out_BTD, jnp.sum(~kept_BTK, axis=2)


def prepared(sizes, config, zero=None):
    """The step of a model on a mesh, its first state, its batch, and its plan."""
    graph, params = nnx.split(jaxtp.models.abstract(config))
    params = drawn(params)
    mesh = jaxtp.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    stages = Stages.even(2, sizes["pp"], micro_batches=MICRO_BATCHES) if "pp" in sizes else None
    plan = jaxtp.make_plan(params, mesh, config=config, stages=stages, zero=zero)
    tx = optax.sgd(1.0)
    state = jaxtp.shard(init_state(params, tx, Precision()), mesh, plan=plan)
    update = make_update(NextToken(graph), tx, lambda _: 1.0, plan, mesh)
    step = jaxtp.jit_step(update, state, mesh, plan=plan)
    return step, state, jaxtp.shard_batch({"tokens": TOKENS}, mesh), plan


def three_updates(step, state, batch, plan):
    """Metrics of three steps and the parameters behind them."""
    rows = []
    for _ in range(3):
        state, metrics = step(state, batch)
        rows.append({name: float(value) for name, value in metrics.items()})
    return rows, jax.tree.leaves(jaxtp.unshard(state.params, plan=plan))


@functools.cache
def by_plain_loop(config, groups):
    """The same on one device by the loop."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe, "run_experts", functools.partial(plain_loop, groups=groups))
        return three_updates(*prepared({"tp": 1}, config))


# Mesh, capacity factor, whether tokens are dropped, groups of tokens that share a capacity. A
# factor of 0.5 leaves most experts without room.
CASES = [
    ({"tp": 1}, 0.5, False, 1),
    ({"tp": 2}, 0.5, True, 1),
    ({"ep": 4, "tp": 1}, 0.5, False, 4),
    ({"fsdp": 2, "ep": 2, "tp": 2}, 0.5, True, 4),
    ({"pp": 2, "ep": 2, "tp": 2}, 0.5, True, 4),
    ({"ep": 2, "cp": 2, "tp": 2}, 0.5, False, 1),
]


@pytest.mark.parametrize(("sizes", "factor", "drops", "groups"), CASES, ids=str)
def test_loss_gradients_and_updates_are_those_of_the_plain_loop(sizes, factor, drops, groups):
    """Under ZeRO 3, over whatever axes the mesh has for it."""
    config = dataclasses.replace(CONFIG, capacity_factor=factor, drop_tokens=drops)
    got, got_params = three_updates(*prepared(sizes, config, zero=3))
    want, want_params = by_plain_loop(config, groups if drops else 1)
    for row, expected in zip(got, want, strict=True):
        assert row == pytest.approx(expected, rel=bound(TERMS), abs=1e-6)
    assert (got[0]["dropped"] > 0) == drops
    assert_close(got_params, want_params, TERMS)


def test_long_messages_travel_in_two_pieces(monkeypatch):
    """The same numbers, and twice as many all-to-alls."""

    def sent(step, *args):
        return step.lower(*args).as_text().count("stablehlo.all_to_all")

    # Another capacity, since what JAX has traced it does not trace again under another bound.
    roomy, config = (
        dataclasses.replace(CONFIG, capacity_factor=factor, drop_tokens=True)
        for factor in (0.75, 0.5)
    )
    sizes = {"fsdp": 2, "ep": 2, "tp": 1}
    whole = prepared(sizes, roomy)
    count = sent(*whole[:-1])
    monkeypatch.setattr(layer_experts, "LEAST_BYTES", 1)
    pieces = prepared(sizes, config)
    assert sent(*pieces[:-1]) == 2 * count > 0
    got, got_params = three_updates(*pieces)
    want, want_params = by_plain_loop(config, 4)
    for row, expected in zip(got, want, strict=True):
        assert row == pytest.approx(expected, rel=bound(TERMS), abs=1e-6)
    assert_close(got_params, want_params, TERMS)


# DeepSeek-V3 in small: three layers, the first without experts, of which two may be in stages.
LATENT = dataclasses.replace(
    CONFIG,
    num_hidden_layers=3,
    num_key_value_heads=8,
    kv_lora_rank=6,
    q_lora_rank=10,
    qk_rope_head_dim=2,
    v_head_dim=3,
    rope_interleave=True,
    first_k_dense_replace=1,
    scoring_func="sigmoid",
    router_correction=True,
    n_group=4,
    topk_group=2,
)


# gpt-oss in small: sinks, biases, windows, its activation; no room for all tokens at once.
BIASED = dataclasses.replace(
    CONFIG,
    n_shared_experts=0,
    capacity_factor=0.5,
    qkv_bias=True,
    o_bias=True,
    expert_bias=True,
    attention_sinks=True,
    hidden_act="clamped_swiglu",
    sliding_window=3,
    layer_types=("sliding_attention", "full_attention"),
)


@functools.cache
def on_one_device(config):
    return three_updates(*prepared({"tp": 1}, config))


KINDS = [
    (LATENT, {"fsdp": 2, "ep": 2, "tp": 2}),
    (LATENT, {"pp": 2, "fsdp": 2, "tp": 2}),
    (LATENT, {"pp": 2, "cp": 2, "tp": 2}),
    (BIASED, {"ep": 2, "cp": 2, "tp": 2}),
]
KIND_IDS = [f"{'latent' if c is LATENT else 'biased'}-{sizes}" for c, sizes in KINDS]


@pytest.mark.parametrize(("config", "sizes"), KINDS, ids=KIND_IDS)
def test_kinds_of_attention_and_of_layers_train_as_on_one_device(config, sizes):
    """Under ZeRO 3; what a stage runs only with a micro-batch waits for no other stage."""
    step, state, batch, plan = prepared(sizes, config, zero=3)
    if "pp" in sizes:
        lines = step.lower(state, batch).compile().as_text().splitlines()
        permutes = [line for line in lines if " collective-permute" in line]
        assert permutes
        assert not [line for line in permutes if "/cond/branch" in line]
    got, got_params = three_updates(step, state, batch, plan)
    want, want_params = on_one_device(config)
    for row, expected in zip(got, want, strict=True):
        assert row == pytest.approx(expected, rel=bound(TERMS), abs=1e-6)
    assert_close(got_params, want_params, TERMS)


HOSTED = dataclasses.replace(
    CONFIG,
    vocab_size=512,
    hidden_size=256,
    num_attention_heads=4,
    head_dim=64,
    intermediate_size=512,
    dtype="bfloat16",
    capacity_factor=1.25,
    drop_tokens=True,
)


def compiled(sizes, config=HOSTED):
    """Collectives and matrix FLOPs of one device in a step on GPUs that are not there."""
    mesh = programs.mesh_of_gpus(sizes)
    graph, params = nnx.split(jaxtp.models.abstract(config))
    plan = jaxtp.make_plan(params, mesh, config=config)
    tx = optax.sgd(1.0)
    state = jax.eval_shape(lambda params: init_state(params, tx, Precision()), params)
    state = jaxtp.shard(state, mesh, plan=plan)
    batch = {"tokens": jax.ShapeDtypeStruct((BATCH, 257), jnp.int32)}
    update = make_update(NextToken(graph), tx, lambda _: 1.0, plan, mesh)
    step = jaxtp.jit_step(update, state, mesh, plan=plan)
    lowered = step.lower(state, jaxtp.shard_batch(batch, mesh))
    module = parse(lowered.compile(dict(PREFLIGHT)).as_text())
    flops = sum(
        matmul_flops(module, computation, instruction) * module.counts[computation.name]
        for computation in module.computations.values()
        for instruction in computation
        if "cei,eio->ceo" in instruction.op_name
    )
    return find(module, sizes), flops


@pytest.mark.parametrize("sizes", [{"tp": 4}, {"ep": 4, "tp": 2}, {"dp": 2, "ep": 2}], ids=str)
def test_compiled_for_gpus_two_all_to_alls_or_none_and_no_gather(sizes):
    sizes = {**sizes, "tp": sizes.get("tp", 1)}
    collectives, flops = compiled(sizes)
    layers, ep, tp = HOSTED.num_hidden_layers, sizes.get("ep", 1), sizes["tp"]
    tokens = BATCH * 256 // (ep * sizes.get("dp", 1))
    moved = [one for one in collectives if one.kind == "all-to-all"]
    assert {one.axes for one in moved} == ({("ep",)} if ep > 1 else set())
    # The tokens twice each way, and their weights, of one number each, once.
    assert sum(one.count for one in moved) == (6 * layers if ep > 1 else 0)
    # tokens x chosen x width x 2 bytes a layer and direction, with the room that experts have; each
    # device along tp sends those of its own experts. One part in ep stays where it is.
    rows = tokens * CHOSEN * HOSTED.capacity_factor / tp
    formula = layers * rows * (4 * HOSTED.hidden_size * 2 + 2 * 4) * (ep - 1) / ep
    assert sum(one.wire_bytes * one.count for one in moved) == formula
    gathered = [one for one in collectives if one.kind == "all-gather"]
    assert not gathered
    # As a dense MLP: one all-reduce of the residual stream for each block and direction.
    stream = tokens * HOSTED.hidden_size * 2
    summed = [one for one in collectives if one.axes == ("tp",) and one.num_bytes >= stream]
    sums = [one for one in summed if one.kind == "all-reduce" and "layers" not in one.op_name]
    assert sum(one.count for one in sums) == (4 * layers + 2 if tp > 1 else 0)
    # Three products forward and six backward, over what this device's experts have room for.
    width = HOSTED.hidden_size * HOSTED.intermediate_size
    assert flops == pytest.approx(9 * 2 * rows * width * layers, rel=1e-6)


def test_two_pieces_stay_two_messages_on_gpus(monkeypatch):
    """XLA combines them neither with each other nor with what else the experts send."""
    monkeypatch.setattr(layer_experts, "LEAST_BYTES", 1)
    # Another capacity, since what JAX has traced it does not trace again under another bound.
    config = dataclasses.replace(HOSTED, capacity_factor=1.5)
    collectives, _ = compiled({"ep": 4, "tp": 2}, config)
    sent = collections.Counter[int]()
    for one in collectives:
        if one.kind == "all-to-all":
            sent[one.num_bytes] += one.count
    # Rows of one piece on a device, of the experts of one of the two devices along tp.
    rows = BATCH * 256 // 4 * CHOSEN * 1.5 / 2 / layer_experts.PIECES
    # Two pieces of the tokens twice each way, and of their weights once.
    layers = config.num_hidden_layers
    assert sent == {rows * config.hidden_size * 2: 8 * layers, rows * 4: 4 * layers}


def routing(**options):
    return moe.Routing(num_chosen=2, **options)


def test_weights_are_the_softmax_of_the_chosen_scores():
    scores = jnp.float32([[[1.0, 3.0, 2.0, -1.0]]])
    weights, index = moe.choose(scores, routing())
    assert index.tolist() == [[[1, 2]]]
    np.testing.assert_allclose(weights[0, 0], jax.nn.softmax(jnp.float32([3.0, 2.0])), rtol=1e-6)


def test_sigmoid_routing_corrects_the_choice_and_not_the_weights():
    scores = jnp.float32([[[0.0, 1.0, 2.0, 3.0, -4.0, 0.5, 0.2, 0.1]]])
    correction = jnp.zeros(8).at[0].set(5.0)
    options = {"scoring": "sigmoid", "num_groups": 4, "num_groups_chosen": 1, "scale": 2.5}
    weights, index = moe.choose(scores, routing(**options), correction)
    # The group of experts 0 and 1 is the best by its corrected scores.
    assert index.tolist() == [[[0, 1]]]
    plain = jax.nn.sigmoid(scores[0, 0, :2])
    np.testing.assert_allclose(weights[0, 0], 2.5 * plain / plain.sum(), rtol=1e-6)


def test_balanced_routing_has_a_balance_loss_of_one_a_token():
    scores = jnp.eye(4, dtype=jnp.float32)[None] * 50.0
    found = moe.balance(scores, jnp.arange(4)[None, :, None], moe.Routing(num_chosen=1))
    np.testing.assert_allclose(found["load_balance"], [4.0], rtol=1e-6)
    collapsed = moe.balance(scores[:, :1].repeat(4, 1), jnp.zeros((1, 4, 1), int), routing())
    assert collapsed["load_balance"][0] > 4.0


@pytest.mark.parametrize(
    ("num_tokens", "factor", "want"),
    [(1024, 1.0, 256), (1024, 1.25, 320), (3, 8.0, 3), (1, 0.1, 1)],
)
def test_capacity_is_the_factor_times_what_balance_needs(num_tokens, factor, want):
    assert Capacity(factor, drops=True).of(num_tokens, 2, 8) == want


def plan_of(num_experts, sizes):
    config = dataclasses.replace(CONFIG, num_experts=num_experts)
    params = jaxtp.models.abstract(config)
    return jaxtp.make_plan(params, sizes, config=config)


GATE = "layers/mlp/experts/gate_proj/kernel"


@pytest.mark.parametrize(
    ("num_experts", "sizes", "spec"),
    [
        (8, {"ep": 4, "tp": 2}, ((), ("tp", "ep"), (), ())),
        (8, {"ep": 8, "tp": 2}, ((), ("ep",), (), ("tp",))),
        (8, {"ep": 2, "tp": 1}, ((), ("ep",), (), ())),
        (8, {"fsdp": 2, "ep": 4, "tp": 2}, ((), ("tp", "ep"), ("fsdp",), ())),
    ],
    ids=str,
)
def test_whole_experts_go_on_ep_and_tp_takes_what_it_can(num_experts, sizes, spec):
    plan = plan_of(num_experts, sizes)
    assert plan[GATE].spec == spec
    assert f"ep={sizes['ep']} on dim 1" in plan.explain(GATE)


def test_what_is_no_expert_takes_ep_for_data():
    plan = plan_of(8, {"fsdp": 2, "ep": 2, "tp": 2})
    assert plan.mesh.batch == ("fsdp", "ep")
    assert plan["layers/self_attn/q_proj/kernel"].dim_on(["ep"]) == 1


def test_experts_that_ep_does_not_divide_are_an_error():
    with pytest.raises(SizeMismatch, match="8 experts do not divide over ep=3") as caught:
        plan_of(8, {"ep": 3, "tp": 1})
    assert GATE in str(caught.value)
    assert "ep of 1, 2, 4, 8" in str(caught.value)


def test_an_ep_axis_without_experts_is_noted():
    config = dataclasses.replace(CONFIG, num_experts=0, num_experts_per_tok=0, n_shared_experts=0)
    plan = jaxtp.make_plan(jaxtp.models.abstract(config), {"ep": 2, "tp": 2}, config=config)
    assert any("no parameter has experts" in note for note in plan.notes)


# ---- models that are not ours --------------------------------------------------------------------

WIDTH, INNER, ROWS, LENGTH = 64, 128, 8, 32


def shapes(dtype):
    experts = {"gate": (WIDTH, INNER), "up": (WIDTH, INNER), "down": (INNER, WIDTH)}
    stacked = {name: (EXPERTS, *shape) for name, shape in experts.items()}
    return {
        name: jax.ShapeDtypeStruct(shape, dtype)
        for name, shape in {"router": (WIDTH, EXPERTS), **stacked}.items()
    }


def one_hot_dispatch(p, x):
    """GShard's: tokens go to (experts, rows, room) by one-hot products."""
    room = 2 * LENGTH * CHOSEN // EXPERTS
    weights, index = jax.lax.top_k(jax.nn.softmax(x @ p["router"]), CHOSEN)
    mask = jax.nn.one_hot(index, EXPERTS)
    flat = mask.reshape(ROWS, LENGTH * CHOSEN, EXPERTS)
    places = (jnp.cumsum(flat, axis=1) * flat - 1).reshape(mask.shape)
    slots = jax.nn.one_hot(places.astype(jnp.int32), room)
    combine = jnp.einsum("btk,btke,btkec->btec", weights, mask, slots).astype(x.dtype)
    inside = jnp.einsum("btec,btd->ebcd", (combine > 0).astype(x.dtype), x)
    gate = jax.nn.silu(jnp.einsum("ebcd,edf->ebcf", inside, p["gate"]))
    inner = gate * jnp.einsum("ebcd,edf->ebcf", inside, p["up"])
    out = jnp.einsum("ebcf,efd->ebcd", inner, p["down"])
    return x + jnp.einsum("btec,ebcd->btd", combine, out)


def gradients(fn):
    return jax.value_and_grad(lambda p, x: jnp.mean(jnp.float32(fn(p, x)) ** 2), argnums=(0, 1))


def test_tokens_travel_to_the_experts_of_anybody():
    x = jax.ShapeDtypeStruct((ROWS, LENGTH, WIDTH), jnp.bfloat16)
    params, mesh = shapes(jnp.bfloat16), programs.mesh_of_gpus({"dp": 2, "ep": 2, "tp": 2})
    plan = jaxtp.make_plan(params, mesh, fn=one_hot_dispatch, inputs=(x,))
    assert plan["gate"].spec == (("tp", "ep"), (), ())
    args = (jaxtp.shard(params, mesh, plan=plan), jaxtp.shard_batch(x, mesh))
    places = jax.tree.map(lambda leaf: leaf.sharding, args)
    step = jax.jit(
        gradients(jaxtp.parallelize(one_hot_dispatch, plan, mesh)), out_shardings=(None, places)
    )
    module = parse(step.lower(*args).compile(dict(PREFLIGHT)).as_text())
    found = find(module, {"dp": 2, "ep": 2, "tp": 2})
    moved = [one for one in found if one.kind == "all-to-all"]
    assert (sum(one.count for one in moved), {one.axes for one in moved}) == (4, {("ep",)})
    experts = EXPERTS * WIDTH * INNER * 2 // 4
    assert [one for one in found if one.kind == "all-gather" and one.num_bytes >= experts] == []


def test_numbers_of_anybodys_experts_stay():
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda like: jnp.float32(random.normal(0, 0.2, like.shape)), shapes(jnp.float32)
    )
    x = jnp.float32(random.normal(0, 1, (ROWS, LENGTH, WIDTH)))
    mesh = jaxtp.make_mesh(dp=2, ep=2, tp=2)
    plan = jaxtp.make_plan(params, mesh, fn=one_hot_dispatch, inputs=(x,))
    step = jax.jit(gradients(jaxtp.parallelize(one_hot_dispatch, plan, mesh)))
    got = step(jaxtp.shard(params, mesh, plan=plan), jaxtp.shard_batch(x, mesh))
    assert_close(got, jax.jit(gradients(one_hot_dispatch))(params, x), INNER * LENGTH * ROWS)
