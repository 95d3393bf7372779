"""Which mesh: what is offered, in which order, and what is written."""

import dataclasses
import json
import time

import numpy as np
import pytest

from jaxtp.cli.commands import main
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.files import load
from jaxtp.cost.candidates import candidates, complexity
from jaxtp.cost.habits import HABITS
from jaxtp.cost.peak_memory import state_bytes
from jaxtp.cost.ranking import EQUAL_WITHIN, rank
from jaxtp.cost.strategy import ModelSizes
from jaxtp.cost.wire import Wires
from jaxtp.errors import BadUsage, DoesNotFit, SizeMismatch
from jaxtp.hardware.gpus import Target
from jaxtp.inspect.pages.search_page import scatter
from jaxtp.models import PRESETS
from jaxtp.train.machine_sizes import largest_batch, smallest_machine
from jaxtp.train.mesh_advice import advice, mesh_text
from jaxtp.train.mesh_search import config_for, run_of, search
from jaxtp.train.pricing import sizes_of
from jaxtp.train.search_result import Asked, compiled_rows, rows_of

SIZES = ModelSizes(
    layers=16, hidden=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64, vocab=128256, seq=2048,
    gated=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def found():
    return search("llama3.2-1b", target="h100:2x8", batch=64, seq=2048, compile_best=0, limit=100)


def test_every_candidate_uses_every_gpu_and_the_whole_batch():
    s = candidates(SIZES, 16, 64)
    assert set(s.devices.tolist()) == {16}
    assert set(s.batch.tolist()) == {64}
    assert s.tp.max() <= 8


def test_every_mesh_that_is_offered_resolves(found):
    for row in found.rows:
        assert resolve(row.config, 16).mesh == row.config.mesh


@pytest.mark.parametrize(
    ("axis", "changes", "batch", "least"),
    [("cp", {"seq": 32768}, 1, 7.9), ("ep", {"experts": 8, "chosen": 2}, 8, 1.2)],
)
def test_zero_is_offered_along_cp_and_ep_without_fsdp(axis, changes, batch, least):
    """And without replicas, of which a config would make fsdp."""
    sizes = dataclasses.replace(SIZES, **changes)
    s = candidates(sizes, 8, batch, fixed={axis: 8})
    assert set(s.zero.tolist()) == {0, 1, 2, 3}
    held = [state_bytes(sizes, s.take(s.zero == stage), HABITS["jaxtp"]).min() for stage in (0, 3)]
    assert held[0] / held[1] > least
    replicas = candidates(sizes, 16, 2 * batch, fixed={axis: 8, "dp": 2})
    assert set(replicas.zero.tolist()) == {0}


def test_those_that_fit_come_first_and_ties_go_to_the_simpler():
    target = Target.parse("h100:2x8")
    s = candidates(SIZES, 16, 64)
    ranking = rank(SIZES, s, Wires.of(target), HABITS["jaxtp"], memory_bytes=20 * 2**30)
    fits = ranking.fits[ranking.order]
    assert 0 < fits.sum() < len(fits)
    assert fits[: fits.sum()].all()
    best = ranking.seconds[ranking.fits].min()
    equal = (ranking.seconds <= best * (1 + EQUAL_WITHIN) * (1 - 1e-9)) & ranking.fits
    assert complexity(s)[ranking.order[0]] == complexity(s)[equal].min()


def test_ten_thousand_candidates_take_less_than_five_seconds():
    config = run_of("llama3-70b", target="h100:8x8", batch=1024, seq=4096)
    start = time.process_time()
    result = search(config, compile_best=0)
    assert len(result.ranking) > 10_000
    assert time.process_time() - start < 5


def test_what_is_fixed_stays(found):
    fixed = search(
        "llama3.2-1b", target="h100:1x8", batch=64, seq=2048, compile_best=0,
        fixed={"mesh.tp": 4, "remat": "full"},
    )  # fmt: skip
    assert {row.config.mesh.tp for row in fixed.rows} == {4}
    assert {row.config.remat for row in fixed.rows} == {"full"}
    with pytest.raises(BadUsage, match=r"seed is not searched"):
        search("llama3.2-1b", batch=8, fixed={"seed": 2})
    with pytest.raises(BadUsage, match="no mesh of 8 GPUs runs a batch of 3"):
        search("llama3.2-1b", batch=3, fixed={"mesh.dp": 8})


def test_gathers_one_layer_ahead_are_offered_cost_less_and_hold_one_layer_more():
    fixed = {"mesh.fsdp": 16, "zero.stage": 3, "remat": "block_outputs", "batch.accumulation": 1}

    def one(overlap):
        rows = search(
            "llama3-8b", target="h100:2x8", batch=32, seq=4096, compile_best=0,
            fixed={**fixed, "communication.overlap": overlap},
        ).rows  # fmt: skip
        return rows[0]

    ahead, usual = one("aggressive"), one("auto")
    assert ahead.config.communication.overlap == "aggressive"
    assert ahead.candidate.parts["gathers"] < 0.5 * usual.candidate.parts["gathers"]
    layer = 2 * sizes_of(PRESETS["llama3-8b"], 4096).layer_params
    assert ahead.candidate.memory_bytes - usual.candidate.memory_bytes == pytest.approx(layer)
    assert "gathered ahead" in str(
        search(
            "llama3-8b",
            target="h100:2x8",
            batch=32,
            compile_best=0,
            seq=4096,
            fixed={**fixed, "communication.overlap": "aggressive"},
        )
    )


def test_losers_have_reasons_that_name_numbers(found):
    assert found.rows[0].verdict == ""
    assert all(row.verdict for row in found.rows[1:])
    small = dataclasses.replace(found.ranking, limit_bytes=2**30)
    lost = small.candidate(0, best=small.candidate(1))
    assert "does not fit by" in lost.reason


def test_the_table_fits_a_terminal_and_the_first_is_what_runs(found):
    """Refused rows stay behind the limit; the others are held against the one that is first."""

    def refuses(row, _):
        raise BadUsage(f"not on {mesh_text(row.candidate)}", fix="another")

    asked = Asked(limit=3, compile_best=1, network=0, time_limit=1, on_progress=lambda *_: None)
    config = run_of("llama3.2-1b", batch=64)
    rows = rows_of(found.ranking, lambda candidate: config_for(config, candidate))
    kept = compiled_rows(found.ranking, rows, asked, refuses)
    assert kept[0].candidate.settings == rows[2].candidate.settings
    assert kept[0].verdict == ""
    assert [row.verdict for row in kept[3:]] == [
        f"TP132: not on {mesh_text(row.candidate)}" for row in rows[:2]
    ]
    for rows in (kept, found.rows):
        assert max(map(len, str(dataclasses.replace(found, rows=rows)).splitlines())) <= 100


def test_what_is_in_use_or_not_offered_is_not_advised():
    def advised(split, **fixed):
        fixed = {"mesh.tp": 8, "communication.overlap": "auto", **fixed}
        found = search("llama3.2-1b", batch=8, seq=1024, fixed=fixed, compile_best=0)
        ranking = found.ranking
        first = int(np.argmax(ranking.strategies.sequence_parallel == split))
        one = ranking.candidate(first)
        return advice(ranking, found.pricing, found.target, one)[-1]

    assert advised(False).endswith("a smaller mesh.tp, or communication.sequence_parallel")
    assert advised(True).endswith("waits for tp messages: a smaller mesh.tp")
    fixed = {"communication.sequence_parallel": "false"}
    assert advised(False, **fixed).endswith("waits for tp messages: a smaller mesh.tp")


def test_a_model_with_positions_is_searched_at_a_length_it_has():
    assert run_of("gpt2", batch=8).seq_len == 1024
    with pytest.raises(SizeMismatch, match="position table of gpt2 has 1024 rows"):
        run_of("gpt2", batch=8, seq=2048)


def test_a_slower_network_makes_gathers_dearer():
    def data(network):
        rows = search(
            "llama3-8b", target="h100:2x8", batch=64, seq=2048, compile_best=0, network=network,
            fixed={"mesh.fsdp": 16, "zero.stage": 3},
        ).rows  # fmt: skip
        return rows[0].candidate.parts["gathers"]

    assert data(100e9 / 8) > 1.5 * data(0)


def test_experts_go_on_an_axis_inside_the_nvlink_domain():
    model = dataclasses.replace(
        PRESETS["llama3.2-1b"], num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512,
        n_shared_experts=1,
    )  # fmt: skip
    sizes = sizes_of(model, 2048)
    assert (sizes.experts, sizes.chosen, sizes.ffn, sizes.shared_ffn) == (8, 2, 512, 512)
    s = candidates(sizes, 32, 256)
    assert set(s.ep.tolist()) == {1, 2, 4, 8}
    assert (s.ep * s.tp <= 8).all()
    assert set(s.devices.tolist()) == {32}
    assert set(s.batch.tolist()) == {256}
    assert not s.interleaved.any()


def test_long_sequences_are_shared_by_devices_and_short_ones_are_not():
    long = search("llama3-8b", target="h100:2x8", batch=2, seq=32768, compile_best=0, limit=1000)
    assert {row.config.mesh.cp for row in long.rows} == {1, 2, 4, 8, 16}
    for row in long.rows[:20]:
        batch = resolve(row.config, 16).batch
        assert batch.micro_size * batch.accumulation * row.config.mesh.data_ways == batch.size == 2
    short = candidates(SIZES, 16, 64)
    assert set(short.cp.tolist()) == {1}


def test_the_smallest_machine_holds_the_run_and_the_one_before_does_not():
    config = run_of("llama3-8b", target="h100:1x8", batch=64, seq=2048)
    small = smallest_machine(config, max_gpus=64)
    assert Target.parse(small.target).num_devices == 2
    with pytest.raises(DoesNotFit, match="no machine of up to 1"):
        smallest_machine(config, max_gpus=1)
    fast = smallest_machine(config, max_gpus=64, tokens_per_day=6e9)
    assert Target.parse(fast.target).num_devices > 2


def test_the_largest_batch_fits_and_twice_of_it_does_not():
    config = largest_batch(run_of("llama3.2-1b", target="h100:1x8", batch=8, seq=2048))
    once = {"batch.accumulation": 1}
    assert search(config, fixed=once, compile_best=0).rows[0].candidate.fits
    twice = search(config, batch=2 * config.batch.size, fixed=once, compile_best=0)
    assert not twice.rows[0].candidate.fits


def test_the_command_writes_a_config_that_loads_and_a_page(tmp_path, capsys):
    best, page = tmp_path / "best.toml", tmp_path / "search.html"
    main(
        ["search", "llama3.2-1b", "--target", "h100:1x8", "--batch", "64", "--compiled", "0"]
        + ["--write", str(best), "--html", str(page), "--json", "--fix", "mesh.tp=2"]
    )
    table = json.loads(capsys.readouterr().out)
    config, _ = load(best)
    chosen = table["meshes"][0]["config"]
    assert (config.mesh.tp, config.mesh.fsdp) == (2, chosen["mesh.fsdp"])
    assert config.batch.size == 64
    assert "<svg" in page.read_text()


def test_a_best_mesh_that_does_not_fit_is_refused():
    result = search("llama3-70b", target="h100:1x8", batch=8, compile_best=0)
    with pytest.raises(DoesNotFit, match="fits on no mesh of h100:1x8"):
        _ = result.best


def test_the_first_meshes_are_compiled_and_their_memory_is_a_fact():
    result = search("llama-tiny", target="h100:1x2", batch=8, seq=64, compile_best=1, limit=2)
    assert result.rows[0].report is not None
    assert result.rows[0].report.fits
    assert " C " in str(result)
    assert mesh_text(result.rows[0].candidate) in str(result)


def test_the_drawing_marks_the_front():
    drawing = scatter([3.0, 1.0, 2.0, 2.5], [1.0, 3.0, 2.0, 2.5], ["a"] * 4, 2.0)
    assert drawing.count('r="4"') == 3
    assert np.isfinite([float(part) for part in drawing.split('cx="')[1].split('"')[:1]]).all()
