"""Running equations that hold programs again, with other bodies in the place of theirs.

`jaxtp.parallelize` runs a traced model once more and adds constraints on the way. A constraint
inside a loop or a checkpoint holds only if the loop itself is built anew around the changed body.
Each function here does that with the public function of JAX that made the equation. They are the
second half of a row in the table of `primitives`; the first half says how dims pass through the
same equation, so that what is read can also be run.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtp.rules.jaxpr.walk import Value

Body = Callable[..., list[Any]]
"""Runs a sub-jaxpr: its inputs -> its outputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """An equation that holds programs, with what to run in their place.

    Attributes:
        equation: The jaxpr equation.
        bodies: One for each sub-jaxpr, in the order in which the handler of the same row reads
            them.
        operands: What each operand is.
        results: What each result is.
        run: `(fn, values, args)` -> (result of `fn(*args)`, what its leaves are). `fn` is traced,
            read and run like the model itself: a derivative rule is not in the model's jaxpr, and
            only traced when somebody differentiates.
    """

    equation: Any
    bodies: Sequence[Body]
    operands: Sequence[Value]
    results: Sequence[Value]
    run: Callable[[Callable[..., Any], Sequence[Value], Sequence[Any]], tuple[Any, list[Value]]]


Again = Callable[[Call, list[Any]], list[Any]]
"""Runs a call on operands; returns its results."""


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation as it stands."""
    params = equation.primitive.get_bind_params(equation.params)
    results = equation.primitive.bind(*operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def read(var: Any, known: Mapping[Any, Any]) -> Any:
    """What a variable or a literal of a jaxpr holds."""
    return var.val if isinstance(var, Literal) else known[var]


def inline(call: Call, operands: list[Any]) -> list[Any]:
    """A call: its body runs in place."""
    return call.bodies[0](*operands)


def checkpoint(call: Call, operands: list[Any]) -> list[Any]:
    """`jax.checkpoint`, with its policy."""
    params = call.equation.params
    again = jax.checkpoint(
        call.bodies[0], policy=params["policy"], prevent_cse=params["prevent_cse"]
    )
    return again(*operands)


def scan(call: Call, operands: list[Any]) -> list[Any]:
    """`lax.scan`; which operands are carried shows in the ranks, under any version of JAX."""
    params, body = call.equation.params, getattr(call.equation.params["jaxpr"], "jaxpr", None)
    body = params["jaxpr"] if body is None else body
    num_rows = same_rank(call.equation.invars, body.invars).count(False)
    num_carry = same_rank(call.equation.outvars, body.outvars).count(True)
    first = len(operands) - num_rows
    consts, init = operands[: first - num_carry], operands[first - num_carry : first]

    def step(carry: Any, row: Any) -> tuple[Any, Any]:
        out = call.bodies[0](*consts, *carry, *row)
        return out[:num_carry], out[num_carry:]

    kept = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, rows = jax.lax.scan(step, init, operands[first:], **kept)
    return [*carry, *rows]


def same_rank(outer: Sequence[Any], inner: Sequence[Any]) -> list[bool]:
    """Which operands or results go into the body as they are: a scan's rows lose a dim."""
    return [o.aval.ndim == i.aval.ndim for o, i in zip(outer, inner, strict=True)]


def while_loop(call: Call, operands: list[Any]) -> list[Any]:
    """`lax.while_loop` and `lax.fori_loop`: the constants of the test come first."""
    params = call.equation.params
    tests, consts = params["cond_nconsts"], params["body_nconsts"]
    tested, held = operands[:tests], operands[tests : tests + consts]
    return jax.lax.while_loop(
        lambda carry: call.bodies[0](*tested, *carry)[0],
        lambda carry: call.bodies[1](*held, *carry),
        operands[tests + consts :],
    )


def cond(call: Call, operands: list[Any]) -> list[Any]:
    """`lax.cond` and `lax.switch`."""
    return jax.lax.switch(operands[0], call.bodies, *operands[1:])


def shard_map(call: Call, operands: list[Any]) -> list[Any]:
    """`jax.shard_map`; the axes that its mesh leaves automatic still take constraints inside."""
    params = call.equation.params
    again = jax.shard_map(
        lambda *args: tuple(call.bodies[0](*args)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        axis_names=set(params.get("newly_manual_axes", params.get("manual_axes"))),
        check_vma=params["check_vma"],
    )
    return list(again(*operands))


def custom_jvp(call: Call, operands: list[Any]) -> list[Any]:
    """`jax.custom_jvp`: its rule is kept, and read and run like the function itself.

    To run the function in place would be to lose the rule: `jax.nn.relu` has a gradient of 0 at 0
    because of it.
    """

    @jax.custom_jvp
    def again(*args: Any) -> tuple[Any, ...]:
        return tuple(call.bodies[0](*args))

    @again.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> Any:  # pyright: ignore[reportUnusedFunction]
        moving = _floats(primals)
        own = _original(call, primals, moving)
        if len(_floats([var.aval for var in call.equation.outvars])) < len(call.equation.outvars):
            return jax.jvp(_original(call, primals, range(len(primals))), primals, tangents)

        def pushed(*args: Any) -> Any:
            return jax.jvp(own, args[: len(moving)], args[len(moving) :])

        values = [call.operands[i] for i in moving]
        args = [side[i] for side in (primals, tangents) for i in moving]
        return call.run(pushed, [*values, *values], args)[0]

    return list(again(*operands))


def custom_vjp(call: Call, operands: list[Any]) -> list[Any]:
    """`jax.custom_vjp`: both of its rules are kept, and read and run like the function itself."""
    kept: list[Value] = []

    @jax.custom_vjp
    def again(*args: Any) -> tuple[Any, ...]:
        return tuple(call.bodies[0](*args))

    def forward(*args: Any) -> Any:
        moving = _floats(args)
        own = _original(call, args, moving)
        values = [call.operands[i] for i in moving]
        (results, pull), leaves = call.run(
            lambda *floats: jax.vjp(own, *floats), values, [args[i] for i in moving]
        )
        kept[:] = leaves[len(call.results) :]
        return results, pull

    def backward(pull: Any, cotangents: Any) -> tuple[Any, ...]:
        moving = _floats([value.aval for value in call.operands])
        floats = _floats(cotangents)

        def pulled(*args: Any) -> Any:
            residuals, given = args[: len(kept)], dict(zip(floats, args[len(kept) :], strict=True))
            whole = [given.get(i, c) for i, c in enumerate(cotangents)]
            return jax.tree.unflatten(jax.tree.structure(pull), residuals)(tuple(whole))

        values = [*kept, *(call.results[i] for i in floats)]
        args = [*jax.tree.leaves(pull), *(cotangents[i] for i in floats)]
        found = dict(zip(moving, call.run(pulled, values, args)[0], strict=True))
        return tuple(found.get(i) for i in range(len(call.operands)))

    again.defvjp(forward, backward)
    return list(again(*operands))


def _floats(arrays: Sequence[Any]) -> list[int]:
    """Positions of what can be differentiated; an integer's tangent has a type of its own."""
    return [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.inexact)]


def _original(
    call: Call, operands: Sequence[Any], moving: Sequence[int]
) -> Callable[..., tuple[Any, ...]]:
    """The equation as it stands, with its own rules, as a function of some of its operands."""

    def own(*args: Any) -> tuple[Any, ...]:
        given = dict(zip(moving, args, strict=True))
        return tuple(bind(call.equation, [given.get(i, x) for i, x in enumerate(operands)]))

    return own
