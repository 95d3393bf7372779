"""Attention over shared sequences in chunks of queries, in models that never heard of it.

XLA's attention holds scores of a device's own queries by all keys, several times over. No query
needs the scores of another. So from the product with the values the way is followed back to the
products that made the scores, and what lies between is computed for some queries at a time, in the
backward pass again; masks of tokens x tokens are made by the chunk, too. The equations are those of
the model; gradients of what all chunks share are added up in float32.
"""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtp.activations.by_chunk import Chunks, Function, by_chunk
from jaxtp.activations.context.blocks import LARGEST
from jaxtp.activations.fused_products import value_of
from jaxtp.rules.jaxpr.primitives import ELEMENTWISE, PRIMITIVES
from jaxtp.rules.jaxpr.reentry import bind, inline
from jaxtp.rules.jaxpr.trails import dim_before
from jaxtp.rules.jaxpr.walk import Scope, bare, shape_of

LEAST_ROWS = 256
"""Of one device in a chunk, however long the keys are. Each chunk reads keys and values and adds to
their gradients, some 12 bytes an element: 1.5 KiB a key with heads of 64. Scores take seven passes
of 4 bytes: 7 KiB a key with so many rows."""

Make = Callable[[], Any]
"""Gives an array where it is called."""

VIEWS = {"broadcast_in_dim", "reshape", "squeeze", "transpose"}
SIZES = {
    "broadcast_in_dim": "shape",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
}
"""Primitives -> their parameter that holds the sizes of the result."""

REDUCTIONS = {f"reduce_{name}" for name in ("and", "max", "min", "or", "prod", "sum")}


class NotByRows(Exception):
    """What keeps scores from being computed for some queries at a time."""


@dataclasses.dataclass(frozen=True, slots=True)
class TokenProduct:
    """A product of tokens with tokens.

    Attributes:
        equation: It.
        rows: The operand whose tokens stay sharded.
        row_dim: Their dim.
        side: Which operand that is, 0 or 1.
        other: Gives the other operand, with all of its tokens.
        result: The dim of the rows in the result.
        place: Constrains the result.
    """

    equation: Any
    rows: Any
    row_dim: int
    side: int
    other: Make
    result: int
    place: Callable[[Any], Any]

    @property
    def num_summed(self) -> int:
        """How many elements of a row are summed."""
        contracted, _ = self.equation.params["dimension_numbers"]
        return math.prod(self.rows.shape[dim] for dim in contracted[self.side])

    def run(self, rows: Any, other: Any) -> Any:
        """The product of some rows."""
        return self.place(bind(self.equation, (other, rows) if self.side else (rows, other))[0])


class Wiring:
    """Where the variables of a jaxpr are made, and where they go.

    Attributes:
        made: Variable -> the number of its equation.
        taken: Variable -> the equations that take it, and as which operand.
    """

    def __init__(self, scope: Scope) -> None:
        equations = list(enumerate(scope.jaxpr.eqns))
        self.made = {var: position for position, e in equations for var in e.outvars}
        self.taken: dict[Any, list[tuple[int, int]]] = {}
        for position, equation in equations:
            for number, var in enumerate(equation.invars):
                if not isinstance(var, Literal):
                    self.taken.setdefault(var, []).append((position, number))


class Facts(NamedTuple):
    """What is known of a program.

    Attributes:
        wirings: Of the jaxprs that were looked at.
        products: (scope, id of an equation) -> the product that makes scores there.
        scored: The variables that come from scores, with their scopes.
        found: Which of these products one attention takes; filled while it is read.
    """

    wirings: dict[Scope, Wiring]
    products: Mapping[tuple[Scope, int], TokenProduct]
    scored: set[tuple[Scope, Any]]
    found: set[tuple[Scope, int]]


@dataclasses.dataclass(eq=False, slots=True)
class Level:
    """A jaxpr that is run, or was run in place.

    Attributes:
        scope: The jaxpr.
        known: What its variables hold; nothing of one that was run in place.
        outer: Where it is run in place; None if it is not.
        call: The equation there.
        inside: Positions of equations -> what is run in place of them.
    """

    scope: Scope
    known: Mapping[Any, Any]
    outer: "Level | None" = None
    call: Any = None
    inside: "dict[int, Level]" = dataclasses.field(default_factory=dict)

    def level_at(self, position: int) -> "Level | None":
        """What is run in place of an equation; None for any other."""
        equation = self.scope.jaxpr.eqns[position]
        row = PRIMITIVES.get(equation.primitive.name)
        if row is None or row.again is not inline:
            return None
        if position not in self.inside:
            # Of constants nothing was read, such as of a causal mask.
            read = self.scope.calls.get(position)
            jaxpr = next(filter(None, map(equation.params.get, ("jaxpr", "call_jaxpr"))))
            scope = read[0] if read else Scope(bare(jaxpr), {}, {}, getattr(jaxpr, "consts", ()))
            self.inside[position] = Level(scope, {}, self, equation)
        return self.inside[position]


@dataclasses.dataclass(slots=True)
class _Chunk:
    """Some queries: rows of arrays, arrays that all chunks share, and what was made of both."""

    taken: Sequence[Any]
    shared: Sequence[Any]
    size: int
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)


_Row = Callable[[_Chunk], Any]


def rows_of_chunk(rows: int, keys: int) -> int:
    """How many of a device's queries come at a time: as many scores as a tile has, or a few rows.

    >>> rows_of_chunk(1024, 2048), rows_of_chunk(1024, 1024), rows_of_chunk(65536, 1048576)
    (512, 1024, 256)
    """
    most = max(LARGEST * LARGEST // keys, LEAST_ROWS)
    sizes = [size for size in range(LEAST_ROWS, rows + 1) if rows % size == 0]
    return max((size for size in sizes if size <= most), default=min(sizes, default=rows))


class AttentionWeights:
    """Weights of values, by the rows of their queries.

    Args:
        facts: What is known of the program.
        level: Where the values are multiplied.
        product: That product; its rows are the weights.
        num_queries: All of them.

    Raises:
        NotByRows: If something else needs the scores, or an equation cannot be run by rows.
    """

    def __init__(self, facts: Facts, level: Level, product: TokenProduct, num_queries: int) -> None:
        self._facts, self._num_scores = facts, num_queries * product.num_summed
        self._arrays: dict[Any, Any] = {}
        self._rows: dict[Any, _Row] = {}
        self._used: set[tuple[Level, Any]] = set()
        self._run = {(level.scope, id(product.equation))}
        self._taken: list[tuple[Any, int]] = []
        self._shared: list[Make] = []
        self._product = product
        self._weights = self._row(level, product.equation.invars[product.side], product.row_dim)
        self._check()

    def times_values(self, chunks: Chunks) -> Any:
        """The product with the values."""

        def some(taken: Sequence[Any], shared: Sequence[Any]) -> Any:
            *others, values = shared
            weights = self._weights(_Chunk(taken, others, chunks.rows))
            return self._product.run(weights, values)

        arrays, dims = zip(*self._taken, strict=True)
        shared = [make() for make in (*self._shared, self._product.other)]
        fn = Function(some, dims, self._product.result, chunks)
        return self._product.place(by_chunk(fn, list(arrays), shared))

    # ---- where a variable comes from -------------------------------------------------------------

    def _wiring(self, level: Level) -> Wiring:
        if level.scope not in self._facts.wirings:
            self._facts.wirings[level.scope] = Wiring(level.scope)
        return self._facts.wirings[level.scope]

    def _source(self, level: Level, var: Any) -> tuple[Level, Any, int | None]:
        """The level that a variable was made in, its name there and the number of its equation."""
        while not isinstance(var, Literal):
            jaxpr = level.scope.jaxpr
            if var in jaxpr.invars:
                if level.outer is None:
                    break
                level, var = level.outer, level.call.invars[jaxpr.invars.index(var)]
                continue
            position = self._wiring(level).made.get(var)
            inner = None if position is None else level.level_at(position)
            if position is None or inner is None:
                return level, var, position
            number = jaxpr.eqns[position].outvars.index(var)
            level, var = inner, inner.scope.jaxpr.outvars[number]
        return level, var, None

    def _array(self, level: Level, var: Any) -> Any:
        """A value with all of its rows, computed again where nobody kept it."""
        level, var, position = self._source(level, var)
        if isinstance(var, Literal):
            return jnp.asarray(var.val, getattr(var.aval, "dtype", None))
        if (level.scope, var) in self._facts.scored:
            raise NotByRows("a sum over all queries")
        if var in level.known:
            return value_of(var, level.known)
        key = level, var
        if position is None:
            return level.scope.consts[level.scope.jaxpr.constvars.index(var)]
        if key not in self._arrays:
            equation = level.scope.jaxpr.eqns[position]
            results = bind(equation, [self._array(level, v) for v in equation.invars])
            names = ((level, name) for name in equation.outvars)
            self._arrays.update(zip(names, results, strict=True))
        return self._arrays[key]

    # ---- rows ------------------------------------------------------------------------------------

    def _row(self, level: Level, var: Any, dim: int) -> _Row:
        """Gives the rows that a chunk has of a variable."""
        level, var, position = self._source(level, var)
        key = level, var, dim
        if key not in self._rows:
            make = self._made(level, var, position, dim)

            def row(chunk: _Chunk) -> Any:
                if key not in chunk.made:
                    chunk.made[key] = make(chunk)
                return chunk.made[key]

            self._rows[key] = row
        return self._rows[key]

    def _made(self, level: Level, var: Any, position: int | None, dim: int) -> _Row:
        if position is None or math.prod(shape_of(var.aval)) < self._num_scores:
            is_taken = (level.scope, var) not in self._facts.scored
        else:
            is_taken = False
        if is_taken or position is None:
            return self._taking(self._array(level, var), dim)
        equation = level.scope.jaxpr.eqns[position]
        if (level.scope, var) in self._facts.scored:
            self._used.add((level, var))
            self._run.add((level.scope, id(equation)))
            return self._computed(level, equation, dim)
        # A mask: made of what has fewer bytes, it or what it is made of.
        before = len(self._taken), len(self._shared), dict(self._rows)
        with contextlib.suppress(NotByRows):
            row = self._computed(level, equation, dim)
            large = [x.nbytes for x, _ in self._taken[before[0] :] if x.size >= self._num_scores]
            if sum(large) < var.aval.size * var.aval.dtype.itemsize:
                return row
        del self._taken[before[0] :], self._shared[before[1] :]
        self._rows = before[2]
        return self._taking(self._array(level, var), dim)

    def _taking(self, x: Any, dim: int) -> _Row:
        number = len(self._taken)
        self._taken.append((x, dim))
        return lambda chunk: chunk.taken[number]

    def _sharing(self, make: Make) -> _Row:
        number = len(self._shared)
        self._shared.append(make)
        return lambda chunk: chunk.shared[number]

    def _computed(self, level: Level, equation: Any, dim: int) -> _Row:
        """Rows of a result, of rows of the operands."""
        product = self._facts.products.get((level.scope, id(equation)))
        if product is not None:
            self._facts.found.add((level.scope, id(equation)))
            if product.result != dim:
                raise NotByRows("scores by their keys")
            rows, other = self._taking(product.rows, product.row_dim), self._sharing(product.other)
            return lambda chunk: product.run(rows(chunk), other(chunk))
        if equation.primitive.name == "iota" and equation.params["dimension"] == dim:
            shape, dtype = list(equation.params["shape"]), equation.params["dtype"]
            numbers = self._taking(jnp.arange(shape[dim]).astype(dtype), 0)
            return lambda chunk: jax.lax.broadcast_in_dim(
                numbers(chunk), [*shape[:dim], chunk.size, *shape[dim + 1 :]], (dim,)
            )
        size, operands = shape_of(equation.outvars[0].aval)[dim], list[_Row]()
        for number, var in enumerate(equation.invars):
            place = _dim_before(equation, number, dim)
            if isinstance(var, Literal):
                operands.append(lambda _, value=var.val: value)
            elif place is not None and shape_of(var.aval)[place] == size:
                operands.append(self._row(level, var, place))
            else:
                array = self._array(level, var)
                operands.append(self._sharing(lambda array=array: array))
        return lambda chunk: bind(
            _of_size(equation, dim, chunk.size), [operand(chunk) for operand in operands]
        )[0]

    # ---- who else needs scores -------------------------------------------------------------------

    def _check(self) -> None:
        """Raises if an equation that is not run by rows takes what comes from scores."""
        seen, left = set[tuple[Level, Any]](), list(self._used)
        while left:
            level, var = left.pop()
            if (level, var) in seen:
                continue
            seen.add((level, var))
            jaxpr = level.scope.jaxpr
            for position, number in self._wiring(level).taken.get(var, ()):
                inner, equation = level.level_at(position), jaxpr.eqns[position]
                if inner is not None:
                    left.append((inner, inner.scope.jaxpr.invars[number]))
                elif (level.scope, id(equation)) not in self._run:
                    raise NotByRows(f"`{equation.primitive.name}` takes them, too")
            results = [n for n, result in enumerate(jaxpr.outvars) if result is var]
            if results and level.outer is None:
                raise NotByRows("they are a result")
            left += [(level.outer, level.call.outvars[n]) for n in results if level.outer]


def _dim_before(equation: Any, number: int, dim: int) -> int | None:
    """Which dim of an operand is a dim of the result; None if it has none.

    Raises:
        NotByRows: If elements along the dim depend on each other, or it is not known.
    """
    name, params = equation.primitive.name, equation.params
    shape = shape_of(equation.invars[number].aval)
    if name in ELEMENTWISE and len(equation.outvars) == 1:
        return dim if shape else None
    if name in VIEWS:
        before = dim_before(equation, dim)
        if before is not None or name == "broadcast_in_dim":
            return before
    if name in REDUCTIONS:
        return [d for d in range(len(shape)) if d not in params["axes"]][dim]
    if name == "dot_general":
        summed, paired = params["dimension_numbers"]
        if dim < len(paired[0]):
            return paired[number][dim]
        ranks = [len(shape_of(var.aval)) for var in equation.invars]
        free = [[d for d in range(ranks[n]) if d not in (*summed[n], *paired[n])] for n in (0, 1)]
        place = dim - len(paired[0]) - number * len(free[0])
        return free[number][place] if 0 <= place < len(free[number]) else None
    if name == "concatenate" and params["dimension"] != dim:
        return dim
    if name == "pad" and params["padding_config"][dim] == (0, 0, 0):
        return None if number else dim
    if name == "slice" and equation.outvars[0].aval.shape[dim] == shape[dim]:
        return dim
    if name == "gather":  # such as a bias looked up by distance
        numbers = params["dimension_numbers"]
        if dim not in numbers.offset_dims and not numbers.operand_batching_dims:
            return len(set(range(dim)) - {*numbers.offset_dims}) if number else None
    raise NotByRows(f"`{name}` takes all of them")


def _of_size(equation: Any, dim: int, size: int) -> Any:
    """The equation with so many elements along a dim of its result, wherever they lie."""
    params = dict(equation.params)
    name = SIZES.get(equation.primitive.name)
    if name is not None:
        params[name] = (*params[name][:dim], size, *params[name][dim + 1 :])
    params |= {name: None for name in ("sharding", "out_sharding") if name in params}
    return equation.replace(params=params)
