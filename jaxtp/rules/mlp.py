"""MLPs and experts: matrices that share an inner width.

A pair shows in the shapes: one matrix is (a, b), its partner (b, a), and the inner width is the one
that is not the residual stream. Names are needed only where the shapes cannot tell: square
matrices, and stacked experts against stacked layers.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from jaxtp.rules.model_tree import Leaf, ModelTree
from jaxtp.rules.roles import Placement, Role, Source, Vote
from jaxtp.rules.words import ATTENTION, Word

NOT_MLP = ATTENTION | {
    *(Word.NORM, Word.TOKENS, Word.HEAD, Word.POSITION, Word.HEAD_TABLE, Word.CONV),
    *(Word.ROUTER, Word.FOLLOWER, Word.CACHE, Word.MODULATION),
}

LOWEST_INNER = 16
"""Widths below this part of the residual stream are ranks, whatever the matrices are called."""


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

    def partners(self, out_first: bool) -> Iterator[tuple[tuple[object, ...], int]]:
        """Keys of matrices that would make a pair with this, and the inner width (0: either).

        Args:
            out_first: Whether flat kernels are stored (out, in) here; stacks may be either way.
        """
        a, b = self.a, self.b
        enters = self.leaf.name.word in (Word.IN, Word.IN_FUSED)
        other = Word.OUT if enters else Word.IN
        if a == b:
            yield self.key(a, b, other), a
            if self.leaf.name.word is not Word.OUT:
                return
        yield self.key(b, a), 0
        if self.stack is not None or not out_first:  # gate and up together as (in, 2 inner)
            yield self.key(b // 2, a, other), b // 2
            yield self.key(b, 2 * a, other), a
        if self.stack is not None or out_first:  # or as (2 inner, in)
            yield self.key(b, a // 2, other), a // 2
            yield self.key(2 * b, a, other), b


Option = tuple[int, int | None, int]
"""An inner width, and the dim and size of the stack that the matrices have in common."""

Options = dict[Option, list[Matrix]]


def votes(tree: ModelTree) -> Iterator[Vote]:
    """Votes for every MLP and expert block of a tree, biases included.

    Nodes are visited from the leaves of the tree to its root; a matrix is decided at the lowest
    node that has a partner for it, so that layers and experts pair within themselves.
    """
    pending: defaultdict[str, list[Leaf]] = defaultdict(list)
    biases: defaultdict[str, list[Leaf]] = defaultdict(list)
    routers = _sizes_near(tree, {Word.ROUTER})
    gates = _sizes_near(tree, {Word.ROUTER, Word.IN})  # "gate" may mean either
    for leaf in tree.leaves.values():
        if leaf.name.bias:
            biases[leaf.name.stem].append(leaf)
        elif leaf.name.word in NOT_MLP or leaf.looked_up:
            continue
        elif len(_dims(leaf)) in (2, 3) or 2 in leaf.sizes:
            pending[leaf.nodes[0]].append(leaf)
    nodes = dict.fromkeys(n for leaf in tree.leaves.values() for n in leaf.nodes)
    for node in sorted(nodes, key=lambda n: (-n.count("/") - bool(n), n)):
        leaves = pending.pop(node, [])
        for inner, members in _pairs(tree, leaves, gates[node] | {tree.dims.experts}):
            used = {m.leaf.param.path for m in members}
            leaves = [leaf for leaf in leaves if leaf.param.path not in used]
            yield from _pair_votes(tree, node, inner, members, gates[node], biases)
        for vote in _flattened_votes(tree, node, leaves, routers[node]):
            leaves = [leaf for leaf in leaves if leaf.param.path != vote.path]
            yield vote
        if node and leaves:
            pending[node.rpartition("/")[0]].extend(leaves)


def _sizes_near(tree: ModelTree, named: set[Word]) -> defaultdict[str, set[int]]:
    """Node -> sizes of kernels of that name up to three levels below it."""
    found: defaultdict[str, set[int]] = defaultdict(set)
    for leaf in tree.leaves.values():
        if leaf.name.word in named and len(leaf.sizes) == 2:
            for node in leaf.nodes[:4]:
                found[node] |= set(leaf.sizes)
    return found


def _dims(leaf: Leaf) -> tuple[int, ...]:
    """The dims of a matrix, without a pointwise convolution's window of one."""
    pointwise = leaf.name.word in (Word.IN, Word.OUT) and len(leaf.core) > 2
    return tuple(d for d in leaf.core if not pointwise or leaf.param.shape[d] > 1)


def _views(leaf: Leaf) -> Iterator[Matrix]:
    dims = _dims(leaf)
    apart = next((d for d in dims if leaf.param.shape[d] == 2), None) if len(dims) > 2 else None
    if apart is not None or len(dims) == 2:  # gate and up may have a dim of their own
        yield from _views_of(leaf, tuple(d for d in dims if d != apart))
    if len(dims) == 3:
        yield from _views_of(leaf, dims)


def _views_of(leaf: Leaf, dims: tuple[int, ...]) -> Iterator[Matrix]:
    if len(dims) == 2:
        yield Matrix(leaf, None, *dims)
    elif len(dims) == 3:
        for stack in dims:
            yield Matrix(leaf, stack, *(d for d in dims if d != stack))


def _pairs(
    tree: ModelTree, leaves: list[Leaf], routed: set[int]
) -> Iterator[tuple[int, list[Matrix]]]:
    """(inner width, its matrices) at one node, the width that covers most first."""
    if len(leaves) < 2:
        return
    views = [m for leaf in leaves for m in _views(leaf) if min(m.a, m.b) > 1]
    present = Counter(m.own_key for m in views)
    options: Options = {}
    for m in views:
        for key, inner in m.partners(tree.out_first(m.leaf)):
            if present[key]:
                width = inner or _inner_width(tree, m)
                options.setdefault((width, m.stack, m.count), []).append(m)
                break
    options = options or _alike(tree, views) or _chain(tree, views)
    options = {
        k: v
        for k, v in options.items()
        if (not _low_rank(k, v) if _named(v) else not _doubtful(k, v, views, routed))
    }
    used: set[str] = set()
    for (inner, _, _), members in sorted(options.items(), key=_covered):
        free = [m for m in members if m.leaf.param.path not in used]
        if len(free) > 1:
            used |= {m.leaf.param.path for m in free}
            yield inner, free


def _covered(option: tuple[Option, list[Matrix]]) -> tuple[int, int]:
    (_, stack, _), members = option
    # Equal sizes make several stack dims possible; the leading one is where stacks are kept.
    return (-sum(m.leaf.param.size for m in members), -1 if stack is None else stack)


def _inner_width(tree: ModelTree, m: Matrix) -> int:
    """Which size is inside the MLP: not the stream's, else as the name says, else the larger."""
    beside, word = _beside_stream(tree, m), m.leaf.name.word
    if beside or word not in (Word.IN, Word.OUT):
        return beside or max(m.a, m.b)
    in_first = m.stack is not None or not tree.out_first(m.leaf)
    return m.b if (word is Word.IN) == in_first else m.a


def _beside_stream(tree: ModelTree, m: Matrix) -> int:
    """The size that is not the residual stream's, 0 where both or neither may be."""
    for known in tree.known(m.leaf):
        if (m.a in known) != (m.b in known):
            return m.b if m.a in known else m.a
    return 0


def _named(members: Iterable[Matrix]) -> bool:
    """Whether a name says that this is an MLP, or all of them sit among experts."""
    sides = (Word.IN, Word.IN_FUSED, Word.OUT)
    members = list(members)
    named = any(m.leaf.name.word in sides for m in members)
    return named or all(m.leaf.name.experts for m in members)


def _low_rank(option: Option, members: Iterable[Matrix]) -> bool:
    """Whether the inner width is a rank, whatever the names say: factors of an adapter.

    Experts may be as narrow, since there are many of them.
    """
    return any(
        LOWEST_INNER * option[0] < max(m.a, m.b) and not (m.count > 1 and m.leaf.name.experts)
        for m in members
    )


def _doubtful(
    option: Option, members: list[Matrix], views: Iterable[Matrix], routed: set[int]
) -> bool:
    """Whether matrices that only fit by their sizes may be something else than an MLP."""
    inner, stack, count = option
    if stack is not None and count not in routed:
        return True  # the stack may be heads, and the inner width one head
    flat = [m for m in views if m.stack is None]
    if any(m.a == m.b == inner for m in flat):
        return True  # leaves open what comes first, or is a recurrence
    if any(4 * inner < max(m.a, m.b) for m in members):
        return True  # a low rank, or a few classes
    # Three matrices in for each one out are queries, keys and values; keys may be narrower.
    sides = Counter((m.a, m.b) for m in members)
    few = min(sides.values())
    spare = Counter((m.a, m.b) for m in flat if (m.a, m.b) not in sides and m.a != m.b)
    outer = {n for pair in sides for n in pair} - {inner}
    keys = sum(n for pair, n in spare.items() if outer & set(pair) and n >= 2 * few)
    return len(sides) > 1 and len(members) + keys >= 4 * few


def _alike(tree: ModelTree, views: Iterable[Matrix]) -> Options:
    """Matrices stored alike, (inner, stream) both ways, of which a name says that some enter."""
    options: defaultdict[Option, list[Matrix]] = defaultdict(list)
    for m in views:
        if m.stack is not None or not m.leaf.name.experts:  # experts may lie one after another
            inner = _beside_stream(tree, m) or max(m.a, m.b)
            options[(inner, m.stack, m.count)].append(m)
    return {
        option: members
        for option, members in options.items()
        if len({(m.a, m.b) for m in members}) == 1
        and members[0].a != members[0].b
        and {m.leaf.name.word is Word.IN for m in members} == {True, False}
        and not any(m.leaf.name.word is Word.IN_FUSED for m in members)
    }


def _chain(tree: ModelTree, views: Iterable[Matrix]) -> Options:
    """Without a residual stream: a width that one matrix ends in and another begins with.

    Two named matrices of one module need not differ: an adapter from one width to another.
    """
    flat = [m for m in views if m.stack is None]
    first, last = ([m for m in flat if m.leaf.name.word is word] for word in (Word.IN, Word.OUT))
    if len(first) == len(last) == 1 and first[0].leaf.nodes[1:] == last[0].leaf.nodes[1:]:
        turned = tree.out_first(first[0].leaf)
        inner = first[0].a if turned else first[0].b
        if inner == (last[0].b if turned else last[0].a):
            return {(inner, None, 0): [*first, *last]}
    # What enters an MLP begins with the residual stream, and what leaves it ends in it.
    outer = {m.a for m in first if not tree.out_first(m.leaf)} & {
        m.b for m in last if not tree.out_first(m.leaf)
    }
    ends, begins = {m.b for m in flat if m.a != m.b}, {m.a for m in flat if m.a != m.b}
    widths = (ends & begins) - tree.streams - tree.widths - outer
    return {(w, None, 0): [m for m in flat if (m.a == w) != (m.b == w)] for w in widths}


def _pair_votes(
    tree: ModelTree,
    node: str,
    inner: int,
    members: list[Matrix],
    routed: set[int],
    biases: dict[str, list[Leaf]],
) -> Iterator[Vote]:
    count = members[0].count
    group = f"{node}:mlp:{inner}" + (f":{count}" if count else "")
    named = all(m.leaf.name.experts for m in members)
    experts = count if count and (named or count == tree.dims.experts or count in routed) else 0
    partners = ", ".join(m.leaf.name.stem.removeprefix(f"{node}/") for m in members[:3])
    for m in members:
        dim = _inner_dim(tree, m, inner)
        out_first = tree.out_first(m.leaf) and m.stack is None
        alike = m.leaf.name.word is Word.IN and dim == m.rows
        role = Role.COLUMN if alike or (dim == m.cols) != out_first else Role.ROW
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


def _flattened_votes(
    tree: ModelTree, node: str, leaves: Iterable[Leaf], routed: set[int]
) -> Iterator[Vote]:
    """Experts one after another in one dim: (experts x inner, stream), each matrix stored alike."""
    flat = [leaf for leaf in leaves if leaf.name.experts and len(leaf.sizes) == 2]
    streams = tree.streams | tree.widths
    experts = tree.dims.experts or min(routed - streams, default=0)
    for leaf in flat if experts > 1 and len(flat) > 1 else ():
        outer = [d for d in leaf.core if leaf.param.shape[d] not in streams]
        if len(outer) == 1 and leaf.param.shape[outer[0]] % experts == 0:
            reason = f"dim {outer[0]} is {experts} experts one after another"
            choice = Placement(outer[0], (experts,))
            path, group = leaf.param.path, f"{node}:experts"
            yield Vote(path, Source.NAMES, Role.EXPERT, reason, (choice,), group)


def _inner_dim(tree: ModelTree, m: Matrix, inner: int) -> int:
    """The dim with the inner width, or with twice of it where gate and up share it."""
    if m.a != m.b:
        fits = [d for d, n in ((m.cols, m.b), (m.rows, m.a)) if n == inner]
        return fits[0] if fits else m.cols if m.b == 2 * inner else m.rows
    entering = m.leaf.name.word is not Word.OUT
    return m.cols if entering != (tree.out_first(m.leaf) and m.stack is None) else m.rows


def _bias_vote(bias: Leaf, inner: int, experts: int, group: str) -> Vote:
    """A bias follows what its matrix puts out: the inner width of a column, 0 for a row."""
    shape = bias.param.shape
    follows = next((Placement(d, (inner,)) for d in bias.core if inner and shape[d] == inner), None)
    role = Role.COLUMN_BIAS if follows else Role.ROW_BIAS
    reason = f"bias along the inner width {inner}" if follows else "bias added once, after the sum"
    choices: tuple[Placement | None, ...] = (follows,)
    stacked = next((d for d in bias.core if experts and shape[d] == experts), None)
    if stacked is not None:
        role, reason = Role.EXPERT, f"dim {stacked} is {experts} experts; {reason}"
        choices = (Placement(stacked, (experts,)), follows)
    elif experts:
        choices = (None, follows)
    return Vote(bias.param.path, Source.NAMES, role, reason, choices, group)
