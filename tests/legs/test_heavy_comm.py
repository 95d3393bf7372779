"""Every threshold of `scripts/bench_comm.py`, on programs of the real width and depth.

python -m pytest tests/legs/test_heavy_comm.py

Needs nvidia-cudnn-cu12 and jax 0.11.2 or later, whose scheduler has the options of the aggressive
profile. About fifty programs for 8 and 256 GPUs; some minutes on two cores.
"""

import sys
from pathlib import Path

import pytest
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_comm
import comm_others


@pytest.fixture(scope="module")
def compiler():
    return bench_comm.Compiler(console=Console(stderr=True))


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", [name for name in bench_comm.SECTIONS if name != "others"])
def test_thresholds_are_reached(name, compiler):
    section = bench_comm.SECTIONS[name](compiler)
    assert section.thresholds
    assert [text for text, reached in section.thresholds if not reached] == []


@pytest.mark.parametrize(
    "case",
    # Unrolled, 32 layers take the compiler most of a minute; the script has them.
    [comm_others.Case(model="linen_scan"), comm_others.Case(model="nnx_loop", num_layers=12)],
    ids=lambda case: case.model,
)
def test_models_not_ours_hide_their_messages(case):
    report = case.report("aggressive")
    assert comm_others.over_longest(report) <= comm_others.MOST_TIME
    assert report.ratio <= comm_others.MOST_WIRE


@pytest.mark.parametrize(
    ("case", "busy", "exposed", "longest"),
    # The ends of the model stand beside nothing: tables, the first weights, the last gradients.
    [
        (comm_others.Case(model="linen_scan", fsdp=8, num_layers=12), 1.02, 0.13, 1.15),
        # Without halves a layer's gathers are messages of their own, each with its start-up.
        (
            comm_others.Case(model="linen_scan", fsdp=64, tp=1, batch=8, num_layers=6),
            1.13,
            0.18,
            1.12,
        ),
    ],
    ids=lambda case: getattr(case, "mesh", None),
)
def test_a_scanned_model_not_ours_gathers_and_reduces_each_layer_once(case, busy, exposed, longest):
    report = case.report("aggressive")
    (network,) = (link for link in report.links if link.name == "network")
    assert network.busy_seconds <= busy * network.needed_seconds
    assert network.exposed_seconds <= exposed * network.busy_seconds
    assert comm_others.over_longest(report) <= longest


def test_an_unrolled_model_not_ours_gathers_ahead_too():
    case = comm_others.Case(model="nnx_loop", fsdp=8, num_layers=12)
    report = case.report("aggressive")
    (network,) = (link for link in report.links if link.name == "network")
    assert network.busy_seconds <= comm_others.MOST_WIRE * network.needed_seconds
    # The first layer's weights and the table come, and their gradients leave, beside nothing.
    assert network.exposed_seconds <= 0.1 * network.busy_seconds
    assert comm_others.over_longest(report) <= 1.2


def test_a_hand_written_plan_is_no_better_and_a_naive_one_is_far_worse(compiler):
    rows = bench_comm.floor(compiler).rows  # compiled already
    for model, _, _ in bench_comm.SHAPES:
        found = {row["plan"]: row for row in rows if row["model"] == model and row["tp"] == 8}
        ours, largest = found["jaxtp"], found["largest"]
        assert ours["wire GiB"] <= found["megatron"]["wire GiB"]
        assert ours["ms"] <= found["megatron"]["ms"] * 1.001
        assert (
            largest["wire GiB"] > ours["wire GiB"] * 1.2 or largest["peak GiB"] > ours["peak GiB"]
        )
        assert found["replicated"]["ms"] > ours["ms"] * 2
