"""The walker: reads a jaxpr once, front to back, and collects facts about dims.

Every sub-jaxpr is read where it is called (inlined), so that a `jit`, a `remat` or a `custom_vjp`
changes nothing. What a primitive does to dims is in the table of `primitives`; a primitive that is
not in it is entered if it holds a jaxpr, taken as elementwise if its shapes allow, and is otherwise
opaque: fresh dims and a record of its name.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var
from jax.extend.source_info_util import summarize

from jaxtp.rules.jaxpr.classes import Classes, Dim, Dims, dim_size
from jaxtp.rules.jaxpr.records import Contraction, Fact, Opaque


class Kind(IntEnum):
    """What a value depends on; a result is the largest kind of its operands."""

    CONSTANT = 0
    PARAMETER = 1
    ACTIVATION = 2


@dataclasses.dataclass(slots=True, eq=False)
class Index:
    """What an integer value picks from; shared by all views of it.

    Attributes:
        rows: The dim that its values run over, () while unknown.
        tokens: Whether it is an integer input of the model as it came in.
    """

    rows: Dim = ()
    tokens: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """An array of the traced program.

    Attributes:
        dims: One dim (tuple of atoms) per array dim.
        aval: Shape and dtype.
        kind: What it depends on.
        order: Creation order; parents always have a smaller one.
        path: The parameter it is a view of, "" for anything else.
        kernel: Whether it is the result of a product or convolution with a weight.
        parents: The activations it was computed from.
        elementwise: Whether it was computed from its parents position by position.
        bent: Whether an elementwise function that is no line made it: an activation function, a
            root, an exponential.
        skip: For a sum on the residual stream, the operand that is not the branch.
        scores: Whether it comes from a product of activations without a kernel in between.
        index: What it picks from, if it holds integers.
        one_hot: Whether it compares `index` with a range.
        product: The contraction that it is the output of, up to views.
    """

    dims: Dims
    aval: Any
    kind: Kind
    order: int
    path: str = ""
    kernel: bool = False
    parents: tuple["Value", ...] = dataclasses.field(default=(), repr=False)
    elementwise: bool = False
    bent: bool = False
    skip: "Value | None" = dataclasses.field(default=None, repr=False)
    scores: bool = False
    index: Index | None = None
    one_hot: bool = False
    product: Contraction | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes in elements."""
        return shape_of(self.aval)


@dataclasses.dataclass(slots=True, eq=False)
class Scope:
    """One jaxpr as it was read at one place where it is called.

    Attributes:
        jaxpr: The jaxpr. The same object has one scope per call.
        values: What each variable is; constants are left out.
        calls: Equation position -> scopes of its sub-jaxprs, in the order they were read.
        consts: What its constvars are.
    """

    jaxpr: Jaxpr = dataclasses.field(repr=False)
    values: dict[Var, Value] = dataclasses.field(repr=False)
    calls: dict[int, list["Scope"]]
    consts: Sequence[Any] = dataclasses.field(default=(), repr=False)


Result = Dims | Value
Handler = Callable[["Walk", Any, Sequence[Value]], Sequence[Result]]


def shape_of(aval: Any) -> tuple[int, ...]:
    """The shape of an abstract value; () for tokens and references, which have none."""
    return tuple(getattr(aval, "shape", ()))


def is_integer(aval: Any) -> bool:
    """Whether an abstract value holds integers that could be indices."""
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.integer)


def bare(jaxpr: Any) -> Any:
    """A jaxpr without its constants; JAX 0.10 closes what 0.12 leaves open. Other things pass."""
    return getattr(jaxpr, "jaxpr", jaxpr)


LINEAR_MAPS = (f"{os.sep}flax{os.sep}", os.path.join("jaxtp", "models", "projections.py"))
"""Parts of the names of files that models call for their products."""


UNKNOWN = "an unknown line"
"""What texts say in place of a line that `where` does not know."""


def where(equation: Any) -> str:
    """The line that wrote an equation: "file.py:83 (Attention.__call__)", "" if it is not known.

    JAX leaves its own frames out; frames of linear maps are skipped here, since Flax's Dense is not
    the user's line.
    """
    frames = summarize(equation.source_info, 8).split("\n")
    own = [f for f in frames if not any(part in f for part in LINEAR_MAPS)] or frames
    place, _, function = own[-1].partition(" ")
    file, _, position = place.partition(":")
    line = position.partition(":")[0]
    return f"{os.path.basename(file)}:{line} {function}".strip() if line else ""


class Walk:
    """State of one analysis.

    Attributes:
        classes: The dimension classes.
        facts: Facts in program order.
        used: Paths of parameters that some equation consumed.
        entered: Scopes of the jaxprs that the current equation has entered so far; at the end, the
            root.
        signatures: Einsum-like signatures of opaque attention kernels, by name.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        default: Handler,
        views: frozenset[str],
        signatures: Mapping[str, str],
    ) -> None:
        self.classes = Classes()
        self.facts: list[Fact] = []
        self.used: set[str] = set()
        self.entered: list[Scope] = []
        self.signatures = signatures
        self._handlers = handlers
        self._default = default
        self._views = views
        self._count = 0

    def new(self, aval: Any, kind: Kind, dims: Dims | None = None, **known: Any) -> Value:
        """A value with the given dims, or with fresh ones."""
        self._count += 1
        if dims is None:
            dims = self.classes.fresh_dims(shape_of(aval))
        return Value(dims, aval, kind, self._count, **known)

    def run(self, jaxpr: Any, inputs: Sequence[Value]) -> list[Value]:
        """Reads a jaxpr, open or closed; returns its outputs."""
        inner: Jaxpr = bare(jaxpr)
        # Constants are not stored: each use makes fresh dims, so that one array of ones that is
        # used for two widths of equal size does not tie them together.
        values = {
            var: value
            for var, value in zip(inner.invars, inputs, strict=True)
            if value.kind is not Kind.CONSTANT
        }
        scope = Scope(inner, values, {}, getattr(jaxpr, "consts", ()))
        self.entered.append(scope)
        for position, equation in enumerate(inner.eqns):
            outer, self.entered = self.entered, []
            self._step(equation, values)
            if self.entered:
                scope.calls[position] = self.entered
            self.entered = outer
        return [self.value(var, values) for var in inner.outvars]

    def derive(
        self,
        aval: Any,
        dims: Dims,
        inputs: Sequence[Value],
        *,
        view: bool = False,
        elementwise: bool = False,
        same_index: bool = False,
        **known: Any,
    ) -> Value:
        """The value that an equation computes from `inputs`.

        Args:
            aval: Shape and dtype of the result.
            dims: Its dims.
            inputs: The operands.
            view: Whether it only moves, drops, repeats or converts elements.
            elementwise: Whether it works position by position.
            same_index: Whether integers still pick the same thing, as they do in a view.
            known: Fields to set directly.
        """
        kind = max((v.kind for v in inputs), default=Kind.CONSTANT)
        if kind is not Kind.ACTIVATION:
            # The operand that the others scale or shift: W in W * scale.
            path = max(inputs, key=lambda v: dim_size(sum(v.dims, ()))).path
            return self.new(aval, kind, dims, **{"path": path, **known})
        parents = tuple(v for v in inputs if v.kind is Kind.ACTIVATION)
        fields: dict[str, Any] = {
            "parents": parents,
            "scores": any(v.scores for v in parents),
            "elementwise": elementwise,
        }
        index = parents[0].index
        if (view or same_index) and all(v.index is index for v in parents):
            fields["index"] = index
            fields["one_hot"] = all(v.one_hot for v in parents)
        elif is_integer(aval):
            fields["index"] = Index()
        if view and len(parents) == 1:
            fields["product"] = parents[0].product
        return self.new(aval, kind, dims, **{**fields, **known})

    def pick(self, index: Index, rows: Dim) -> None:
        """An index picks along `rows`; what one index picks from, in whatever array, is one dim."""
        if not index.rows:
            index.rows = rows
        elif dim_size(index.rows) == dim_size(rows):
            self.classes.unify(index.rows, rows)

    def give_up(
        self, equation: Any, inputs: Sequence[Value], reason: str, name: str = ""
    ) -> list[Dims]:
        """Fresh dims for an equation that cannot be read, and a record of it."""
        paths = tuple(v.path for v in inputs if v.path)
        dims = tuple(dim for value in inputs for dim in value.dims)
        name = name or equation.primitive.name
        self.facts.append(Opaque(name, reason, paths, where(equation), dims))
        return [self.classes.fresh_dims(shape_of(var.aval)) for var in equation.outvars]

    def value(self, var: Any, values: Mapping[Var, Value]) -> Value:
        """What a variable is; a new constant each time for what depends on no input."""
        value = None if isinstance(var, Literal) else values.get(var)
        return value or self.new(var.aval, Kind.CONSTANT)

    def _step(self, equation: Any, values: dict[Var, Value]) -> None:
        if not any(not isinstance(var, Literal) and var in values for var in equation.invars):
            return  # computed from constants only
        name = equation.primitive.name
        inputs = [self.value(var, values) for var in equation.invars]
        self.classes.origin = equation
        results = self._handlers.get(name, self._default)(self, equation, inputs)
        if not self.entered:
            self.used.update(v.path for v in inputs if v.path)
        view = name in self._views
        for var, result in zip(equation.outvars, results, strict=True):
            if not isinstance(result, Value):
                result = self.derive(var.aval, result, inputs, view=view)
            if result.kind is not Kind.CONSTANT:
                values[var] = result
