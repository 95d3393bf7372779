"""A plan as a page: every parameter drawn as a block, divided and coloured by device.

Everything becomes the same small `Node` tree first; `to_html` lowers it. Drawing never raises: what
cannot be drawn is written.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

from jaxtp.compile.report import Report
from jaxtp.config.named_files import write_text
from jaxtp.errors import BadConfig, join
from jaxtp.errors.arguments import checked, instance
from jaxtp.inspect.pages.html import Node, Section, page
from jaxtp.inspect.pages.report_page import report_sections
from jaxtp.mesh.axes import MeshShape
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.plan.specs import spec_text
from jaxtp.rules.planner import make_plan
from jaxtp.rules.roles import Role

MOST_PIECES = 64
"""A block is drawn with at most this many pieces; more would be thinner than a pixel."""


@checked(report=instance(Report, takes="a report from jaxtp.preflight").or_none())
def see_tp_plan(
    model_or_params: Any,
    path: str | os.PathLike[str] = "tp_plan.html",
    *,
    mesh: Any = None,
    report: Report | None = None,
    **options: Any,
) -> Path:
    """Writes the page of a plan and returns where it is.

    Args:
        model_or_params: A `Plan`, or any tree that `make_plan` takes.
        path: File to write.
        mesh: The mesh to plan for; not needed for a `Plan`.
        report: A compiled step's report, for its heat map and timeline.
        **options: Options of `make_plan`.

    Raises:
        BadUsage: TP132, if the file cannot be written.
        JaxtpError: whatever `make_plan` raises.
        BadConfig: TP020, for options beside a plan, or a report that is none.
    """
    given = isinstance(model_or_params, Plan)
    if given and (mesh is not None or options):
        raise BadConfig(
            f"a plan is given, so {join(['mesh'] * (mesh is not None) + [*options])} would have no "
            "effect",
            fix="give them to make_plan, or the parameters in the plan's place",
        )
    plan = model_or_params if given else make_plan(model_or_params, mesh, **options)
    compiled = () if report is None else report_sections(report)
    text = page(f"tensor-parallel plan, {plan.mesh}", (*plan_sections(plan), *compiled))
    return write_text(path, text)


def plan_sections(plan: Plan) -> tuple[Section, ...]:
    """What a page says about a plan: what needs a look first, then the whole tree."""
    size = plan.num_bytes / 1e6
    summary = (
        f"{len(plan.decisions)} parameters, {size:,.1f} MB; each device holds "
        f"{plan.bytes_per_device / 1e6:,.1f} MB. A colour is one device's share along the tensor "
        "axis; grey is replicated. Repeated layers are one line."
    )
    first = tuple(_leaf(d, count, plan.mesh) for _, count, d in _needs_a_look(plan))
    stages = (f"stages: {plan.stages}",) if plan.stages else ()
    notes = tuple(Node(n, "note") for n in (*stages, *plan.notes))
    return (
        Section(
            "Look here first", f"{len(first)} fallbacks and replicated matrices.", (*notes, *first)
        ),
        Section("All parameters", summary, _tree(plan)),
    )


def _needs_a_look(plan: Plan) -> list[tuple[str, int, ParamDecision]]:
    """Folded rows that are narrower than the tensor axis or replicated, the most bytes first."""
    rows = [r for r in plan.rows() if r[2].fallback or _is_whole_matrix(r[2], plan.mesh)]
    return sorted(rows, key=lambda r: -r[1] * r[2].bytes_per_device(plan.mesh))


def _is_whole_matrix(d: ParamDecision, mesh: MeshShape) -> bool:
    is_matrix = len(d.shape) > 1 and d.role != Role.NORM  # a stack of norms is no matrix
    return mesh.tp_size > 1 and is_matrix and d.dim_on(mesh.tp) is None


def _tree(plan: Plan) -> tuple[Node, ...]:
    """The folded rows as nested blocks."""
    root: dict[str, Any] = {}
    for name, count, d in plan.rows():
        *blocks, leaf = name.split("/")
        level = root
        for block in blocks:
            level = level.setdefault(f"{block}/", {})
        level[leaf] = _leaf(d, count, plan.mesh, leaf)
    return _nested(root)


def _nested(level: dict[str, Any]) -> tuple[Node, ...]:
    nodes: list[Node] = []
    for name, item in level.items():
        inner = (item,) if isinstance(item, Node) else _nested(item)
        if isinstance(item, Node):
            nodes.append(item)
        elif len(inner) == 1:  # a block with one line is that line
            nodes.append(dataclasses.replace(inner[0], label=name + inner[0].label))
        else:
            nodes.append(Node(name, "block", children=inner, is_open=True))
    return tuple(nodes)


def _leaf(d: ParamDecision, count: int, mesh: MeshShape, name: str = "") -> Node:
    """One parameter: its drawing, and all that is known about it below."""
    many = f" x{count}" if count > 1 else ""
    dtype = f"{d.dtype}{list(d.shape)}"
    each = f"{d.bytes_per_device(mesh) / 1e6:,.3f} MB/device"
    kind = (
        "fallback" if d.fallback else "sharded" if d.dim_on(mesh.tp) is not None else "replicated"
    )
    facts = [f"path {d.path}", *d.reasons, *([f"fallback: {d.fallback}"] if d.fallback else [])]
    if d.group:
        facts.append(f"decided together with group {d.group}")
    return Node(
        f"{name or d.path}{many}  {dtype}  {spec_text(d.spec)}  {d.role}  {each}",
        kind,
        path=d.path,
        drawing=draw(d, mesh),
        children=tuple(Node(fact) for fact in facts),
    )


def draw(d: ParamDecision, mesh: MeshShape, width: int = 96, height: int = 32) -> str:
    """An SVG of one array as its last two dims, divided as the spec says and coloured by device.

    Args:
        d: The decision.
        mesh: The plan's mesh shape.
        width: Pixels.
        height: Pixels.
    """
    dim = d.dim_on(mesh.tp)
    ways = 1 if dim is None else mesh.ways(a for a in d.spec[dim] if a in mesh.tp)
    across = dim is not None and dim == len(d.shape) - 1
    shown = min(ways, MOST_PIECES)
    pieces = [_piece(i, shown, across, width, height) for i in range(shown)]
    if ways == 1:
        pieces = [f'<rect width="{width}" height="{height}" class="same"/>']
    title = (
        f"{ways} shards, {mesh.tp_size // ways} copies of each" if dim is not None else "replicated"
    )
    return (
        f'<svg width="{width}" height="{height}" role="img"><title>{title}</title>'
        f"{''.join(pieces)}</svg>"
    )


def _piece(i: int, count: int, across: bool, width: int, height: int) -> str:
    x, w = (width * i / count, width / count) if across else (0, width)
    y, h = (0, height) if across else (height * i / count, height / count)
    hue = round(360 * i / count)
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" '
        f'fill="hsl({hue} 65% 62%)" stroke="#fff" stroke-width=".6"/>'
    )
