"""The comparison of `scripts/bench_kinds.py`: plans by jaxtp against plans by hand.

python -m pytest tests/legs/test_kinds.py

Twenty-six small programs for eight GPUs; three to six minutes on two cores.
"""

import re
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_kinds

pytestmark = [
    pytest.mark.timeout(900),
    # Names that guess otherwise than the dataflow are part of the matter.
    pytest.mark.filterwarnings("ignore:.*dataflow overrules names:jaxtp.JaxtpWarning"),
]


@pytest.fixture(
    scope="module", params=bench_kinds.KINDS, ids=lambda name: re.sub(r"\W+", "-", name)
)
def row(request):
    with jax.numpy_rank_promotion("allow"):  # strangers write so
        return bench_kinds.compare(request.param)


def test_never_more_than_the_plan_by_hand(row):
    assert row["hand_wire"] > 0
    assert row["wire"] <= 1.02 * row["hand_wire"]
    assert row["our_bytes"] <= 1.02 * row["hand_bytes"]
    assert row["flops"] <= 1.02


def test_names_change_nothing(row):
    assert row["scrambled_wire"] <= 1.02 * row["hand_wire"]
