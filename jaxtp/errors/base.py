"""The root of every coded error, and what messages are made of."""

import inspect
import os
import textwrap
import warnings
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import ClassVar

PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
"""Where the source of jaxtp lies."""


class JaxtpError(Exception):
    """Root of every error jaxtp raises on purpose.

    Attributes:
        what: One sentence with the numbers that disagree.
        where: A parameter path, a config key or a file; empty when there is no single place.
        fix: What would work, with legal values.
    """

    code: ClassVar[str] = "TP000"
    exit_code: ClassVar[int] = 2
    """What a program ends with: 2, as for a wrong command line, where the same run would fail again
    in the same way; 75, EX_TEMPFAIL of BSD's sysexits.h, where starting it again may help."""

    registry: ClassVar[dict[str, type["JaxtpError"]]] = {}

    def __init_subclass__(cls) -> None:
        if cls.registry.setdefault(cls.code, cls) is not cls:
            raise TypeError(f"{cls.code} is already taken by {cls.registry[cls.code].__name__}")

    def __init__(self, what: str, *, fix: str, where: str = "") -> None:
        self.what, self.where, self.fix = what, where, fix
        place = f" at {where}" if where else ""
        super().__init__(f"{self.code}{place}: {what}\n  fix: {fix}")

    def __reduce__(self) -> tuple[object, ...]:
        # BaseException pickles through self.args, which cannot rebuild keyword-only arguments.
        return (_rebuild, (type(self), self.what, self.fix, self.where))


def _rebuild(cls: type[JaxtpError], what: str, fix: str, where: str) -> JaxtpError:
    return cls(what, fix=fix, where=where)


class JaxtpWarning(UserWarning):
    """Something works but costs more than it should; the text starts with a code."""


def warn(text: str) -> None:
    """A `JaxtpWarning` that shows the user's line that led to it, also from inside a transform."""
    frame, level = inspect.currentframe(), 1
    while frame is not None and _is_library(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, JaxtpWarning, stacklevel=level)


def _is_library(frame: FrameType) -> bool:
    room, _, _ = frame.f_globals.get("__name__", "").partition(".")
    return frame.f_code.co_filename.startswith(PACKAGE) or room in ("jax", "flax")


def join(items: Iterable[object], limit: int = 8) -> str:
    """Items for a message: at most `limit` of them, then how many more there are."""
    listed = [str(item) for item in items]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more


class Problems:
    """Collects every problem of one input, so that a user fixes them in one round.

    `raise_any` raises nothing when empty, the error itself when there is one, and otherwise an
    error of the first one's class whose text lists all of them.
    """

    def __init__(self) -> None:
        self.found: list[JaxtpError] = []

    def add(self, error: JaxtpError) -> None:
        """Keeps one problem for `raise_any`."""
        self.found.append(error)

    def raise_any(self) -> None:
        """Raises what was collected; returns when nothing was."""
        if not self.found:
            return
        first = self.found[0]
        if len(self.found) == 1:
            raise first
        # Behind the first one's fix, so that each fix stands under its error.
        rest = "\n".join(f"  - {textwrap.indent(str(e), '  ').lstrip()}" for e in self.found[1:11])
        more = f"\n  - and {len(self.found) - 11} more" if len(self.found) > 11 else ""
        raise type(first)(first.what, fix=f"{first.fix}\n  also:\n{rest}{more}", where=first.where)
