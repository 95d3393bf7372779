"""MLPs and experts: matrices that share an inner width.

Stage in: a `Block`. Stage out: votes. A pair shows in the shapes: one matrix is (a, b), its partner
(b, a), and the inner width is the one that is not the residual stream. Names are needed only where
the shapes cannot tell: square matrices, and stacked experts against stacked layers.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from jaxtp.rules.blocks import Block, Leaf
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import ATTENTION, Word

NOT_MLP = ATTENTION | {
    *(Word.NORM, Word.TOKENS, Word.HEAD, Word.POSITION, Word.HEAD_TABLE, Word.CONV, Word.ROUTER)
}


@dataclasses.dataclass(frozen=True, slots=True)
class Matrix:
    """One way to see an array as a matrix.

    Attributes:
        leaf: The array.
        stack: The dim that stacks matrices (experts, or layers nobody named), or None.
        rows: The first dim of the matrix.
        cols: The second.
    """

    leaf: Leaf
    stack: int | None
    rows: int
    cols: int

    @property
    def count(self) -> int:
        """Size of the stack dim, 0 without one."""
        return 0 if self.stack is None else self.leaf.param.shape[self.stack]

    @property
    def a(self) -> int:
        """Size of the first dim."""
        return self.leaf.param.shape[self.rows]

    @property
    def b(self) -> int:
        """Size of the second dim."""
        return self.leaf.param.shape[self.cols]

    def key(self, a: int, b: int, side: Word = Word.NONE) -> tuple[object, ...]:
        """What a partner looks like: the same stack, sizes (a, b), and a side if it is square."""
        return (self.stack, self.count, a, b, side if a == b else Word.NONE)

    @property
    def own_key(self) -> tuple[object, ...]:
        """What this matrix looks like to others."""
        return self.key(self.a, self.b, self.leaf.name.word)

    def partners(self) -> Iterator[tuple[tuple[object, ...], int]]:
        """Keys of matrices that would make a pair with this, and the inner width (0: either)."""
        a, b = self.a, self.b
        other = Word.OUT if self.leaf.name.word is Word.IN else Word.IN
        if a == b:
            yield self.key(a, b, other), a
            return
        yield self.key(b, a), 0
        for x, y, inner in ((b // 2, a, b // 2), (b, 2 * a, a), (b, a // 2, a // 2), (2 * b, a, b)):
            yield self.key(x, y, other), inner


def votes(block: Block) -> Iterator[Vote]:
    """Votes for every MLP and expert block of a tree, biases included.

    Nodes are visited from the leaves of the tree to its root; a matrix is decided at the lowest
    node that has a partner for it, so that layers and experts pair within themselves.
    """
    pending: defaultdict[str, list[Leaf]] = defaultdict(list)
    biases: defaultdict[str, list[Leaf]] = defaultdict(list)
    routers: defaultdict[str, set[int]] = defaultdict(set)
    for leaf in block.leaves.values():
        word = leaf.name.word
        if leaf.name.bias:
            biases[leaf.name.stem].append(leaf)
        elif word not in NOT_MLP and len(leaf.core) in (2, 3):
            pending[leaf.nodes[0]].append(leaf)
        if word in (Word.ROUTER, Word.IN) and len(leaf.sizes) == 2:
            for node in leaf.nodes[:3]:
                routers[node] |= set(leaf.sizes)
    nodes = {n for leaf in block.leaves.values() for n in leaf.nodes}
    for node in sorted(nodes, key=lambda n: n.count("/") + bool(n), reverse=True):
        leaves = pending.pop(node, [])
        for inner, members in _pairs(block, leaves):
            used = {m.leaf.param.path for m in members}
            leaves = [leaf for leaf in leaves if leaf.param.path not in used]
            yield from _pair_votes(block, node, inner, members, routers[node], biases)
        if node and leaves:
            pending[node.rpartition("/")[0]].extend(leaves)


def _views(leaf: Leaf) -> Iterator[Matrix]:
    dims = leaf.core
    if len(dims) == 2:
        yield Matrix(leaf, None, *dims)
        return
    for stack in dims:
        rest = [d for d in dims if d != stack]
        yield Matrix(leaf, stack, *rest)
        if leaf.param.shape[stack] == 2:  # gate and up apart on a dim of their own
            yield Matrix(leaf, None, *rest)


def _pairs(block: Block, leaves: list[Leaf]) -> Iterator[tuple[int, list[Matrix]]]:
    """(inner width, its matrices) at one node, the width that covers most first."""
    if len(leaves) < 2:
        return
    views = [m for leaf in leaves for m in _views(leaf)]
    present = Counter(m.own_key for m in views)
    options: defaultdict[tuple[int, object, int], list[Matrix]] = defaultdict(list)
    for m in views:
        for key, inner in m.partners():
            if present[key] and min(m.a, m.b) > 1:
                width = inner or _inner_width(block, m.a, m.b)
                options[(width, m.stack, m.count)].append(m)
                break
    if not options:
        options = _chain(block, views)
    used: set[str] = set()
    for (inner, _, _), members in sorted(options.items(), key=_covered):
        free = [m for m in members if m.leaf.param.path not in used]
        if len(free) > 1:
            used |= {m.leaf.param.path for m in free}
            yield inner, free


def _covered(option: tuple[tuple[int, object, int], list[Matrix]]) -> tuple[int, int]:
    (_, stack, _), members = option
    # Equal sizes make several stack dims possible; the leading one is where stacks are kept.
    return (-sum(m.leaf.param.size for m in members), stack if isinstance(stack, int) else -1)


def _inner_width(block: Block, a: int, b: int) -> int:
    """Which of two sizes is inside the MLP: not the stream, else the larger."""
    for known in (block.streams, block.widths):
        if (a in known) != (b in known):
            return b if a in known else a
    return max(a, b)


def _chain(
    block: Block, views: Iterable[Matrix]
) -> defaultdict[tuple[int, object, int], list[Matrix]]:
    """Without a residual stream: a width that one matrix ends in and another begins with."""
    options: defaultdict[tuple[int, object, int], list[Matrix]] = defaultdict(list)
    flat = [m for m in views if m.stack is None]
    ends, begins = {m.b for m in flat}, {m.a for m in flat}
    for width in (ends & begins) - block.streams - block.widths:
        options[(width, None, 0)] = [m for m in flat if (m.a == width) != (m.b == width)]
    return options


def _pair_votes(
    block: Block,
    node: str,
    inner: int,
    members: list[Matrix],
    routed: set[int],
    biases: dict[str, list[Leaf]],
) -> Iterator[Vote]:
    group = f"{node}:mlp:{inner}"
    count = members[0].count
    named = all(m.leaf.name.experts for m in members)
    experts = count if count and (named or count == block.dims.experts or count in routed) else 0
    partners = ", ".join(m.leaf.name.stem.removeprefix(f"{node}/") for m in members[:3])
    for m in members:
        dim = _inner_dim(block, m, inner)
        out_first = block.out_first and m.stack is None
        role = Role.COLUMN if (dim == m.cols) != out_first else Role.ROW
        reason = f"inner width {inner} of {partners}"
        choice = Placement(dim, (inner,)) if m.leaf.param.shape[dim] == inner else None
        if choice is None:
            role, reason = Role.FUSED, f"gate and up one after another: {2 * inner} = 2 x {inner}"
        choices: tuple[Placement | None, ...] = (choice,)
        if experts and m.stack is not None:
            choices = (Placement(m.stack, (experts,)), choice)
            role, reason = Role.EXPERT, f"dim {m.stack} is {experts} experts; {reason}"
        yield Vote(m.leaf.param.path, Source.NAMES, role, reason, choices, group)
        for bias in biases.get(m.leaf.name.stem, ()):
            entering = role is Role.COLUMN or (role is Role.EXPERT and dim == m.cols)
            yield _bias_vote(bias, inner if entering and choice else 0, experts, group)


def _inner_dim(block: Block, m: Matrix, inner: int) -> int:
    """The dim with the inner width, or with twice of it where gate and up share it."""
    if m.a != m.b:
        fits = [d for d, n in ((m.cols, m.b), (m.rows, m.a)) if n == inner]
        return fits[0] if fits else m.cols if m.b == 2 * inner else m.rows
    entering = m.leaf.name.word is not Word.OUT
    return m.cols if entering != (block.out_first and m.stack is None) else m.rows


def _bias_vote(bias: Leaf, inner: int, experts: int, group: str) -> Vote:
    """A bias follows what its matrix puts out: the inner width of a column, 0 for a row."""
    shape = bias.param.shape
    follows = next((Placement(d, (inner,)) for d in bias.core if inner and shape[d] == inner), None)
    role = Role.COLUMN_BIAS if follows else Role.ROW_BIAS
    reason = f"bias along the inner width {inner}" if follows else "bias added once, after the sum"
    choices: tuple[Placement | None, ...] = (follows,)
    if experts:
        stacked = next((d for d in bias.core if shape[d] == experts), None)
        choices = (None if stacked is None else Placement(stacked, (experts,)), follows)
    return Vote(bias.param.path, Source.NAMES, role, reason, choices, group)
