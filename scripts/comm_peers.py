"""The plans that jaxtp is compared with in `bench_comm.py`, on the same preset and step.

megatron    specs written by hand, constraints where an expert puts them
largest     each array cut along its largest dim that tp divides; XLA places activations
replicated  every array replicated
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jax.sharding import Mesh

from jaxtp.config.settings import parse
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import ParamDecision
from jaxtp.train import paper
from jaxtp.train.preset import StepOptions, planned_step, preset_plan
from jaxtp.train.setup import model_of, plan_of

# Path of a parameter -> the dim that Megatron-LM cuts, None for whole; the first dim is the layer.
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


def megatron_step(mesh: Mesh, **settings: Any) -> Any:
    """The preset's step by the plan that an expert writes."""
    return _peer(mesh, StepOptions(**settings), lambda d, _: _by_hand(d), constrain=True)


def megatron_config_step(mesh: Mesh, settings: str) -> Any:
    """The step of a config file by the plan that an expert writes; fsdp cuts what jaxtp would."""
    config, _ = parse(settings)
    plan = plan_of(config, model_of(config), mesh)
    decisions: list[ParamDecision] = []
    for d in plan.decisions:
        name = plan.mesh.name_of(Axis.FSDP)
        fsdp = [tuple(axis for axis in axes if axis == name) for axes in d.spec]
        cut = _by_hand(d)
        spec = tuple((("tp",) if dim == cut else ()) + fsdp[dim] for dim in range(len(d.shape)))
        decisions.append(d.revise(spec, "by hand"))
    return paper.planned_step(config, dataclasses.replace(plan, decisions=tuple(decisions)), mesh)


def largest_step(mesh: Mesh, **settings: Any) -> Any:
    """The preset's step with every array cut along its largest dim that divides."""
    return _peer(mesh, StepOptions(**settings), _largest, constrain=False)


def replicated_step(mesh: Mesh, **settings: Any) -> Any:
    """The preset's step with every array replicated."""
    return _peer(mesh, StepOptions(**settings), lambda *_: None, constrain=False)


def _peer(
    mesh: Mesh,
    options: StepOptions,
    choose: Callable[[ParamDecision, int], int | None],
    *,
    constrain: bool,
) -> Any:
    """The step with `choose(decision, tp)` in the place of jaxtp's decisions."""
    mesh = Mesh(mesh.devices.reshape(-1, options.tp), ("dp", "tp"))
    model, plan = preset_plan(mesh, options)
    decisions: list[ParamDecision] = []
    for d in plan.decisions:
        cut = choose(d, options.tp)
        spec = tuple(("tp",) if dim == cut else () for dim in range(len(d.shape)))
        decisions.append(d.revise(spec, "peer", padding=d.padding if constrain else ()))
    peer = dataclasses.replace(plan, decisions=tuple(decisions))
    return planned_step(model, peer, mesh, options, constrain=constrain)


def _by_hand(d: ParamDecision) -> int | None:
    (cut,) = [dim for rule, dim in MEGATRON.items() if re.fullmatch(rule, d.path)]
    return cut


def _largest(d: ParamDecision, tp: int) -> int | None:
    dims = [dim for dim, size in enumerate(d.shape) if size % tp == 0]
    return max(dims, key=lambda dim: d.shape[dim], default=None)
