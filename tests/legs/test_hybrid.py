"""The parity table: every combination of axes gives the numbers of one device."""

import pytest
from hybrid_runs import check, rows

MESHES = {
    "tp8": {"tp": 8},
    "tp4 dp2": {"tp": 4, "dp": 2},
    "fsdp8": {"tp": 1, "fsdp": 8},
    "fsdp2 tp4": {"tp": 4, "fsdp": 2},
}


@pytest.mark.parametrize(("model", "mesh", "zero", "num_micro"), rows(MESHES))
def test_loss_norm_and_parameters_equal_one_device(model, mesh, zero, num_micro):
    check(model, MESHES[mesh], zero=zero, num_micro=num_micro)
