"""How many heads a block has, where its kernels do not show it."""

import dataclasses
import math
from collections.abc import Iterable

from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.model_tree import Leaf, ModelTree
from jaxtp.rules.path_words import head_norm, low_rank
from jaxtp.rules.words import Word

COMMON_HEAD_DIMS = (128, 64)
"""Assumed head widths when nothing tells them: those of almost all published decoders."""

POWERS = frozenset({16, 32, 64, 128, 256})
"""Head widths that a table with one entry per head may speak for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one attention block, or pieces that hold whole heads, and how they are known."""

    query: int
    kv: int
    evidence: str
    noun: str = "heads"

    @property
    def query_units(self) -> tuple[int, ...]:
        """Query heads as (kv heads, query heads per kv head), which is how they are stored."""
        if self.query % self.kv:
            return (math.gcd(self.query, self.kv),)
        return (self.kv, self.query // self.kv) if self.query > self.kv else (self.query,)

    @property
    def kv_units(self) -> tuple[int, ...]:
        """Units of key and value projections."""
        return (math.gcd(self.query, self.kv),) if self.query % self.kv else (self.kv,)


def count(
    dims: ModelDims, query: int, kv: int, norms: Iterable[Leaf], tables: Iterable[tuple[int, ...]]
) -> Heads | None:
    """Heads of flat projections, from given sizes, norms, tables, or the usual widths.

    Args:
        dims: Sizes the user gave.
        query: Width of the query projection, in elements.
        kv: Width of the key projection, in elements.
        norms: Norms inside the block.
        tables: Sizes that may be head counts, of tables near the block.
    """
    width, evidence = _width(dims, query, kv, norms, tables)
    if width:
        return Heads(query // width, kv // width, evidence)
    return None if dims.heads or dims.head_dim else _assumed(query, kv)


def _width(
    dims: ModelDims, query: int, kv: int, norms: Iterable[Leaf], tables: Iterable[tuple[int, ...]]
) -> tuple[int, str]:
    """Width of one head and how it is known; 0 if it is not."""

    def fits(width: int) -> bool:
        return width > 1 and query % width == 0 and kv % width == 0

    # A config may speak of another tower, or of the rotary part of a head: where its numbers do not
    # meet, a split that suits both is safe.
    wide = fits(dims.head_dim) and query // dims.head_dim
    both = math.gcd(dims.heads, wide) if wide and dims.heads else 0
    for count, reason in (
        (both, f"{dims.heads} heads and head_dim {dims.head_dim} were given"),
        (wide, f"head_dim {dims.head_dim} was given"),
        (dims.heads, f"{dims.heads} heads were given"),
    ):
        if count and query % count == 0 and fits(query // count):
            return query // count, reason
    width = _norm_width(norms, query)
    if fits(width):
        return width, f"norms inside attention are {width} wide, one head"
    found = {query // n for sizes in tables for n in sizes if query % n == 0}
    found = {w for w in found if w in POWERS and fits(w)}
    if len(found) == 1:
        (width,) = found
        return width, f"a table nearby has {query // width} entries, one for each head"
    return 0, ""


def _assumed(query: int, kv: int) -> Heads | None:
    """Pieces that hold whole heads of nearly any model, where nothing tells their width.

    Fewer, wider heads than there may be: a split between them divides no head, as long as heads
    are not wider. Grouped-query keys get the widest, since they have the fewest heads. Only powers
    of two are trusted: 3072 is 24 heads of 128, but 32 of 96 as well.
    """
    wide = ((256,) if kv < query else ()) + (COMMON_HEAD_DIMS if query >= 2048 else (64,))
    usual = [w for w in wide if query % w == 0 and kv % w == 0]
    # Head counts are even in nearly all models: 3200 is 32 x 100 or 40 x 80 before it is 25 x 128.
    even = (w for w in usual if query // w % 2 == 0 and (kv // w % 2 == 0 or kv == w))
    width = next(even, usual[0] if usual else 0)
    if not width:
        return None
    q, k = (n & -n for n in (query // width, kv // width))
    return Heads(q, k, f"head_dim {width} assumed; give heads= to be sure", "pieces")


def _norm_width(norms: Iterable[Leaf], query: int) -> int:
    """Width of one head if the norms of queries and keys agree on it, else 0."""
    # One scale for all heads is (head_dim,), one for each is (heads, head_dim) or turned.
    sizes = [
        set(norm.sizes)
        for norm in norms
        if head_norm(norm.name.stem) and not low_rank(norm.name.stem)
    ]
    # As wide as all heads together it says nothing about one of them.
    widths = {w for w in set.intersection(*sizes) if w < query} if sizes else set[int]()
    return widths.pop() if len(widths) == 1 else 0


def table_sizes(tree: ModelTree) -> dict[str, list[tuple[int, ...]]]:
    """Node -> sizes that may be head counts, of tables with one entry per head below it."""
    found: dict[str, list[tuple[int, ...]]] = {}
    for leaf in tree.leaves.values():
        if leaf.name.word is Word.HEAD_TABLE and leaf.sizes:
            # A looked-up table is (buckets, heads); an array of no known kind may be turned.
            for node in leaf.nodes:
                found.setdefault(node, []).append(leaf.sizes[-1:] if leaf.looked_up else leaf.sizes)
    return found
