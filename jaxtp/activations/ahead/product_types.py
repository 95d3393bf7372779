"""In which type a traced program takes its parameters."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import Jaxpr, Var


def product_type(jaxpr: Jaxpr, var: Var) -> Any:
    """The type that a program takes a parameter in: the one that every use converts it to."""
    kinds = set(_uses(jaxpr, var))
    return kinds.pop() if len(kinds) == 1 else _own_type(var)


def _own_type(var: Var) -> Any:
    aval: Any = var.aval
    return aval.dtype


def _uses(jaxpr: Jaxpr, var: Var) -> Iterator[Any]:
    """The types that uses of a variable convert it to, its own for any other use."""
    if any(out is var for out in jaxpr.outvars):
        yield _own_type(var)
    for equation in jaxpr.eqns:
        for place, operand in enumerate(equation.invars):
            if operand is not var:
                continue
            inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
            inner = getattr(inner, "jaxpr", inner)
            if equation.primitive.name == "convert_element_type":
                yield equation.params["new_dtype"]
            elif equation.primitive.name.startswith("custom_"):
                yield _own_type(var)  # its rule may use what its function rounds
            elif isinstance(inner, Jaxpr) and len(inner.invars) == len(equation.invars):
                yield from _uses(inner, inner.invars[place])
            else:
                yield _own_type(var)
