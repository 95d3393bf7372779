"""What a step takes beside its own state: which arguments are static, and how the others travel.

A step function is called like any other: with one batch or several, keys, `nnx.Rngs`, flags,
schedules. Arrays and numbers are traced; what steers Python (flags, strings, functions, whatever is
named static) is part of the program, which is compiled once for each of its values.
"""

import dataclasses
import enum
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtp.errors import BadStep, PlanMismatch, join
from jaxtp.errors.arguments import is_whole
from jaxtp.plan.trees import PyTree, as_pytree, has_objects, refuse_shapes, shape_dtype

FLAGS = (bool, str, bytes, enum.Enum)
"""Arguments of these types are static by themselves, and so are functions, such as schedules."""


def check_state(values: Sequence[Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses a state that is not the one that a step was made for.

    Args:
        values: Its leaves.
        shapes: Path -> shape of each leaf in the step's own state, in their order.

    Raises:
        PlanMismatch: TP045, if it has more or fewer leaves, or one of another shape.
        BadTree: TP046, if a leaf is no array, or a shape alone.
    """
    fix = "make the step from this state"
    if len(values) != len(shapes):
        raise PlanMismatch(
            f"the state has {len(values)} arrays, the step was made for {len(shapes)}", fix=fix
        )
    for (path, known), leaf in zip(shapes.items(), values, strict=True):
        refuse_shapes(leaf, path)
        if (shape := shape_dtype(leaf, path)[0]) != known:
            raise PlanMismatch(
                f"shape {shape} in the state, {known} in the step's", where=path, fix=fix
            )


class Static:
    """A value as a static argument of a jitted function, also where it cannot be hashed.

    NNX modules keep plain dataclasses and lists as attributes. Such values share one hash, and
    equality tells them apart.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = hash(type(value))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and bool(self.value == other.value)


@dataclasses.dataclass(frozen=True)
class Form:
    """Everything about the arguments of one call that is not an array.

    Attributes:
        num_positional: How many of them were given by position.
        names: Their names, in order.
        static: Name -> the value of a static one.
        structures: Name -> how to put a traced one together again.
    """

    num_positional: int
    names: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]
    structures: tuple[tuple[str, Callable[[PyTree], PyTree]], ...]

    def build(self, traced: Mapping[str, PyTree]) -> dict[str, Any]:
        """Every argument by name."""
        values = {name: rebuild(traced[name]) for name, rebuild in self.structures}
        return {**dict(self.static), **values}

    def call(self, fn: Callable[..., Any], state: Any, values: Mapping[str, Any]) -> Any:
        """`fn(state, ...)`, by position and by name as it was called."""
        positional, named = self.names[: self.num_positional], self.names[self.num_positional :]
        return fn(state, *(values[n] for n in positional), **{n: values[n] for n in named})

    def changed(self, values: Mapping[str, Any]) -> dict[str, PyTree]:
        """The arrays of NNX objects among the arguments, which a step may change in place.

        Raises:
            BadStep: TP133, if such an object has other parts than it came in with.
        """
        found: dict[str, PyTree] = {}
        for name, before in self.structures:
            plain, after = as_pytree(values[name])
            if after != before:
                raise BadStep(
                    "the step changed the static parts of an argument",
                    where=name,
                    fix="keep the structure of NNX objects, or make them part of the state",
                )
            if has_objects(values[name]):
                found[name] = plain
        return found


class Signature:
    """The arguments of a step function, and which of them are static.

    Args:
        step_fn: `(state, ...) -> ...`.
        static_argnums: Positions of static arguments, the state being 0.
        static_argnames: Names of static arguments.

    Raises:
        BadStep: TP133, if the function has no such argument.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        static_argnums: int | Sequence[int],
        static_argnames: str | Sequence[str],
    ) -> None:
        try:
            self._signature = inspect.signature(step_fn)
        except (TypeError, ValueError):  # builtins and some wrappers have none
            self._signature = inspect.signature(lambda state, *args, **named: None)
        by_name = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        self._names = [p.name for p in self._signature.parameters.values() if p.kind not in by_name]
        if not all(is_whole(n) and n >= 0 for n in _several(static_argnums)) or not all(
            isinstance(n, str) for n in _several(static_argnames)
        ):
            raise BadStep(
                f"static_argnums is {static_argnums!r}, static_argnames {static_argnames!r}",
                fix="numbers from 1, since 0 is the state, and names, as jax.jit takes them",
            )
        numbers = [static_argnums] if isinstance(static_argnums, int) else static_argnums
        names = [static_argnames] if isinstance(static_argnames, str) else static_argnames
        self._static = {*map(self._name, numbers), *names}
        open_ended = any(p.kind in by_name for p in self._signature.parameters.values())
        unknown = self._static - set(self._names)
        if set(self._names[:1]) & self._static or (unknown and not open_ended):
            raise BadStep(
                f"static arguments {join(sorted(self._static))}: the step takes "
                f"{join(self._names)}",
                fix="positions from 1, since 0 is the state, or names of the step's arguments",
            )

    def _name(self, position: int) -> str:
        known = self._names
        return known[position] if position < len(known) else f"argument {position}"

    def read(
        self, state: Any, args: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[Form, dict[str, PyTree]]:
        """The form of a call's arguments after the state, and the arrays of those that are traced.

        Raises:
            BadStep: TP133, if the step cannot be called like that.
        """
        try:
            self._signature.bind(state, *args, **named)
        except TypeError as err:
            given = join([f"{len(args)} by position", *named])
            raise BadStep(
                f"{err}; after the state it was given {given}",
                fix=f"call it as the step function is written: {self._signature}",
            ) from None
        values = {self._name(i + 1): value for i, value in enumerate(args)} | dict(named)
        static = {n: v for n, v in values.items() if n in self._static or _is_static(v)}
        parts = {n: as_pytree(v) for n, v in values.items() if n not in static}
        form = Form(
            num_positional=len(args),
            names=tuple(values),
            static=tuple(static.items()),
            structures=tuple((name, rebuild) for name, (_, rebuild) in parts.items()),
        )
        return form, {name: plain for name, (plain, _) in parts.items()}


def update_objects(values: Mapping[str, Any], changed: Mapping[str, PyTree]) -> None:
    """Gives the caller's NNX objects the arrays that the step left in them."""
    for name, state in changed.items():
        sys.modules["flax.nnx"].update(values[name], state)


def _is_static(value: Any) -> bool:
    if isinstance(value, FLAGS):
        return True
    # A module is a tree of arrays that can be called; a function, or a ufunc, is one leaf.
    return callable(value) and jax.tree.leaves(value) == [value] and not has_objects(value)


def _several(given: Any) -> Sequence[Any]:
    """What was given, one or several; a value that is neither stands for itself."""
    return given if isinstance(given, list | tuple) else (given,)
