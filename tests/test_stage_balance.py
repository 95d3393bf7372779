"""Clusters of several kinds: which groups they may form, how many layers each kind is given."""

import dataclasses
import json

import pytest

from jaxtp.config.batch_sizes import resolve
from jaxtp.config.files import parse
from jaxtp.config.settings import Batch, Config, Mesh, Pipeline, Zero
from jaxtp.cost.stage_balance import LayerWork, compare, deal, step_seconds, table
from jaxtp.errors import BadConfig, BadMesh, BadTarget
from jaxtp.hardware.clusters import Cluster
from jaxtp.hardware.gpus import KINDS, LAUNCH_SECONDS
from jaxtp.plan.stages import Stages
from jaxtp.train.planning import Build, plan_of
from jaxtp.train.preflight import strategies, work_of

A100, H100 = KINDS["a100-80"], KINDS["h100"]
MIXED = "a100-80:1x8+h100:1x8"
WORK = LayerWork(layer_flops=1e12, end_flops=0, layer_bytes=10**9, permute_seconds=1e-3)


def test_parts_are_numbered_one_after_the_other():
    cluster = Cluster.parse("a100-40:1x4+h100:2x4")
    assert str(cluster) == "a100-40:1x4+h100:2x4"
    assert (cluster.num_devices, len({kind.name for kind in cluster.kinds})) == (12, 2)
    assert [kind.name for kind in cluster.kinds[3:5]] == ["a100-40", "h100"]
    # One program has to fit the smallest card.
    assert str(cluster.smallest) == "a100-40:3x4"
    assert Cluster.parse("h100:1x8").stage_kinds({"tp": 8}) == (H100,)


def test_across_parts_messages_take_the_slower_card():
    cluster = Cluster.parse(MIXED)
    across = cluster.permute_seconds(10**9, 7, 8)
    assert across == pytest.approx(LAUNCH_SECONDS + 10**9 / A100.nic_bandwidth)
    assert cluster.permute_seconds(10**9, 8, 12) < cluster.permute_seconds(10**9, 0, 4) < across


@pytest.mark.parametrize(
    ("text", "sizes", "error", "message"),
    [
        (MIXED, {"tp": 16}, BadMesh, r"mesh.tp: the tp group of devices 0 to 15 .*8 a100-80, 8 h1"),
        (MIXED, {"fsdp": 2, "tp": 8}, BadMesh, r"TP010 at mesh.fsdp: .*waits for the slower"),
        (MIXED, {"pp": 4, "tp": 5}, BadTarget, "has 16 GPUs, the mesh 20"),
        (
            "a100-80:1x4+h100:2x4",
            {"pp": 2, "dp": 3, "tp": 2},
            BadMesh,
            r"the dp group of devices 0 to 5 .*4 a100-80, 2 h100.*\n.*in a stage as one of 1, 2, 4",
        ),
    ],
)
def test_groups_of_mixed_kinds_are_refused(text, sizes, error, message):
    with pytest.raises(error, match=message):
        Cluster.parse(text).stage_kinds(sizes)


def test_hosts_of_other_sizes_cannot_be_compiled_for():
    with pytest.raises(BadTarget, match="hosts of 4, 8 GPUs"):
        _ = Cluster.parse("a100-80:1x4+h100:1x8").smallest


def test_layers_follow_flops_or_memory():
    kinds = (KINDS["a100-40"], KINDS["h200"])
    options = {"micro_batches": 4}
    assert deal("even", 32, kinds, **options).layers == ((16, 16),)
    # 236 to 700 TFLOP/s that products reach: 8.1 to 23.9 layers.
    assert deal("compute_first", 32, kinds, **options).layers == ((8, 24),)
    # 42 to 151 GB, and 42 to 85.
    assert deal("memory_first", 32, kinds, **options).layers == ((7, 25),)
    assert deal("memory_first", 32, (kinds[0], H100), **options).layers == ((10, 22),)
    # In rounds too, every round by the same shares.
    dealt = deal("compute_first", 32, kinds, **options, num_rounds=2)
    assert dealt.layers == ((4, 12), (4, 12))


def test_a_step_is_ticks_of_the_slowest_chunk():
    stages = Stages.even(16, 2, micro_batches=4)
    slowest = 8 * WORK.layer_flops / A100.matmul_flops
    assert step_seconds(stages, (A100, H100), WORK) == pytest.approx(5 * (slowest + 2e-3))
    # The head at the pace of the slowest.
    with_head = dataclasses.replace(WORK, end_flops=A100.matmul_flops)
    assert step_seconds(stages, (A100, H100), with_head) == pytest.approx(1 + 5 * (slowest + 2e-3))
    even, compute, memory = compare(stages, (A100, H100), WORK)
    assert compute.stages.layers == ((4, 12),)
    assert even.step_seconds / compute.step_seconds == pytest.approx(
        (8 / 4 * 4 / A100.matmul_flops * 1e12 + 2e-3)
        / (max(4 / A100.matmul_flops, 12 / H100.matmul_flops) * 1e12 + 2e-3)
    )
    # The cards are alike in memory. One program holds the longest stage everywhere.
    assert memory.stages == even.stages
    assert (even.held_bytes, compute.held_bytes) == (8 * 10**9, 12 * 10**9)
    lines = table((even, compute, memory), (A100, H100))
    assert lines[0].startswith("stages on a100-80 + h100; a step is ticks x (slowest chunk")
    assert "4, 12 layers; 12.0 GB" in lines[2]


def config_of(**pipeline):
    return Config(
        model="llama3-8b",
        seq_len=4096,
        remat="full",
        target=MIXED,
        mesh=Mesh(tp=4, pp=4),
        batch=Batch(size=32, accumulation=8),
        zero=Zero(stage=0),
        pipeline=Pipeline(**pipeline),
    )


def test_a_config_deals_out_by_its_target():
    config = resolve(config_of(allow_heterogeneous=True, load_balance="compute_first"), 16)
    build = Build.of(config)
    plan = plan_of(build)
    assert plan.stages.layers == ((4, 4, 12, 12),)
    work = work_of(build, plan)
    # 218.1 million parameters a layer; 4 x 4096 tokens; 4 GPUs; remat "full" runs all but the last
    # product, of 58.7 million parameters, once more.
    products = (6 * 218.1e6 + 2 * (218.1e6 - 58.7e6)) * 4 * 4096
    attention = 16 * 4096 * 4 * 4096 * 4096
    assert work.layer_flops == pytest.approx((products + attention) / 4, rel=1e-3)
    # The head, 128,256 x 4096, on 32 sequences over 16 GPUs.
    assert work.end_flops == pytest.approx(6 * 128256 * 4096 * 32 * 4096 / 16)
    assert work.layer_bytes == pytest.approx(12 * 218.1e6 / 4, rel=0.01)
    assert work.permute_seconds == pytest.approx(LAUNCH_SECONDS + 4 * 4096 * 4096 * 2 / 25e9)
    lines = strategies(build, plan)
    assert [line.split(":")[0] for line in lines[1:]] == ["even", "compute_first", "memory_first"]
    even = resolve(config_of(allow_heterogeneous=True), 16)
    assert Build.of(even).stages.layers == ((8, 8, 8, 8),)
    assert strategies(Build.of(dataclasses.replace(config, target="h100:2x8")), plan) == ()


def test_mixed_targets_must_be_wanted():
    config = resolve(config_of(), 16)
    with pytest.raises(
        BadConfig, match=r"at pipeline.allow_heterogeneous: the target a100.* kinds"
    ):
        Build.of(config)


def test_deepspeeds_spelling_reaches_the_stages():
    text = {
        "model": "llama3-8b",
        "target": MIXED,
        "train_batch_size": 32,
        "gradient_accumulation_steps": 8,
        "tensor_parallel": {"tp_size": 8},
        "pipeline_parallel": {"pp_size": 2},
        "allow_heterogeneous": True,
        "load_balance": {"enabled": True, "strategy": "COMPUTE_FIRST"},
    }
    config, lines = parse(json.dumps(text))
    config = resolve(config, 16)
    assert Build.of(config).stages.layers == ((8, 24),)
    assert "load_balance: mapped; --pipeline.load_balance" in map(str, lines)
