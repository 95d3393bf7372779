"""What users do wrong, one mistake a code, and what its message must say."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from test_run_folder import HOLD
from test_startup import rosters

import jaxtp
from jaxtp.activations.by_name import active_plan
from jaxtp.cli.model_argument import load_subject
from jaxtp.compile.compiler import trace
from jaxtp.hardware.gpus import Target
from jaxtp.layers import interleaving
from jaxtp.plan.stages import Stages
from jaxtp.processes import faults, startup
from jaxtp.processes.startup import process_facts
from jaxtp.train import run_folder
from jaxtp.train.data import read_corpus
from jaxtp.train.guard import Guard

STRUCT = jax.ShapeDtypeStruct
HEADS = {n: STRUCT((64, 64), jnp.float32) for n in ("q", "k", "v", "o")}
MLP = {"up": STRUCT((64, 256), jnp.float32), "down": STRUCT((256, 64), jnp.float32)}
TREE = {"attn": HEADS, "mlp": MLP}
ONE_OF_MANY = {"mlp": MLP, "big": STRUCT((64, 1000), jnp.float32)}
P = PartitionSpec


def plan(tree=TREE, mesh=None, **options):
    return jaxtp.make_plan(tree, mesh or {"tp": 4}, **options)


def agree_with_another(monkeypatch):
    zero, one = rosters(2)
    monkeypatch.setattr(faults.run, "roster", zero)
    monkeypatch.setattr(startup, "_counts", startup.Counter())
    other = {**process_facts(), "steps": "200"}
    peer = threading.Thread(
        target=lambda: [one.gather("agreement 1", "x", 5), one.gather("disagreement 1", other, 5)]
    )
    peer.start()
    try:
        jaxtp.agree({"steps": 100})
    finally:
        peer.join()


def lose_a_process():
    with jaxtp.watchdog(0, first_step=3):
        raise RuntimeError("UNAVAILABLE: Socket closed")


def diverge():
    guard = Guard("run/metrics.jsonl")
    for step, loss in enumerate((2.0, 1.9, float("nan")), 1):
        if problem := guard.problem(step, {"loss": loss}):
            raise problem


def wrong_device():
    def tamper(device, what, result):
        return result.at[0, 0].add(1) if device.id == 5 and what == "product" else result

    jaxtp.probe(size=64, tamper=tamper).refuse_wrong()


def another_program_each_time():
    calls = iter(range(100))

    def counting(params, x):
        return x @ params["w"] * (1 + next(calls))

    mesh = jaxtp.make_mesh(tp=8)
    w = {"w": jnp.ones((8, 64))}
    jaxtp.verify(counting, w, (jnp.ones((4, 8)),), mesh, show=lambda _: None)


def halves_of_an_odd_batch():
    mesh = jaxtp.make_mesh(tp=8)
    shape = jaxtp.make_plan(MLP, mesh)
    with jaxtp.use_plan(shape, jaxtp.plan_mesh(mesh, shape.mesh)):
        interleaving.interleave([], jnp.zeros((3, 4, 8)), {}, active_plan())


def saved(folder, tree):
    with jaxtp.Checkpoints(folder) as checkpoints:
        checkpoints.save(4, tree)
    return jaxtp.Checkpoints(folder)


def damage_and_restore(folder):
    checkpoints = saved(folder, {"x": jnp.zeros(4096)})
    for path in (folder / "4").rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    with checkpoints:
        checkpoints.restore({"x": jnp.zeros(4096)}, step=4)


def restore_another(folder):
    with saved(folder, {"x": jnp.zeros(4)}) as checkpoints:
        checkpoints.restore({"x": jnp.zeros(8)})


def hold_what_another_holds(folder):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout.readline() == "held\n"
        with run_folder.hold(folder):
            pass
    finally:
        other.kill()
        other.communicate()


def hold_below_a_file(folder):
    (folder / "file").write_text("")
    with run_folder.hold(folder / "file" / "run"):
        pass


def llama_tiny():
    mesh = jaxtp.make_mesh(tp=1, devices=jax.devices()[:1])
    return jaxtp.shard(jaxtp.models.build("llama-tiny", nnx.Rngs(0)), mesh)


def folder_of(folder, **change):
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **change}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def hf_without_weights(folder):
    config = {
        "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 64, "n_embd": 16,
        "n_layer": 1, "n_head": 2, "n_positions": 32, "activation_function": "gelu_new",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    jaxtp.load_hf(folder, jaxtp.make_mesh(tp=8), progress=False)


def compiled(entry, **options):
    mesh = {"dp": 1, "tp": 8}
    return jaxtp.preflight(f"compiled_programs:{entry}", target="h100:1x8", mesh=mesh, **options)


def without_plugin(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    compiled("entry_step")


@functools.cache
def report():
    return jaxtp.preflight(
        lambda mlp: mlp["up"] @ mlp["down"], (jaxtp.shard(MLP, {"tp": 8}),), target="h100:1x8"
    )


def step_on(leaf, change=lambda state: state):
    mesh = jaxtp.make_mesh(tp=8)
    step = jaxtp.jit_step(lambda state, batch: change(state), {"w": leaf}, mesh)
    step({"w": leaf}, np.zeros(8, np.float32))


def replicated_leaf():
    return jax.device_put(jnp.ones(8), NamedSharding(jaxtp.make_mesh(tp=8), P()))


# Code -> what is done wrong; then patterns of the place ("" for none), the cause and the fix.
CASES = {
    "TP001": (
        lambda: plan(overrides={"attn/q": P("tp"), "attn/.$": P(None, "tp")}),
        "attn/q",
        r"'attn/q' says P\(tp, -\), override .* says P\(-, tp\)",
        "drop one",
    ),
    "TP002": (lose_a_process, "step 3", "JAX reports .*Socket closed", "process's own log first"),
    "TP003": (
        lambda: jaxtp.shard_batch({"x": STRUCT((3, 2), jnp.int32)}, {"dp": 2, "tp": 2}),
        "x",
        r"dim 0 of shape \(3, 2\) has size 3",
        "make the size 4",
    ),
    "TP010": (lambda: jaxtp.make_mesh(tp=0), "", "'tp': 0", "1 or more"),
    "TP011": (
        lambda: plan(
            mesh=jax.make_mesh((2, 2), ("dp", "tp"), devices=jax.devices()[:4]),
            heads=8,
            strict=True,
        ),
        "",
        "leaves 4 of 8 devices idle",
        r"make_mesh\(tp=\.\.\., dp=-1\)",
    ),
    "TP012": (
        lambda: Target.parse("h100:1x16"),
        "",
        "16 GPUs per host, .*8 over NVLink",
        "at most 8 GPUs",
    ),
    "TP013": (lambda: plan(mesh={"x": 8}), "", "'x': 8", r"axis_names=\{.tp"),
    "TP014": (
        agree_with_another,
        "",
        "steps: 100 on process 0, 200 on process 1",
        r"same files, flags, environment and versions",
    ),
    "TP015": (
        lambda: jaxtp.initialize("nowhere", num_processes=2, process_id=0),
        "",
        "'nowhere' is not HOST:PORT",
        "node1:12345",
    ),
    "TP016": (
        wrong_device,
        "",
        "wrong results from device 5 .* in its product",
        r"leave out .*, and start again",
    ),
    "TP020": (lambda: plan(policy="split"), "policy", "'split'", "factor, replicate, error"),
    "TP040": (lambda: plan(overrides={"atn/q": P()}), "", "'atn/q' .*none of 6", "attn/q"),
    "TP041": (
        lambda: plan(heads=2, policy="error"),
        "attn/",
        "2 units on tp=4",
        "tp of 1, 2, or policy",
    ),
    "TP042": (
        lambda: plan({"w": STRUCT((7, 7), jnp.float32)}, strict=True),
        "",
        r"none of 1 parameters .*tp=4",
        "heads= or config=, .* add overrides=",
    ),
    "TP043": (
        lambda: plan(ONE_OF_MANY, strict=True),
        "big",
        r"replicated matrices take 0\.3 MB .*big \[64, 1000\]",
        "replicated_budget=",
    ),
    "TP044": (
        lambda: plan(overrides={"mlp/up": P("rows")}),
        "mlp/up",
        "uses rows",
        "axes of the mesh: tp",
    ),
    "TP045": (
        lambda: plan()["attn/x"],
        "attn/x",
        "no parameter 'attn/x'",
        "paths look like 'attn/",
    ),
    "TP046": (
        lambda: plan({"w": object()}),
        "w",
        "a leaf of type object",
        r"arrays, jax.ShapeDtypeStruct or numbers",
    ),
    "TP070": (
        lambda: step_on(jnp.ones((8, 8))),
        "",
        "no array on the mesh",
        r"jaxtp\.shard\(state, mesh\)",
    ),
    "TP071": (
        another_program_each_time,
        "output|gradient",
        r"differs by .* on tp=",
        r"deterministic and pure",
    ),
    "TP072": (lambda: jaxtp.constrain(jnp.ones((2, 4, 8)), "residul"), "", "'residul'", "residual"),
    "TP073": (
        halves_of_an_odd_batch,
        "",
        "3 sequences on 1 replicas",
        "a batch that is a multiple of 2",
    ),
    "TP074": (
        lambda: Stages.even(3, 4, micro_batches=4),
        "pp",
        "3 layers for 4 stages",
        "at most pp=3",
    ),
    "TP090": (damage_and_restore, ".*/4$", "JSONDecodeError", r"restore an older one"),
    "TP091": (
        restore_another,
        ".*/4",
        r"x: float32\[4\] saved, float32\[8\] wanted",
        r"the model and the optimizer that were saved",
    ),
    "TP092": (hold_what_another_holds, ".", "belongs to a run that still lives: process", "kill"),
    "TP093": (
        hold_below_a_file,
        ".*/file/run",
        "cannot be written: Not a directory",
        r"another run.folder",
    ),
    "TP095": (hf_without_weights, ".", "no model.safetensors ", r"download the safetensors files"),
    "TP096": (
        lambda tmp_path: jaxtp.load_hf(
            folder_of(tmp_path, model_type="bloom"), jaxtp.make_mesh(tp=8)
        ),
        ".*config.json",
        "bloom",
        "llama",
    ),
    "TP110": (lambda: jaxtp.compile_options(overlap="fast"), "overlap", "fast", "aggressive"),
    "TP111": (lambda: compiled("entry_abort"), "", "a cycle is detected", r"overlap=.off."),
    "TP112": (lambda: compiled("entry_sleep", time_limit=0.5), "", "ran for", "time_limit"),
    "TP113": (without_plugin, "", "no GPU compiler for jax", f"jax-cuda12-pjrt=={jax.__version__}"),
    "TP114": (
        lambda: jaxtp.check(dataclasses.replace(report(), card_bytes=1)),
        "h100:1x8",
        r"[\d,]+ bytes per GPU, [\d,]+ more than the GPU's",
        r"raise tp or fsdp, lower the batch",
    ),
    "TP115": (
        lambda: jaxtp.check(report(), max_peak_bytes=10),
        "h100:1x8",
        "peak .* limit 10",
        r"lower the batch or recompute more",
    ),
    "TP116": (lambda: Target.parse("h1000:1x8"), "", "h1000", "h100, h200"),
    "TP117": (
        lambda: trace(lambda x: x @ x, (jnp.ones((2, 3)),), {"tp": 8}),
        "",
        "cannot be traced.*TypeError",
        "shardings are on one mesh",
    ),
    "TP130": (
        lambda tmp_path: read_corpus(tmp_path),
        ".",
        r"'\*\.py' gives 0 files",
        r"a folder with more files",
    ),
    "TP131": (
        diverge,
        "run/metrics.jsonl",
        "the loss is nan at step 3",
        r"lower the learning rate",
    ),
    "TP132": (
        lambda: load_subject("llama3-8bb"),
        "llama3-8bb",
        "no such file, and no preset",
        "llama3-8b, .*dump_tree",
    ),
    "TP133": (
        lambda: step_on(replicated_leaf(), lambda state: {**state, "ema": state["w"]}),
        "",
        "new: ema",
        r"return \(state, metrics\) or state",
    ),
    "TP140": (
        lambda: jaxtp.generate(llama_tiny(), [[1, 256]], max_new_tokens=8),
        r"prompts\[0\]",
        "token 256 of a vocabulary of 256",
        "the tokenizer that belongs to the model",
    ),
}
