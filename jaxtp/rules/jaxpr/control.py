"""Equations that hold programs, elementwise arithmetic, and primitives that nobody knows."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxtp.rules.jaxpr.classes import Dims
from jaxtp.rules.jaxpr.contractions import attention
from jaxtp.rules.jaxpr.records import Choice, Offset, Residual, Whole
from jaxtp.rules.jaxpr.walk import Kind, Result, Value, Walk, bare, shape_of

# One result of an operand's shape, and yet not elementwise.
MIXING = frozenset(
    [
        *("all_to_all", "cholesky", "custom_linear_solve", "householder_product", "ormqr", "schur"),
        *("symmetric_product", "triangular_solve", "tridiagonal", "tridiagonal_solve"),
        *("ffi_call", "pallas_call", "pure_callback", "io_callback", "debug_callback"),
    ]
)


# An index that is shifted, clipped, or wrapped when negative still picks from the same table; one
# that is multiplied or divided does not. Comparisons are how it is wrapped.
SAME_INDEX = frozenset(
    ["add", "sub", "max", "min", "clamp", "select_n", "eq", "ne", "lt", "le", "gt", "ge"]
)


# Elementwise functions between two kernels that make a branch more than a product of matrices.
BENT = frozenset(
    [
        *("max", "min", "abs", "square", "integer_pow", "pow", "sqrt", "rsqrt", "cbrt"),
        *("exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "erfc", "sin", "cos"),
    ]
)


# How many residual sums a search goes back through. A branch holds few; a search that meets more
# has left its block, and giving up keeps the work linear in the number of blocks.
MAX_INNER_SUMS = 4


def elementwise(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Dims unify by position; size 1 and scalars link nothing."""
    aval, name = equation.outvars[0].aval, equation.primitive.name
    dims = ((),) * len(shape_of(aval))
    for value in inputs:
        if value.dims:
            pairs = zip(dims, value.dims, strict=True)
            dims = tuple(walk.classes.meet(one, two) for one, two in pairs)
    result = walk.derive(aval, dims, inputs, elementwise=True, same_index=name in SAME_INDEX)
    result.bent = name in BENT
    if name == "eq":
        _compare(walk, equation, result, inputs)
    if name in ("add", "sub") and len(inputs) == 2:
        _sum(walk, equation, result, inputs)
    return [result]


def _compare(walk: Walk, equation: Any, result: Value, sides: Sequence[Value]) -> None:
    """Records a one-hot comparison: an index against a range along dims that only the range has."""
    index = result.parents[0].index if result.parents else None
    if index is None:
        return
    for side in sides:
        for axis, dim in enumerate(side.dims if side.kind is Kind.CONSTANT else ()):
            if dim and all(parent.shape[axis] == 1 for parent in result.parents):
                result.one_hot = True
                walk.pick(index, dim)
                walk.facts.append(Choice(dim, index.tokens, equation))


def _sum(walk: Walk, equation: Any, result: Value, sides: Sequence[Value]) -> None:
    """Records what an addition says: a bias, or a step of the residual stream."""
    bias, other = sorted(sides, key=lambda side: side.kind)
    if bias.kind is Kind.PARAMETER and bias.path and other.product:
        walk.facts.append(Offset(bias.path, other.product, equation))
    if len(result.parents) == 2:
        result.product = sides[0].product or sides[1].product
        for near, far in (result.parents, result.parents[::-1]):
            origins = _origins(near, result.shape)
            inside = _branch(far, origins)
            if inside is None:
                inside = _branch(far, _projected(origins), bent=True)
            if inside is not None:
                result.skip = near
                walk.facts.append(Residual(result.dims, inside, equation))
                return


def _origins(value: Value, shape: tuple[int, ...]) -> set[Value]:
    """What a value is, up to elementwise steps: floating-point values of the given shape."""
    found: set[Value] = set()
    pending = [value]
    while pending:
        value = pending.pop()
        if value in found or value.shape != shape or not _is_float(value):
            continue
        found.add(value)
        if value.elementwise and value.skip is None:
            pending.extend(value.parents)
    return found


def _projected(origins: set[Value]) -> set[Value]:
    """What some values are one kernel away from: the stream before it changed its width.

    A convolutional network's shortcut has a kernel of its own wherever channels or positions
    change. Pooling on the way counts as a view.
    """
    found: set[Value] = set()
    for made in origins:
        for value in made.parents if made.kernel else ():
            found |= _origins(value, value.shape)
            while len(value.parents) == 1 and not value.kernel:
                (value,) = value.parents
                found |= _origins(value, value.shape)
    return found


def _branch(end: Value, origins: set[Value], *, bent: bool = False) -> tuple[Dims, ...] | None:
    """Whether `end` was computed from one of `origins` through at least one kernel.

    That makes the sum of the two residual; GELU's x + c x^3 and the rotary sum have no kernel in
    between. The search goes back along the stream at earlier sums, never into their branches: a
    mask added to the scores of every layer is no residual although later scores depend on it.

    Args:
        end: The branch's end.
        origins: What the other side of the sum is.
        bent: Whether two kernels are asked for, and something between them that is no line: where
            the other side has a kernel too, x W + x A B (an adapter) is one larger kernel.

    Returns:
        The dims of the residual sums inside the branch, or None.
    """
    oldest = min((origin.order for origin in origins), default=end.order)
    inside, seen, found = list[Dims](), set[tuple[Value, int]](), False
    # How far the way back has come: nothing, a kernel, a bend before it, a kernel before that.
    enough = 3 if bent else 1
    pending = [(end, 0, 0)]
    while pending:
        value, way, sums = pending.pop()
        if (value, way) in seen or value.order < oldest or sums > MAX_INNER_SUMS:
            continue
        seen.add((value, way))
        if value in origins:
            found |= way >= enough
            continue
        before = value.parents
        if value.skip is not None:
            inside.append(value.dims)
            before, sums = (value.skip,), sums + 1
        if (value.kernel and way in (0, 2)) or (value.bent and way == 1):
            way += 1
        pending.extend((parent, way, sums) for parent in before)
    return tuple(inside) if found else None


def _is_float(value: Value) -> bool:
    return jnp.issubdtype(value.aval.dtype, jnp.floating)


def _inner_jaxpr(equation: Any) -> Any:
    """The jaxpr in an equation's parameters that takes its operands as they are, or None."""
    for param in equation.params.values():
        body = bare(param)
        if hasattr(body, "eqns") and hasattr(body, "outvars"):
            sides = (body.invars, equation.invars, body.outvars, equation.outvars)
            shapes = [[shape_of(var.aval) for var in side] for side in sides]
            if shapes[0] == shapes[1] and shapes[2] == shapes[3]:
                return body
    return None


def default(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """A primitive without a handler: a declared kernel, a call, elementwise, or no information."""
    params, name = equation.params, equation.primitive.name
    if not equation.outvars:
        return []  # a print or an assertion
    kernel = str(params.get("name") or params.get("target_name") or "")
    label = f"{name}:{kernel}" if name in MIXING and kernel else name
    signature = walk.signatures.get(kernel if name in MIXING else name)
    if signature is not None:
        results = attention(walk, equation, inputs, signature)
        reason = f"its operands do not fit the declared signature {signature}"
        return results or [*walk.give_up(equation, inputs, reason, label)]
    if name in MIXING:
        return [*walk.give_up(equation, inputs, "nothing is known about it", label)]
    body = _inner_jaxpr(equation)
    if body is not None:
        return [*walk.run(body, inputs)]
    shape = shape_of(equation.outvars[0].aval) if len(equation.outvars) == 1 else None
    if shape is not None and all(_broadcasts(value.shape, shape) for value in inputs):
        return elementwise(walk, equation, inputs)
    return [*walk.give_up(equation, inputs, "no rule is known for it", label)]


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether an operand fits an elementwise result: a scalar, or equal up to sizes of 1."""
    if not shape:
        return True
    fits = len(shape) == len(target)
    return fits and all(a in (1, b) for a, b in zip(shape, target, strict=True))


def _enter(walk: Walk, value: Value, kind: Kind, aval: Any, dims: Dims) -> Value:
    """A value as the body of a loop sees it: same lineage, possibly without its leading dim."""
    return walk.new(
        aval,
        kind,
        dims,
        path=value.path if kind is Kind.PARAMETER else "",
        parents=(value,) if value.kind is Kind.ACTIVATION else (),
        scores=value.scores,
        index=value.index,
    )


def _leave(walk: Walk, value: Value, aval: Any, dims: Dims) -> Value:
    """A result of the body as the caller sees it."""
    if value.kind is not Kind.ACTIVATION:
        return walk.new(aval, value.kind, dims, path=value.path)
    return walk.derive(aval, dims, [value], elementwise=True)


def _is_active(inputs: Sequence[Value]) -> bool:
    return any(value.kind is Kind.ACTIVATION for value in inputs)


def _loop(
    walk: Walk, body: Any, consts: Sequence[Value], carry: Sequence[Value], rows: Sequence[Value]
) -> list[Value]:
    """Reads a loop body once; what is carried out is what is carried in.

    A carry counts as an activation from the start if anything that enters the loop is one: an
    accumulator of zeros is one after the first step. Weights that are carried along unchanged do
    not come here as carries: JAX makes them constants of the loop.
    """
    active = _is_active([*consts, *carry, *rows])
    held: list[Value] = []
    for value in carry:
        kind = Kind.ACTIVATION if active else value.kind
        if kind is not value.kind and value.path:
            walk.used.add(value.path)
        held.append(_enter(walk, value, kind, value.aval, value.dims))
    results = walk.run(body, [*consts, *held, *rows])
    for before, after in zip(held, results, strict=False):
        for one, two in zip(before.dims, after.dims, strict=True):
            walk.classes.unify(one, two)
    return results


def scan(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Scanned operands lose their leading dim (the layer dim) and stacked results gain it.

    How many operands are constants, carries and rows is read from ranks: the spelling differs
    between versions.
    """
    body = bare(equation.params["jaxpr"])
    ranks = zip(body.invars, inputs, strict=True)
    num_rows = sum(len(shape_of(var.aval)) < len(value.shape) for var, value in ranks)
    ranks = zip(body.outvars, equation.outvars, strict=True)
    num_carry = sum(len(shape_of(a.aval)) == len(shape_of(b.aval)) for a, b in ranks)
    first = len(inputs) - num_rows
    steps = walk.classes.fresh(equation.params["length"])
    rows: list[Value] = []
    for value, var in zip(inputs[first:], body.invars[first:], strict=True):
        walk.classes.unify(steps, value.dims[0])
        rows.append(_enter(walk, value, value.kind, var.aval, value.dims[1:]))
    if steps:
        walk.facts.append(Whole(steps, "layer", equation))
    start = first - num_carry
    results = _loop(walk, body, inputs[:start], inputs[start:first], rows)
    leads = [()] * num_carry + [(steps,)] * (len(results) - num_carry)
    return [
        _leave(walk, value, var.aval, lead + value.dims)
        for var, value, lead in zip(equation.outvars, results, leads, strict=True)
    ]


def while_(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """A loop with a carry only; the condition is read for its uses of parameters."""
    params = equation.params
    tests, consts = params["cond_nconsts"], params["body_nconsts"]
    carry = inputs[tests + consts :]
    walk.run(params["cond_jaxpr"], [*inputs[:tests], *carry])
    body = bare(params["body_jaxpr"])
    results = _loop(walk, body, inputs[tests : tests + consts], carry, ())
    return [
        _leave(walk, value, var.aval, value.dims)
        for var, value in zip(equation.outvars, results, strict=True)
    ]


def cond(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """All branches are read; their results are one."""
    choice, *operands = inputs
    branches = [walk.run(body, operands) for body in equation.params["branches"]]
    results: list[Result] = []
    for var, *values in zip(equation.outvars, *branches, strict=True):
        dims = values[0].dims
        for other in values[1:]:
            pairs = zip(dims, other.dims, strict=True)
            dims = tuple(walk.classes.meet(one, two) for one, two in pairs)
        lineage = values if _is_active(values) else [choice, *values]
        results.append(walk.derive(var.aval, dims, lineage, elementwise=True))
    return results


def shard_map(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """The body sees one shard: each dim is (shards, rest), and only the rest goes inside."""
    body = bare(equation.params["jaxpr"])
    local: list[Value] = []
    for var, value in zip(body.invars, inputs, strict=True):
        parts = zip(value.dims, value.shape, shape_of(var.aval), strict=True)
        dims = tuple(walk.classes.align((d,), (n // max(m, 1), m))[1] for d, n, m in parts)
        local.append(_enter(walk, value, value.kind, var.aval, dims))
    results: list[Result] = []
    for var, value in zip(equation.outvars, walk.run(body, local), strict=True):
        parts = zip(value.dims, shape_of(var.aval), value.shape, strict=True)
        dims = tuple(walk.classes.fresh(n // max(m, 1)) + d for d, n, m in parts)
        results.append(_leave(walk, value, var.aval, dims))
    return results
