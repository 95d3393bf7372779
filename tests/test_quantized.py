"""Integer kernels: what they are, where they lie, what is read of them, and who has none."""

import dataclasses
import json
import sys
from pathlib import Path

import compiled_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounding
from flax import nnx

import jaxtp
from jaxtp import models
from jaxtp.compile import traffic
from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse
from jaxtp.compile.options import PREFLIGHT, probe
from jaxtp.errors import BadConfig
from jaxtp.generation.preflight import cache_bytes, program_on_target, token_floor
from jaxtp.generation.programs import loop_options
from jaxtp.generation.workload import Workload
from jaxtp.hardware.gpus import Target
from jaxtp.io.hf import load_hf, save_hf
from jaxtp.mesh.build import make_mesh
from jaxtp.plan.trees import leaves

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
FLOAT32 = {"param_dtype": "float32", "dtype": "float32", "progress": False}
PROMPTS = [[5, 7, 9], [1], [11, 12, 13, 14, 15, 16]]
TINY = dataclasses.replace(models.config_of("llama-tiny"), num_hidden_layers=2, dtype="float32")


@nnx.jit
def run(model, tokens):
    return model(tokens)


def load(family, mesh=None, **options):
    mesh = mesh or make_mesh(tp=1, devices=jax.devices()[:1])
    return load_hf(FIXTURES / family, mesh, **FLOAT32, **options)[0]


@pytest.mark.parametrize(("kind", "steps"), [("int8", 127.5), ("int4", 7.5)])
def test_a_value_is_off_by_half_a_scale_at_most(kind, steps):
    floats = models.build(TINY)
    whole = models.quantize(floats, kind)
    for name in ("q_proj", "o_proj"):
        kernel = getattr(floats.layers.self_attn, name).kernel[...][1]
        map_ = getattr(whole.layers[1].self_attn, name)
        values, scale = map_.kernel.qvalue[...], map_.kernel.scale[...]
        summed = tuple(range(len(map_.in_features)))
        assert values.dtype == kind
        largest = jnp.max(jnp.abs(kernel), axis=summed, keepdims=True)
        rounding.assert_close(scale, largest / steps, terms=2)
        back = values.astype(jnp.float32) * scale
        # Half a step, and the rounding of a division and a product of up to `steps` steps.
        bound = scale * (0.5 + 3 * steps * np.finfo(np.float32).eps)
        assert bool(jnp.all(jnp.abs(back - kernel) <= bound))
        x = jax.random.normal(jax.random.key(1), (2, 3, *map_.in_features))
        want = jnp.tensordot(x, back, axes=len(summed))
        rounding.assert_close(map_(x), want, terms=int(np.prod(map_.in_features)) + 4)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "mixtral", "gpt_oss"])
def test_a_folder_is_quantised_as_it_is_read(family):
    """As the model that was read whole; 99 tokens are padded, and the head's scales with them."""
    want = models.quantize(load(family), "int8")
    got = load(family, make_mesh(dp=2, tp=4), quantize="int8", pad_vocab=True)
    here = dict(leaves(got))
    assert here["lm_head/kernel/scale"].shape == (1, 100)
    for path, leaf in leaves(want):
        part = np.asarray(here[path])[tuple(map(slice, leaf.shape))]
        np.testing.assert_array_equal(part, np.asarray(leaf), err_msg=path)
    alone = jaxtp.generate(want, PROMPTS, max_new_tokens=6)
    answers = jaxtp.generate(got, PROMPTS, max_new_tokens=6)
    assert [a.tokens for a in answers] == [a.tokens for a in alone]
    rows = [[*PROMPTS[answer.prompt], *answer.tokens] for answer in alone]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int32)  # what follows a row is not seen
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    for logits, tokens, answer in zip(run(want, ids), rows, alone, strict=True):
        nats = jax.nn.log_softmax(logits)[len(tokens) - 7 : len(tokens) - 1]
        nats = nats[np.arange(6), np.array(answer.tokens)]
        np.testing.assert_allclose(answer.log_probabilities, nats, atol=1e-4)


def test_each_expert_has_scales_of_its_own():
    config = dataclasses.replace(TINY, num_experts=4, num_experts_per_tok=2)
    floats, whole = models.build(config), models.quantize(models.build(config), "int8")
    plan = jaxtp.make_plan(whole, {"tp": 4}, config=whole.config)
    for name in ("gate_proj", "down_proj"):
        kernel = getattr(floats.layers.mlp.experts, name).kernel[...][1]
        map_ = getattr(whole.layers[1].mlp.experts, name).kernel
        largest = jnp.max(jnp.abs(kernel), axis=1, keepdims=True)
        rounding.assert_close(map_.scale[...], largest / 127.5, terms=2)
        values, scale = (
            plan[f"layers/1/mlp/experts/{name}/kernel/{x}"] for x in ("qvalue", "scale")
        )
        assert values.spec == scale.spec == (("tp",), (), ())
    assert not hasattr(whole.layers[1].mlp.router.kernel, "qvalue")


def test_scales_lie_along_their_outputs():
    config = dataclasses.replace(TINY, quantize="int8")
    plan = jaxtp.make_plan(models.abstract(config), {"tp": 4}, config=config)
    floats = jaxtp.make_plan(models.abstract(TINY), {"tp": 4}, config=TINY)
    for name in ("self_attn/q_proj", "self_attn/o_proj", "mlp/up_proj", "mlp/down_proj"):
        spec = floats[f"layers/{name}/kernel"].spec[1:]
        values, scale = (plan[f"layers/1/{name}/kernel/{x}"] for x in ("qvalue", "scale"))
        assert values.spec == spec
        assert scale.spec == tuple(
            axes if size > 1 else () for axes, size in zip(spec, scale.shape, strict=True)
        )
        assert 4 * values.bytes_per_device(plan.mesh) == values.num_bytes
    half = dataclasses.replace(plan["lm_head/kernel/qvalue"], dtype="int4")
    assert 2 * half.num_bytes == plan["lm_head/kernel/qvalue"].num_bytes


def largest_written(module):
    """Most bytes that one instruction writes; what fusions hold in themselves is not written."""
    inside = {
        name
        for computation in module.computations.values()
        for one in computation
        if one.opcode not in traffic.CALLS
        for name in one.calls
    }
    return max(
        traffic.moved(module, computation, one)[2]
        for name, computation in module.computations.items()
        if name not in inside
        for one in computation
    )


COMPILED = [
    ("llama3-8b", "int8", 16), ("llama3-8b", "int8", 1), ("llama3-8b", "int4", 16),
    ("mixtral-8x7b", "int8", 16), ("qwen3-30b-a3b", "int4", 16),
]  # fmt: skip


@pytest.mark.parametrize(("model", "kind", "batch"), COMPILED)
def test_a_token_reads_integers_once_and_writes_no_kernel(model, kind, batch):
    work = Workload(model=model, batch=batch, layers=2, context=512, new_tokens=64, quantize=kind)
    plan, target = work.plan(8), Target.parse("h100:1x8")
    mesh = compiled_programs.gpu_mesh(1, 8)
    mesh = jax.sharding.Mesh(mesh.devices.reshape(8), ("tp",))
    step, arguments = program_on_target(mesh, json.dumps(dataclasses.asdict(work)), "decode")
    options = dict(probe({**PREFLIGHT, **loop_options(quantized=True)}).options)
    program = step.lower(*arguments).compile(options)
    module = parse(program.as_text())
    found = find(module, dict(plan.mesh.sizes))
    sent = [one for one in found if one.num_bytes >= batch * work.config.hidden_size * 2]
    assert [one.kind for one in sent] == ["all-reduce"] * (2 * 2 + 1)  # two layers, the lookup
    floor = token_floor(work, plan, target)[0]
    assert 1 <= traffic.traffic(module, found, target).stored_bytes / floor <= 1.05
    cache = cache_bytes(work, plan)
    assert cache <= program.memory_analysis().alias_size_in_bytes <= 1.01 * cache + 2**16
    config = work.config
    in_16_bits = config.hidden_size * config.intermediate_size // 8 * 2
    if getattr(config, "num_experts", 0):
        width = config.moe_intermediate_size or config.intermediate_size
        in_16_bits = config.hidden_size * width * config.num_experts // 8 * 2
    assert largest_written(module) < in_16_bits


def quantised_twice():
    models.quantize(models.quantize(models.build(TINY), "int8"), "int8")


def merged():
    lora = models.Lora(rank=2, alpha=2.0, targets=("q_proj",))
    models.merge_lora(models.build(dataclasses.replace(TINY, lora=lora, quantize="int8")))


REFUSED = {
    "another type": (lambda: models.quantize(models.build(TINY), "int3"), "'int3' is no type"),
    "twice": (quantised_twice, "the model's kernels are int8"),
    "merging": (merged, "the kernels are int8, to which nothing is added"),
}


@pytest.mark.parametrize(("mistake", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_quantised_is_refused(mistake, message):
    with pytest.raises(BadConfig, match=message):
        mistake()


def test_integers_are_not_saved_and_take_qwix(monkeypatch, tmp_path):
    model = models.quantize(models.build(TINY), "int8")
    with pytest.raises(BadConfig, match=r"TP020 at config\.quantize: the model's kernels are int8"):
        save_hf(model, tmp_path / "out", progress=False)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(BadConfig, match=r"qwix is not installed\n.*jaxtp\[quantize\]"):
        models.quantize(models.build(TINY), "int8")
