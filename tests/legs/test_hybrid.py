"""The parity table: every combination of axes gives the numbers of one device."""

import jax
import numpy as np
import pytest
from hybrid_runs import MODELS, reference, train

import jaxtp

MESHES = {
    "tp8": {"tp": 8},
    "tp4 dp2": {"tp": 4, "dp": 2},
    "fsdp8": {"tp": 1, "fsdp": 8},
    "fsdp2 tp4": {"tp": 4, "fsdp": 2},
}
# Without an fsdp axis ZeRO has nothing to cut, and the programs of all stages are one.
ROWS = [
    (model, mesh, zero, num_micro)
    for model in MODELS
    for mesh in MESHES
    for zero in ((0, 1, 2, 3) if "fsdp" in mesh else (0,))
    for num_micro in (1, 4)
]

# float32 sums in another order. AdamW divides a gradient by its own size, and so makes steps out of
# the noise in gradients that are zero (GPT-2's key biases): an eps of 1e-5 keeps these small.
TOLERANCE = {"rtol": 0, "atol": 3e-5}


@pytest.mark.parametrize(("model", "mesh", "zero", "num_micro"), ROWS)
def test_loss_norm_and_parameters_equal_one_device(model, mesh, zero, num_micro):
    losses, norms, params = train(
        model, jaxtp.make_mesh(**MESHES[mesh]), zero=zero, num_micro=num_micro
    )
    expected_losses, expected_norms, expected_params = reference(model)
    np.testing.assert_allclose(losses, expected_losses, **TOLERANCE)
    np.testing.assert_allclose(norms, expected_norms, **TOLERANCE)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, **TOLERANCE), params, expected_params
    )
