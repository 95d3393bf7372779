"""Interleaved layers: the same numbers, whatever the branches; when it cannot be; what it hides."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtp.activations.by_name import ActivePlan, active_plan, in_force, use_plan
from jaxtp.config.presets import preset
from jaxtp.errors import JaxtpWarning, NotInterleaved
from jaxtp.layers import interleaving
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models import GPTConfig, LlamaConfig, abstract, build, cross_entropy
from jaxtp.models.projections import Linear, products
from jaxtp.placement.arrays import shard
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.rules.planner import make_plan
from jaxtp.rules.roles import Role
from jaxtp.train.preflight import preflight_config

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=4,
    intermediate_size=48,
    dtype="float32",
    remat="block_outputs",
)
GPT = GPTConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=8,
    max_position_embeddings=24,
    dtype="float32",
    remat="block_outputs",
)
# Two devices share each kv head; norms and biases inside attention.
QWEN = dataclasses.replace(LLAMA, num_key_value_heads=4, qk_norm=True, qkv_bias=True)
MIXTRAL = dataclasses.replace(LLAMA, num_experts=4, num_experts_per_tok=2)


def close(got, want):
    """Equal up to the order in which fp32 sums are taken."""
    scale = jax.tree.map(lambda w: np.abs(w).max(), want)
    jax.tree.map(
        lambda g, w, s: np.testing.assert_allclose(g / s, w / s, atol=1e-5), got, want, scale
    )


# Maps of the same inputs


def test_on_one_device_kernels_are_multiplied_side_by_side():
    """The same numbers by one product forward and two backward, however many maps there are."""
    rngs, x = nnx.Rngs(0), jax.random.normal(jax.random.key(1), (2, 3, 8))
    maps = [Linear(8, (2, 3), use_bias=False, rngs=rngs), Linear(8, 5, rngs=rngs)]
    mesh = MeshShape.of({"tp": 1})
    inside = ActivePlan(mesh, False, make_mesh(tp=1, devices=jax.devices()[:1]), is_mapped=True)

    def loss(maps, x):
        return sum(jnp.sum(jnp.sin(out)) for out in products(x, *maps))

    derivative = jax.value_and_grad(loss, argnums=(0, 1))
    want, program = derivative(maps, x), jax.make_jaxpr(derivative)(maps, x)
    with in_force(inside):
        got, merged = derivative(maps, x), jax.make_jaxpr(derivative)(maps, x)
    close(got, want)
    assert [str(one).count("dot_general[") for one in (program, merged)] == [6, 3]


# Any branches


def rms_norm(params, x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True)) * params["scale"][None, None]


def mix(params, h, context):
    """A block in which tokens meet, with a bias behind the row product."""
    inner = jnp.cumsum(h @ params["into"], axis=1) * context["gain"]
    return jnp.tanh(inner) @ params["out"] + params["after"][None, None]


def each(params, h, context):
    """A block that works on each token alone, with a bias before its row product."""
    return jnp.tanh(h @ params["into"] + params["before"][None, None]) @ params["out"]


WIDTH, INNER = 16, 24
BLOCKS = {
    "mix": (mix, {"into": (WIDTH, INNER), "out": (INNER, WIDTH), "after": (WIDTH,)}),
    "each": (each, {"into": (WIDTH, INNER), "before": (INNER,), "out": (INNER, WIDTH)}),
}
LEAVES = {
    "into": (Role.COLUMN, ((), (), ("tp",))),
    "before": (Role.COLUMN_BIAS, ((), ("tp",))),
    "out": (Role.ROW, ((), ("tp",), ())),
    "after": (Role.ROW_BIAS, ((), ())),
}


def toy(kinds, num_layers):
    """Branches of these kinds without parameters, parameters, and their plan on tp=8."""
    random = np.random.default_rng(0)
    draw = functools.partial(random.normal, 0.0, 0.3)
    params, decisions = [], []
    for i, kind in enumerate(kinds):
        shapes = {leaf: (num_layers, *shape) for leaf, shape in BLOCKS[kind][1].items()}
        block = {leaf: jnp.float32(draw(shape)) for leaf, shape in shapes.items()}
        params.append(({"scale": jnp.float32(1 + draw((num_layers, WIDTH)))}, block))
        for leaf, shape in shapes.items():
            role, spec = LEAVES[leaf]
            path = f"layers/{kind}{i}/{leaf}"
            decisions.append(
                ParamDecision(
                    path=path, shape=shape, dtype="float32", spec=spec, role=role, reasons=("-",)
                )
            )
    plan = Plan(mesh=MeshShape.of({"tp": 8}), decisions=tuple(decisions), overlap="aggressive")
    return params, plan


def as_branches(kinds, params):
    return [
        interleaving.ResidualBranch(
            name=f"{kind}{i}",
            norm=rms_norm,
            block=BLOCKS[kind][0],
            norm_params=norm,
            block_params=block,
            tokenwise=kind == "each",
        )
        for i, (kind, (norm, block)) in enumerate(zip(kinds, params, strict=True))
    ]


def one_after_the_other(kinds, params, x, context):
    for layer in range(jax.tree.leaves(params)[0].shape[0]):
        for kind, pair in zip(kinds, params, strict=True):
            norm, block = jax.tree.map(lambda w, layer=layer: w[layer], pair)
            x = x + BLOCKS[kind][0](block, rms_norm(norm, x), context)
    return x


@pytest.mark.parametrize(
    ("kinds", "num_layers", "num_tokens", "sequence_parallel"),
    [
        (["mix", "each"], 3, 6, False),
        (["mix", "each"], 1, 5, False),  # no loop, and tokens that cannot be cut in two
        (["mix"], 2, 8, True),
        (["each", "each", "mix"], 2, 8, True),  # half A starts in the middle of a branch
    ],
)
def test_any_branches_give_the_numbers_of_one_after_the_other(
    kinds, num_layers, num_tokens, sequence_parallel
):
    params, plan = toy(kinds, num_layers)
    plan = dataclasses.replace(plan, sequence_parallel=sequence_parallel)
    random = np.random.default_rng(1)
    x, weight = jnp.float32(random.normal(size=(2, 4, num_tokens, WIDTH)))
    context = {"gain": jnp.float32(random.normal(size=(4, num_tokens, 1)))}

    def interleaved(params, x):
        branches = as_branches(kinds, params)
        return jnp.sum(weight * interleaving.interleave(branches, x, context, active_plan()))

    def plain(params, x):
        return jnp.sum(weight * one_after_the_other(kinds, params, x, context))

    with use_plan(plan, plan_mesh(make_mesh(tp=8), plan.mesh)):
        got = jax.jit(jax.value_and_grad(interleaved, (0, 1)))(params, x)
        value = jax.jit(interleaved)(params, x)
    want = jax.jit(jax.value_and_grad(plain, (0, 1)))(params, x)
    close(got, want)
    np.testing.assert_allclose(value, want[0], rtol=1e-5)


def test_context_has_no_gradient_and_says_so():
    params, plan = toy(["mix"], 1)

    def out(gain):
        branches = as_branches(["mix"], params)
        x = jnp.ones((2, 4, WIDTH))
        return interleaving.interleave(branches, x, {"gain": gain}, active_plan()).sum()

    with (
        use_plan(plan, plan_mesh(make_mesh(tp=8), plan.mesh)),
        pytest.raises(NotImplementedError, match="no gradient"),
    ):
        jax.grad(out)(jnp.ones((1, 4, 1)))


# The models


@functools.cache
def trained(config):
    """A model's structure and parameters far from their initial zeros and ones."""
    graph, params = nnx.split(build(config))
    random = np.random.default_rng(0)
    return graph, jax.tree.map(lambda w: w + jnp.float32(random.normal(0, 0.1, w.shape)), params)


def loss_of(config, num_sequences, packed):
    """`(loss(params), params)` on fixed tokens."""
    graph, params = trained(config)
    random = np.random.default_rng(2)
    tokens = jnp.asarray(random.integers(0, 64, (num_sequences, 17)))
    positions = segments = None
    if packed:
        starts = random.random((num_sequences, 16)) < 0.2
        segments = jnp.asarray(np.cumsum(starts, 1))
        positions = jnp.asarray(np.arange(16)[None] * np.ones((num_sequences, 1), int) % 7)

    def loss(params):
        model = nnx.merge(graph, params)
        return cross_entropy(model(tokens[:, :-1], positions, segments), tokens[:, 1:])

    return loss, params


def planned(config, dp, tp, **changes):
    mesh = make_mesh(dp=dp, tp=tp)
    plan = make_plan(abstract(config), mesh, config=config)
    plan = dataclasses.replace(plan, **{"overlap": "aggressive", **changes})
    return plan, mesh, plan_mesh(mesh, plan.mesh)


@pytest.mark.parametrize(
    ("config", "dp", "tp", "packed", "sequence_parallel"),
    [
        (LLAMA, 2, 4, True, False),
        (QWEN, 1, 8, False, False),
        (GPT, 1, 8, True, False),
        (GPT, 2, 4, False, True),
    ],
    ids=["llama-dp2-tp4-packed", "qwen-tp8", "gpt-tp8-packed", "gpt-dp2-tp4-sequence"],
)
def test_models_give_the_numbers_of_one_device(config, dp, tp, packed, sequence_parallel):
    loss, params = loss_of(config, 4 * dp, packed)
    want = jax.jit(jax.value_and_grad(loss))(params)
    plan, mesh, own_mesh = planned(config, dp, tp, sequence_parallel=sequence_parallel)
    with use_plan(plan, own_mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        got = jax.jit(jax.value_and_grad(loss))(shard(params, mesh, plan=plan))
    close(jax.device_get(got), jax.device_get(want))


OBSTACLES = {
    "3 sequences on 1 replicas": (LLAMA, 8, 3, {}),
    "6 sequences on 2 replicas": (LLAMA, 4, 6, {}),
    "remat is 'none'": (dataclasses.replace(LLAMA, remat="none"), 8, 4, {}),
    "a row parameter with 4 parts on 8": (
        dataclasses.replace(LLAMA, num_attention_heads=12, num_key_value_heads=12), 8, 4, {},
    ),
    "a row parameter with 1 parts": (dataclasses.replace(LLAMA, intermediate_size=45), 8, 4, {}),
    "experts choose tokens": (MIXTRAL, 8, 4, {}),
    "0 parameters of the plan have this path": (LLAMA, 8, 4, {"decisions": ()}),
}  # fmt: skip


@pytest.mark.parametrize("reason", OBSTACLES)
def test_what_cannot_be_interleaved_says_why_and_runs_the_ordinary_way(reason):
    config, tp, num_sequences, changes = OBSTACLES[reason]
    plan, _, own_mesh = planned(config, 8 // tp, tp, **changes)
    graph, params = nnx.split(abstract(config))
    tokens = jax.ShapeDtypeStruct((num_sequences, 8), jnp.int32)

    def forward(params, tokens):
        return nnx.merge(graph, params)(tokens)

    with use_plan(plan, own_mesh), pytest.warns(JaxtpWarning, match=f"TP073.*{reason}"):
        logits = jax.eval_shape(forward, params, tokens)
    assert logits.shape == (num_sequences, 8, 64)


def test_sequences_that_devices_cannot_share_are_refused():
    _, plan = toy(["mix"], 1)
    plan = dataclasses.replace(plan, sequence_parallel=True)
    with (
        use_plan(plan, plan_mesh(make_mesh(tp=8), plan.mesh)),
        pytest.raises(NotInterleaved, match="12 tokens on 8"),
    ):
        interleaving.interleave([], jnp.ones((2, 12, WIDTH)), {}, active_plan())


@pytest.mark.parametrize(("tp", "asked"), [(8, "auto"), (8, "off"), (1, "auto")])
def test_layers_run_the_ordinary_way_unless_asked(tp, asked):
    plan, _, own_mesh = planned(LLAMA, 8 // tp, tp, overlap=asked)
    graph, params = nnx.split(abstract(LLAMA))
    tokens = jax.ShapeDtypeStruct((16, 8), jnp.int32)

    def forward(params, tokens):
        return nnx.merge(graph, params)(tokens)

    with use_plan(plan, own_mesh), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "optimization_barrier" not in str(jax.make_jaxpr(forward)(params, tokens))


def test_a_plan_keeps_its_overlap_in_json():
    plan, _, _ = planned(LLAMA, 1, 8)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_json(plan.to_json()).overlap == "aggressive"


# What the GPU compiler makes of it


@functools.cache
def preflighted(profile):
    """Llama-3-70B's 80 layers, ends and Adam on 8 H100s; compile time is flat in depth."""
    config = preset(
        "llama3-70b",
        **{
            "batch.size": 2,
            "seq_len": 4096,
            "precision.params": "bfloat16",
            "attention": "xla",
            "communication.overlap": profile,
        },
    )
    return preflight_config(config)[1]


def test_nearly_all_communication_hides_at_the_real_depth():
    # XLA's own attention, as cuDNN is not everywhere; with it 99%, see the heavy leg.
    report = preflighted("aggressive")
    assert report.hidden_share >= 0.92
    assert min(report.hidden_forward, report.hidden_backward) >= 0.9
    messages = [row for row in report.collectives if "tp" in row.axes and row.num_bytes > 2**20]
    assert {(row.kind, row.dtype) for row in messages} == {("all-reduce", "bf16")}
    assert report.wire_bytes <= 1.01 * report.floor_bytes


def test_the_step_is_shorter_and_no_bigger_than_the_default():
    default, aggressive = preflighted("auto"), preflighted("aggressive")
    assert default.hidden_share < 0.01
    waits = sum(link.exposed_seconds for link in default.links)
    assert waits > 0.1 * default.step_seconds_modelled
    assert aggressive.step_seconds_modelled <= default.step_seconds_modelled - 0.95 * waits
    assert aggressive.peak_bytes <= 1.01 * default.peak_bytes
