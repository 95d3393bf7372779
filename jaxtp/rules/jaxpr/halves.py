"""Which equations of a traced function give the same on half of the batch, or on another part.

The function is traced on the whole batch and on half of it. Where both jaxprs have the same
equations, a dim that is half as long in one of them is where the batch lies, and an equation that
treats every row of it alone gives for half of the rows half of its results. Whatever is not known
to do that *mixes* the batch. Of other equal parts than two the same is true.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, Literal

from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import checkpoint, custom_jvp, custom_vjp, inline, same_rank, scan
from jaxtp.rules.jaxpr.rows import Lies, MixesBatch, lies_in_results
from jaxtp.rules.jaxpr.walk import UNKNOWN, bare, where

SIZES = ("shape", "new_sizes", "start_indices", "limit_indices", "slice_sizes", "sharding")
"""Parameters of equations that hold sizes; the rules look at them."""


@dataclasses.dataclass(eq=False)
class Halves:
    """One jaxpr on half of the batch, beside the same on the whole.

    Attributes:
        half: On half, or another part.
        whole: On the whole.
        parts: How many such parts the whole has.
        lies: Variable of `half` -> where the batch lies; absent where it does not.
        mixing: Positions of equations that have to run on the whole batch -> why, "" for those that
            only depend on others.
        shared: Positions that have nothing of the batch and run once.
        calls: Position -> the program inside.
    """

    half: Jaxpr
    whole: Jaxpr
    parts: int = 2
    lies: dict[Any, Lies] = dataclasses.field(default_factory=dict)
    mixing: dict[int, str] = dataclasses.field(default_factory=dict)
    shared: set[int] = dataclasses.field(default_factory=set)
    calls: dict[int, "Halves"] = dataclasses.field(default_factory=dict)

    def where(self, var: Any) -> Lies | None:
        """Where the batch lies in a variable."""
        return None if isinstance(var, Literal) else self.lies.get(var)


def compare(
    half: Any,
    whole: Any,
    inputs: Sequence[Lies | None],
    rows: int,
    *,
    inside: bool = False,
    parts: int = 2,
) -> Halves:
    """What of a function can run on halves of the batch.

    Args:
        half: Its jaxpr on `rows / parts` rows.
        whole: Its jaxpr on `rows`.
        inputs: Where the batch lies in each input.
        rows: Of the whole batch.
        inside: Whether this is the program of an equation, which runs in one piece.
        parts: How many such parts the whole batch has.

    Raises:
        MixesBatch: If the jaxprs differ in more than sizes; if `inside`, also where one equation
            mixes the batch.
    """
    found = Halves(bare(half), bare(whole), parts)
    if len(found.half.eqns) != len(found.whole.eqns):
        raise MixesBatch("another program on half of the batch")
    _same_consts(half, whole)
    pairs = zip(found.half.invars, inputs, strict=True)
    found.lies |= {var: lies for var, lies in pairs if lies}
    late: set[Any] = set()
    for position, (one, two) in enumerate(zip(found.half.eqns, found.whole.eqns, strict=True)):
        if any(not isinstance(v, Literal) and v in late for v in one.invars):
            found.mixing[position] = ""
            late |= set(one.outvars)
            continue
        try:
            _equation(found, position, one, two, rows)
        except MixesBatch as error:
            reason = _at(one, error)
            if inside:
                raise MixesBatch(reason) from None
            found.mixing[position] = reason
            late |= set(one.outvars)
    return found


def compare_scan(one: Any, two: Any, around: tuple[Jaxpr, Jaxpr], rows: int, parts: int) -> Halves:
    """What a scan is on a part of the batch, wherever its operands come from.

    Args:
        one: The equation on `rows / parts` rows.
        two: The same on `rows`.
        around: The jaxprs that they stand in.
        rows: Of the whole batch.
        parts: How many such parts it has.

    Returns:
        Of the jaxprs around it no more than this equation: where the batch lies in its operands and
        results, and its body.

    Raises:
        MixesBatch: If the body does not treat rows alone; names the line.
    """
    found = Halves(*around, parts)
    try:
        operands = lies_by_size(one.invars, two.invars, rows, parts)
        results = _call(found, 0, one, two, operands, rows)
    except MixesBatch as error:
        raise MixesBatch(_at(one, error)) from None
    pairs = zip((*one.invars, *one.outvars), (*operands, *results), strict=True)
    found.lies |= {var: lies for var, lies in pairs if lies}
    return found


def lies_by_size(
    one: Sequence[Any], two: Sequence[Any], rows: int, parts: int
) -> list[Lies | None]:
    """Where the batch lies in variables, by their sizes on `rows / parts` rows and on `rows`.

    Raises:
        MixesBatch: If the batch does not lead in a dim that depends on its size.
    """
    found: list[Lies | None] = []
    for a, b in zip(one, two, strict=True):
        dim = _halved(a.aval, b.aval, parts)
        if dim is not None and b.aval.shape[dim] % rows:
            raise MixesBatch("the batch does not lead in its dim")
        found.append(None if dim is None else Lies(dim, b.aval.shape[dim] // rows))
    return found


def _at(equation: Any, error: MixesBatch) -> str:
    """A reason with its equation and line."""
    reason, line = str(error), where(equation) or UNKNOWN
    if reason.startswith("`"):  # from a program inside, which may be one of JAX's own
        return reason.replace(UNKNOWN, line)
    return f"`{equation.primitive.name}` at {line}: {reason}"


def _same_consts(half: Any, whole: Any) -> None:
    ours, theirs = getattr(half, "consts", ()), getattr(whole, "consts", ())
    for one, two in zip(ours, theirs, strict=True):
        try:
            same = one is two or np.array_equal(np.asarray(one), np.asarray(two))
        except TypeError:  # a tracer, or random keys
            same = False
        if not same:
            raise MixesBatch("a constant that is another on half of the batch")


def _equation(found: Halves, position: int, one: Any, two: Any, rows: int) -> None:
    """Learns where the batch lies in the results of an equation."""
    name = one.primitive.name
    if name != two.primitive.name:
        raise MixesBatch("another equation on half of the batch")
    for a, b in zip(one.invars, two.invars, strict=True):
        both = isinstance(a, Literal), isinstance(b, Literal)
        if both[0] != both[1] or (all(both) and not np.array_equal(a.val, b.val)):
            raise MixesBatch("a number that depends on the size of the batch")
    operands = [found.where(var) for var in one.invars]
    dims = [
        _halved(a.aval, b.aval, found.parts) for a, b in zip(one.outvars, two.outvars, strict=True)
    ]
    row = PRIMITIVES.get(name)
    again = row and row.again
    enters = again in (inline, checkpoint, scan, custom_jvp, custom_vjp)
    is_shared = not any(operands) and all(dim is None for dim in dims)
    _same_params(one.params, two.params, () if is_shared else SIZES, enters=enters)
    if is_shared:
        if enters:
            _call(found, position, one, two, operands, rows)
        found.shared.add(position)
        return
    if enters:
        results = _call(found, position, one, two, operands, rows)
    else:
        results = lies_in_results(one, two, operands, dims, rows)
    for var, other, dim, lies in zip(one.outvars, two.outvars, dims, results, strict=True):
        if (lies.dim if lies else None) != dim:
            raise MixesBatch("rows of the batch meet")
        if lies:
            if other.aval.shape[lies.dim] != rows * lies.inner:
                raise MixesBatch("the batch does not lead in its dim")
            found.lies[var] = lies


def _same_params(one: Any, two: Any, sizes: Sequence[str], *, enters: bool) -> None:
    """Nothing in an equation but sizes may depend on the size of the batch."""
    if enters:  # the program inside is compared by itself; functions have no equality
        one, two = ({k: p.get(k) for k in ("length", "reverse")} for p in (one, two))
    if any(str(one[key]) != str(two[key]) for key in one if key not in sizes):
        raise MixesBatch("a parameter that depends on the size of the batch")


def _halved(half: Any, whole: Any, parts: int) -> int | None:
    """The dim that is half as long, or as the other part says."""
    shapes = getattr(half, "shape", ()), getattr(whole, "shape", ())
    if len(shapes[0]) != len(shapes[1]):
        raise MixesBatch("another rank on half of the batch")
    dims = [d for d, (a, b) in enumerate(zip(*shapes, strict=True)) if a != b]
    if len(dims) > 1 or any(parts * shapes[0][d] != shapes[1][d] for d in dims):
        raise MixesBatch("several dims depend on the size of the batch")
    return dims[0] if dims else None


def _call(
    found: Halves, position: int, one: Any, two: Any, operands: list[Lies | None], rows: int
) -> list[Lies | None]:
    """An equation that holds a program."""
    inner = [_program(eqn) for eqn in (one, two)]
    given = operands
    is_scan = one.primitive.name == "scan"
    if is_scan:
        given = [_row(lies, outer, v) for lies, outer, v in _zip(operands, one.invars, inner[0])]
    body = compare(inner[0], inner[1], given, rows, inside=True, parts=found.parts)
    found.calls[position] = body
    results = [body.where(var) for var in body.half.outvars]
    if not is_scan:
        return results
    num_carry = same_rank(one.outvars, body.half.outvars).count(True)
    num_rows = same_rank(one.invars, body.half.invars).count(False)
    first = len(operands) - num_rows - num_carry
    if results[:num_carry] != given[first : first + num_carry]:
        raise MixesBatch("the batch moves from one turn of the loop to the next")
    return [
        lies and Lies(lies.dim + (n >= num_carry), lies.inner) for n, lies in enumerate(results)
    ]


def _zip(operands: Any, outer: Any, inner: Any) -> Any:
    return zip(operands, outer, bare(inner).invars, strict=True)


def _row(lies: Lies | None, outer: Any, inner: Any) -> Lies | None:
    if lies is None or outer.aval.ndim == inner.aval.ndim:
        return lies
    if lies.dim == 0:
        raise MixesBatch("a loop over the batch")
    return Lies(lies.dim - 1, lies.inner)


def _program(equation: Any) -> Any:
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if key in equation.params:
            return equation.params[key]
    raise MixesBatch("its program is not known")
