"""Every threshold of `scripts/bench_hybrid.py`: stages of two kinds of GPU, and the largest models.

python -m pytest tests/legs/test_bench_hybrid.py

Ten whole steps compiled for 64 and 512 GPUs; four minutes on two cores.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_hybrid


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", bench_hybrid.SECTIONS)
def test_thresholds_are_reached(name):
    section = bench_hybrid.SECTIONS[name]()
    assert section.thresholds
    assert [text for text, reached in section.thresholds if not reached] == []
