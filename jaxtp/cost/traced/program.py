"""A traced step as flat blocks of operations: calls inlined, loops kept, sizes of one device.

In: a scope of `jaxtp.rules.jaxpr` and a plan. Out: arrays with their bytes on one device along the
tensor axis, and what the batch multiplies.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Literal

from jaxtp.plan.decisions import Plan
from jaxtp.rules.inputs import leads
from jaxtp.rules.jaxpr import Analysis
from jaxtp.rules.jaxpr.walk import Kind, Scope, Value, shape_of

LOOPS = frozenset(["scan", "while", "cond"])
"""Primitives whose bodies are blocks of their own; all other calls are inlined."""

VIEWS = frozenset(
    ["reshape", "squeeze", "expand_dims", "transpose", "copy", "optimization_barrier"]
)
"""Primitives that make no array of their own: XLA reads the operand in another order."""


@dataclasses.dataclass(slots=True, eq=False)
class Array:
    """One array of the program.

    Attributes:
        shape: Elements on one device along the tensor axis, at the traced batch.
        itemsize: Bytes of an element.
        batch: Which dim the batch is, or leads; None if it is of no batch.
        split: Which dims the tensor axis shards.
        kind: What it depends on.
        path: The parameter that it is a view of, "" for anything else.
        steps: Entries of the loop that it has one entry a turn of; 1 for others.
    """

    shape: tuple[float, ...]
    itemsize: int
    batch: int | None = None
    split: tuple[int, ...] = ()
    kind: Kind = Kind.CONSTANT
    path: str = ""
    steps: int = 1

    @property
    def num_bytes(self) -> float:
        """Bytes on one device along the tensor axis, at the traced batch."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(slots=True)
class Operation:
    """One equation.

    Attributes:
        name: Its primitive.
        params: As in the jaxpr.
        operands: Arrays that it reads; a literal is an array without bytes.
        results: Arrays that it makes.
        bodies: Blocks that it runs `turns` times each, if it is a loop.
        turns: How often.
    """

    name: str
    params: Mapping[str, Any]
    operands: list[Array]
    results: list[Array]
    bodies: list["Block"] = dataclasses.field(default_factory=list)
    turns: float = 1.0


@dataclasses.dataclass(slots=True)
class Block:
    """Operations one after the other.

    Attributes:
        operations: In program order.
        inputs: Arrays that come in.
        outputs: Arrays that go out.
    """

    operations: list[Operation]
    inputs: list[Array]
    outputs: list[Array]


class Reader:
    """Makes blocks of scopes, with sizes under one plan."""

    def __init__(self, analysis: Analysis, plan: Plan) -> None:
        self._analysis, self._plan = analysis, plan
        self._leads = leads(analysis, plan)

    def block(self, scope: Scope) -> Block:
        """A whole program."""
        known = {var: self._array(scope, var) for var in scope.jaxpr.invars}
        inputs = list(known.values())
        operations: list[Operation] = []
        outputs = self._inline(scope, known, operations)
        return Block(operations, inputs, outputs)

    def _inline(self, scope: Scope, known: dict[Any, Array], into: list[Operation]) -> list[Array]:
        """Adds a scope's equations; `known` holds its inputs. Returns its outputs."""

        def of(var: Any) -> Array:
            if isinstance(var, Literal):
                return Array((0.0,), 1)
            if var not in known:  # a constant of the jaxpr
                known[var] = self._array(scope, var)
            return known[var]

        for position, equation in enumerate(scope.jaxpr.eqns):
            operands = [of(var) for var in equation.invars]
            calls = scope.calls.get(position, [])
            name = equation.primitive.name
            bodies = [call for call in calls if len(call.jaxpr.outvars) == len(equation.outvars)]
            if bodies and name not in LOOPS and len(bodies[0].jaxpr.invars) == len(operands):
                inner = dict(zip(bodies[0].jaxpr.invars, operands, strict=True))
                results = self._inline(bodies[0], inner, into)
                known |= dict(zip(equation.outvars, results, strict=True))
                continue
            results = [self._array(scope, var) for var in equation.outvars]
            known |= dict(zip(equation.outvars, results, strict=True))
            made = Operation(name, equation.params, operands, results)
            if bodies:
                made.bodies = [self.block(body) for body in bodies]
                made.turns = equation.params.get("length", 1) if name == "scan" else 1
                made.turns /= len(bodies)  # of branches each is as likely
                _mark_steps(made)
            into.append(made)
        return [of(var) for var in scope.jaxpr.outvars]

    def _array(self, scope: Scope, var: Any) -> Array:
        aval = var.aval
        shape, dtype = shape_of(aval), getattr(aval, "dtype", None)
        itemsize = jnp.dtype(dtype).itemsize if _is_plain(dtype) else 4
        value = scope.values.get(var)
        if value is None:
            return Array(tuple(map(float, shape)), itemsize)
        sizes, split = self._sizes(value)
        batch = next((i for i, d in enumerate(value.dims) if self._analysis.is_batch(d)), None)
        return Array(sizes, itemsize, batch, split, value.kind, value.path)

    def _sizes(self, value: Value) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Elements of each dim on one device, and which dims the tensor axis shards."""
        sizes, split = [float(n) for n in value.shape], list[int]()
        for axis, found in enumerate(self._analysis.dim_classes(value)):
            lead = self._leads.get(found.group)
            if lead is None or found.classes[:1] != lead or split:
                continue
            ways = self._plan.mesh.ways(self._plan.axes_for(found.units))
            if ways > 1:
                sizes[axis] /= ways
                split.append(axis)
        return tuple(sizes), tuple(split)


def _is_plain(dtype: Any) -> bool:
    """Whether NumPy knows the type; keys of random numbers have one of their own."""
    try:
        jnp.dtype(dtype)
    except TypeError:
        return False
    return dtype is not None


def _mark_steps(loop: Operation) -> None:
    """Says which operands and results of a scan have one entry a turn: they lose a dim inside."""
    turns = int(loop.turns)
    if loop.name != "scan":
        return
    (body,) = loop.bodies
    sides: Sequence[tuple[list[Array], list[Array]]] = (
        (loop.operands, body.inputs),
        (loop.results, body.outputs),
    )
    for outside, inside in sides:
        for whole, one in zip(outside, inside, strict=True):
            if len(whole.shape) > len(one.shape):
                whole.steps = turns
