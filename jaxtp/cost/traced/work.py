"""What one device computes, moves and sends in a traced step, along the tensor axis of one plan.

Everything is at the traced batch; prices scale what the batch multiplies.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from jaxtp.cost.traced.program import VIEWS, Array, Block, Operation
from jaxtp.rules.jaxpr.primitives import ELEMENTWISE
from jaxtp.rules.jaxpr.walk import Kind

# A name marks what recomputation may keep: that is written.
FUSED = (ELEMENTWISE - {"name"}) | {
    *("broadcast_in_dim", "iota", "rev", "pad", "concatenate", "bitcast_convert_type", "mul_add"),
    *("random_bits", "threefry2x32"),
}
"""Primitives that XLA computes in the kernel of whatever reads them."""

PIECES = frozenset(["slice", "dynamic_slice", "split"])
REDUCING = ("reduce_", "arg", "cum")
"""Beginnings of the names of what reads all of an operand, in the kernel that makes it."""

LINEAR = frozenset(["add", "add_any", "sub", "convert_element_type", "neg", *VIEWS])
"""Primitives through which a sum over devices may wait: partial results are added first."""

PRODUCTS = frozenset(["dot_general", "ragged_dot_general", "conv_general_dilated"])
ATTENTION = ("dot_product_attention_fwd", "dot_product_attention_bwd")
"""Beginnings of the names of the kernels behind `jax.nn.dot_product_attention`."""


LEAST_DEPTH = 1024
"""Elements that a core sums at least of a kernel's gradient, where several share the sum.

Assumed: enough that adding the parts up is small beside them. Nothing was measured.
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EqualProducts:
    """Equal matrix products, or kernels of attention, of one step.

    Attributes:
        rows: Rows of the result on one device, in elements.
        columns: Columns of the result.
        depth: What is summed over.
        count: Independent products in one kernel.
        scaled: Which of these the batch multiplies: "rows", "columns", "depth", "count" or "".
        attention: "" for a product; "forward" or "backward" for a kernel of attention, of `count`
            heads of width `depth`, `rows` queries and `columns` keys.
    """

    rows: float
    columns: float
    depth: float
    count: float = 1.0
    scaled: str = ""
    attention: str = ""


def _zeros() -> defaultdict[Any, float]:
    return defaultdict(float)


@dataclasses.dataclass(slots=True)
class Work:
    """One step on one device along the tensor axis, before data parallelism.

    Attributes:
        products: Product -> how often a step runs it.
        moved: Bytes that kernels between products read and write, of the batch and of no batch.
        stacked: The part of `moved` that loops stack and take out again: what is kept.
        sent: Bytes of a message along the tensor axis, all-reduced -> how often.
        unsent: Names of products of sharded operands whose messages, if any, are not in `sent`.
        whiles: Whether a `while` is in it, counted as one turn: no program says how many it runs.
    """

    products: defaultdict[EqualProducts, float] = dataclasses.field(default_factory=_zeros)
    moved: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    stacked: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    sent: defaultdict[float, float] = dataclasses.field(default_factory=_zeros)
    unsent: set[str] = dataclasses.field(default_factory=set[str])
    whiles: bool = False


def work_of(block: Block) -> Work:
    """All that a block does."""
    work = Work()
    _read(block, 1.0, work)
    return work


def _read(block: Block, times: float, work: Work) -> None:
    kernels, partial = _Kernels(work, times), _Partial(work, times)
    for operation in block.operations:
        work.whiles |= operation.name == "while"
        for body in operation.bodies:
            _read(body, times * operation.turns, work)
        for array in operation.results if operation.name == "scan" else ():
            if array.steps > 1 and array.kind is Kind.ACTIVATION:
                work.stacked[array.batch is None] += times * array.num_bytes
        if (found := product_of(operation)) is not None:
            work.products[found] += times
        kernels.meet(operation)
        partial.meet(operation)
    kernels.make(block.outputs)
    partial.send(block.outputs)


class _Kernels:
    """Groups what lies between products into kernels, and adds up what they read and write.

    A value is written where something reads it that is computed apart: a product, a reduction, a
    loop. What is read then is all written values that it is made of. XLA's fusion does the same,
    and joins some kernels that read the same besides.
    """

    def __init__(self, work: Work, times: float) -> None:
        self._work, self._times = work, times
        self._sources: dict[Array, frozenset[Array]] = {}
        self._viewed: dict[Array, Array] = {}

    def meet(self, operation: Operation) -> None:
        """The next operation of the block."""
        operands = [self._viewed.get(array, array) for array in operation.operands]
        if operation.name in VIEWS:
            self._viewed |= dict(zip(operation.results, operands, strict=False))
        elif operation.name in PIECES:
            self.make(operands[:1])  # of a piece only the piece is read
        elif operation.name in FUSED:
            read = frozenset[Array]().union(*map(self._of, operands))
            self._sources |= dict.fromkeys(operation.results, read)
        elif operation.name.startswith(REDUCING):
            read = frozenset[Array]().union(*map(self._of, operands))
            self._move([*read, *operation.results])
        else:
            # Rows that are picked from a table are computed where they are picked.
            self.make(operands[1:] if operation.name == "gather" else operands)
            self._move(_touched(operation))

    def make(self, arrays: Iterable[Array]) -> None:
        """Writes values that were only described so far."""
        for array in arrays:
            array = self._viewed.get(array, array)
            sources = self._sources.pop(array, None)
            if sources is not None:
                self._move([*sources, array])

    def _of(self, array: Array) -> frozenset[Array]:
        return self._sources.get(array, frozenset((array,)))

    def _move(self, arrays: Iterable[Array]) -> None:
        for array in arrays:
            if array.kind is not Kind.CONSTANT:  # constants are computed where they are read
                self._work.moved[array.batch is None] += self._times * array.num_bytes


def _touched(operation: Operation) -> list[Array]:
    """What an operation that is no product reads and writes beside whole operands."""
    if operation.name in ("gather", "sort", "top_k"):
        return [*operation.results, *operation.results]  # rows that are picked are read, too
    if operation.name == "dynamic_update_slice":
        return 2 * operation.operands[1:2]
    if operation.name.startswith("scatter"):
        return 2 * operation.operands[-1:]
    return []


class _Partial:
    """Sums over the tensor axis: which results are partial, and when they have to be added up."""

    def __init__(self, work: Work, times: float) -> None:
        self._work, self._times = work, times
        self._partial: set[Array] = set()

    def meet(self, operation: Operation) -> None:
        """The next operation of the block."""
        waiting = [array for array in operation.operands if array in self._partial]
        whole = len(waiting) == len(operation.operands)
        # Before they are widened there are fewer bytes to send.
        if waiting and operation.name in LINEAR and whole and not _widens(operation):
            self._partial -= set(waiting)
            self._partial |= set(operation.results)
            return
        self.send(waiting)
        if _sums_over_devices(operation):
            self._partial |= set(operation.results)
        elif _forgets_shards(operation):
            self._work.unsent.add(operation.name)

    def send(self, arrays: Iterable[Array]) -> None:
        """All-reduces those of them that are partial."""
        for array in set(arrays) & self._partial:
            self._partial.discard(array)
            if array.batch is not None:
                self._work.sent[array.num_bytes] += self._times


def _widens(operation: Operation) -> bool:
    return operation.results[0].itemsize > operation.operands[0].itemsize


def _sums_over_devices(operation: Operation) -> bool:
    """Whether each device along the tensor axis gets a part of the sum."""
    if operation.name == "gather":
        picked = operation.params["dimension_numbers"].start_index_map
        return bool(set(picked) & set(operation.operands[0].split))
    if operation.name not in PRODUCTS:
        return False
    pairs = zip(operation.operands, _summed_dims(operation), strict=False)
    return any(set(array.split) & set(dims) for array, dims in pairs)


def _summed_dims(product: Operation) -> tuple[Sequence[int], Sequence[int]]:
    """Dims of its left and its right operand that a product sums over."""
    params = product.params
    if product.name == "conv_general_dilated":
        # All of the kernel but its outputs; in the kernel's gradient those are batch and window.
        # Channels in groups stay where their group is.
        numbers, is_whole = params["dimension_numbers"], params["feature_group_count"] == 1
        return numbers.lhs_spec[1:2] if is_whole else (), numbers.rhs_spec[1:]
    if product.name == "ragged_dot_general":
        return params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0]
    return params["dimension_numbers"][0]


def _forgets_shards(operation: Operation) -> bool:
    """Whether a product has sharded operands and a result of the batch of which no dim is."""
    if operation.name not in PRODUCTS and not operation.name.startswith(ATTENTION):
        return False
    made = any(array.batch is not None and not array.split for array in operation.results)
    return made and any(array.split for array in operation.operands)


def product_of(operation: Operation) -> EqualProducts | None:
    """The sizes of a product or of a kernel of attention; None for any other operation."""
    if operation.name.startswith(ATTENTION):
        return _attention(operation)
    if operation.name not in PRODUCTS:
        return None
    left, right = operation.operands[:2]
    if operation.name == "dot_general":
        (sum_left, sum_right), (batch_left, _) = operation.params["dimension_numbers"]
        batch_right = operation.params["dimension_numbers"][1][1]
    elif operation.name == "conv_general_dilated":
        return _convolution(operation)
    else:  # a ragged product: every row by one of the stacked matrices
        rows, depth = math.prod(left.shape[:-1]), left.shape[-1]
        scaled = "rows" if left.batch is not None else ""
        return EqualProducts(rows=rows, columns=right.shape[-1], depth=depth, scaled=scaled)
    parts = {
        "count": _part(left, batch_left),
        "depth": _part(left, sum_left),
        "rows": _part(left, set(range(len(left.shape))) - {*batch_left, *sum_left}),
        "columns": _part(right, set(range(len(right.shape))) - {*batch_right, *sum_right}),
    }
    # A dim that one side knows to be split is split on the other as well.
    parts["depth"] = min(parts["depth"], _part(right, sum_right), key=lambda part: part[0])
    parts["count"] = min(parts["count"], _part(right, batch_right), key=lambda part: part[0])
    scaled = next((name for name, (_, is_batch) in parts.items() if is_batch), "")
    rows, columns, depth, count = (parts[name][0] for name in ("rows", "columns", "depth", "count"))
    return EqualProducts(rows=rows, columns=columns, depth=depth, count=count, scaled=scaled)


def _part(array: Array, dims: Iterable[int]) -> tuple[float, bool]:
    """Elements of some dims together, and whether the batch is one of them."""
    chosen = list(dims)
    return math.prod(array.shape[dim] for dim in chosen), array.batch in chosen


def _convolution(operation: Operation) -> EqualProducts:
    """A convolution as the product that it is: pixels by channels, summed over the window."""
    out, kernel = operation.results[0], operation.operands[1]
    numbers = operation.params["dimension_numbers"]
    features, outputs = numbers.out_spec[1], numbers.rhs_spec[0]
    columns = out.shape[features]
    depth = math.prod(kernel.shape) / kernel.shape[outputs]
    rows = math.prod(out.shape) / columns
    if out.batch is not None:
        return EqualProducts(rows=rows, columns=columns, depth=depth, scaled="rows")
    # The kernel's gradient: the batch is summed over, in parts that keep all cores busy.
    scaled = "count" if kernel.batch is not None else ""
    parts = max(depth / LEAST_DEPTH, 1.0)
    return EqualProducts(
        rows=rows, columns=columns, depth=depth / parts, count=parts, scaled=scaled
    )


def _attention(operation: Operation) -> EqualProducts | None:
    """A kernel of attention on (batch, time, heads, width)."""
    queries, keys = operation.operands[:2]
    if len(queries.shape) != 4:
        return None
    batch, rows, heads, width = queries.shape
    backward = "bwd" in operation.name
    return EqualProducts(
        rows=rows,
        columns=keys.shape[1],
        depth=width,
        count=batch * heads,
        scaled="count" if queries.batch is not None else "",
        attention="backward" if backward else "forward",
    )
