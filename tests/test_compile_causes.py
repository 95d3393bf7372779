"""Collectives that should not be there, and the sentence about each."""

from pathlib import Path

import pytest

from jaxtp.compile.causes import arguments_behind, unexpected
from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse

DATA = Path(__file__).parent / "data" / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")


def causes(name, version, dp, tp, **axes):
    module = parse((DATA / f"{name}-{version}.txt").read_text())
    found = find(module, {"dp": dp, "tp": tp})
    return {
        one.kind: cause for one, cause in unexpected(module, found, tensor_axes=("tp",), **axes)
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_permutes_and_all_to_alls(version):
    found = causes("manual", version, 2, 4)
    assert set(found) == {"collective-permute", "all-to-all"}
    assert "sharded over tp is shifted" in found["collective-permute"]
    assert "different specs" in found["all-to-all"]
    allowed = causes("manual", version, 2, 4, stage_axes=("tp",), expert_axes=("tp",))
    assert allowed == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_gathered_weight_is_named_even_in_one_message_with_an_activation(version):
    """The scan's second weight is split along its output, which the constraint contradicts."""
    (cause,) = causes("layers", version, 2, 4).values()
    assert cause.startswith("w: ")
    assert "sharded over tp and gathered before use" in cause


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", ["row_product", "embedding", "gradients"])
def test_what_a_plan_needs_is_not_unexpected(name, version):
    assert causes(name, version, 2, 4) == {}


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_gathered_over_other_axes_are_fine(version):
    """FSDP gathers its weights over its own axis."""
    assert causes("gathered", version, 4, 2) == {}
    module = parse((DATA / f"gathered-{version}.txt").read_text())
    (gather,) = find(module, {"dp": 4, "tp": 2})
    operands = module.entry.instructions[gather.start].operands
    names = [name for one in operands for name in arguments_behind(module, module.entry, one)]
    assert names == ["w", "v"]
    product = next(one for one in module.entry if one.opcode == "custom-call")
    assert arguments_behind(module, module.entry, product.name) == []
