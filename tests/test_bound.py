"""What a strategy has to move, against sums by hand."""

import dataclasses

import pytest

from jaxtp.cost.bound import Need, needed, seconds_of
from jaxtp.hardware.gpus import Target
from jaxtp.models import LlamaConfig, abstract
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.planner import make_plan

CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=8,
    head_dim=8,
    intermediate_size=256,
)
LAYER = 4 * 64 * 64 + 3 * 64 * 256  # elements of its matrices
TABLE = 512 * 64
NORMS = (2 * 6 + 1) * 64
TOKENS = 32 * 128


def needs(zero, num_micro=1, config=CONFIG, **mesh):
    plan = make_plan(abstract(config), mesh, config=config, zero=zero)
    found = needed(
        plan,
        ModelDims.of(config),
        tokens=TOKENS,
        num_micro=num_micro,
        compute="bfloat16",
        sums="bfloat16",
    )
    totals = {}
    for need in found:
        key = (need.kind, need.axes)
        totals[key] = totals.get(key, 0) + need.num_bytes * need.count
    return totals


def test_tensor_parallelism_needs_its_lower_bound():
    stream = TOKENS // 2 * 64 * 2
    found = needs(0, dp=2, tp=4)
    assert found["all-reduce", ("tp",)] == (4 * 6 + 2) * stream
    assert found == needs(0, num_micro=4, dp=2, tp=4)
    gradients = (6 * LAYER + 2 * TABLE) / 4 + NORMS
    assert found["all-reduce", ("dp",)] == 2 * gradients


def test_tokens_travel_to_experts_and_back_in_the_layers_that_have_them():
    routed = {"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
    found = needs(0, config=dataclasses.replace(CONFIG, **routed), ep=2, tp=2)
    # Two chosen experts a token; each device along tp sends what its own ones need.
    assert found["all-to-all", ("ep",)] == 4 * (6 - 2) * 2 * TOKENS // 2 * 64 * 2 / 2


def test_stages_share_the_reductions_of_layers_and_of_the_ends():
    found = needs(0, pp=2, tp=4)
    assert found["all-reduce", ("tp",)] == (4 * 6 + 2) / 2 * TOKENS * 64 * 2
    # All of them use the tables and the last norm, of which each has a gradient.
    assert found["all-reduce", ("pp",)] == 2 * (2 * TABLE / 4 + 64)


@pytest.mark.parametrize("over", [{"fsdp": 4}, {"fsdp": 2, "cp": 2}], ids=str)
def test_zero_3_gathers_layers_twice_and_tables_once_and_reduces_once(over):
    found, axes = needs(3, tp=2, **over), tuple(over)
    assert found["all-gather", axes] == 2 * (2 * 6 * LAYER + 2 * TABLE) / 2
    assert found["reduce-scatter", axes] == 2 * (6 * LAYER + 2 * TABLE) / 2
    assert found["all-reduce", axes] == 2 * NORMS


def test_replicas_reduce_what_zero_leaves_of_a_gradient():
    found = needs(3, dp=2, fsdp=2, tp=2)
    assert found["all-reduce", ("dp",)] == 2 * (6 * LAYER + 2 * TABLE) / 2 / 2
    assert found["all-reduce", ("dp", "fsdp")] == 2 * NORMS


def test_zero_1_gathers_what_was_updated():
    found = needs(1, fsdp=4, tp=1)
    assert found["reduce-scatter", ("fsdp",)] == 2 * (6 * LAYER + 2 * TABLE)
    assert found["all-gather", ("fsdp",)] == 4 * (6 * LAYER + 2 * TABLE)  # float32


@pytest.mark.parametrize(("axis", "link"), [("tp", "NVLink"), ("dp", "network")])
def test_each_need_is_on_the_links_of_its_axis(axis, link):
    target = Target.parse("h100:4x8")
    need = Need(kind="all-gather", axes=(axis,), num_bytes=2**28, count=3)
    found = seconds_of([need], {"dp": 4, "tp": 8}, target)
    group = range(8) if axis == "tp" else range(0, 32, 8)
    assert found.pop(link) == pytest.approx(
        3 * target.collective_seconds(need.kind, 2**28, [group])
    )
    assert set(found.values()) == {0.0}


def test_keys_and_values_go_around_three_times():
    found = needs(0, cp=4, tp=2)
    own = 2 * (TOKENS / 4) * (8 / 2) * 8 * 2  # keys and values of a device, in bfloat16
    assert found["collective-permute", ("cp",)] == 3 * 3 * 6 * own
    assert found["all-reduce", ("tp",)] == (4 * 6 + 2) * TOKENS / 4 * 64 * 2
    assert found["all-reduce", ("cp",)] == 2 * ((6 * LAYER + 2 * TABLE) / 2 + NORMS)
