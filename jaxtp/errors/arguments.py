"""Arguments that can only be a slip, refused by name before anything is computed with them.

A public function's table stands above it: `@checked(donate=FLAG, timeout=number(above=0))`. Each
row is a `Kind`: which values it accepts, what it says that it takes, and the error for all others.
"""

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar, cast

import numpy as np

from jaxtp.errors.base import JaxtpError, join
from jaxtp.errors.planning import BadConfig

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """What one argument may be.

    Attributes:
        accepts: Whether a value is of the kind.
        takes: The kind in words; it becomes the fix.
        error: What is raised for another value.
    """

    accepts: Callable[[Any], bool]
    takes: str
    error: type[JaxtpError] = BadConfig

    def check(self, name: str, value: Any) -> None:
        """Refuses a value of another kind.

        Raises:
            JaxtpError: of the class `error`.
        """
        if not self.accepts(value):
            raise self.error(f"{name} is {_shown(value)}", where=name, fix=self.takes)

    def or_none(self) -> "Kind":
        """The same, where the argument may be left out."""
        accepts = self.accepts
        return dataclasses.replace(self, accepts=lambda value: value is None or accepts(value))

    def raising(self, error: type[JaxtpError]) -> "Kind":
        """The same with another error."""
        return dataclasses.replace(self, error=error)


def checked(**kinds: Kind) -> Callable[[F], F]:
    """A function whose arguments of these names are checked in each call that gives them."""

    def wrap(function: F) -> F:
        signature = inspect.signature(function)
        assert kinds.keys() <= signature.parameters.keys()

        @functools.wraps(function)
        def call(*args: Any, **named: Any) -> Any:
            try:
                given = signature.bind(*args, **named).arguments
            except TypeError:
                given = {}  # the call itself says what it lacks
            for name, kind in kinds.items():
                if name in given:
                    kind.check(name, given[name])
            return function(*args, **named)

        return cast("F", call)

    return wrap


def _shown(value: Any) -> str:
    """A value for a message: itself if it is short, or its type."""
    if isinstance(value, str | bytes | numbers.Number | np.generic | None):
        return f"{value!r:.60}"
    return f"a {type(value).__name__}"


def is_number(value: object) -> bool:
    """Whether a value is a real, finite number, of Python or NumPy: not text, not True, not NaN."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond floats
        return False


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, of Python or NumPy, that 64 bits hold: not True."""
    return isinstance(value, numbers.Integral) and is_number(value) and abs(int(value)) < 2**63


def number(least: float = -math.inf, most: float = math.inf, *, above: float = -math.inf) -> Kind:
    """Real numbers between two bounds, both included, that are more than `above`."""
    bounds = [
        *([f"{least} or more"] if least > -math.inf else []),
        *([f"more than {above}"] if above > -math.inf else []),
        *([f"at most {most}"] if most < math.inf else []),
    ]
    return Kind(
        lambda value: is_number(value) and least <= value <= most and value > above,
        join(["a number", *bounds]),
    )


def whole(least: int, most: int = 2**31 - 1) -> Kind:
    """Whole numbers between two bounds, both included."""
    return Kind(
        lambda value: is_whole(value) and least <= value <= most,
        f"an integer, {least:,} to {most:,}",
    )


def one_of(*choices: Any) -> Kind:
    """A few values, each of its own type: 1 is not True."""
    return Kind(
        lambda value: any(type(value) is type(choice) and value == choice for choice in choices),
        f"one of {join(map(repr, choices))}",
    )


def instance(*classes: type, takes: str, error: type[JaxtpError] = BadConfig) -> Kind:
    """Objects of some classes."""
    return Kind(lambda value: isinstance(value, classes), takes, error)


def several(each: Kind, takes: str) -> Kind:
    """A list or a tuple of values of one kind."""
    return Kind(
        lambda value: isinstance(value, list | tuple) and all(map(each.accepts, value)), takes
    )


FLAG = instance(bool, np.bool_, takes="True or False")
TEXT = instance(str, takes="text")
FUNCTION = Kind(callable, "a function")
MAPPING = instance(Mapping, takes="a dict")
NAMES = several(TEXT, 'a tuple of names, such as ("tp",)')
