"""`jaxtp plan` and `jaxtp explain`: where every parameter of a model goes."""

import dataclasses
import json
from typing import Annotated

import tyro

from jaxtp.cli.model_argument import load_subject
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.rules.planner import make_plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """How to plan a tree."""

    tp: int = 8
    """Devices along the tensor axis."""

    dp: int = 1
    """Replicas; only changes the mesh that is printed."""

    heads: int | None = None
    """Query heads of one layer; read from the file's config if it has one."""

    kv_heads: int | None = None
    """Key/value heads of one layer."""

    head_dim: int | None = None
    """Width of one head, in elements."""

    policy: str = "factor"
    """For units that do not divide: factor, replicate or error."""

    pad_vocab: bool = False
    """Pad a vocabulary that does not divide."""

    use_config: bool = True
    """Whether the sizes in the file may be used."""

    strict: bool = False
    """Refuse a plan that wastes devices or memory."""


def plan_of(text: str, options: PlanOptions) -> Plan:
    """The plan of what a command is asked about.

    Args:
        text: A file of shapes, a preset, or package.module:function.
        options: How to plan.
    """
    subject = load_subject(text)
    mesh = {Axis.DP.value: options.dp} if options.dp > 1 else {}
    return make_plan(
        subject.params,
        {**mesh, Axis.TP.value: options.tp},
        config=subject.config if options.use_config else None,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        policy=options.policy,
        pad_vocab="masked" if options.pad_vocab else False,
        strict=options.strict,
        fn=subject.fn,
        inputs=subject.inputs,
    )


Tree = Annotated[str, tyro.conf.Positional]
Options = Annotated[PlanOptions, tyro.conf.arg(name="")]
DEFAULTS = PlanOptions()


def plan(
    tree: Tree,
    options: Options = DEFAULTS,
    *,
    as_json: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Plan a model and print one line a parameter, or JSON.

    Args:
        tree: File written by jaxtp.dump_tree, a preset, or package.module:function, which returns
            (fn, params, inputs).
        options: How to plan.
        as_json: Print mesh sizes, and per path spec, role, reasons and bytes.
    """
    result = plan_of(tree, options)
    if not as_json:
        print(result)
        return
    mesh = result.mesh
    params = {
        d.path: {
            "spec": [list(axes) for axes in d.spec],
            "role": d.role,
            "reasons": list(d.reasons),
            "fallback": d.fallback,
            "bytes": d.num_bytes,
            "bytes_per_device": d.bytes_per_device(mesh),
        }
        for d in result.decisions
    }
    tensor = {name: size for name, size in mesh.sizes if name in mesh.tp}
    print(json.dumps({"mesh": tensor, "notes": list(result.notes), "params": params}, indent=1))


def explain(tree: Tree, path: Tree, options: Options = DEFAULTS) -> None:
    """Print all that is known about one parameter, with the lines of the model that say so.

    Args:
        tree: File written by jaxtp.dump_tree, a preset, or package.module:function, which returns
            (fn, params, inputs).
        path: The parameter's path.
        options: How to plan.
    """
    print(plan_of(tree, options).explain(path))
