"""Files and folders that somebody names."""

import os
from pathlib import Path
from typing import Any

from jaxtp.errors import BadUsage


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes a file that somebody asked for, and returns where it is.

    Raises:
        BadUsage: TP132, for what names no file, or one that cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, TypeError, ValueError) as err:  # ValueError: a null character
        raise _unwritable(path, err) from None
    return Path(path)


def check_writable(path: str | os.PathLike[str]) -> None:
    """Refuses a file that could not be written, before the work that it is for; leaves it as it is.

    Raises:
        BadUsage: TP132, as `write_text`.
    """
    file = Path(path)
    try:
        was_there = file.exists()
        if was_there and not file.is_file() and not file.is_dir():
            return  # a pipe's reader would take this for the end
        file.open("a").close()
        if not was_there:
            file.unlink(missing_ok=True)
    except (OSError, TypeError, ValueError) as err:
        raise _unwritable(path, err) from None


def _unwritable(path: Any, err: Exception) -> BadUsage:
    return BadUsage(
        f"cannot write it: {getattr(err, 'strerror', None) or err}",
        where=str(path),
        fix="name a file in a folder that is there and can be written to",
    )


def as_folder(folder: Any, where: str = "folder") -> Path:
    """The path of a folder, there or not.

    Args:
        folder: What somebody gave.
        where: The argument's name.

    Raises:
        BadUsage: TP132, for what is no path.
    """
    if not isinstance(folder, str | os.PathLike) or "\0" in str(folder):
        raise BadUsage(
            f"a {type(folder).__name__} names no folder",
            where=where,
            fix="its path, as text or a Path",
        )
    return Path(folder)
