"""A plan as a page: every parameter drawn as a block, cut and coloured by device.

Stage in: a `Plan`, and if there is one a compiled report's heat map and timeline. Stage out: one
HTML file without outside references, which works from a mail attachment.

Everything becomes the same small `Node` tree first; `to_html` lowers it. Drawing never raises: what
cannot be drawn is written.
"""

import dataclasses
import html
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxtp.mesh.axes import MeshShape
from jaxtp.plan import ParamDecision, Plan
from jaxtp.planner import make_plan
from jaxtp.trees import spec_text

MOST_PIECES = 64
"""A block is drawn with at most this many pieces; more would be thinner than a pixel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One line of a page, with what is below it.

    Attributes:
        label: Text of the line.
        kind: CSS class: "split", "whole", "fallback", "block", "note" or "plain".
        path: What the search box matches, "" for lines that only group.
        drawing: SVG beside the label, "" without.
        children: Lines below.
        is_open: Whether they show at first.
    """

    label: str
    kind: str = "plain"
    path: str = ""
    drawing: str = ""
    children: tuple["Node", ...] = ()
    is_open: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A heading, a sentence on what is below it, and the lines or a ready drawing."""

    title: str
    text: str
    nodes: tuple[Node, ...] = ()
    drawing: str = ""


def see_tp_plan(
    model_or_params: Any,
    path: str | os.PathLike[str] = "tp_plan.html",
    *,
    mesh: Any = None,
    sections: Sequence[Section] = (),
    **options: Any,
) -> Path:
    """Writes the page of a plan and returns where it is.

    Args:
        model_or_params: A `Plan`, or any tree that `make_plan` takes.
        path: File to write.
        mesh: The mesh to plan for; not needed for a `Plan`.
        sections: More to show, such as a compiled report's (`jaxtp.xla.page.sections`).
        **options: Options of `make_plan`.

    Raises:
        JaxtpError: whatever `make_plan` raises.
    """
    given = isinstance(model_or_params, Plan)
    plan = model_or_params if given else make_plan(model_or_params, mesh, **options)
    target = Path(path)
    target.write_text(page(f"tensor-parallel plan, {plan.mesh}", (*plan_sections(plan), *sections)))
    return target


def plan_sections(plan: Plan) -> tuple[Section, ...]:
    """What a page says about a plan: what needs a look first, then the whole tree."""
    size = plan.num_bytes / 1e6
    summary = (
        f"{len(plan.decisions)} parameters, {size:,.1f} MB; each device holds "
        f"{plan.bytes_per_device / 1e6:,.1f} MB. A colour is one device's share along the tensor "
        "axis; grey is whole on every device. Repeated layers are one line."
    )
    first = tuple(_leaf(d, count, plan.mesh) for _, count, d in _needs_a_look(plan))
    notes = tuple(Node(n, "note") for n in plan.notes)
    return (
        Section("Look here first", f"{len(first)} fallbacks and whole matrices.", (*notes, *first)),
        Section("All parameters", summary, _tree(plan)),
    )


def _needs_a_look(plan: Plan) -> list[tuple[str, int, ParamDecision]]:
    """Folded rows that are narrower than the tensor axis or whole, the most bytes first."""
    rows = [r for r in plan.rows() if r[2].fallback or _is_whole_matrix(r[2], plan.mesh)]
    return sorted(rows, key=lambda r: -r[1] * r[2].bytes_per_device(plan.mesh))


def _is_whole_matrix(d: ParamDecision, mesh: MeshShape) -> bool:
    return mesh.tp_size > 1 and len(d.shape) > 1 and d.dim_on(mesh.tp) is None


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
    kind = "fallback" if d.fallback else "split" if d.dim_on(mesh.tp) is not None else "whole"
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
    """An SVG of one array as its last two dims, cut as the spec says and coloured by device.

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
    title = f"{ways} pieces, {mesh.tp_size // ways} copies of each" if dim is not None else "whole"
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


def to_html(node: Node) -> str:
    """One node and what is below it as list items; all text is escaped."""
    path = f' data-path="{html.escape(node.path, quote=True)}"' if node.path else ""
    label = f'{node.drawing}<span class="{node.kind}">{html.escape(node.label)}</span>'
    if not node.children:
        return f"<li{path}>{label}</li>"
    inner = "".join(map(to_html, node.children))
    is_open = " open" if node.is_open else ""
    return f"<li{path}><details{is_open}><summary>{label}</summary><ul>{inner}</ul></details></li>"


def page(title: str, sections: Iterable[Section]) -> str:
    """One self-contained HTML page."""
    body = "".join(
        f"<section><h2>{html.escape(s.title)}</h2><p>{html.escape(s.text)}</p>{s.drawing}"
        f"<ul>{''.join(map(to_html, s.nodes))}</ul></section>"
        for s in sections
    )
    safe = html.escape(title)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{safe}</title>'
        f"<style>{STYLE}</style></head><body><h1>{safe}</h1>"
        '<p><input id="search" type="search" placeholder="search a path" autofocus> '
        f'<output id="found"></output></p>{body}<script>{SCRIPT}</script></body></html>'
    )


STYLE = """
body{font:14px/1.5 system-ui,sans-serif;margin:2rem;max-width:110rem;color:#222}
ul{list-style:none;padding-left:1.2rem}li{margin:.15rem 0}summary{cursor:pointer}
svg{vertical-align:middle;margin-right:.6rem}.same{fill:#ccc}
span{font-family:ui-monospace,monospace;white-space:pre-wrap}
.block{font-weight:600}.whole{color:#666}.fallback{color:#b45309}.note{color:#b91c1c}
[hidden]{display:none}#search{width:24rem;padding:.3rem}
table{border-collapse:collapse}td,th{padding:.2rem .5rem;border:1px solid #ddd;text-align:right}
th:first-child{text-align:left}
"""

# A layer that was folded into "*" is found by any of its numbers.
SCRIPT = """
const box=document.getElementById('search'),found=document.getElementById('found');
const rows=[...document.querySelectorAll('[data-path]')];
const plain=t=>t.toLowerCase().replace(/\\d+/g,'*');
box.addEventListener('input',()=>{const q=plain(box.value.trim());let n=0;
for(const r of rows){const hit=plain(r.dataset.path).includes(q);r.hidden=!hit;n+=hit}
for(const d of document.querySelectorAll('details')){
const inner=[...d.querySelectorAll('[data-path]')];
if(inner.length)d.parentElement.hidden=inner.every(r=>r.hidden)}
found.textContent=q?n+' found':''});
"""
