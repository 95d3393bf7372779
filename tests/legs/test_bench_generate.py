"""Every threshold of `scripts/bench_generate.py`, on programs of the real width and depth.

python -m pytest tests/legs/test_bench_generate.py

About twenty programs; two minutes on two cores.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_generate

OPTIONS = bench_generate.Options()


@pytest.mark.timeout(1800)
def test_a_token_is_at_its_floor():
    section = bench_generate.floor(OPTIONS)
    assert not [text for text, reached in section.thresholds if not reached]


@pytest.mark.timeout(1800)
def test_integers_are_read_once():
    section = bench_generate.quantized(bench_generate.Options(layers=2))
    assert not [text for text, reached in section.thresholds if not reached]


@pytest.mark.timeout(1800)
def test_no_naive_way_is_faster():
    section = bench_generate.naive(bench_generate.Options(layers=8))
    assert all(reached for _, reached in section.thresholds)
