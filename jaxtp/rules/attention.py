"""Attention blocks: which dim is the heads, how many there are, and who must be split together."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping

from jaxtp.errors import SizeMismatch, join
from jaxtp.rules import heads
from jaxtp.rules.heads import Heads
from jaxtp.rules.model_tree import Leaf, ModelTree, ancestors, lowest_common
from jaxtp.rules.path_words import head_norm
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import ATTENTION, ENTERS_ATTENTION, FUSED_QKV, Word

KV_WORDS = frozenset({Word.K, Word.V, Word.KV})
NARROWEST_HEAD = 8
"""No head is narrower, in elements: the product of queries and keys needs a multiple of 8."""

PARTED = FUSED_QKV | {Word.KV}


@dataclasses.dataclass(frozen=True, slots=True)
class Projection:
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


def votes(tree: ModelTree) -> Iterator[Vote]:
    """Votes for every attention block of a tree.

    Raises:
        SizeMismatch: TP003, if heads were given that fit no attention block of the tree.
    """
    members = [leaf for leaf in tree.leaves.values() if leaf.name.word in ATTENTION]
    groups = lowest_common(members, _at_home, lambda leaf: leaf.name.word)
    # A projection around whole blocks finds their queries below it, but none of its own.
    groups = {
        node: group
        for node, group in groups.items()
        if any(leaf.name.word in ENTERS_ATTENTION for leaf in group)
    }
    extras = _extras(tree, groups)
    tables = heads.table_sizes(tree)
    known: dict[str, Heads] = {}
    for node, group in groups.items():
        slots = [s for leaf in group if (s := _slot(tree, leaf)) is not None]
        near = next((tables[n] for n in _upwards(node) if n in tables), [])
        found = _heads(tree, slots, extras.get(node, []), near)
        yield from _group_votes(node, group, slots, found)
        if found is not None:
            known[node] = found
            yield from _norm_votes(node, extras.get(node, []), slots, found)
    _check_given(tree, groups, known)
    yield from _table_votes(tree, known)


def _at_home(words: Counter[object], leaf: Leaf) -> bool:
    return words[Word.O] > 0 and any(words[w] for w in ENTERS_ATTENTION)


def _extras(tree: ModelTree, groups: dict[str, list[Leaf]]) -> dict[str, list[Leaf]]:
    """Norms inside each attention block."""
    found: dict[str, list[Leaf]] = {}
    for leaf in tree.leaves.values():
        if leaf.name.word is Word.NORM:
            home = next((n for n in leaf.nodes if n in groups), None)
            if home is not None:
                found.setdefault(home, []).append(leaf)
    return found


def _slot(tree: ModelTree, leaf: Leaf) -> Projection | None:
    """Where the heads are in one array; None for an array that has none, such as an output bias."""
    word, sizes, dims = leaf.name.word, leaf.sizes, leaf.core
    rest = list(range(len(sizes)))
    if leaf.name.bias:
        if word is Word.O or not rest:
            return None
    elif len(rest) < 2:
        return None
    else:
        rest.remove(_model_dim(tree, leaf))
    parted = word not in PARTED
    if not parted and len(rest) > 1:
        parts = [i for i in rest if sizes[i] == (2 if word is Word.KV else 3)]
        if parts:
            rest.remove(parts[0])
            parted = True
    if len(rest) == 3 and word in (Word.Q, Word.O):
        rest = [rest[0], rest[2]]  # (kv heads, query heads per kv head, head_dim): cut at kv heads
    if len(rest) > 2 or not rest:
        return None
    head_dim = sizes[rest[1]] if len(rest) == 2 else 0
    return Projection(leaf, dims[rest[0]], sizes[rest[0]], head_dim, parted)


def _model_dim(tree: ModelTree, leaf: Leaf) -> int:
    """Index of the dim that is not heads: the residual stream, or a low rank that feeds the heads.

    Flat kernels are (in, out) unless the tree stores (out, in); 3-D ones are (embed, heads,
    head_dim) on the way in and (heads, head_dim, embed) on the way out, or have the heads first.
    """
    rank = len(leaf.sizes)
    entering = leaf.name.word is not Word.O
    if rank == 2:
        return 0 if entering != tree.out_first(leaf) else 1
    usual, other = (0, rank - 1) if entering else (rank - 1, 0)
    order = (usual, other, *range(1, rank - 1))
    for known in tree.known(leaf):
        found = next((i for i in order if leaf.sizes[i] in known), None)
        if found is not None:
            return found
    return usual


def _heads(
    tree: ModelTree, slots: list[Projection], norms: list[Leaf], tables: list[tuple[int, ...]]
) -> Heads | None:
    """Head counts of one block, from 3-D kernels, given sizes, norms, tables or usual widths."""
    kernels = [s for s in slots if not s.leaf.name.bias]
    query = next((s for s in kernels if s.leaf.name.word is Word.Q), None)
    whole = next((s for s in kernels if s.leaf.name.word is Word.O), query)
    if whole is None:
        return None
    kv = next((s for s in kernels if s.leaf.name.word in KV_WORDS and s.parted), None)
    if whole.head_dim:
        whole = query or whole
        count = kv.size if kv is not None and kv.head_dim else whole.size
        return Heads(whole.size, count, f"kernel of {whole.size} heads x {whole.head_dim}")
    # A query wider than the output carries a gate beside each head, or a position part.
    kv_size = whole.size if kv is None or kv.size > whole.size else kv.size
    grouped = next((s for s in kernels if _kv_width(s, slots)), None)
    kv_size = kv_size if grouped is None else _kv_width(grouped, slots)
    return heads.count(tree.dims, whole.size, kv_size, norms, tables)


def _upwards(node: str) -> tuple[str, ...]:
    return (node, *ancestors(node)) if node else ("",)


def _group_votes(
    node: str, group: list[Leaf], slots: list[Projection], found: Heads | None
) -> Iterator[Vote]:
    by_path = {s.leaf.param.path: s for s in slots}
    name = f"{node}:attention"
    for leaf in group:
        word, path = leaf.name.word, leaf.param.path
        slot = by_path.get(path)

        def replicated(role: Role, reason: str, path: str = path) -> Vote:
            return Vote(path, Source.NAMES, role, reason, group=name)

        if word is Word.O and leaf.name.bias:
            yield replicated(Role.ROW_BIAS, "bias of the output projection, added once")
        elif word is Word.LOW_RANK:
            yield replicated(Role.LOW_RANK, "low-rank factor: small, and its rank stays together")
        elif slot is None or found is None:
            yield replicated(
                Role.UNKNOWN, f"{word}, but the number of heads is unknown; give heads="
            )
        elif not (slot.parted or _per_head(slot, slots) or _kv_width(slot, slots)):
            yield replicated(
                Role.FUSED, f"{word} share {slot.size}, one after another or in unknown order"
            )
        else:
            yield _head_vote(name, slot, found)


def _per_head(slot: Projection, slots: list[Projection]) -> bool:
    """Whether q, k and v of each head lie together: only where there are as many of each."""
    outputs = {s.size for s in slots if s.leaf.name.word is Word.O}
    return slot.leaf.name.word is Word.QKV_PER_HEAD and outputs == {slot.size // 3}


def _kv_width(slot: Projection, slots: list[Projection]) -> int:
    """Width of all keys in a projection that holds them per kv head, 0 if it holds none so.

    Queries are as wide as the output; with as many kv heads as heads the order is open.
    """
    words = (Word.QKV_PER_GROUP, Word.QKV_PER_HEAD)
    outputs = {s.size for s in slots if s.leaf.name.word is Word.O and not s.leaf.name.bias}
    if slot.leaf.name.word not in words or slot.head_dim or len(outputs) != 1:
        return 0
    (query,) = outputs
    rest = slot.size - query
    return rest // 2 if 0 < rest < 2 * query and rest % 2 == 0 else 0


def _head_vote(name: str, slot: Projection, found: Heads) -> Vote:
    word = slot.leaf.name.word
    grouped = slot.leaf.name.word in FUSED_QKV and found.kv < found.query
    units = found.kv_units if word in KV_WORDS or grouped else found.query_units
    count = math.prod(units)
    role = Role.ROW if word is Word.O else Role.COLUMN_BIAS if slot.leaf.name.bias else Role.COLUMN
    if slot.size % count or not _holds(slot, found):
        return Vote(
            slot.leaf.param.path,
            Source.NAMES,
            Role.UNKNOWN,
            f"{word} of {slot.size} is not a multiple of {count} {found.noun}",
            group=name,
        )
    noun = found.noun.removesuffix("s") if count == 1 else found.noun
    reason = f"{word}, dim {slot.dim} holds {count} {noun} ({found.evidence})"
    placement = Placement(slot.dim, units)
    assumed = found.noun == "pieces"
    return Vote(
        slot.leaf.param.path, Source.NAMES, role, reason, (placement,), name, assumed=assumed
    )


def _holds(slot: Projection, found: Heads) -> bool:
    """Whether a flat kernel is wide enough for these heads; one head of an indexer is not."""
    count = found.kv if slot.leaf.name.word in KV_WORDS else found.query
    return slot.leaf.name.bias or slot.head_dim > 0 or slot.size >= NARROWEST_HEAD * count


def _norm_votes(
    node: str, norms: list[Leaf], slots: list[Projection], found: Heads
) -> Iterator[Vote]:
    """A norm over all heads at once follows them; one as wide as a head is replicated."""
    kernels = [s for s in slots if not s.leaf.name.bias and not s.head_dim and _holds(s, found)]
    for norm in norms:
        kind = head_norm(norm.name.stem)
        words = KV_WORDS if kind.startswith("k") else {Word.Q}
        widths = {s.size for s in kernels if s.leaf.name.word in words}
        if not kind or math.prod(norm.sizes) not in widths:
            continue
        units = found.kv_units if kind.startswith("k") else found.query_units
        count = math.prod(units)
        dim = norm.core[0] if len(norm.sizes) == 1 or norm.sizes[0] == count else norm.core[-1]
        if norm.param.shape[dim] % count:
            continue
        reason = f"norm over all {count} heads at once, follows them"
        placement = Placement(dim, units)
        yield Vote(
            norm.param.path, Source.NAMES, Role.NORM, reason, (placement,), f"{node}:attention"
        )


def _table_votes(tree: ModelTree, known: dict[str, Heads]) -> Iterator[Vote]:
    """Tables with one entry per head follow the heads of the nearest attention blocks."""
    below: dict[str, set[Heads]] = {}
    for node, found in known.items():
        parts = node.split("/") if node else []
        for n in range(len(parts) + 1):
            below.setdefault("/".join(parts[:n]), set()).add(found)
    for leaf in tree.leaves.values():
        if leaf.name.word is not Word.HEAD_TABLE:
            continue
        near = next((below[n] for n in leaf.nodes if n in below), set[Heads]())
        units = {h.query_units for h in near}
        counts = {h.query for h in near}
        dims = leaf.core[-1:] if leaf.looked_up else leaf.core
        fits = [d for d in dims if {leaf.param.shape[d]} == counts]
        if len(fits) != 1 or len(units) != 1:
            reason = "one entry per head, but the heads' dim cannot be told apart"
            yield Vote(leaf.param.path, Source.NAMES, Role.HEAD_TABLE, reason)
            continue
        reason = f"dim {fits[0]} has one entry for each of {leaf.param.shape[fits[0]]} heads"
        placement = Placement(fits[0], next(iter(units)))
        yield Vote(leaf.param.path, Source.NAMES, Role.HEAD_TABLE, reason, (placement,))


def _check_given(
    tree: ModelTree, groups: Mapping[str, list[Leaf]], known: Mapping[str, Heads]
) -> None:
    """Given heads that fit nowhere are a mistake; two towers, of which one fits, are not."""
    dims = tree.dims
    fits = any(dims.heads in (h.query, h.kv) for h in known.values())
    if not dims.heads or not dims.insist or not groups or fits:
        return
    node, group = next(iter(groups.items()))
    kernels = [leaf.param for leaf in group if not leaf.name.bias]
    seen = join(f"{p.path} {list(p.shape)}" for p in kernels)
    raise SizeMismatch(
        f"{dims.heads} heads (kv {dims.kv_heads or dims.heads}) do not fit {seen}",
        where=node,
        fix="give the query and kv heads of one layer; their widths must divide these sizes",
    )
