"""Attention blocks: which dim is the heads, how many there are, and who must be split together.

Stage in: a `Block`. Stage out: votes for query, key, value and output projections, their biases,
norms as wide as all heads, and tables with one entry per head.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from jaxtp.errors import SizeMismatch, join
from jaxtp.rules.blocks import Block, Leaf, lowest_common
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import ATTENTION, ENTERS_ATTENTION, Word, spaced

KV_WORDS = frozenset({Word.K, Word.V, Word.KV})
PARTED = frozenset({Word.QKV, Word.KV, Word.QKV_PER_HEAD})
COMMON_HEAD_DIMS = (128, 64)
"""Assumed head widths when nothing tells them: those of almost all published decoders."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where the heads lie in one array.

    Attributes:
        leaf: The array.
        dim: The dim with the heads, flat (heads x head_dim) or alone.
        size: That dim's size in elements.
        head_dim: Width of a head when it is a dim of its own, else 0.
        parted: Whether q, k and v are apart on a dim of their own, or there is only one of them.
    """

    leaf: Leaf
    dim: int
    size: int
    head_dim: int
    parted: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Heads:
    """Heads of one attention block, and how they are known."""

    query: int
    kv: int
    evidence: str

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


def votes(block: Block) -> Iterator[Vote]:
    """Votes for every attention block of a tree.

    Raises:
        SizeMismatch: TP003, if heads were given that fit no attention block of the tree.
    """
    members = [leaf for leaf in block.leaves.values() if leaf.name.word in ATTENTION]
    groups = lowest_common(members, _at_home, lambda leaf: leaf.name.word)
    extras = _extras(block, groups)
    known: dict[str, Heads] = {}
    for node, group in groups.items():
        slots = [s for leaf in group if (s := _slot(block, leaf)) is not None]
        heads = _heads(block, slots, extras.get(node, []))
        if heads is not None:
            known[node] = heads
        yield from _group_votes(node, group, slots, heads)
        if heads is not None:
            yield from _norm_votes(node, extras.get(node, []), slots, heads)
    _check_given(block, groups, known)
    yield from _table_votes(block, known)


def _at_home(words: Counter[object], leaf: Leaf) -> bool:
    return words[Word.O] > 0 and any(words[w] for w in ENTERS_ATTENTION)


def _extras(block: Block, groups: dict[str, list[Leaf]]) -> dict[str, list[Leaf]]:
    """Norms inside each attention block."""
    found: dict[str, list[Leaf]] = {}
    for leaf in block.leaves.values():
        if leaf.name.word is Word.NORM:
            home = next((n for n in leaf.nodes if n in groups), None)
            if home is not None:
                found.setdefault(home, []).append(leaf)
    return found


def _slot(block: Block, leaf: Leaf) -> Slot | None:
    """Where the heads are in one array; None for an array that has none, such as an output bias."""
    word, sizes, dims = leaf.name.word, leaf.sizes, leaf.core
    rest = list(range(len(sizes)))
    if leaf.name.bias:
        if word is Word.O or not rest:
            return None
    elif len(rest) < 2:
        return None
    else:
        rest.remove(_model_dim(block, leaf))
    parted = word not in PARTED
    if not parted and len(rest) > 1:
        parts = [i for i in rest if sizes[i] == (2 if word is Word.KV else 3)]
        if parts:
            rest.remove(parts[0])
            parted = True
    if len(rest) > 2 or not rest:
        return None
    head_dim = sizes[rest[1]] if len(rest) == 2 else 0
    return Slot(leaf, dims[rest[0]], sizes[rest[0]], head_dim, parted or word is Word.QKV_PER_HEAD)


def _model_dim(block: Block, leaf: Leaf) -> int:
    """Index of the dim that is not heads: the residual stream, or a low rank that feeds the heads.

    Flat kernels are (in, out) unless the tree stores (out, in); 3-D ones are (embed, heads,
    head_dim) on the way in and (heads, head_dim, embed) on the way out, or have the heads first.
    """
    rank = len(leaf.sizes)
    entering = leaf.name.word is not Word.O
    first, last = 0, rank - 1
    usual = first if entering != (block.out_first and rank == 2) else last
    order = [usual, *(i for i in range(rank) if i != usual)]
    found = block.stream_dim(leaf.sizes, order)
    return usual if found is None else found


def _heads(block: Block, slots: list[Slot], norms: list[Leaf]) -> Heads | None:
    """Head counts of one block, from 3-D kernels, given sizes, norms, or the usual widths."""
    per_head = Word.KV_UP in {s.leaf.name.word for s in slots}
    query = next((s for s in slots if s.leaf.name.word is Word.Q and not s.leaf.name.bias), None)
    output = next((s for s in slots if s.leaf.name.word is Word.O), None)
    whole = output if per_head or query is None else query
    if whole is None:
        return None
    kv = next((s for s in slots if s.leaf.name.word in KV_WORDS and s.parted), None)
    if whole.head_dim:
        count = kv.size if kv is not None and kv.head_dim else whole.size
        return Heads(whole.size, count, f"kernel of {whole.size} heads x {whole.head_dim}")
    kv_size = whole.size if kv is None or per_head else kv.size
    head_dim, evidence = _head_dim(block, whole.size, kv_size, norms)
    if not head_dim:
        return None
    return Heads(whole.size // head_dim, kv_size // head_dim, evidence)


def _head_dim(block: Block, query: int, kv: int, norms: list[Leaf]) -> tuple[int, str]:
    """Width of a head in a flat projection of `query` and `kv` elements, and how it is known."""
    dims = block.dims
    if dims.head_dim and query % dims.head_dim == 0 and kv % dims.head_dim == 0:
        return dims.head_dim, f"head_dim {dims.head_dim} was given"
    if dims.heads and query % dims.heads == 0 and kv % (query // dims.heads) == 0:
        return query // dims.heads, f"{dims.heads} heads were given"
    for norm in norms:
        width = norm.sizes[-1] if norm.sizes else 0
        if 1 < width < min(query, kv + 1) and query % width == 0 and kv % width == 0:
            return width, f"a norm inside attention is {width} wide, one head"
    if dims.heads or dims.head_dim:
        return 0, ""
    # Fewer, wider units than there may be: a cut between them never cuts a head in two, as long as
    # heads are not wider. Grouped-query keys get the widest, since they have the fewest heads.
    wide = ((256,) if kv < query else ()) + (COMMON_HEAD_DIMS if query >= 2048 else (64,))
    fits = [w for w in wide if query % w == 0 and kv % w == 0]
    # Head counts are even in nearly all models: 3200 is 32 x 100 or 40 x 80 before it is 25 x 128.
    width = next((w for w in fits if query // w % 2 == 0), fits[0] if fits else 0)
    return width, f"head_dim {width} assumed; give heads= to be sure"


def _group_votes(
    node: str, group: list[Leaf], slots: list[Slot], heads: Heads | None
) -> Iterator[Vote]:
    by_path = {s.leaf.param.path: s for s in slots}
    name = f"{node}:attention"
    for leaf in group:
        word, path = leaf.name.word, leaf.param.path
        slot = by_path.get(path)

        def whole(role: Role, reason: str, path: str = path) -> Vote:
            return Vote(path, Source.NAMES, role, reason, group=name)

        if word is Word.O and leaf.name.bias:
            yield whole(Role.ROW_BIAS, "bias of the output projection, added once")
        elif word is Word.LOW_RANK:
            yield whole(Role.LOW_RANK, "low-rank projection that all heads share")
        elif slot is None or heads is None:
            yield whole(Role.UNKNOWN, f"{word}, but the number of heads is unknown; give heads=")
        elif not slot.parted or (word is Word.QKV_PER_HEAD and slot.size % (3 * heads.query)):
            yield whole(
                Role.FUSED, f"{word} share {slot.size}, one after another or in unknown order"
            )
        else:
            yield _head_vote(name, slot, heads)


def _head_vote(name: str, slot: Slot, heads: Heads) -> Vote:
    word = slot.leaf.name.word
    units = heads.kv_units if word in KV_WORDS else heads.query_units
    count = math.prod(units)
    role = Role.ROW if word is Word.O else Role.COLUMN_BIAS if slot.leaf.name.bias else Role.COLUMN
    if slot.size % count:
        return Vote(
            slot.leaf.param.path,
            Source.NAMES,
            Role.UNKNOWN,
            f"{word} of {slot.size} is not a multiple of {count} heads",
            group=name,
        )
    reason = f"{word}, dim {slot.dim} holds {count} heads ({heads.evidence})"
    placement = Placement(slot.dim, units)
    return Vote(slot.leaf.param.path, Source.NAMES, role, reason, (placement,), name)


def _norm_votes(node: str, norms: list[Leaf], slots: list[Slot], heads: Heads) -> Iterator[Vote]:
    """A norm over all heads at once follows them; one of a head's width is the same on every
    device.
    """
    widths = {s.size: s for s in slots if s.leaf.name.word in KV_WORDS and not s.leaf.name.bias}
    widths |= {s.size: s for s in slots if s.leaf.name.word is Word.Q and not s.leaf.name.bias}
    for norm in norms:
        module = spaced(norm.nodes[0].rpartition("/")[2])
        is_key = re.search(r"\bk\b|\bkey\b", module) is not None
        if len(norm.sizes) != 1 or not (is_key or re.search(r"\bq\b|\bquery\b", module)):
            continue
        slot = widths.get(norm.sizes[0])
        if slot is None or slot.head_dim:
            continue
        units = heads.kv_units if is_key else heads.query_units
        reason = f"norm over all {math.prod(units)} heads at once, follows them"
        yield Vote(
            norm.param.path,
            Source.NAMES,
            Role.NORM,
            reason,
            (Placement(norm.core[0], units),),
            f"{node}:attention",
        )


def _table_votes(block: Block, known: dict[str, Heads]) -> Iterator[Vote]:
    """Tables with one entry per head follow the heads of the nearest attention blocks."""
    below: dict[str, set[Heads]] = {}
    for node, heads in known.items():
        parts = node.split("/") if node else []
        for n in range(len(parts) + 1):
            below.setdefault("/".join(parts[:n]), set()).add(heads)
    for leaf in block.leaves.values():
        if leaf.name.word is not Word.HEAD_TABLE:
            continue
        near = next((below[n] for n in leaf.nodes if n in below), set[Heads]())
        units = {h.query_units for h in near}
        counts = {h.query for h in near}
        fits = [d for d in leaf.core if {leaf.param.shape[d]} == counts]
        if len(fits) != 1 or len(units) != 1:
            reason = "one entry per head, but the heads' dim cannot be told apart"
            yield Vote(leaf.param.path, Source.NAMES, Role.HEAD_TABLE, reason)
            continue
        reason = f"dim {fits[0]} has one entry for each of {leaf.param.shape[fits[0]]} heads"
        placement = Placement(fits[0], next(iter(units)))
        yield Vote(leaf.param.path, Source.NAMES, Role.HEAD_TABLE, reason, (placement,))


def _check_given(
    block: Block, groups: Mapping[str, list[Leaf]], known: Mapping[str, Heads]
) -> None:
    """Given heads that fit nowhere are a mistake; two towers, of which one fits, are not."""
    dims = block.dims
    if not dims.heads or not groups or any(h.query == dims.heads for h in known.values()):
        return
    node, group = next(iter(groups.items()))
    kernels = [leaf.param for leaf in group if not leaf.name.bias]
    seen = join(f"{p.path} {list(p.shape)}" for p in kernels)
    raise SizeMismatch(
        f"{dims.heads} heads (kv {dims.kv_heads or dims.heads}) do not fit {seen}",
        where=node,
        fix="give the query and kv heads of one layer; their widths must divide these sizes",
    )
