"""The model families: shapes, masks, formulas, remat, sizes, loss, decoding, constraints."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from rounding import assert_close, bound

from jaxtp.activations.by_name import use_plan
from jaxtp.errors import BadConfig, SizeMismatch
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import make_mesh, plan_mesh
from jaxtp.models import (
    PRESETS,
    GPTConfig,
    LlamaConfig,
    RopeScaling,
    abstract,
    build,
    cross_entropy,
    generate,
)
from jaxtp.models.attention import attend, rotary
from jaxtp.models.llama import YarnRopeScaling, rotary_frequencies
from jaxtp.plan.decisions import Plan

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,  # 4 x 12 is not the hidden size
    intermediate_size=48,
    dtype="float32",
)
QWEN = dataclasses.replace(LLAMA, qk_norm=True, tie_word_embeddings=True)
GPT2 = GPTConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=24,
    dtype="float32",
)
LATENT = dataclasses.replace(
    LLAMA, num_key_value_heads=4, kv_lora_rank=8, qk_rope_head_dim=4, v_head_dim=8
)
YARN = dataclasses.replace(
    LLAMA, rope_scaling=YarnRopeScaling(factor=8.0, original_max_position_embeddings=64)
)
CONFIGS = {"llama": LLAMA, "qwen": QWEN, "gpt2": GPT2}
TOKENS = jax.random.randint(jax.random.key(1), (2, 16), 0, 64)


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request):
    return build(CONFIGS[request.param])


@nnx.jit
def run(model, *inputs):
    return model(*inputs)


def shapes(model):
    """`{path: shape}` of every parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model)))
    return {jax.tree_util.keystr(p, simple=True, separator="/"): x.shape for p, x in leaves}


def loss_of(graph):
    def loss(params, tokens):
        return cross_entropy(nnx.merge(graph, params)(tokens[:, :-1]), tokens[:, 1:])

    return loss


def test_parameters_have_the_names_and_shapes_that_planners_read():
    assert shapes(abstract(QWEN)) == {
        "embed_tokens/embedding": (64, 32),
        "layers/input_layernorm/scale": (3, 32),
        "layers/mlp/down_proj/kernel": (3, 48, 32),
        "layers/mlp/gate_proj/kernel": (3, 32, 48),
        "layers/mlp/up_proj/kernel": (3, 32, 48),
        "layers/post_attention_layernorm/scale": (3, 32),
        "layers/self_attn/k_norm/scale": (3, 12),
        "layers/self_attn/k_proj/kernel": (3, 32, 2, 12),
        "layers/self_attn/o_proj/kernel": (3, 4, 12, 32),
        "layers/self_attn/q_norm/scale": (3, 12),
        "layers/self_attn/q_proj/kernel": (3, 32, 4, 12),
        "layers/self_attn/v_proj/kernel": (3, 32, 2, 12),
        "norm/scale": (32,),
    }
    untied = set(shapes(abstract(LLAMA))) - set(shapes(abstract(QWEN)))
    assert untied == {"lm_head/kernel"}
    assert shapes(abstract(GPT2)) == {
        "h/attn/c_attn/bias": (3, 3, 4, 8),
        "h/attn/c_attn/kernel": (3, 32, 3, 4, 8),
        "h/attn/c_proj/bias": (3, 32),
        "h/attn/c_proj/kernel": (3, 4, 8, 32),
        "h/ln_1/bias": (3, 32),
        "h/ln_1/scale": (3, 32),
        "h/ln_2/bias": (3, 32),
        "h/ln_2/scale": (3, 32),
        "h/mlp/c_fc/bias": (3, 128),
        "h/mlp/c_fc/kernel": (3, 32, 128),
        "h/mlp/c_proj/bias": (3, 32),
        "h/mlp/c_proj/kernel": (3, 128, 32),
        "ln_f/bias": (32,),
        "ln_f/scale": (32,),
        "wpe/embedding": (24, 32),
        "wte/embedding": (64, 32),
    }


def test_forward_gives_finite_logits(model):
    logits = run(model, TOKENS)
    assert logits.shape == (2, 16, 64)
    assert logits.dtype == jnp.float32
    # An untrained model is about as good as a guess.
    assert abs(cross_entropy(logits[:, :-1], TOKENS[:, 1:]) - math.log(64)) < 1.0


def test_layers_start_out_different(model):
    layers = nnx.to_pure_dict(nnx.state(model.h if hasattr(model, "h") else model.layers))
    kernels = [x for x in jax.tree.leaves(layers) if x.ndim > 2]
    assert kernels
    assert all(np.abs(k[0] - k[1]).max() > 1e-3 for k in kernels if np.any(k))


@pytest.mark.parametrize(
    ("config", "block", "row", "fan_in"),
    [
        (LLAMA, "self_attn", "o_proj", 48),
        (LLAMA, "mlp", "down_proj", 48),
        (GPT2, "mlp", "c_proj", 128),
    ],
)
def test_row_kernels_start_small_enough_for_the_depth(config, block, row, fan_in):
    model = build(config)
    layers = model.h if config is GPT2 else model.layers
    kernel = getattr(getattr(layers, block), row).kernel[...]
    # 3 layers add 6 row products to the stream: variance 1 / (6 fan_in) each.
    np.testing.assert_allclose(kernel.std(), (6 * fan_in) ** -0.5, rtol=0.05)


def test_a_future_token_changes_nothing_before_it(model):
    changed = TOKENS.at[:, 9].set((TOKENS[:, 9] + 1) % 64)
    before, after = run(model, TOKENS), run(model, changed)
    np.testing.assert_allclose(after[:, :9], before[:, :9], atol=1e-6)
    assert np.abs(after[:, 9:] - before[:, 9:]).max(axis=(0, 2)).min() > 1e-4


def test_segments_are_documents_of_their_own(model):
    segments = jnp.where(jnp.arange(16) < 7, 0, 1)[None, :].repeat(2, axis=0)
    positions = jnp.where(jnp.arange(16) < 7, jnp.arange(16), jnp.arange(16) - 7)[None, :]
    packed = run(model, TOKENS, positions, segments)
    np.testing.assert_allclose(packed[:, :7], run(model, TOKENS[:, :7]), atol=1e-5)
    np.testing.assert_allclose(packed[:, 7:], run(model, TOKENS[:, 7:]), atol=1e-5)
    assert np.abs(packed[:, 7:] - run(model, TOKENS)[:, 7:]).max() > 1e-3


@nnx.jit
def unrolled(model, tokens):
    """The same mathematics as `model(tokens)`, one layer after the other in Python."""
    config = model.config
    positions = jnp.arange(tokens.shape[1])
    if isinstance(config, LlamaConfig):
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta)
        angles = positions[None, :, None] * jnp.float32(frequencies)[None, None, :]
        shared = {"angles_BTH": angles, "segment_ids_BT": None}
        x, layers, norm = model.embed_tokens(tokens), model.layers, model.norm
    else:
        shared = {"segment_ids_BT": None}
        x, layers, norm = model.wte(tokens) + model.wpe(positions)[None], model.h, model.ln_f
    graph, params = nnx.split(layers)
    for i in range(config.num_hidden_layers):
        x = nnx.merge(graph, jax.tree.map(lambda p, i=i: p[i], params))(x, shared)
    return model.logits(norm(x))


def test_scan_equals_an_unrolled_loop(model):
    np.testing.assert_allclose(run(model, TOKENS), unrolled(model, TOKENS), atol=1e-5)


@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_gradients_by_jax_by_nnx_and_by_row_agree(config):
    model = build(config)
    graph, params = nnx.split(model, nnx.Param)
    loss = loss_of(graph)
    want = jax.tree.leaves(jax.jit(jax.grad(loss))(params, TOKENS))
    assert min(np.abs(g).max() for g in want) > 0  # every parameter takes part

    def module_loss(model):
        return cross_entropy(model(TOKENS[:, :-1]), TOKENS[:, 1:])

    by_nnx = jax.tree.leaves(nnx.jit(nnx.value_and_grad(module_loss))(model)[1])
    per_row = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, TOKENS[:, None])
    by_row = [g.mean(axis=0) for g in jax.tree.leaves(per_row)]
    for got in (by_nnx, by_row):
        assert_close(got, want, terms=64)


def test_remat_policies_trade_memory_and_keep_gradients():
    tokens = jnp.tile(TOKENS, (4, 3))
    grads, temp = {}, {}
    for remat in ("none", "full", "block_outputs", "dots"):
        model = build(dataclasses.replace(LLAMA, remat=remat, num_hidden_layers=8))
        graph, params = nnx.split(model)
        run = jax.jit(jax.grad(loss_of(graph))).lower(params, tokens).compile()
        temp[remat] = run.memory_analysis().temp_size_in_bytes
        grads[remat] = jax.tree.leaves(run(params, tokens))
    for remat in ("full", "block_outputs", "dots"):
        assert_close(grads[remat], grads["none"], terms=tokens.size)
    assert temp["full"] < temp["block_outputs"] < temp["dots"] < temp["none"]


def test_tied_head_is_the_embedding():
    model = build(QWEN)
    h = nnx.jit(lambda model: model.hidden(TOKENS))(model)
    want = jnp.einsum("btd,vd->btv", h, model.embed_tokens.embedding[...])
    np.testing.assert_allclose(run(model, TOKENS), want, atol=1e-5)
    assert not hasattr(model, "lm_head")


@pytest.mark.parametrize(("config", "same"), [(LLAMA, False), (QWEN, True)], ids=["off", "on"])
def test_qk_norm_makes_attention_blind_to_the_scale_of_queries(config, same):
    model = build(dataclasses.replace(config, rms_norm_eps=1e-12))
    before = run(model, TOKENS)
    attention = model.layers.self_attn
    attention.q_proj.kernel[...] = 5 * attention.q_proj.kernel[...]
    assert np.allclose(run(model, TOKENS), before, atol=1e-5) is same


def test_rotary_is_a_rotation_of_pairs_by_position():
    q, k = jax.random.normal(jax.random.key(2), (2, 1, 9, 3, 8))
    angles = jnp.arange(9.0)[None, :, None] * jnp.float32(rotary_frequencies(8, 100.0))[None, None]
    # The direct formula: element i and i + 4 as one complex number, times e^(i t theta^(-2i/8)).
    z = np.asarray(q[..., :4]) + 1j * np.asarray(q[..., 4:])
    turn = np.exp(1j * np.arange(9)[:, None] * 100.0 ** (-np.arange(0, 8, 2) / 8))
    want = z * turn[None, :, None, :]
    np.testing.assert_allclose(
        rotary(q, angles), np.concatenate([want.real, want.imag], axis=-1), atol=1e-5
    )
    # Scores depend on the distance only.
    shifted = angles + 40 * angles[:, 1:2]
    scores = jnp.einsum("btnh,bsnh->bnts", rotary(q, angles), rotary(k, angles))
    far = jnp.einsum("btnh,bsnh->bnts", rotary(q, shifted), rotary(k, shifted))
    np.testing.assert_allclose(far, scores, atol=1e-4)


def test_rope_scaling_follows_the_three_cases_of_the_reference():
    scaling = RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    plain = rotary_frequencies(128, 500_000.0)
    want = []
    for frequency in plain:  # Llama 3.1 reference code, case by case
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            want.append(frequency)
        elif wavelength > 8192 / 1:
            want.append(frequency / 8)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want.append((1 - smooth) * frequency / 8 + smooth * frequency)
    np.testing.assert_allclose(rotary_frequencies(128, 500_000.0, scaling), want, rtol=1e-12)
    assert len({round(w / p, 9) for w, p in zip(want, plain, strict=True)}) > 3  # all cases met


def test_grouped_query_attention_equals_repeated_heads():
    q = jax.random.normal(jax.random.key(3), (2, 7, 6, 8))
    k, v = jax.random.normal(jax.random.key(4), (2, 2, 7, 2, 8))
    want = attend(q, k.repeat(3, axis=2), v.repeat(3, axis=2), None, "xla")
    np.testing.assert_allclose(attend(q, k, v, None, "xla"), want, atol=1e-6)
    # And against softmax written out, for the first query head of the second group.
    scores = q[:, :, 3] @ k[:, :, 1].mT / math.sqrt(8)
    weights = jax.nn.softmax(jnp.where(jnp.tri(7)[None] > 0, scores, -jnp.inf), axis=-1)
    np.testing.assert_allclose(want[:, :, 3], weights @ v[:, :, 1], atol=1e-5)


def dots(jaxpr):
    """Every matrix product of a jaxpr and the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            yield eqn
        for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns")):
            if hasattr(inner, "eqns"):
                yield from dots(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_bf16_compute_keeps_fp32_parameters(config):
    model = abstract(dataclasses.replace(config, dtype="bfloat16"))
    graph, params = nnx.split(model)
    logits = jax.eval_shape(lambda params: nnx.merge(graph, params)(TOKENS), params)
    grads = jax.eval_shape(jax.grad(loss_of(graph)), params, TOKENS)
    assert logits.dtype == jnp.bfloat16
    assert {p.dtype for p in jax.tree.leaves((params, grads))} == {jnp.dtype("float32")}
    jaxpr = jax.make_jaxpr(lambda params: nnx.merge(graph, params)(TOKENS))(params)
    products = list(dots(jaxpr.jaxpr))
    assert len(products) >= 7
    assert {v.aval.dtype for e in products for v in e.invars} == {jnp.dtype("bfloat16")}
    # Cast inside the scan, so that gradients cross the wire in bf16: what enters it is fp32.
    (scan,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    stacked = [v.aval for v in scan.invars if v.aval.ndim > 3]
    assert {a.dtype for a in stacked} == {jnp.dtype("float32")}


PUBLISHED = {
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "tinyllama-1.1b": 1_100_048_384,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,  # without the 14 B of the layer for a second token
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,  # published as 175.0 B, without a count
    "gpt-1t": 1_008_038_758_400,  # published as 1008.0 B
}


def test_another_depth_keeps_the_kinds_of_layers():
    model = PRESETS["gpt-oss-20b"]
    assert model.of_depth(0) == model
    assert model.of_depth(3).layer_types == (*model.layer_types[:2], model.layer_types[0])
    assert model.of_depth(36) == dataclasses.replace(PRESETS["gpt-oss-120b"], num_experts=32)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    leaves = jax.tree.leaves(nnx.state(abstract(name)))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    num_parameters = sum(math.prod(leaf.shape) for leaf in leaves)
    if name == "llama-tiny":
        assert 0.5e6 < num_parameters < 1.5e6
    else:
        assert num_parameters == PUBLISHED[name]


def test_abstract_and_built_models_agree(model):
    assert shapes(abstract(model.config)) == shapes(model)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(BadConfig, match=r"TP020 at model: .*'llama3-8B'\n  fix: .*llama3-8b"):
        build("llama3-8B")


@pytest.mark.parametrize(
    ("config", "change", "error", "message"),
    [
        (LLAMA, {"remat": "block_output"}, BadConfig, r"TP020 at remat: .*\n  fix: block_outputs$"),
        (LLAMA, {"num_key_value_heads": 3}, SizeMismatch, r"TP003 at num_key_value_heads: 4 .* 3 "),
        (LLAMA, {"first_k_dense_replace": 1}, SizeMismatch, r"TP003 at first_k_dense_replace: 1 "),
        (LLAMA, {"v_head_dim": 4}, BadConfig, r"TP020 at kv_lora_rank: .* without"),
        (LATENT, {"v_head_dim": 13}, SizeMismatch, r"TP003 at head_dim: 4 .* 13 .* 12"),
        (LATENT, {"num_key_value_heads": 2}, SizeMismatch, r"TP003 at num_key_value_heads: 2 "),
        (LATENT, {"qk_norm": True}, BadConfig, r"TP020 at kv_lora_rank: .* qk_norm"),
        (YARN, {"rope_theta": 1.0}, BadConfig, r"TP020 at rope_theta: .* base 1.0"),
        (YARN, {"rope_local_theta": 9.0}, BadConfig, r"TP020 at rope_scaling: yarn"),
        (LLAMA, {"head_dim": 5}, SizeMismatch, r"TP003 at head_dim: .* 5\n"),
        (GPT2, {"num_attention_heads": 5}, SizeMismatch, r"TP003 at num_attention_heads: .*32.* 5"),
    ],
)
def test_impossible_configs_are_refused(config, change, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(config, **change)


def test_gpt_refuses_tokens_past_its_position_table():
    with pytest.raises(SizeMismatch, match=r"TP003 at max_position_embeddings: 32 tokens.* 24"):
        build(GPT2)(jnp.tile(TOKENS, (1, 2)))


def test_cross_entropy_is_the_usual_one():
    logits = 5 * jax.random.normal(jax.random.key(5), (2, 16, 64))
    per_token = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS)
    np.testing.assert_allclose(cross_entropy(logits, TOKENS), per_token.mean(), rtol=bound(64))
    counted = TOKENS % 3 == 0
    want = per_token[counted].mean()
    np.testing.assert_allclose(cross_entropy(logits, TOKENS, counted), want, rtol=bound(64))
    # Sums are fp32 whatever the logits are: 64 equal bf16 logits give log 64 to fp32 precision.
    equal = jnp.full((2, 16, 64), 30, jnp.bfloat16)
    np.testing.assert_allclose(cross_entropy(equal, TOKENS), math.log(64), rtol=bound(64))


def test_vocab_parallel_cross_entropy_moves_scalars_only():
    mesh = make_mesh(tp=8)
    logits = jax.ShapeDtypeStruct(
        (2, 16, 64),
        jnp.float32,
        sharding=NamedSharding(mesh, PartitionSpec(None, None, "tp")),
    )
    compiled = jax.jit(jax.grad(cross_entropy)).lower(logits, TOKENS).compile()
    moved = [line for line in compiled.as_text().splitlines() if " all-" in line]
    assert moved
    assert not any("all-gather" in line or "all-to-all" in line for line in moved)
    assert not any("64]" in line or "8]{" in line.split("(")[0] for line in moved)


def test_padded_vocab_changes_nothing_but_the_width(model):
    name = "wte" if hasattr(model, "wte") else "embed_tokens"
    graph, params = nnx.split(model)
    want = run(model, TOKENS)
    pure = nnx.to_pure_dict(params)
    pure[name]["embedding"] = jnp.pad(pure[name]["embedding"], ((0, 6), (0, 0)))
    if "lm_head" in pure:
        pure["lm_head"]["kernel"] = jnp.pad(pure["lm_head"]["kernel"], ((0, 0), (0, 6)))
    padded = nnx.merge(graph, nnx.State(jax.tree.map(nnx.Param, pure)))
    got = run(padded, TOKENS)
    assert got.shape == (2, 16, 70)
    np.testing.assert_allclose(got[..., :64], want, atol=1e-5)
    np.testing.assert_allclose(
        cross_entropy(got, TOKENS), cross_entropy(want, TOKENS), rtol=bound(64)
    )
    assert got[..., 64:].max() < -1e30


def test_greedy_decoding_takes_the_likeliest_token_each_time(model):
    got = generate(model, TOKENS[:, :5], 6)
    np.testing.assert_array_equal(got, generate(model, TOKENS[:, :5], 6))
    np.testing.assert_array_equal(got[:, :5], TOKENS[:, :5])
    likeliest = run(model, got).argmax(axis=-1)
    np.testing.assert_array_equal(got[:, 5:], likeliest[:, 4:-1])


def test_sampling_follows_its_key_and_temperature():
    model = build(LLAMA)

    def sample(seed, temperature):
        key = jax.random.key(seed)
        return np.asarray(generate(model, TOKENS[:, :4], 12, temperature=temperature, key=key))

    np.testing.assert_array_equal(sample(0, 1.0), sample(0, 1.0))
    assert (sample(0, 1.0) != sample(1, 1.0)).any()
    np.testing.assert_array_equal(sample(0, 1e-5), generate(model, TOKENS[:, :4], 12))


def test_decoding_compiles_once_per_total_length(monkeypatch):
    model, traces = build(LLAMA), []
    hidden = type(model).hidden

    def counted(self, *args):
        traces.append(1)
        return hidden(self, *args)

    monkeypatch.setattr(type(model), "hidden", counted)
    for num_given, temperature in [(3, 0.0), (5, 0.0), (7, 0.8)]:
        generate(model, TOKENS[:, :num_given], 20 - num_given, temperature=temperature)
    assert 1 <= len(traces) <= 2  # fori_loop may trace its body twice


def test_decoding_needs_a_prompt():
    with pytest.raises(SizeMismatch, match="TP003: the prompt has no tokens"):
        generate(build(LLAMA), TOKENS[:, :0], 3)


FACTORED = MeshShape.of({"dp": 2, "tp": 4}).factored((2, 2))
PLACED = {
    "llama-dp2-tp4": (LLAMA, MeshShape.of({"dp": 2, "tp": 4}), False),
    "llama-dp2-tp2x2-sp": (LLAMA, FACTORED, True),  # 2 kv heads, each on two devices
    "qwen-tp8": (QWEN, MeshShape((("tp", 8),)), False),  # 4 heads on 8 devices: whole
    "gpt2-dp2-tp2x2": (GPT2, FACTORED, False),
    "gpt2-tp8-sp": (GPT2, MeshShape((("tp", 8),)), True),
}


@pytest.mark.parametrize(("config", "shape", "sequence_parallel"), PLACED.values(), ids=PLACED)
def test_constraints_say_where_things_lie_and_not_what_they_are(config, shape, sequence_parallel):
    graph, params = nnx.split(build(config))
    loss = jax.jit(jax.value_and_grad(loss_of(graph)))
    want_loss, want = loss(params, TOKENS)
    plan = Plan(mesh=shape, decisions=(), sequence_parallel=sequence_parallel)
    with use_plan(plan, plan_mesh(make_mesh(**dict(shape.whole)), shape)):
        got_loss, got = loss(params, TOKENS)
    assert jax.tree.leaves(got)[0].sharding.num_devices == 8
    np.testing.assert_allclose(got_loss, want_loss, rtol=1e-5)
    assert_close(got, want, terms=64)
