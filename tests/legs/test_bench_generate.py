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
    late = {text for text, reached in section.thresholds if not reached}
    assert not [text for text in late if not text.startswith("modelled time")]
    # The largest is 8B at 64 rows: four query heads a kv head are padded to eight for cuBLAS, and
    # the scores are a tenth of what is moved.
    above = [row for row in section.rows if row["x floor "] > bench_generate.MOST_SECONDS]
    assert [(row["model"], row["rows"]) for row in above] == [("llama3-8b", 64)]
    assert above[0]["x floor "] <= 1.15


@pytest.mark.timeout(1800)
def test_no_naive_way_is_faster():
    section = bench_generate.naive(bench_generate.Options(layers=8))
    assert all(reached for _, reached in section.thresholds)
