"""The plans that jaxtp is compared with in `bench_comm.py` and `bench_hybrid.py`, on the same step.

    megatron    specs written by hand, constraints where an expert puts them
    largest     each array sharded along its largest dim that tp divides; XLA places activations
    replicated  every array replicated on every device

Each `NAME_step` is an entry for `jaxtp.train.preflight.preflight_config`.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

import jaxtp
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.train.config_step import abstract_batch, abstract_state, abstract_step, update_of
from jaxtp.train.planning import Build, plan_of
from jaxtp.train.preflight import resolved

# Path of a parameter -> the dim that Megatron-LM shards, None for none; the first dim is the layer.
MEGATRON: Mapping[str, int | None] = {
    r"(embed_tokens|wte)/embedding": 0,
    r"lm_head/kernel": 1,
    r".*/[qkv]_proj/kernel": 2,
    r".*/o_proj/kernel": 1,
    r".*/(gate|up)_proj/kernel": 2,
    r".*/down_proj/kernel": 1,
    r".*/c_attn/kernel": 3,
    r".*/c_attn/bias": 2,
    r".*/c_fc/kernel": 2,
    r".*/c_fc/bias": 1,
    r".*/c_proj/kernel": 1,
    r".*/c_proj/bias|wpe/embedding|.*(norm|ln_.)/(scale|bias)": None,
}


def megatron_step(mesh: Mesh, settings: str) -> Any:
    """The step by the plan that an expert writes; fsdp shards what jaxtp would."""
    build, plan, mesh = _as_planned(mesh, settings)
    fsdp = plan.mesh.name_of(Axis.FSDP)

    def by_hand(d: ParamDecision) -> ParamDecision:
        (cut,) = [dim for rule, dim in MEGATRON.items() if re.fullmatch(rule, d.path)]
        spec = tuple(
            (plan.mesh.tp if dim == cut else ()) + tuple(axis for axis in axes if axis == fsdp)
            for dim, axes in enumerate(d.spec)
        )
        return d.revise(spec, "by hand")

    return abstract_step(build, _replanned(plan, by_hand), mesh)


def largest_step(mesh: Mesh, settings: str) -> Any:
    """The step with every array sharded along its largest dim that divides."""
    build, plan, mesh = _as_planned(mesh, settings)

    def largest(d: ParamDecision) -> ParamDecision:
        dims = [dim for dim, size in enumerate(d.shape) if size % plan.mesh.tp_size == 0]
        cut = max(dims, key=lambda dim: d.shape[dim], default=None)
        spec = tuple(plan.mesh.tp if dim == cut else () for dim in range(len(d.shape)))
        return d.revise(spec, "largest dim", padding=())

    return _unconstrained(build, _replanned(plan, largest), mesh)


def replicated_step(mesh: Mesh, settings: str) -> Any:
    """The step with every array replicated on every device."""
    build, plan, mesh = _as_planned(mesh, settings)

    def replicated(d: ParamDecision) -> ParamDecision:
        return d.revise(((),) * len(d.shape), "replicated", padding=())

    return _unconstrained(build, _replanned(plan, replicated), mesh)


def _as_planned(mesh: Mesh, settings: str) -> tuple[Build, Plan, Mesh]:
    build, mesh = resolved(settings, mesh)
    return build, plan_of(build, mesh), mesh


def _replanned(plan: Plan, decide: Callable[[ParamDecision], ParamDecision]) -> Plan:
    return dataclasses.replace(plan, decisions=tuple(decide(d) for d in plan.decisions))


def _unconstrained(build: Build, plan: Plan, mesh: Mesh) -> Any:
    """The step without the plan's activation constraints."""
    state = jaxtp.shard(abstract_state(build), mesh, plan=plan)
    batch = jaxtp.shard_batch(abstract_batch(build.config), mesh)
    donate = build.config.communication.donate
    step = jaxtp.jit_step(update_of(build, plan, mesh), state, mesh, donate=donate)
    return step, (state, batch)
