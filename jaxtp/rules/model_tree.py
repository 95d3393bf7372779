"""What the names and shapes of a whole tree say: what each leaf is for, and which dims are stacks.

Nothing is decided here.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

from jaxtp.plan.trees import Param
from jaxtp.rules import path_words
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.path_words import Name
from jaxtp.rules.words import FUSED_QKV, TABLES, Word

LONGEST_WINDOW = 7
"""Elements of a convolution's window on a side, in attention and in front of it."""


@dataclasses.dataclass(slots=True)
class Leaf:
    """One array and what its name says.

    Attributes:
        param: The array.
        name: What its path says.
        nodes: Ancestors of the leaf, the innermost first, the root ("") last.
        core: Dims that are not the layer dim of a scanned stack.
        sizes: Sizes of the core dims, in elements.
        layer: The dim that counts layers, or None.
    """

    param: Param
    name: Name
    nodes: tuple[str, ...]
    core: tuple[int, ...]
    sizes: tuple[int, ...]
    layer: int | None = None

    @property
    def looked_up(self) -> bool:
        """Whether its rows are picked by index, as the last part of its path says."""
        last = self.param.path.rpartition("/")[2]
        return last in TABLES or (last == "weight" and self.name.word is Word.HEAD_TABLE)

    def mark_stack(self, dim: int) -> None:
        """Takes one dim out of the core: it counts layers."""
        self.layer = dim
        self.core = tuple(d for d in range(len(self.param.shape)) if d != dim)
        self.sizes = tuple(self.param.shape[d] for d in self.core)


@dataclasses.dataclass(frozen=True, slots=True)
class ModelTree:
    """A whole tree as its names and shapes describe it.

    Attributes:
        leaves: Every leaf by path.
        dims: Sizes the user gave.
        streams: Sizes of the residual stream: the given one and the width of token tables.
        widths: Sizes of norm vectors, a weaker sign of the same.
        near: Node -> sizes of norm vectors below it: a tower or stage may have a width of its own.
        order: Node -> how many kernels below it are stored (out, in), as FlaxConv1D and PyTorch
            do, less how many are stored (in, out).
    """

    leaves: Mapping[str, Leaf]
    dims: ModelDims
    streams: frozenset[int]
    widths: frozenset[int]
    near: Mapping[str, frozenset[int]]
    order: Mapping[str, int]

    def known(self, leaf: Leaf) -> tuple[frozenset[int], ...]:
        """Sets of residual-stream widths for a leaf, the best evidence first.

        A norm right beside a block tells more than the token table of the whole model.
        """
        near = next((self.near[n] for n in leaf.nodes if n in self.near), frozenset[int]())
        return (near, self.streams, self.widths)

    def out_first(self, leaf: Leaf) -> bool:
        """Whether flat kernels near a leaf are stored (out, in)."""
        return next((self.order[n] for n in leaf.nodes if self.order.get(n)), 0) > 0


def read(params: Mapping[str, Param], dims: ModelDims) -> ModelTree:
    """Names, widths and stacks of a tree."""
    attention = _attention_nodes(params)
    leaves = {
        path: Leaf(
            param,
            path_words.read(path, attention),
            ancestors(path),
            tuple(range(len(param.shape))),
            param.shape,
        )
        for path, param in params.items()
    }
    _mark_scales(leaves.values())
    _mark_factors(leaves.values())
    _mark_modulations(leaves.values())
    _mark_listed_biases(leaves.values())
    _mark_bias_modules(leaves.values())
    _mark_outputs(leaves.values())
    _mark_numbered(leaves.values())
    streams = {dims.hidden_size} - {0}
    for leaf in leaves.values():
        shape = leaf.param.shape
        if leaf.name.word is Word.TOKENS and not leaf.name.bias and len(shape) == 2:
            streams.add(shape[1] if shape[0] not in streams else shape[0])
    norms = [leaf for leaf in leaves.values() if leaf.name.word is Word.NORM]
    _mark_stacks(leaves.values(), norms, streams, dims)
    near: defaultdict[str, set[int]] = defaultdict(set)
    for norm in norms:
        ours = len(norm.sizes) == 1 and not path_words.head_norm(norm.name.stem)
        for node in _around(norm) if ours else ():
            near[node].add(norm.sizes[0])
    widths = frozenset(near.get("", ()))
    return ModelTree(
        leaves=leaves,
        dims=dims,
        streams=frozenset(streams),
        widths=widths,
        near={node: frozenset(found) for node, found in near.items()},
        order=_order(leaves.values(), widths | frozenset(streams)),
    )


def ancestors(path: str) -> tuple[str, ...]:
    """Every node above a leaf, the innermost first, the root ("") last.

    >>> ancestors("h/0/attn/kernel")
    ('h/0/attn', 'h/0', 'h', '')
    """
    parts = path.split("/")[:-1]
    return tuple("/".join(parts[:n]) for n in range(len(parts), -1, -1))


def _around(norm: Leaf) -> tuple[str, ...]:
    """Nodes above a norm, without the module that is the norm itself."""
    own = norm.name.stem == norm.nodes[0]
    return norm.nodes[1:] if own else norm.nodes


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
    """Nodes that hold a query, a key and a value, fused or not, whatever they are called."""
    children: defaultdict[str, set[Word]] = defaultdict(set)
    for path in params:
        parts = path.split("/")
        for i in range(max(0, len(parts) - 2), len(parts)):
            children["/".join(parts[:i])].add(path_words.attention_word(parts[i]))
    together = (
        {Word.Q, Word.K, Word.V},
        {Word.Q, Word.KV},
        {Word.Q, Word.KV_UP},
        {Word.Q_UP, Word.KV_UP},
    )
    return frozenset(n for n, found in children.items() if any(t <= found for t in together))


def _mark_scales(leaves: Collection[Leaf]) -> None:
    """A scale or zero point beside a matrix is of a quantised weight, else of a norm."""
    parts = {leaf.param.path: path_words.follower(leaf.param.path.split("/")) for leaf in leaves}
    matrices = {
        leaf.name.stem
        for leaf in leaves
        if len(leaf.param.shape) > 1 and not leaf.name.bias and not parts[leaf.param.path][0]
    }
    for leaf in leaves:
        follows, stem = parts[leaf.param.path]
        if follows == path_words.SCALES and stem in matrices:
            leaf.name = leaf.name._replace(word=Word.FOLLOWER, stem=stem, follows=follows)


def _mark_factors(leaves: Iterable[Leaf]) -> None:
    """Two factors called A and B beside the one kernel that they adapt; alone they may be anything.

    State-space models have an A and a B too, but no rank that both share beside a kernel.
    """
    beside: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if len(leaf.param.shape) > 1:
            beside[leaf.nodes[0]].append(leaf)
    for node, items in beside.items():
        parts = {leaf.param.path.rpartition("/")[2].lower(): leaf for leaf in items}
        if len(items) != 3 or not {"a", "b"} < parts.keys():
            continue
        a, b = parts["a"], parts["b"]
        kernel = next(leaf for leaf in items if leaf is not a and leaf is not b)
        rank = a.sizes[-1]  # B is (rank, out), one for each layer, or (rank, heads, head_dim)
        shared = rank in (b.sizes[0], b.sizes[-2]) and rank < min(kernel.sizes[-2:])
        if shared and kernel.name.stem == node:
            for leaf, side in ((a, path_words.ADAPTER_A), (b, path_words.ADAPTER_B)):
                leaf.name = Name(Word.FOLLOWER, False, kernel.name.experts, node, side)


def _mark_modulations(leaves: Collection[Leaf]) -> None:
    """A kernel in a module named like a norm makes the norm's scales; it is none itself."""
    found = {
        leaf.name.stem
        for leaf in leaves
        if leaf.name.word is Word.NORM
        and len(leaf.param.shape) > 1
        and leaf.param.path.rpartition("/")[2] == "kernel"
    }
    for leaf in leaves if found else ():
        if leaf.name.stem in found:
            leaf.name = leaf.name._replace(word=Word.MODULATION)


def _mark_listed_biases(leaves: Iterable[Leaf]) -> None:
    """In trees of plain lists a vector beside one matrix is its bias: nothing has a name there."""
    lists: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.param.path.rpartition("/")[2].isdigit():
            lists[leaf.nodes[0]].append(leaf)
    for node, items in lists.items():
        ranks = [len(leaf.param.shape) for leaf in items]
        if ranks.count(1) == 1 and len(items) == 2:
            for leaf in items:
                leaf.name = leaf.name._replace(stem=node, bias=len(leaf.param.shape) == 1)


def _mark_bias_modules(leaves: Iterable[Leaf]) -> None:
    """A module "bias" beside the one module that holds the kernel has the stem of that kernel."""
    beside: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        beside[leaf.name.stem.rpartition("/")[0]].append(leaf)
    for items in beside.values():
        kernels = [leaf for leaf in items if not leaf.name.bias and len(leaf.sizes) > 1]
        for leaf in items if len(kernels) == 1 else ():
            if leaf.name.bias and leaf.name.stem.endswith("/"):
                kernel = kernels[0].name
                leaf.name = leaf.name._replace(stem=kernel.stem, word=kernel.word)


def _mark_outputs(leaves: Iterable[Leaf]) -> None:
    """Beside an output that has the queries' sizes turned, others ("dense_proj") are none."""
    beside: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        beside[leaf.name.stem.rpartition("/")[0]].append(leaf)
    for items in beside.values():
        kernels = [leaf for leaf in items if not leaf.name.bias and len(leaf.sizes) == 2]
        turned = {leaf.sizes[::-1] for leaf in kernels if leaf.name.word is Word.Q}
        outputs = [leaf for leaf in kernels if leaf.name.word is Word.O]
        fits = {leaf.name.stem for leaf in outputs if leaf.sizes in turned}
        others = {leaf.name.stem for leaf in outputs if leaf.sizes not in turned} if fits else ()
        for leaf in items:
            if leaf.name.stem in others and not leaf.name.follows:
                leaf.name = leaf.name._replace(word=Word.NONE)


def _mark_numbered(leaves: Collection[Leaf]) -> None:
    """Square kernels that only numbers tell apart run in their order: every second one leaves.

    In an MLP, or where each number leaves one out, as functions between the layers of a Sequential
    do: elements of a list have all numbers. Only in pairs: after three nothing ends the last.
    """
    kernels: defaultdict[tuple[str, tuple[int, ...]], list[tuple[int, Leaf]]] = defaultdict(list)
    for leaf in leaves:
        told = leaf.name.bias or leaf.name.experts or leaf.name.word is not Word.NONE
        if told or len(leaf.sizes) != 2 or leaf.sizes[0] != leaf.sizes[1]:
            continue
        prefix, number, rest = path_words.numbered(leaf.name.stem)
        if number is not None and rest in ("", "/proj"):
            kernels[prefix, leaf.sizes].append((number, leaf))
    if not kernels:
        return
    nodes = {node for leaf in leaves for node in (leaf.name.stem, *leaf.nodes)}
    taken = {path_words.numbered(node)[:2] for node in nodes}
    for (prefix, _), found in kernels.items():
        numbers = [number for number, _ in found]
        alone = len(set(numbers)) == len(numbers)
        apart = not any((prefix, n + d) in taken for n in numbers for d in (-1, 1))
        if len(numbers) % 2 == 0 and alone and (apart or path_words.in_mlp(prefix)):
            for place, (_, leaf) in enumerate(sorted(found, key=lambda one: one[0])):
                leaf.name = leaf.name._replace(word=Word.OUT if place % 2 else Word.IN)


def _mark_stacks(
    leaves: Iterable[Leaf], norms: Iterable[Leaf], streams: set[int], dims: ModelDims
) -> None:
    """Finds layer dims: under a module whose norm scales are (layers, width) or (width, layers)."""
    held = {
        (node, d, size)
        for leaf in leaves
        if len(leaf.param.shape) > 2
        for node in leaf.nodes
        for d, size in enumerate(leaf.param.shape)
    }
    stacks: dict[str, tuple[int, int]] = {}
    scales = [n for n in norms if len(n.param.shape) == 2]
    for norm in sorted(scales, key=lambda n: not streams & set(n.param.shape)):
        shape, node = norm.param.shape, _around(norm)[0]
        if any(n in stacks and shape[stacks[n][0]] == stacks[n][1] for n in norm.nodes):
            continue
        known = next((d for d in (1, 0) if shape[d] in streams), None)
        # Without a known width the layers are the smaller dim: no model is deeper than wide.
        layer = (0 if shape[0] <= shape[1] else 1) if known is None else 1 - known
        if (node, layer, shape[layer]) in held:
            stacks.setdefault(node, (layer, shape[layer]))
    for leaf in leaves:
        found = next((stacks[n] for n in leaf.nodes if n in stacks), None)
        shape = leaf.param.shape
        if found is not None and len(shape) > found[0] and shape[found[0]] == found[1]:
            leaf.mark_stack(found[0])
        elif _looks_stacked(leaf, dims):
            leaf.mark_stack(0)
    _mark_stacked_attention(leaves)


def _mark_stacked_attention(leaves: Iterable[Leaf]) -> None:
    """Without norms to go by: keys of four dims count layers, as no heads need more than three.

    Two short dims in front are the window of a convolution.
    """
    beside: defaultdict[str, list[Leaf]] = defaultdict(list)
    for leaf in leaves:
        if leaf.layer is None and leaf.name.word in (Word.Q, Word.K, Word.V, Word.O):
            beside[leaf.name.stem.rpartition("/")[0]].append(leaf)
    for items in beside.values():
        kernels = [leaf for leaf in items if not leaf.name.bias]
        words = {
            leaf.name.word
            for leaf in kernels
            if len(leaf.param.shape) == 4 and max(leaf.param.shape[:2]) > LONGEST_WINDOW
        }
        first = {leaf.param.shape[:1] for leaf in items}
        if {Word.Q, Word.K, Word.V} <= words and len(first) == 1:
            for leaf in items:
                leaf.mark_stack(0)


def _looks_stacked(leaf: Leaf, dims: ModelDims) -> bool:
    """Without norms to go by: a leading dim as long as the model is deep, in no numbered layer."""
    if len(leaf.param.shape) < 3 or leaf.param.shape[0] != dims.layers:
        return False
    numbered = any(part.rpartition("_")[2].isdigit() for part in leaf.param.path.split("/"))
    return not numbered and dims.layers not in (dims.heads, dims.kv_heads, dims.experts)


def _order(leaves: Iterable[Leaf], streams: frozenset[int]) -> dict[str, int]:
    """Per node, kernels stored (out, in) less kernels stored (in, out).

    A bias is as long as its kernel's output. Only where a tree has no such bias do names and the
    residual stream have to tell, each kind of kernel once.
    """
    kernels = {
        leaf.name.stem: leaf
        for leaf in leaves
        if not leaf.name.bias and not leaf.name.follows and _flat(leaf)
    }
    order: Counter[str] = Counter()
    for leaf in leaves:
        kernel = kernels.get(leaf.name.stem)
        if leaf.name.bias and kernel is not None and len(leaf.sizes) == 1:
            a, b = (size == leaf.sizes[0] for size in kernel.sizes)
            order.update(dict.fromkeys(kernel.nodes, a - b))
    if any(order.values()):
        return order
    enters = FUSED_QKV | {Word.IN, Word.IN_FUSED, Word.Q, Word.K, Word.V}
    kinds = {(k.name.word, k.sizes) for k in kernels.values() if k.name.word in enters}
    return {"": sum((sizes[1] in streams) - (sizes[0] in streams) for _, sizes in kinds)}


def _flat(leaf: Leaf) -> bool:
    return len(leaf.sizes) == 2 and leaf.sizes[0] != leaf.sizes[1]
