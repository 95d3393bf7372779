"""The parity table with pipeline stages, and with activations partitioned along the sequence."""

import pytest
from hybrid_runs import MODELS, check, rows

MESHES = {
    "pp2 tp4": {"pp": 2, "tp": 4},
    "pp2 fsdp2 tp2": {"pp": 2, "fsdp": 2, "tp": 2},
    "pp4 tp2": {"pp": 4, "tp": 2},
}
PARTITIONED = {**MESHES, "tp4 dp2": {"tp": 4, "dp": 2}, "fsdp2 tp4": {"tp": 4, "fsdp": 2}}


@pytest.mark.parametrize(("model", "mesh", "zero", "num_micro"), rows(MESHES))
def test_stages_equal_one_device(model, mesh, zero, num_micro):
    check(model, MESHES[mesh], zero=zero, num_micro=num_micro)


@pytest.mark.parametrize("mesh", PARTITIONED)
@pytest.mark.parametrize("model", MODELS)
def test_partitioned_activations_equal_one_device(model, mesh):
    zero = 3 if "fsdp" in mesh else 0
    check(model, PARTITIONED[mesh], zero=zero, num_micro=4, sequence_parallel=True)
