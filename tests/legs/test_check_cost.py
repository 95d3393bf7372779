"""Prices from sizes alone against the compiled program."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent.parent / "scripts"))
import check_cost

# ZeRO 2 beside a tensor axis, stages, and a model with a learned table of positions.
TELLING = [case for case in check_cost.CASES if "mesh.fsdp" in case[2] or "mesh.pp" in case[2]][
    1::5
]


@pytest.mark.parametrize("case", TELLING, ids=lambda case: str(dict(case[2])))
def test_memory_bytes_flops_and_seconds_are_those_of_the_compiled_step(case):
    _, memory, wire, flops, step = check_cost.compare(*case)
    assert memory == pytest.approx(1, abs=0.1)
    assert wire == pytest.approx(1, abs=0.01)
    assert flops == pytest.approx(1, abs=0.01)
    assert step == pytest.approx(1, abs=0.2)
