"""Preflight of a run, with the real GPU compiler under it; checks on its report."""

import dataclasses
import json
import os
import re
import subprocess
import sys

import jax
import pytest

from jaxtp.cli.commands import main
from jaxtp.compile.limits import check
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.files import changed
from jaxtp.config.presets import preset
from jaxtp.config.settings import Batch, Config, Data, Mesh, Optimizer, Zero
from jaxtp.cost.flops import matmul_params, model_flops, train_flops
from jaxtp.errors import CheckFailed, DoesNotFit
from jaxtp.models import PRESETS, abstract
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.planner import make_plan
from jaxtp.train.config_step import OF_EXPERTS, OF_WHOLE_LAYERS, abstract_step, options_of
from jaxtp.train.planning import Build, axis_sizes, plan_of
from jaxtp.train.preflight import preflight_config, step_on_target
from jaxtp.train.pricing import sizes_of
from jaxtp.train.setup import prepare

TINY = preset(
    "llama3.2-1b",
    **{"mesh.tp": 4, "batch.size": 2, "seq_len": 256, "layers": 2, "optimizer.name": "sgd"},
)


@pytest.fixture(scope="module")
def report():
    return preflight_config(TINY)[1]


def test_a_preset_moves_the_floor_and_nothing_else(report):
    assert report.ratio == pytest.approx(1, abs=0.002)
    assert not report.unexpected
    assert report.mesh == {"dp": 2, "tp": 4}
    big = [row for row in report.collectives if "tp" in row.axes and row.num_bytes > 2**17]
    assert {(row.kind, row.dtype) for row in big} == {("all-reduce", "bf16")}
    assert report.alias_bytes == pytest.approx(report.output_bytes, rel=1e-4)


def test_the_command_prints_what_programs_need(capsys, tmp_path):
    page = tmp_path / "page.html"
    args = "--model gpt2 --target h100:1x8 --batch 1 --seq 128 --layers 1 --optimizer sgd --json"
    main(["preflight", *args.split(), "--html", str(page)])
    data = json.loads(capsys.readouterr().out)
    wanted = (
        "wire_bytes floor_bytes ratio hidden_share hidden_forward hidden_backward peak_bytes "
        "card_bytes fits step_seconds_modelled collectives mfu_modelled"
    )
    assert set(wanted.split()) <= set(data)
    # 12 heads on tp=8: attention 4-way, the MLP 8-way, and still one all-reduce for each.
    assert data["mesh"] == {"tp_0": 4, "tp_1": 2}
    large = [row for row in data["collectives"] if row["num_bytes"] > 2**17]
    assert {row["kind"] for row in large} == {"all-reduce"}
    assert not data["unexpected"]
    text = page.read_text()
    assert "Schedule" in text
    assert 'class="heat"' in text
    assert text.count("<rect") > 20


def test_the_command_compiles_what_a_config_file_says(capsys, tmp_path):
    """Stages of two kinds, by DeepSpeed's spelling: the example of its users, made small."""
    file = tmp_path / "train.json"
    file.write_text(
        json.dumps(
            {
                "train_batch_size": 8,
                "gradient_accumulation_steps": 2,
                "seq_len": 64,
                "tensor_parallel": {"tp_size": 2, "communication": {"overlap": "AGGRESSIVE"}},
                "pipeline_parallel": {"pp_size": 2},
                "data_parallel_size": 2,
                "zero_optimization": {
                    "stage": 3,
                    "partition_activations": True,
                    "offload_optimizer": {"device": "cpu"},
                },
                "allow_heterogeneous": True,
                "load_balance": {"enabled": True, "strategy": "COMPUTE_FIRST"},
            }
        )
    )
    main(["preflight", str(file), "--target", "a100-80:1x4+h100:1x4"])
    out, err = capsys.readouterr()
    assert "train.json: load_balance: mapped; --pipeline.load_balance" in err
    for text in (
        "stages        2 stages of 1, 3 layers, 2 micro-batches; each idles 33.3% of the time",
        "mesh pp=2 fsdp=2 tp=2",
        "collective-permute",
        "GiB of optimizer state per GPU, which zero.offload_optimizer keeps",
        "stages on a100-80 + h100; a step is ticks x",
        "compute_first: ",
    ):
        assert text in out
    assert "MFU" in out


AHEAD = {"model": "llama3-8b", "communication.overlap": "aggressive"}


@pytest.mark.parametrize(
    ("settings", "own", "has_own"),
    [
        ({"model": "mixtral-8x7b"}, OF_EXPERTS, True),
        ({"model": "mixtral-8x7b", "communication.overlap": "aggressive"}, OF_EXPERTS, False),
        ({"model": "mixtral-8x7b", "communication.gradient_fusion": 2**20}, OF_EXPERTS, False),
        ({"model": "llama3-8b"}, OF_EXPERTS, False),
        ({**AHEAD, "mesh.fsdp": 8}, OF_WHOLE_LAYERS, True),
        ({**AHEAD, "mesh.fsdp": 4, "mesh.tp": 2}, OF_WHOLE_LAYERS, False),
        ({"model": "llama3-8b", "mesh.fsdp": 8}, OF_WHOLE_LAYERS, False),
    ],
    ids=["experts", "aggressive", "bytes", "dense", "ahead", "ahead-tp", "auto"],
)
def test_some_runs_have_options_of_their_own(settings, own, has_own):
    config = resolve(changed(Config(target="h100:1x8"), settings), 8)
    assert (own.items() <= options_of(Build.of(config)).options.items()) == has_own


def test_nothing_is_printed_before_the_report():
    """Where there is the GPU compiler and neither GPU nor CUDA, as a user's shell calls it."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "TF_"))}
    command = [sys.executable, "-m", "jaxtp.cli.commands", "preflight", "--model", "llama-tiny"]
    sizes = ["--tp", "2", "--batch", "2", "--seq", "32", "--layers", "1", "--target", "h100:1x2"]
    ran = subprocess.run(
        [*command, *sizes], env=environment, capture_output=True, text=True, check=True
    )
    assert ran.stderr == ""
    assert ran.stdout.startswith("preflight     h100:1x2, mesh tp=2;")
    probe = [*command[:3], "probe", "--cpu-devices", "2", "--size", "32"]
    ran = subprocess.run(probe, env=environment, capture_output=True, text=True, check=True)
    assert "Traceback" not in ran.stderr
    assert ran.stdout.startswith("probed 2 devices, 0 wrong")


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (["--model", "llama-nope"], "TP020"),
        (["--model", "gpt2", "--target", "h100"], "TP116"),
        (["--model", "gpt2", "--tp", "3"], "TP010 at mesh: tp=3 x .* there are 8"),
        (["--model", "gpt2", "--batch", "3", "--tp", "2"], "TP003 at batch.size"),
        (["--model", "gpt2", "--optimizer", "adamww"], "TP020 at optimizer.name: .*\n.*adamw"),
        (["--model", "gpt2", "--remat", "fulll"], "TP020 at remat: .*\n.*did you mean full"),
        (["--model", "gpt2", "--attention", "xlaa"], "TP020 at attention: .*\n.*mean xla"),
        (["--model", "gpt2", "--param-dtype", "bf16"], "TP020 at precision.params: .*'bfloat16'"),
        ([], "TP132: a preset with its sizes, or a config file"),
        (["train.json", "--model", "gpt2"], "TP132"),
        (["train.json", "--tp", "4"], "TP132"),
        (["train.json"], "TP020 at train.json: cannot read it"),
    ],
)
def test_mistakes_are_found_before_anything_compiles(args, code, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["preflight", *args])
    assert exit_.value.code == 2
    assert re.search(code, capsys.readouterr().err)


def test_checks_hold_and_break_at_their_limits(report):
    check(report, max_ratio=1.01, max_peak_bytes=report.peak_bytes, min_hidden_share=0.0)
    with pytest.raises(
        CheckFailed, match=r"TP115 at h100:1x8: wire bytes .* limit 0\.9: \d+ x all"
    ):
        check(report, max_ratio=0.9)
    with pytest.raises(CheckFailed, match=r"peak .* limit 10"):
        check(report, max_peak_bytes=10)
    with pytest.raises(CheckFailed, match=r"hidden \(modelled\), limit 100.0%"):
        check(report, min_hidden_share=1.0)
    worse = dataclasses.replace(report, unexpected={"here": "a weight is gathered"}, card_bytes=1)
    with pytest.raises(DoesNotFit, match=r"(?s)TP114 .* also:.*a weight is gathered"):
        check(worse)
    check(worse, must_fit=False, allow_unexpected=True)
    with pytest.raises(CheckFailed, match="no floor"):
        check(dataclasses.replace(report, floor_bytes=None), max_ratio=1.0)


def test_flops_of_llama_8b_agree_with_6n():
    # 8.03e9 parameters, of which the 0.53e9 of the token table multiply nothing.
    plan = make_plan(abstract("llama3-8b"), {"tp": 8}, config=PRESETS["llama3-8b"])
    params = matmul_params(plan)
    assert params == pytest.approx(7.5e9, rel=0.01)
    flops = train_flops(
        matmul_params=params, tokens=8192, layers=32, heads=32, head_dim=128, seq=8192
    )
    assert flops.projections == 6 * params * 8192
    assert flops.attention == 12 * 8192 * 8192 * 32 * 128 * 32
    assert flops.causal == flops.projections + flops.attention / 2


def test_flops_of_deepseek_count_chosen_experts_and_values_that_are_narrower_than_keys():
    config = PRESETS["deepseek-v3"]
    dims = ModelDims.of(config)
    plan = make_plan(abstract(config), {"tp": 8}, config=config)
    flops = model_flops(plan, dims, tokens=4096, seq=4096)
    # Published: 37 B of 671 B for a token, with the embedding, which multiplies nothing.
    active = flops.projections / 6 / 4096 + 129280 * 7168
    assert active == pytest.approx(37e9, rel=0.02)
    assert flops.attention == 6 * 4096 * 4096 * 128 * (192 + 128) * 61
    assert sizes_of(config, 4096).params == pytest.approx(671e9, rel=0.005)


def test_a_tied_table_multiplies_too():
    plan = make_plan(abstract("gpt2"), {"tp": 4})
    extra = matmul_params(plan, tied=True) - matmul_params(plan)
    assert extra >= 50257 * 768


def test_gradients_of_replicas_are_summed_in_the_type_that_is_asked_for(report):
    wide = preflight_config(changed(TINY, {"precision.gradients": "float32"}))[1]
    assert wide.ratio == pytest.approx(1, abs=0.002)
    assert not wide.unexpected
    narrow_rows, wide_rows = (
        [row for row in one.collectives if "dp" in row.axes and row.num_bytes > 2**17]
        for one in (report, wide)
    )
    # Layer by layer; the tied table's two gradients become one sum of their float32 forms.
    layers = [row for row in narrow_rows if row.count >= TINY.layers]
    assert layers
    assert {row.dtype for row in layers} == {"bf16"}
    assert {row.dtype for row in wide_rows} == {"f32"}


def test_sequence_parallelism_moves_a_quarter_more_in_blocks_and_needs_no_permutes(report):
    cut = preflight_config(changed(TINY, {"communication.sequence_parallel": True}))[1]
    assert not cut.unexpected
    # Each of a layer's four all-reduces is two halves; two gathers are done again backward. The
    # ends of the model move what they moved.
    num_layers = TINY.layers
    ratio = (5 * num_layers + 2) / (4 * num_layers + 2)
    assert cut.wire_bytes / report.wire_bytes == pytest.approx(ratio, abs=0.01)


def test_a_padded_vocabulary_is_sharded():
    for pad, dim in ((False, None), (True, 0)):
        config = resolve(preset("gpt2", **{"mesh.tp": 4, "tensor.pad_vocab": pad}), 4)
        plan = plan_of(Build.of(config), {"tp": 4})
        assert plan["wte/embedding"].dim_on(plan.mesh.tp) == dim


def test_what_is_compiled_ahead_is_what_runs():
    """Training's step and preflight's, lowered for the same devices: the same text."""
    config = Config(
        seq_len=16,
        layers=2,
        mesh=Mesh(dp=2, fsdp=2, tp=2),
        batch=Batch(size=16, accumulation=2),
        zero=Zero(stage=1),
        data=Data(packed=True),
        optimizer=Optimizer(name="lion", clip=0.5),
    )
    setup = prepare(config)
    batch = setup.placed(setup.text.train(0))
    running = setup.step.lower(setup.state, batch).as_text()
    settings = json.dumps(dataclasses.asdict(setup.config), default=str)
    # As the compiler's process has it: devices on the axes of the plan.
    mesh = jax.make_mesh(tuple(size for _, size in setup.plan.mesh.sizes), setup.plan.mesh.names)
    step, arguments = step_on_target(mesh, settings)
    assert step.lower(*arguments).as_text() == running
    clipped = Build.of(changed(setup.config, {"optimizer.clip": 0.6}))
    other = abstract_step(clipped, setup.plan, setup.mesh)
    assert other[0].lower(*other[1]).as_text() != running


def test_the_same_axes_as_in_training():
    config = resolve(preset("gpt2", **{"batch.size": 8, "mesh.tp": 4}), 8)
    assert axis_sizes(config) == {"dp": 2, "tp": 4}
