"""The comparison of `scripts/bench_peers.py` on four of its models.

python -m pytest tests/legs/test_peers.py

Twenty programs for eight GPUs; two to four minutes on two cores. google-parallax is not needed.
"""

import re
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_peers
import peer_models

from jaxtp.plan import trees

MIB = 2**20


@pytest.fixture(
    scope="module",
    params=["linen encoder", "llama, 4 kv heads", "gpt2, fused qkv", "phi3, fused gate|up"],
    ids=lambda name: re.sub(r"\W+", "-", name),
)
def row(request):
    return bench_peers.compare(request.param, sys.executable, lambda _: None)


@pytest.mark.timeout(1800)
def test_jaxtp_moves_the_floor_and_no_peer_moves_less(row):
    _, best = bench_peers.best_peer(row)
    assert row["jaxtp"]["wire_bytes"] <= min(best, 1.02 * bench_peers.with_form(row))
    kinds = {"all-reduce"} | ({"all-to-all"} if "fused" in row["model"] else set())
    assert row["jaxtp"]["collectives"].keys() - {"all-gather"} == kinds  # of a fused bias
    assert row["jaxtp"]["plan_seconds"] < 20


@pytest.mark.timeout(1800)
def test_every_peer_has_figures_or_an_error(row):
    assert set(row["peers"]) == {"expert", "parallax", "redco", "largest", "fsdp"}
    for name, peer in row["peers"].items():
        if "error" in peer:
            assert name == "parallax"
            assert peer["error"]
        else:
            assert peer["wire_bytes"] > MIB
            assert peer["peak_bytes"] > MIB
    assert row["peers"]["largest"]["wire_bytes"] > 1.2 * row["jaxtp"]["wire_bytes"]


@pytest.mark.parametrize("name", peer_models.MODELS, ids=lambda name: re.sub(r"\W+", "-", name))
def test_every_layout_divides(name):
    case = peer_models.MODELS[name]()
    leaves = jax.tree.leaves(case.params)
    paths = [path for path, _ in trees.leaves(case.params)]
    assert all(any(re.fullmatch(rule, path) for path in paths) for rule in case.rules)
    for make in (
        bench_peers.jaxtp_layout,
        bench_peers.expert_layout,
        bench_peers.redco_layout,
        bench_peers.largest_layout,
        bench_peers.fsdp_layout,
    ):
        layout = make(case)
        assert any(any(spec) for spec in layout.specs)
        for leaf, spec in zip(leaves, layout.specs, strict=True):
            for size, entry in zip(leaf.shape, spec, strict=False):
                names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
                for axis in names:
                    assert size % layout.mesh[axis] == 0
                    size //= layout.mesh[axis]


def test_a_peer_that_repeats_work_is_not_the_best():
    ours = {"wire_bytes": 4.0, "flops_per_device": 100.0}
    peers = {
        "whole": {"wire_bytes": 0.0, "flops_per_device": 800.0},
        "even": {"wire_bytes": 5.0, "flops_per_device": 100.0},
        "none": {"error": "not installed"},
    }
    assert bench_peers.best_peer({"jaxtp": ours, "peers": peers}) == ("even", 5.0)
