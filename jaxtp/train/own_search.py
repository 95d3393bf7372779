"""The search for a model of one's own: strategies from its program, priced like all others.

Searched are dp, fsdp with a ZeRO stage, tp and micro-batches, over which the step has to loop; not
cp, ep or `overlap="aggressive"`, which `parallelize` also runs. Recomputation is the model's own.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtp.compile.deviceless import preflight
from jaxtp.compile.report import Report
from jaxtp.cost.candidates import divisors, sharding
from jaxtp.cost.ranking import Candidate, Ranking
from jaxtp.cost.strategy import AXES, Strategy
from jaxtp.cost.traced.price import TracedStep, rank_traced
from jaxtp.errors import BadUsage, join
from jaxtp.hardware.gpus import Target
from jaxtp.io.model_functions import OwnModel
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.rules.planner import make_plan
from jaxtp.train.fixed_settings import fixed_fields
from jaxtp.train.mesh_advice import Pricing
from jaxtp.train.own_model import Batched, TracedModel, batched, traced
from jaxtp.train.pricing import JAXTP, wires_of
from jaxtp.train.search_result import (
    OWN_SETTINGS,
    Asked,
    Found,
    Search,
    compiled_rows,
    machine_of,
    rows_of,
)

MESH = (Axis.DP.value, Axis.FSDP.value, Axis.TP.value)
"""Axes of a mesh for anybody's model, slowest first."""


def search_own(
    model: OwnModel, target: str, batch: int, fixed: Mapping[str, Any], asked: Asked
) -> Search:
    """The best meshes for a model of one's own.

    Args:
        model: The model.
        target: The machine.
        batch: Rows of the global batch.
        fixed: As in `jaxtp.search`.
        asked: The rest of its arguments.

    Raises:
        BadTarget: TP116, for the target.
        BadUsage: TP132, without a batch, if no candidate is left, or a setting cannot be fixed.
    """
    if batch < 1:
        raise BadUsage("no batch", where="batch", fix="rows of the global batch")
    machine = machine_of(target, asked.network)
    read = traced(batched(model))
    plans = _plans(read.model, wires_of(machine).domain, machine.num_devices)
    steps = {tp: read.step(plan) for tp, plan in plans.items() if _uses(plan, tp)}
    values = fixed_fields(fixed, OWN_SETTINGS)
    strategies = _candidates(sorted(steps), machine.num_devices, batch, values)
    pricing = _pricing(steps, strategies, read.flops * batch)
    ranking = pricing.rank(machine)
    compiled = functools.partial(_compiled, machine, model.entry, batch, asked.time_limit)
    if not model.entry:
        asked = dataclasses.replace(asked, compile_best=0)
    rows = compiled_rows(ranking, rows_of(ranking, lambda _: None), asked, compiled)
    return Search(
        target=machine,
        model=model.name,
        batch=batch,
        seq=0,
        rows=rows,
        ranking=ranking,
        pricing=pricing,
        notes=tuple(_notes(model, read, plans, steps[max(steps)])),
    )


def _plans(model: Batched, domain: int, devices: int) -> dict[int, Plan]:
    """The plan along each tensor axis that stays inside an NVLink domain."""
    sizes = [tp for tp in divisors(devices) if tp <= domain]
    return {
        tp: make_plan(model.params, {Axis.TP.value: tp}, fn=model.call, inputs=model.inputs)
        for tp in sizes
    }


def _uses(plan: Plan, tp: int) -> bool:
    """Whether something is sharded over all of the tensor axis; else a smaller one does as much."""
    return tp == 1 or any(plan.mesh.tp_ways(d.spec) == tp for d in plan.decisions)


def _candidates(tensor: list[int], devices: int, batch: int, fixed: Mapping[str, int]) -> Strategy:
    """All strategies; every field that differs an array of the same length."""
    rows = [
        row
        for tp in tensor
        for row in _rows(tp, devices, batch)
        if all(row[name] == value for name, value in fixed.items())
    ]
    if not rows:
        given = join(f"{name}={value}" for name, value in fixed.items())
        raise BadUsage(
            f"no mesh of {devices} GPUs runs a batch of {batch} with {given or 'these sizes'}",
            fix="fix fewer settings, or a batch that more data-parallel devices divide",
        )
    ones = dict.fromkeys(("rounds", *(axis for axis in AXES if axis not in MESH)), 1)
    zeros = dict.fromkeys(("recompute", "sequence_parallel", "interleaved"), 0)
    whole = [{**ones, **zeros, **row} for row in rows]
    return Strategy(**{name: np.asarray([row[name] for row in whole]) for name in whole[0]})


def _rows(tp: int, devices: int, batch: int) -> Iterator[dict[str, int]]:
    data = devices // tp
    if batch % data:
        return
    for (fsdp, zero), micro_batches in itertools.product(sharding(data), divisors(batch // data)):
        yield {
            **dict(zip(MESH, (data // fsdp, fsdp, tp), strict=True)),
            "zero": zero,
            "micro_batches": micro_batches,
            "micro_batch": batch // data // micro_batches,
        }


def _pricing(steps: Mapping[int, TracedStep], strategies: Strategy, flops: float) -> Pricing:
    def ranked(target: Target) -> Ranking:
        return rank_traced(
            steps,
            strategies,
            wires_of(target),
            JAXTP,
            memory_bytes=target.device.memory_bytes,
            flops=flops,
        )

    def message_bytes(one: Candidate) -> float:
        step = steps[one.settings[Axis.TP]]
        largest = max(step.work.sent, default=0.0)
        return largest * one.settings["micro_batch"] / step.batch

    counts = {tp: round(sum(step.work.sent.values())) for tp, step in steps.items()}
    messages = f"a micro-batch waits for {max(counts.values())} all-reduces"
    return Pricing(rank=ranked, message_bytes=message_bytes, messages=messages)


def _compiled(
    machine: Target,
    entry: str,
    batch: int,
    time_limit: float,
    row: Found,
    show: Callable[[float], None],
) -> Report:
    s = row.candidate.settings
    return preflight(
        "jaxtp.train.own_step:step_on_target",
        target=machine,
        mesh=mesh_sizes(row.candidate),
        keywords={
            "entry": entry,
            "batch": batch,
            "micro_batches": s["micro_batches"],
            "zero": s["zero"],
        },
        time_limit=time_limit,
        on_progress=show,
    )


def mesh_sizes(candidate: Candidate) -> dict[str, int]:
    """The mesh of a candidate as `make_mesh` takes it: axes of one device left out, except tp."""
    s = candidate.settings
    return {axis: s[axis] for axis in MESH if s[axis] > 1 or axis == Axis.TP.value}


def _notes(
    model: OwnModel, read: TracedModel, plans: Mapping[int, Plan], widest_step: TracedStep
) -> Iterator[str]:
    """What limits tp, what could not be read, and what stands in for what is not known."""
    yield _batch_note(read.model)
    widest = max(plans)
    limits = {d.fallback for d in plans[widest].decisions if d.fallback}
    for text in sorted(limits)[:3]:
        yield f"tp={widest}: {text}"
    if read.analysis.opaque:
        names = sorted({o.primitive for o in read.analysis.opaque})
        yield f"priced without {join(names)}: nothing is known about what they cost"
    if widest_step.work.unsent:
        names = join(sorted(widest_step.work.unsent))
        yield f"priced without what {names} may send along tp: their results show no shards"
    if widest_step.work.whiles:
        yield "a while loop is priced as one turn: the program does not say how many it runs"
    yield (
        "the step: the function's loss is not known, so the cross-entropy of the ids it takes, or "
        "the mean square of what it returns; Adam; recomputation as the function has it"
    )
    if not model.entry:
        yield "not compiled: another process cannot import the function; give one of a module"


def _batch_note(model: Batched) -> str:
    """Which inputs have the batch, and which stay as they are at any batch."""
    names = [model.names[i] for i in model.batched]
    others = [name for name in model.names if name not in names]
    stays = f"; as given at any batch: input {', '.join(others)}" if others else ""
    return f"batch: dim 0 of input {', '.join(names)}{stays}"
