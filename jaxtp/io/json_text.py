"""JSON that others wrote, read strictly: no repeated keys, no NaN, bounded, regular files."""

import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from jaxtp.errors import BadWeights, join

LONGEST = 64 * 2**20
"""Bytes of one JSON file; the index of 140,000 tensors has 15 MB."""

MOST_MARKS = 600_000
"""Commas and colons in one text; an index or a header has up to ten a tensor. A mixture of experts
with 60,000 tensors in one file is not known, and reading this many takes less than a second."""


def open_regular(file: Path) -> int:
    """A descriptor of a regular file, to be closed by the caller; a pipe would block for ever.

    Raises:
        BadWeights: TP095, if it cannot be opened or is no regular file.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as err:
        raise BadWeights(
            f"cannot be read: {err.strerror}",
            where=str(file),
            fix="give the folder that has config.json and *.safetensors",
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadWeights(
            "is no regular file", where=str(file), fix="a folder of files, as downloaded"
        )
    return descriptor


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        BadWeights: TP095, if there is none, or a key stands twice in one object.
    """
    with os.fdopen(open_regular(file), "rb") as stream:
        text = stream.read(LONGEST + 1)
    if len(text) > LONGEST:
        raise BadWeights(
            f"more than {LONGEST:,} bytes", where=str(file), fix="download the file again"
        )
    try:
        return parse_object(text)
    except ValueError as err:
        raise BadWeights(str(err), where=str(file), fix="download the file again") from None


def parse_object(text: bytes) -> dict[str, Any]:
    """The object that a JSON text is.

    Raises:
        ValueError: If it is none; the message says why.
    """
    marks = text.count(b",") + text.count(b":")
    if marks > MOST_MARKS:
        raise ValueError(f"is no description of a model: {marks:,} entries")
    try:
        content = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_constant)
    except (ValueError, RecursionError) as err:
        raise ValueError(f"is no JSON: {err}") from None
    if not isinstance(content, dict):
        raise ValueError("is no JSON object")
    return content


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object with these keys; a hook of `json.loads`.

    Raises:
        ValueError: If one stands twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"twice in one object: {join(n for n, c in counts.items() if c > 1)}")
    return found


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
