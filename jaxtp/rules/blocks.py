"""A tree as blocks: what each leaf is for, which dims are stacks, and which leaves belong together.

Stage in: `{path: Param}`. Stage out: `Block`, which `attention.py`, `mlp.py` and `vocab.py` read.
Nothing is decided here.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from jaxtp.rules import words
from jaxtp.rules.dims import ModelDims
from jaxtp.rules.words import Name, Word
from jaxtp.trees import Param


@dataclasses.dataclass(slots=True)
class Leaf:
    """One array and what its name says.

    Attributes:
        param: The array.
        name: What its path says.
        nodes: Ancestors of the leaf, the innermost first, the root ("") last.
        stack: The layer dim of a scanned stack, or None.
    """

    param: Param
    name: Name
    nodes: tuple[str, ...]
    stack: int | None = None

    @property
    def core(self) -> tuple[int, ...]:
        """Dims that are not the layer dim."""
        return tuple(d for d in range(len(self.param.shape)) if d != self.stack)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the core dims, in elements."""
        return tuple(self.param.shape[d] for d in self.core)


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A whole tree, read.

    Attributes:
        leaves: Every leaf by path.
        dims: Sizes the user gave.
        streams: Sizes of the residual stream: the given one and the width of token tables.
        widths: Sizes of norm vectors, a weaker sign of the same.
        out_first: Whether flat kernels are stored (out, in), as FlaxConv1D and PyTorch do.
    """

    leaves: Mapping[str, Leaf]
    dims: ModelDims
    streams: frozenset[int]
    widths: frozenset[int]
    out_first: bool

    def stream_dim(self, sizes: tuple[int, ...], prefer: Iterable[int]) -> int | None:
        """Index of the residual-stream dim in `sizes`, trying `prefer` in order, or None."""
        order = tuple(prefer)
        for known in (self.streams, self.widths):
            found = [i for i in order if sizes[i] in known]
            if found:
                return found[0]
        return None


def read(params: Mapping[str, Param], dims: ModelDims) -> Block:
    """Names, widths and stacks of a tree."""
    attention = _attention_nodes(params)
    leaves = {
        path: Leaf(param, words.read(path, attention), ancestors(path))
        for path, param in params.items()
    }
    streams = {dims.hidden_size} - {0}
    for leaf in leaves.values():
        shape = leaf.param.shape
        if leaf.name.word is Word.TOKENS and not leaf.name.bias and len(shape) == 2:
            streams.add(shape[1] if shape[0] not in streams else shape[0])
    norms = [leaf for leaf in leaves.values() if leaf.name.word is Word.NORM]
    widths = {leaf.param.shape[-1] for leaf in norms if len(leaf.param.shape) == 1}
    _mark_stacks(leaves.values(), norms, streams, dims)
    return Block(
        leaves=leaves,
        dims=dims,
        streams=frozenset(streams),
        widths=frozenset(widths | {max(n.sizes) for n in norms if n.stack is not None}),
        out_first=_out_first(leaves.values(), streams | widths),
    )


def ancestors(path: str) -> tuple[str, ...]:
    """Every node above a leaf, the innermost first, the root ("") last.

    >>> ancestors("h/0/attn/kernel")
    ('h/0/attn', 'h/0', 'h', '')
    """
    parts = path.split("/")[:-1]
    return tuple("/".join(parts[:n]) for n in range(len(parts), -1, -1))


def lowest_common(
    leaves: Iterable[Leaf],
    complete: Callable[[Counter[object], Leaf], bool],
    key: Callable[[Leaf], object],
) -> dict[str, list[Leaf]]:
    """Groups leaves by the lowest node at which a leaf finds what it needs.

    Args:
        leaves: Candidates.
        complete: Given the keys counted below a node, whether this leaf is at home there.
        key: What is counted.

    Returns:
        Node path -> its leaves. Leaves at home nowhere are left out.
    """
    items = list(leaves)
    below: defaultdict[str, Counter[object]] = defaultdict(Counter)
    for leaf in items:
        for node in leaf.nodes:
            below[node][key(leaf)] += 1
    homes: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in items:
        home = next((n for n in leaf.nodes if complete(below[n], leaf)), None)
        if home is not None:
            homes[home].append(leaf)
    return dict(homes)


def _attention_nodes(params: Mapping[str, Param]) -> frozenset[str]:
    """Nodes that hold a query, a key and a value, whatever they are called."""
    children: defaultdict[str, set[Word]] = defaultdict(set)
    for path in params:
        parts = path.split("/")
        for i in range(max(1, len(parts) - 2), len(parts)):
            children["/".join(parts[:i])].add(words.attention_word(parts[i]))
    return frozenset(n for n, found in children.items() if {Word.Q, Word.K, Word.V} <= found)


def _mark_stacks(
    leaves: Iterable[Leaf], norms: Iterable[Leaf], streams: set[int], dims: ModelDims
) -> None:
    """Finds layer dims: under a module whose norm scales are (layers, width) or (width, layers)."""
    stacks: dict[str, tuple[int, int]] = {}
    for norm in norms:
        shape = norm.param.shape
        if len(shape) != 2 or len(norm.nodes) < 2:
            continue
        width = next((d for d in (1, 0) if shape[d] in streams), 1)
        # nodes[0] is the norm module itself; what it normalises for are its siblings.
        stacks.setdefault(norm.nodes[1], (1 - width, shape[1 - width]))
    for leaf in leaves:
        found = next((stacks[n] for n in leaf.nodes if n in stacks), None)
        shape = leaf.param.shape
        if found is not None and len(shape) > found[0] and shape[found[0]] == found[1]:
            leaf.stack = found[0]
        elif _looks_stacked(leaf, dims):
            leaf.stack = 0


def _looks_stacked(leaf: Leaf, dims: ModelDims) -> bool:
    """Without norms to go by: a leading dim as long as the model is deep, in no numbered layer."""
    shape = leaf.param.shape
    numbered = any(part.rpartition("_")[2].isdigit() for part in leaf.param.path.split("/"))
    deep = bool(dims.layers) and len(shape) > 2 and shape[0] == dims.layers != dims.heads
    return deep and not numbered and shape[0] not in (dims.kv_heads, dims.experts)


def _out_first(leaves: Iterable[Leaf], streams: set[int]) -> bool:
    """Whether flat kernels that enter a block are stored (out, in): most of the non-square."""
    enters = {Word.IN, Word.IN_FUSED, Word.Q, Word.K, Word.V, Word.QKV, Word.QKV_PER_HEAD}
    balance = 0
    for leaf in leaves:
        if leaf.name.word in enters and not leaf.name.bias and len(leaf.sizes) == 2:
            a, b = (size in streams for size in leaf.sizes)
            balance += b - a
    return balance > 0
