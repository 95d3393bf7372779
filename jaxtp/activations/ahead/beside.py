"""What moves beside a layer's backward pass, and has arrived before its last turn.

Left free, XLA's scheduler begins a reduction with the layer and ends it with the layer, and the
gather of the next weights, which shares its link, behind it: nothing then hides the gather. Where a
layer runs in turns, the reduction is therefore to end with the turn before the last.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.extend.source_info_util import current_name_stack, user_context

from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import bind, checkpoint, inline, read

BARRIER = "optimization_barrier"


def with_arrived(layer: Callable[..., Any], args: tuple[Any, ...], beside: Any) -> tuple[Any, Any]:
    """What `layer` gives, and `beside`, which its last barrier waits for; as it is without one.

    Args:
        layer: Of trees of arrays.
        args: What it takes.
        beside: A tree of arrays.
    """
    closed, shape = jax.make_jaxpr(layer, return_shape=True)(*args)
    results, beside = _run(closed.jaxpr, closed.consts, jax.tree.leaves(args), beside)
    return jax.tree.unflatten(jax.tree.structure(shape), results), beside


def _run(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], beside: Any
) -> tuple[list[Any], Any]:
    """Runs a program equation by equation."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))
    last = max((n for n, one in enumerate(jaxpr.eqns) if _has_barrier(one)), default=None)
    for position, equation in enumerate(jaxpr.eqns):
        operands = [read(var, known) for var in equation.invars]
        stack = current_name_stack() + equation.source_info.name_stack
        with user_context(equation.source_info.traceback, name_stack=stack), equation.ctx.manager:
            if position != last:
                results = bind(equation, operands)
            elif equation.primitive.name == BARRIER:
                results, beside = lax.optimization_barrier((operands, beside))
            else:
                (inner,) = jaxprs_in_params(equation.params)
                own = getattr(equation.params["jaxpr"], "consts", ())
                results, beside = _run(inner, own, operands, beside)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(var, known) for var in jaxpr.outvars], beside


def _has_barrier(equation: Any) -> bool:
    """Whether an equation is a barrier, or runs a program in place that has one."""
    row = PRIMITIVES.get(equation.primitive.name)
    if equation.primitive.name == BARRIER:
        return True
    if row is None or row.again not in (inline, checkpoint):
        return False
    return any(_has_barrier(e) for inner in jaxprs_in_params(equation.params) for e in inner.eqns)
