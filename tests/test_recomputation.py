"""FLOPs that each remat policy adds, by count and in the compiled GPU program."""

import pytest

from jaxtp.config.settings import Batch, Config, Mesh
from jaxtp.cost.flops import layer_params, model_flops
from jaxtp.cost.recomputation import RERUNS, recomputed_flops
from jaxtp.layers.recomputation import REMAT
from jaxtp.models import PRESETS, abstract
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.planner import make_plan
from jaxtp.train.preflight import preflight_config

TINY = ModelDims.of(PRESETS["llama-tiny"])


def test_every_policy_has_its_own_price():
    assert set(RERUNS) == set(REMAT)
    assert len(set(RERUNS.values())) == len(RERUNS)


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2-xl", "qwen3-8b"])
@pytest.mark.parametrize("tp", [1, 8])
def test_matrices_of_layers_are_counted_whatever_divides(model, tp):
    config = PRESETS[model]
    params = layer_params(
        make_plan(abstract(model), {"tp": tp}, config=config), ModelDims.of(config)
    )
    layers, width = config.num_hidden_layers, config.hidden_size
    heads = config.num_attention_heads * config.head_dim
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads) * config.head_dim
    inner = getattr(config, "intermediate_size", 4 * width)
    gates = 2 if model != "gpt2-xl" else 1
    assert params.attention_out == layers * heads * width
    assert params.mlp_out == layers * inner * width
    assert params.columns == layers * width * (heads + 2 * kv_heads + gates * inner)


@pytest.mark.parametrize("remat", ["stage", "full"])
def test_the_compiled_program_runs_as_many(remat):
    """In two stages, where the policies differ most; ticks without a micro-batch count as well."""
    config = Config(
        model="llama-tiny",
        seq_len=128,
        target="h100:1x2",
        mesh=Mesh(pp=2),
        batch=Batch(size=4, accumulation=4),
        remat=remat,
    )
    plan, report = preflight_config(config)
    tokens = 4 * 128
    whole = model_flops(plan, TINY, tokens=tokens, seq=128).full
    head = 6 * TINY.vocab_size * TINY.hidden_size * tokens
    layers = whole - head + recomputed_flops(remat, plan, TINY, tokens=tokens, seq=128)
    num_ticks, num_micro = 5, 4
    expected = (head + layers * num_ticks / num_micro) / 2
    assert report.flops_per_device == pytest.approx(expected, rel=1e-6)
