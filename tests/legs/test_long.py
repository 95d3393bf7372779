"""Every threshold of `scripts/bench_long.py`, and the meshes that the default tests leave out.

python -m pytest tests/legs/test_long.py

Four programs of the real width and depth for up to 128 GPUs; two minutes on two cores.
"""

import sys
from pathlib import Path

import pytest
from hybrid_runs import check

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_long

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("name", bench_long.SECTIONS)
def test_thresholds_are_reached(name):
    section = bench_long.SECTIONS[name]()
    assert section.thresholds
    assert [text for text, reached in section.thresholds if not reached] == []


@pytest.mark.parametrize(
    ("name", "sizes", "options"),
    [
        ("gpt2", {"cp": 4, "tp": 1, "dp": 2}, {"num_micro": 2}),
        ("llama", {"cp": 4, "tp": 2}, {"sequence_parallel": True}),
        ("llama", {"cp": 8, "tp": 1}, {}),
        ("llama", {"fsdp": 2, "cp": 4, "tp": 1}, {"zero": 1}),
    ],
    ids=str,
)
def test_three_updates_are_those_of_one_device(name, sizes, options):
    check(name, sizes, **options)
