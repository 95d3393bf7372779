"""The search for anybody's model: priced from its program, run on the mesh that was chosen."""

import dataclasses
import json
import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import searched_models

import jaxtp
from jaxtp.cli.commands import main
from jaxtp.config.presets import preset
from jaxtp.cost.ranking import EXPECTED_ERROR
from jaxtp.errors import BadUsage
from jaxtp.io.model_functions import own_model
from jaxtp.train.own_model import batched, traced
from jaxtp.train.own_step import step_on_target
from jaxtp.train.search_result import Search

DECODER = "searched_models:decoder"


def search(model, **asked) -> Search:
    return jaxtp.search(model, **{"target": "h100:1x8", "batch": 64, "compile_best": 0, **asked})


@pytest.fixture(scope="module")
def found():
    return search(searched_models.decoder, limit=100)


@pytest.fixture(scope="module")
def of_preset():
    """The same model, as jaxtp's own search knows it."""
    settings = dataclasses.replace(preset(searched_models.PRESET), attention="xla")
    fixed = {"mesh.pp": 1, "mesh.cp": 1, "remat": searched_models.REMAT}
    fixed |= {"communication.sequence_parallel": "false", "communication.overlap": "auto"}
    return search(settings, seq=searched_models.SEQ, fixed=fixed, limit=100)


def by_fields(result):
    """Seconds and bytes of every candidate, by what is searched."""
    names = ("dp", "fsdp", "tp", "zero", "micro_batches")
    s = result.ranking.strategies
    keys = np.stack([getattr(s, name) for name in names], axis=1).tolist()
    values = zip(result.ranking.seconds, result.ranking.memory.total, strict=True)
    return dict(zip(map(tuple, keys), values, strict=True))


def test_the_ranking_of_a_preset_written_as_a_function_is_that_of_its_own_search(found, of_preset):
    own, known = by_fields(found), by_fields(of_preset)
    assert own.keys() == known.keys()
    first = found.rows[0].candidate.settings
    chosen = tuple(first[n] for n in ("dp", "fsdp", "tp", "zero", "micro_batches"))
    best = min(seconds for seconds, _ in known.values())
    assert known[chosen][0] <= best * (1 + EXPECTED_ERROR)
    ratios = np.array([own[key][0] / known[key][0] for key in own])
    # One against the other, candidates are as far apart as the prices' error says, whatever is
    # common to all of them.
    assert np.abs(np.log(ratios) - np.log(ratios).mean()).mean() <= EXPECTED_ERROR


def test_messages_along_tp_are_those_of_the_formulas(found, of_preset):
    for row in found.rows:
        s = row.candidate.settings
        same = [r for r in of_preset.rows if r.candidate.settings["tp"] == s["tp"]]
        one = next(r.candidate for r in same if r.candidate.settings["fsdp"] == s["fsdp"])
        if one.settings["micro_batches"] == s["micro_batches"]:
            assert row.candidate.parts["tensor"] == pytest.approx(one.parts["tensor"], rel=1e-6)


def test_flops_and_parameters_are_those_of_the_model(found, of_preset):
    # A causal mask leaves at least half of the attention, which is a tenth of this model's FLOPs.
    ratio = found.ranking.seconds_at_peak / of_preset.ranking.seconds_at_peak
    assert 1 - 0.1 / 2 <= ratio <= 1 + 1e-3
    state, known = (r.rows[0].candidate.state_bytes for r in (found, of_preset))
    assert state == pytest.approx(known, rel=0.05)


def test_heads_limit_tp_and_the_table_says_so():
    result = search(searched_models.three_heads, target="h100:1x2", batch=4)
    assert "3 heads" in str(result) or "3 units" in str(result)
    assert "not compiled" not in str(search(DECODER, target="h100:1x2", batch=4))


def test_what_is_fixed_stays_and_what_is_not_searched_is_refused():
    rows = search(DECODER, fixed={"mesh.tp": 2, "zero.stage": 3}).rows
    assert {row.candidate.settings["tp"] for row in rows} == {2}
    with pytest.raises(BadUsage, match=r"mesh\.pp is not searched"):
        search(DECODER, fixed={"mesh.pp": 2})
    with pytest.raises(BadUsage, match="no mesh of 8 GPUs runs a batch of 3"):
        search(DECODER, batch=3, fixed={"mesh.dp": 8})
    with pytest.raises(BadUsage, match="no batch"):
        search(DECODER, batch=0)
    with pytest.raises(BadUsage, match="has its length in its inputs"):
        search(DECODER, seq=64)


@pytest.mark.parametrize("kind", ["vision", "convolutions", "with_dropout"])
def test_models_of_other_kinds_are_priced(kind):
    result = search(getattr(searched_models, kind), batch=32)
    assert result.rows[0].candidate.seconds > 0
    assert result.rows[0].candidate.mfu < 1
    read = traced(batched(own_model(getattr(searched_models, kind))))
    assert read.flops > 0


def test_a_model_of_another_kind_costs_what_its_products_cost():
    read = traced(batched(own_model(searched_models.perceptron)))
    width, inner = searched_models.PERCEPTRON
    # A product of the input has no gradient of the input.
    assert read.flops == 3 * 2 * (width * inner + inner * width)


def test_the_command_writes_a_module_that_makes_the_mesh_and_the_plan(tmp_path, capsys):
    best, page = tmp_path / "best.py", tmp_path / "search.html"
    asked = ["search", DECODER, "--target", "h100:1x8", "--batch", "64", "--compiled", "0"]
    main([*asked, "--write", str(best), "--html", str(page), "--json", "--fix", "mesh.tp=2"])
    table = json.loads(capsys.readouterr().out)
    chosen = table["meshes"][0]["config"]
    mesh, plan = runpy.run_path(str(best))["make"]()
    assert mesh.shape["tp"] == chosen["mesh.tp"] == 2
    assert mesh.size == plan.mesh.num_devices == 8
    assert plan.zero == chosen["zero.stage"]
    assert "<svg" in page.read_text()
    with pytest.raises(SystemExit):
        main([*asked, "--write", str(tmp_path / "best.toml")])
    assert "best.py" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*asked, "--max-gpus", "4"])
    assert "--max-gpus" in capsys.readouterr().err


def test_the_step_that_is_compiled_trains_on_the_mesh():
    mesh = jaxtp.make_mesh(tp=2, fsdp=4)
    step, (state, batch) = step_on_target(mesh, "searched_models:with_dropout", 8, 2, 3)
    kernels = [x for x in jax.tree.leaves(state.params) if x.ndim == 2]
    assert all(x.sharding.shard_shape(x.shape) != x.shape for x in kernels)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), (state, batch))
    _, metrics = step(*zeros)
    assert np.isfinite(metrics["loss"])


def test_a_first_mesh_is_compiled_and_its_memory_is_a_fact():
    result = search("searched_models:vision", target="h100:1x2", batch=4, compile_best=1, limit=2)
    first = result.rows[0]
    assert first.report is not None, first.refusal
    assert first.report.fits
    assert " C " in str(result)
