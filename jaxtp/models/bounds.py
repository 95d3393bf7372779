"""Bounds of a config's numbers, declared beside the field and checked when a config is made.

Wide enough for any model that exists, narrow enough that a damaged number cannot become an
allocation or a loop.
"""

import dataclasses
import functools
import typing
from typing import Annotated, Any, NamedTuple

from jaxtp.errors import BadConfig


class Bounds(NamedTuple):
    """The least and the greatest value of a number; both may occur."""

    low: float
    high: float

    def admit(self, value: Any) -> bool:
        """Whether a value is None, no number, or within; NaN is not."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return self.low <= value <= self.high

    def __str__(self) -> str:
        """For messages: "1 to 16384"."""
        low, high = (f"{x:,.0f}" if x == int(x) else f"{x:g}" for x in self)
        return f"{low} to {high}"


Depth = Annotated[int, Bounds(1, 2**14)]
"""Layers, heads, or the width of a head."""

Width = Annotated[int, Bounds(1, 2**24)]
"""Width of a residual stream or an MLP, entries of a vocabulary, experts."""

Experts = Annotated[int, Bounds(0, 2**14)]
"""Experts of a layer, or of a token."""

Tokens = Annotated[int, Bounds(1, 2**31 - 1)]
"""A length in tokens: positions are 32-bit integers."""

Epsilon = Annotated[float, Bounds(1e-30, 0.5)]
"""What keeps a norm from dividing by zero."""

Share = Annotated[float, Bounds(1e-3, 1.0)]
"""A share of 1."""

Positive = Annotated[float, Bounds(1e-12, 1e12)]
"""A factor, a cap, or the base of frequencies."""


Coefficient = Annotated[float, Bounds(0.0, 1e6)]
"""What a loss is multiplied by."""


@functools.cache
def bounds_of(kind: type) -> dict[str, Bounds]:
    """Field -> bounds, of a dataclass."""
    found: dict[str, Bounds] = {}
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        # `Tokens | None` holds the annotated type as its first member.
        for member in (hint, *typing.get_args(hint)):
            for note in getattr(member, "__metadata__", ()):
                if isinstance(note, Bounds):
                    found[name] = note
    return found


def check_bounds(config: Any) -> None:
    """Checks every number of a config.

    Raises:
        BadConfig: TP020, if one is not finite or out of its bounds.
    """
    for field in dataclasses.fields(config):
        bounds, value = bounds_of(type(config)).get(field.name), getattr(config, field.name)
        if bounds is not None and not bounds.admit(value):
            raise BadConfig(f"{field.name} is {value}", where=field.name, fix=f"{bounds}")
