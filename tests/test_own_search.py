"""The search for anybody's model: priced from its program, run on the mesh that was chosen."""

import dataclasses
import json
import math
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
from jaxtp.cost.traced.program import Array, Block, Operation
from jaxtp.cost.traced.work import work_of
from jaxtp.errors import BadUsage, DoesNotFit
from jaxtp.io.model_functions import own_model
from jaxtp.rules.planner import make_plan
from jaxtp.train.own_model import LEAST_BATCH, batched, traced
from jaxtp.train.own_step import step_on_target
from jaxtp.train.search_result import OWN_ERROR, Search

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


@pytest.mark.parametrize(
    "kind", ["vision", "convolutions", "with_dropout", "with_a_number_and_a_key"]
)
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


def step_along(tp, model):
    read = traced(batched(own_model(model)))
    plan = make_plan(read.model.params, {"tp": tp}, fn=read.model.call, inputs=read.model.inputs)
    return read.step(plan)


def test_the_batch_is_what_the_dataflow_says():
    fn, params, (positions, x) = searched_models.positions_first()
    model = batched(own_model(searched_models.positions_first))
    assert (model.batched, model.size) == ((1,), x.shape[0])
    rows = math.prod(x.shape[1:])
    assert traced(model).flops == 3 * 2 * rows * 2 * searched_models.PERCEPTRON[1]
    one = jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype)
    model = batched(own_model(lambda: (fn, params, (positions, one))))
    assert (model.batched, model.size) == ((1,), LEAST_BATCH)
    result = search(searched_models.positions_first)
    assert "batch: dim 0 of input 1; as given at any batch: input 0" in result.notes


def test_a_batch_that_is_not_there_or_not_in_front_is_refused():
    fn, params, (_, x) = searched_models.positions_first()
    scalar = jax.ShapeDtypeStruct((), x.dtype)
    with pytest.raises(BadUsage, match="no input has a batch"):
        batched(own_model(lambda: (lambda p, t: p["up"] * t, params, (scalar,))))

    def h(p, t, x):
        return fn(p, jnp.zeros(x.shape[1], x.dtype), x + t.sum(0)[..., None])

    three = jax.ShapeDtypeStruct((3, *x.shape[:2]), x.dtype)
    with pytest.raises(BadUsage, match="dim 1 of input 0, dim 0 of input 1"):
        batched(own_model(lambda: (h, params, (three, x))))


@pytest.mark.parametrize("kind", ["convolutions_back", "ragged"])
def test_all_kinds_of_row_products_are_summed_along_tp(kind):
    model = getattr(searched_models, kind)
    x = model()[2][0]
    work = step_along(2, model).work
    assert dict(work.sent) == {math.prod(x.shape) * x.dtype.itemsize: 1}  # once, forward
    assert not work.unsent


def test_a_product_that_loses_its_shards_is_named():
    heads = Array((2.0, 8.0, 4.0, 16.0), 2, batch=0)
    split = dataclasses.replace(heads, split=(3,))
    kernel = Operation("dot_product_attention_fwd", {}, [split, split, split], [heads])
    assert work_of(Block([kernel], [split], [heads])).unsent == {kernel.name}


def test_what_has_no_gradient_has_no_moments_and_is_not_gathered():
    stored = step_along(1, searched_models.frozen).stored
    _, params, _ = searched_models.frozen()
    assert stored.trained_bytes == params["w"].size * 2
    assert stored.num_bytes == stored.trained_bytes + params["codes"].size
    result = search(searched_models.frozen)
    row = next(r.candidate for r in result.rows if r.candidate.settings["zero"] == 0)
    sums = 4 * stored.elements * (row.settings["micro_batches"] > 1)
    assert row.state_bytes == stored.num_bytes + 2 * stored.trained_bytes + sums
    assert any("while loop is priced as one turn" in note for note in result.notes)


def test_gathers_are_in_the_type_of_the_largest_product():
    def h(p, x):
        def layer(x, w):
            return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype), None

        return jax.lax.scan(layer, x, p["small"])[0] @ p["large"]

    shapes = {"small": (2, 8, 8), "large": (8, 64)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes.items()}
    x = jax.ShapeDtypeStruct((4, 8), jnp.float32)
    stored = step_along(1, lambda: (h, params, (x,))).stored
    assert stored.sums == stored.trained_bytes == 4 * stored.elements


def test_what_is_said_of_models_of_ones_own_is_of_them(found, of_preset):
    assert OWN_ERROR in str(found)
    assert OWN_ERROR not in str(of_preset)
    for result, offloads in ((found, False), (of_preset, True)):
        assert (json.loads(result.to_json())["expected_error"] is not None) == offloads
        refused = dataclasses.replace(result.rows[0], refusal="refused")
        with pytest.raises(DoesNotFit) as error:
            _ = dataclasses.replace(result, rows=(refused,)).best
        assert ("in a config" in str(error.value)) == offloads


def test_the_command_writes_a_module_that_makes_the_mesh_and_the_plan(tmp_path, capsys):
    best, page = tmp_path / "best.py", tmp_path / "search.html"
    asked = ["search", DECODER, "--target", "h100:1x8", "--batch", "64", "--compiled", "0"]
    main(
        [
            *asked,
            "--write",
            str(best),
            "--html",
            str(page),
            "--json",
            "--fix",
            "mesh.tp=2",
            "--fix",
            "batch.accumulation=4",
        ]
    )
    table = json.loads(capsys.readouterr().out)
    chosen = table["meshes"][0]["config"]
    written = runpy.run_path(str(best))
    mesh, plan = written["make"]()
    assert mesh.shape["tp"] == chosen["mesh.tp"] == 2
    assert mesh.size == plan.mesh.num_devices == 8
    assert plan.zero == chosen["zero.stage"]
    assert written["MICRO_BATCHES"] == 4
    rows = np.arange(16.0, dtype=np.float32).reshape(8, 2)
    once = jax.value_and_grad(lambda w, x: jnp.square(x @ w).mean())
    looped = jax.jit(written["accumulated"](once))(jnp.ones(2), rows)
    # Whole numbers below 2**24: sums are exact in any order.
    assert all(map(np.array_equal, looped, once(jnp.ones(2), rows)))
    assert "<svg" in page.read_text()
    with pytest.raises(SystemExit):
        main([*asked, "--write", str(tmp_path / "best.toml")])
    said = capsys.readouterr()
    assert said.out == ""  # before a mesh is priced
    assert "best.py" in said.err
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
