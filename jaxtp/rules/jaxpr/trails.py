"""Where dims of a value go through a traced program, and where they come from.

Dim classes say which dims are the same dim of the model. Scores have two dims of tokens, which are
of one class; which of them counts keys only the way of each dim through the program says.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import inline
from jaxtp.rules.jaxpr.walk import Scope, shape_of


def steps_of(made: tuple[int, Any], scope: Scope) -> tuple[Any, list[Any]] | None:
    """What an equation is a view of, and the single steps from there; None for anything else."""
    position, equation = made
    sources = [v for v in equation.invars if not isinstance(v, Literal)]
    calls = scope.calls.get(position, [])
    if len(sources) != 1 or len(equation.outvars) != 1:
        return None
    row = PRIMITIVES.get(equation.primitive.name)
    if not calls:
        moves = row is not None and (row.view or equation.primitive.name == "convert_element_type")
        return (sources[0], [equation]) if moves else None
    if row is None or row.again is not inline:
        return None
    jaxpr, steps = calls[0].jaxpr, list[Any]()
    var = jaxpr.outvars[0]
    while var not in jaxpr.invars:
        inside = [(n, e) for n, e in enumerate(jaxpr.eqns) if var in e.outvars]
        found = steps_of(inside[0], calls[0]) if inside else None
        if found is None:
            return None
        var, passed = found
        steps[:0] = passed
    outer = equation.invars[jaxpr.invars.index(var)]
    return None if isinstance(outer, Literal) else (outer, steps)


def dim_before(step: Any, dim: int) -> int | None:
    """Which dim of a view's operand is a dim of its result; None if it is none alone."""
    name, params = step.primitive.name, step.params
    source = step.invars[0].aval.shape
    target = step.outvars[0].aval.shape
    moved = _moved(name, params, source, target)
    return next((d for d in range(len(source)) if moved(d) == dim), None)


def _moved(
    name: str, params: Mapping[str, Any], source: Sequence[int], target: Sequence[int]
) -> Callable[[int], int | None]:
    """Where the dims of an operand are in the result of an equation of one operand."""
    if name == "transpose":
        return lambda d: list(params["permutation"]).index(d)
    if name == "broadcast_in_dim":
        places = params["broadcast_dimensions"]
        return lambda d: places[d] if source[d] == target[places[d]] else None
    if name == "squeeze":
        gone = {d % len(source) for d in params["dimensions"]}
        return lambda d: None if d in gone else d - sum(g < d for g in gone)
    if name == "reshape":
        return lambda d: _same_place(source, target, d)
    return lambda d: d if len(source) == len(target) and source[d] == target[d] else None


def _same_place(source: Sequence[int], target: Sequence[int], dim: int) -> int | None:
    """The dim of a reshape's result with the same elements before it, and as many along it."""
    before = math.prod(source[:dim])
    fits = [d for d in range(len(target)) if target[d] == source[dim]]
    return next((d for d in fits if math.prod(target[:d]) == before), None)


_REDUCES = ("reduce_max", "reduce_sum", "reduce_min", "argmax", "cumsum")


def follow(
    scope: Scope, start: int, var: Any, tracked: dict[int, int]
) -> tuple[int | None, int | None, dict[int, int]]:
    """Follows dims of a variable through a jaxpr to where one of them alone is reduced.

    Returns:
        The dim that is, or None; else the number of the output that the variable became, or None,
        and its dims there.
    """
    places: dict[Any, dict[int, int]] = {var: tracked}
    for position in range(start, len(scope.jaxpr.eqns)):
        equation = scope.jaxpr.eqns[position]
        for number, source in enumerate(equation.invars):
            if isinstance(source, Literal) or source not in places:
                continue
            dims, name = places[source], equation.primitive.name
            gone = _reduced(equation, number, dims)
            if len(gone) == 1:
                return gone[0], None, {}
            calls = scope.calls.get(position, [])
            if calls and len(calls[0].jaxpr.invars) == len(equation.invars):
                inner = calls[0].jaxpr
                found, output, after = follow(calls[0], 0, inner.invars[number], dims)
                if found is not None:
                    return found, None, {}
                if output is not None and output < len(equation.outvars):
                    places[equation.outvars[output]] = after
            elif not gone and not calls:
                moved = _moved(
                    name, equation.params, shape_of(source.aval), shape_of(equation.outvars[0].aval)
                )
                after = {moved(d): label for d, label in dims.items()}
                if None not in after:
                    places[equation.outvars[0]] = {d: x for d, x in after.items() if d is not None}
    for number, output in enumerate(scope.jaxpr.outvars):
        if not isinstance(output, Literal) and output in places:
            return None, number, places[output]
    return None, None, {}


def _reduced(equation: Any, number: int, dims: Mapping[int, int]) -> list[int]:
    """Labels of the dims that an equation reduces of one operand."""
    params = equation.params
    if equation.primitive.name == "dot_general":
        axes = params["dimension_numbers"][0][number]
    elif equation.primitive.name in _REDUCES:
        axes = params.get("axes", (params.get("axis"),))
    else:
        return []
    return [label for dim, label in dims.items() if dim in axes]
