"""Pages: a small tree of nodes, lowered to one self-contained HTML file.

Drawing never raises: what cannot be drawn is written.
"""

import dataclasses
import html
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """One line of a page, with what is below it.

    Attributes:
        label: Text of the line.
        kind: CSS class: "sharded", "replicated", "fallback", "block", "note" or "plain".
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
.block{font-weight:600}.replicated{color:#666}.fallback{color:#b45309}.note{color:#b91c1c}
[hidden]{display:none}.gap{stroke:#888;stroke-dasharray:3}text{font-size:11px}#search{width:24rem;padding:.3rem}
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
