"""The compiled GPU program of generation: messages, what is read, what is copied, its price."""

import dataclasses
import functools
import json

import compiled_programs
import jax
import pytest

from jaxtp.cli.commands import main
from jaxtp.compile import traffic
from jaxtp.compile.collectives import find
from jaxtp.compile.hlo import parse
from jaxtp.compile.options import PREFLIGHT, probe
from jaxtp.errors import BadConfig, BadTarget, DoesNotFit
from jaxtp.generation.preflight import (
    cache_bytes,
    preflight_generation,
    program_on_target,
)
from jaxtp.generation.programs import READ_ONCE
from jaxtp.generation.workload import Workload
from jaxtp.hardware.gpus import Target

IN_PLACE = jax.__version_info__ >= (0, 12)
"""Whether XLA lets a product read one layer's slice of stacked weights where it lies; that of jax
0.10 copies the slice first."""

# Real widths at a few layers: layers run in a loop, so depth changes no instruction.
FEW = {"layers": 3, "context": 512, "new_tokens": 64}


@functools.cache
def compiled(model, batch, tp=8, **changes):
    """The decode program of a model on H100s: its module, messages and memory, and the plan."""
    work = Workload(model=model, batch=batch, tp=tp, **{**FEW, **changes})
    plan = work.plan(8)
    mesh = compiled_programs.gpu_mesh(8 // tp, tp)
    if tp == 8:
        mesh = jax.sharding.Mesh(mesh.devices.reshape(8), ("tp",))
    settings = json.dumps(dataclasses.asdict(work))
    step, arguments = program_on_target(mesh, settings, "decode")
    options = dict(probe({**PREFLIGHT, **READ_ONCE}).options)
    program = step.lower(*arguments).compile(options)
    module = parse(program.as_text())
    return work, plan, module, find(module, dict(plan.mesh.sizes)), program.memory_analysis()


CASES = {
    "8B, one row": ("llama3-8b", 1, 8),
    "8B": ("llama3-8b", 16, 8),
    "8B, two replicas of one row": ("llama3-8b", 2, 4),
    "experts": ("mixtral-8x7b", 16, 8),
    "kv heads for half of the devices": ("tinyllama-1.1b", 16, 8),
    "gpt2": ("gpt2-medium", 16, 8),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_token_sends_two_messages_a_layer_and_copies_nothing(case):
    work, plan, _module, found, memory = compiled(*case)
    config, rows = work.config, work.batch // plan.mesh.batch_ways
    width = max(rows, 2) * config.hidden_size * 2  # one row is computed twice
    layers = [one for one in found if one.count == config.num_hidden_layers]
    assert [(one.kind, one.dtype, one.num_bytes) for one in layers] == [
        ("all-reduce", "bf16", width)
    ] * 2
    ends = sorted((one.kind, one.num_bytes) for one in found if one.count == 1)
    # The lookup, and of the head four numbers a row and shard; no logits are gathered.
    # Replicas tell each other whether all rows have ended.
    ended = [("all-reduce", 1)] * (plan.mesh.batch_ways > 1)
    assert ends == [
        ("all-gather", 16 * rows * plan.mesh.tp_size),
        *ended,
        ("all-reduce", width),
    ]
    assert len(found) == len(layers) + len(ends)
    # The cache is updated in place, and beside weights and cache there is next to nothing.
    cache = cache_bytes(work, plan)
    assert cache <= memory.alias_size_in_bytes <= 1.01 * cache + 2**16
    workspace = 32 * 2**20  # that of cuBLAS, once
    logits = 8 * rows * 4 * config.vocab_size // plan.mesh.tp_size
    slices = 0 if IN_PLACE else (plan.bytes_per_device + cache) // config.num_hidden_layers
    assert memory.temp_size_in_bytes <= workspace + logits + 64 * width + slices
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= 2**16


@pytest.mark.parametrize("case", list(CASES.values())[:4], ids=list(CASES)[:4])
def test_a_token_reads_weights_and_cache_once(case):
    work, plan, module, found, _ = compiled(*case)
    did = traffic.traffic(module, found, Target.parse("h100:1x8"))
    table = work.config.vocab_size * work.config.hidden_size * 2 // plan.mesh.tp_size
    floor = plan.bytes_per_device - table + cache_bytes(work, plan)
    assert 1 <= did.stored_bytes / floor <= 1.05
    largest = max(
        traffic.moved(module, computation, one)[2]
        for computation in module.computations.values()
        for one in computation
        if one.opcode in ("fusion", "copy", "convert", "transpose", "custom-call")
    )
    if IN_PLACE:
        assert largest <= 32 * work.batch * work.config.vocab_size  # no weight is written


def test_candidates_come_from_the_parts_of_the_vocabulary():
    """Beside four numbers a row sends its shards' 128 likeliest tokens."""
    *_, found, _ = compiled("llama3-8b", 16, 8, temperature=0.7, top_k=50, top_p=0.9)
    gathered = [one for one in found if one.kind == "all-gather"]
    assert sorted(one.num_bytes for one in gathered) == [16 * 8 * 16, 16 * 8 * 128 * 4]
    assert {one.kind for one in found} == {"all-gather", "all-reduce"}


def test_the_report_adds_up(capsys):
    flags = ["--tp", "8", "--batch", "16", "--context", "512", "--new-tokens", "64"]
    main(["preflight", "--generate", "--model", "llama3-8b", "--layers", "2", *flags, "--json"])
    data = json.loads(capsys.readouterr().out)
    work = Workload(model="llama3-8b", batch=16, context=512, new_tokens=64, layers=2)
    plan = work.plan(8)
    assert data["weight_bytes"] == plan.bytes_per_device
    assert data["cache_bytes"] == 2 * 2 * 16 * 512 * 1 * 128 * 2
    assert 1 <= data["read_ratio"] <= 1.05
    assert data["time_ratio"] >= 1
    decode, prefill = (data["reports"][phase] for phase in ("decode", "prefill"))
    assert decode["peak_bytes"] >= data["weight_bytes"] + data["cache_bytes"]
    assert decode["fits"]
    grown = data["largest_batch"] / 16
    most = max(decode["peak_bytes"], prefill["peak_bytes"]) - data["weight_bytes"]
    assert data["weight_bytes"] + grown * most <= data["card_bytes"]
    assert data["traffic"]["prefill"]["seconds"] > data["traffic"]["decode"]["seconds"]


def test_what_cannot_work_is_refused_before_it_is_compiled():
    with pytest.raises(
        DoesNotFit, match=r"TP114 at tp: weights take 16.\d GiB and the cache 1,280.0"
    ):
        preflight_generation(Workload(model="llama3-70b", batch=512, context=65536), "h200:1x8")
    with pytest.raises(BadTarget, match="TP116 at tp: 8 devices and 16 rows with tp=3"):
        preflight_generation(Workload(model="llama3-8b", tp=3), "h100:1x8")
    with pytest.raises(BadConfig, match="TP020 at context: context is 64"):
        Workload(model="llama3-8b", context=64, new_tokens=64)
