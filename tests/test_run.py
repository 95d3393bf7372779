"""Runs from config files: scripts/train.py from the command line, and what watches a run."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxtp import models, train
from jaxtp.cli.train_command import read_arguments
from jaxtp.config.batch_sizes import resolve
from jaxtp.config.files import parse
from jaxtp.config.settings import Batch, Config, Mesh, Pipeline, Precision, Run
from jaxtp.errors import BadCheckpoint, BadConfig, JaxtpError, SizeMismatch
from jaxtp.train import watch, whole_run
from jaxtp.train.config_step import loss_of
from jaxtp.train.planning import model_of
from jaxtp.train.setup import prepare
from jaxtp.train.text import read_text

ROOT = Path(__file__).parent.parent

# DeepSpeed's spelling, with ZeRO-3 on top of tensor parallelism.
FILE = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "steps": 4,
    "seq_len": 32,
    "tensor_parallel": {"enabled": True, "tp_size": 2},
    "data_parallel_size": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "run": {"checkpoint_every": 2, "eval_every": 2, "eval_windows": 4},
}


def run(folder, *flags, **variables):
    (folder / "config.json").write_text(json.dumps(FILE))
    command = [sys.executable, "scripts/train.py", folder / "config.json"]
    command += ["--run.folder", folder / "run"]  # unless a flag says otherwise
    return subprocess.run(
        [*command, *flags],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_run_continues_where_it_stopped(tmp_path):
    # The second run compiles what the first has compiled, so it may take that from a folder.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = run(tmp_path, "--run.profile", JAXTP_REPORT_COMMUNICATION="1", **cache)
    assert first.returncode == 0, first.stderr
    for text in (
        "config.json: zero_optimization.stage: mapped; --zero.stage",
        "plan for fsdp=2 x tp=2",
        "batch      8 = 2 x 2 accumulated x 2 data-parallel",
        "this step runs on cpu, which moves other bytes",
        "operations of 3 steps, communication",
    ):
        assert text in first.stdout
    metrics = tmp_path / "run" / "metrics.jsonl"
    before = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in before] == [1, 2, 3, 4]
    assert {"loss", "grad_norm", "lr", "tokens_per_s", "step_seconds"} < before[0].keys()
    # A CPU has no utilisation to log; what H100s would take is said once.
    assert not any(name.startswith("mfu") for line in before for name in line)
    assert re.search(r"step       \S+ ms on h100:1x4, MFU [\d.]+%, modelled", first.stdout)
    assert before[0]["memory_gb"] > 0
    assert before[-1]["validation_loss"] < before[0]["loss"]

    # As if the run had stopped after step 2: the same batches come again, to the same end.
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "4")
    again = run(tmp_path, **cache)
    assert again.returncode == 0, again.stderr
    assert "continuing after step 2" in again.stdout
    after = [json.loads(line) for line in metrics.read_text().splitlines()]
    for old, new in zip(before, after, strict=True):
        for name in ("step", "loss", "grad_norm", "lr"):
            assert new[name] == old[name], name


def test_run_that_shall_not_resume_does_not_start_over_checkpoints(tmp_path):
    (tmp_path / "run" / "checkpoints" / "4").mkdir(parents=True)
    with pytest.raises(BadCheckpoint, match=r"up to step 4, and run\.resume is off"):
        train.run(Config(steps=1, run=Run(folder=tmp_path / "run", resume=False)))


def test_run_that_could_not_write_checkpoints_does_not_start(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("")
    with pytest.raises(BadCheckpoint, match=r"TP090 at .*checkpoints: is a file"):
        train.run(Config(steps=1, run=Run(folder=tmp_path / "run")), say=print)
    (tmp_path / "scratch").symlink_to("/not/mounted")
    settings = Run(folder=tmp_path / "other", checkpoints=str(tmp_path / "scratch"))
    with pytest.raises(BadCheckpoint, match=r"is a link to /not/mounted, which is not there"):
        train.run(Config(steps=1, run=settings), say=print)


def test_stages_of_two_kinds_train_as_one_device(tmp_path):
    """One layer on the A100s, three on the H100s, by DeepSpeed's spelling and a target."""
    flags = ("--steps", "2", "--run.checkpoint-every", "0", "--pipeline.allow-heterogeneous")
    mixed = ("--target", "a100-80:1x4+h100:1x4", "--pipeline.load-balance", "compute_first")
    ran = run(tmp_path, "--mesh.pp", "2", *flags, *mixed)
    assert ran.returncode == 0, ran.stderr
    for text in (
        "plan for pp=2 x fsdp=2 x tp=2",
        "stages: 2 stages of 1, 3 layers, 2 micro-batches; each idles 33.3% of the time",
        "P(pp, fsdp, tp)",
        "stages on a100-80 + h100; a step is ticks x",
        "compute_first: ",
    ):
        assert text in ran.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line)["loss"] for line in lines)
    config = resolve(parse(json.dumps(FILE))[0], 4)
    model = model_of(config)
    _, params = nnx.split(models.build(model, nnx.Rngs(config.seed)))
    batch = read_text(config, model.vocab_size).train(0)
    loss = loss_of(model)
    expected = jax.jit(loss.total)(params, batch) / loss.count(batch)
    assert first == pytest.approx(float(expected), rel=1e-5)
    assert second < first


def test_mistakes_end_a_supervised_run_before_it_starts(tmp_path):
    wrong = run(tmp_path, "--run.folder", "/etc/passwd", "--run.max_restarts", "3")
    assert wrong.returncode == 2, wrong.stderr
    assert "TP093 at /etc/passwd: cannot be written: File exists" in wrong.stderr
    assert "Traceback" not in wrong.stderr
    assert "the run ended with" not in wrong.stdout  # as a supervisor says before it starts again


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--batch.size", "9"),
            "TP003 at batch.size: a batch of 9 does not divide by accumulation 2",
        ),
        (("--target", "h999:1x8"), "TP116"),
        (("--attention", "cudnn"), "TP020 at attention: cuDNN computes attention on NVIDIA GPUs"),
        (("--optimizer.no-decay", "("), r"TP020 at optimizer\.no_decay"),
        (("--run.folder", "/proc/nope"), "TP093 at /proc/nope: cannot be written: No such file"),
        (("--lora.rank", "4", "--lora.targets", "q_proj,("), r"TP020 at lora\.targets: no linear"),
    ],
)
def test_mistakes_in_flags_are_found_before_the_first_step(tmp_path, monkeypatch, flags, message):
    monkeypatch.setattr(whole_run, "fit", None)
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as many as the harness has started
    (tmp_path / "config.json").write_text(json.dumps(FILE | {"data_parallel_size": 4}))
    folder = ("--run.folder", str(tmp_path / "run"))
    with pytest.raises(JaxtpError, match=message):
        train.run(read_arguments((str(tmp_path / "config.json"), *folder, *flags)))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(precision=Precision(compute="float16")), "no float16 matrix products on CPUs"),
        (Config(model="llama-tinny"), "TP020 at model: no preset .*\n  fix: llama-tiny"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(config, message):
    with pytest.raises(BadConfig, match=message):
        prepare(config)


def test_evaluation_goes_through_the_stages_too():
    config = Config(mesh=Mesh(tp=4, pp=2), pipeline=Pipeline(micro_batches=6), batch=Batch(size=12))
    with pytest.raises(
        SizeMismatch, match=r"at run.eval_windows: 64 .* 6 micro-b.*\n  fix: 60, 66"
    ):
        prepare(config)


def test_devices_of_several_kinds_must_be_named(monkeypatch):
    @dataclasses.dataclass
    class Device:
        device_kind: str

    kinds = ["NVIDIA A100", "NVIDIA H100"]
    monkeypatch.setattr(jax, "devices", lambda: [Device(kind) for kind in kinds for _ in range(4)])
    message = r"TP020 at target: .* several kinds: NVIDIA A100, NVIDIA H100\n.*a100-80:1x8\+h100"
    with pytest.raises(BadConfig, match=message):
        prepare(Config(mesh=Mesh(tp=4, pp=2)))


def test_tensorboard_needs_its_writer(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(BadConfig, match=r'pip install "jaxtp.tensorboard."'):
        watch.tensorboard(tmp_path)


def test_profile_names_the_longest_operations(tmp_path):
    profiler = watch.Profiler(tmp_path)
    multiply = jax.jit(lambda x: x @ x)
    x = jnp.ones((256, 256))
    for step in range(7):
        multiply(x).block_until_ready()
        profiler({"step": step})
    found = watch.operations(tmp_path)
    assert sum(op.share for op in found) == pytest.approx(1)
    assert found == sorted(found, key=lambda op: -op.seconds)
    # One device multiplies; what the operation is called is up to XLA.
    assert found[0].count == len(watch.PROFILED)
    assert not found[0].is_communication
    assert "communication 0.0%" in watch.table(found)
    assert watch.operations(tmp_path / "missing") == []
