"""Which trees cannot be taken apart at all, and which are those of stacked layers."""

from typing import Any

import jax

from jaxtp.errors import BadTree
from jaxtp.errors.arguments import Kind

MOST_LEVELS = 200
"""Containers in each other; Python and JAX take apart no more than a few hundred."""


CONTAINERS = (dict, list, tuple)


def refuse_endless(tree: Any) -> None:
    """Refuses dicts, lists and tuples that hold themselves, before JAX takes them apart.

    JAX would run into Python's limit of recursion, and not come out of it: whatever the process
    takes apart afterwards fails as well.

    Raises:
        BadTree: TP046, with the place.
    """
    level: list[Any] = [tree]
    for _ in range(MOST_LEVELS):
        # Each object once: a list that holds itself twice does not double with every level.
        held = {id(node): node for node in level if isinstance(node, CONTAINERS)}
        if not held:
            return
        level = [
            part
            for node in held.values()
            for part in (node.values() if isinstance(node, dict) else node)
        ]
    _refuse_deepest(tree)


def _refuse_deepest(tree: Any) -> None:
    """Says where one of too many containers in each other is, and whether it holds itself."""
    above: list[tuple[Any, str]] = []
    todo: list[tuple[Any, str, int]] = [(tree, "", 0)]
    while todo:
        node, key, depth = todo.pop()
        if not isinstance(node, CONTAINERS):
            continue
        del above[depth:]
        holds_itself = any(node is other for other, _ in above)
        if holds_itself or depth >= MOST_LEVELS:
            raise BadTree(
                f"a {type(node).__name__} that holds itself"
                if holds_itself
                else f"more than {MOST_LEVELS} containers in each other",
                where="/".join([*(name for _, name in above[1:9]), key]),
                fix="a tree of arrays, in which no dict or list is a part of itself",
            )
        above.append((node, key))
        parts: Any = node.items() if isinstance(node, dict) else enumerate(node)
        todo += [(part, str(name), depth + 1) for name, part in parts]


def _are_stacked(tree: Any) -> bool:
    counts = {tuple(getattr(leaf, "shape", ()))[:1] for leaf in jax.tree.leaves(tree)}
    return len(counts) == 1 and counts != {()}


STACKED = Kind(_are_stacked, "a tree of arrays (layers, ...), as many layers in each", BadTree)
"""What functions take as the parameters of stacked layers."""
