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
        raise BadUsage(
            f"cannot write it: {getattr(err, 'strerror', None) or err}",
            where=str(path),
            fix="name a file in a folder that is there and can be written to",
        ) from None
    return Path(path)


def as_folder(folder: Any) -> Path:
    """The path of a folder, there or not.

    Raises:
        BadUsage: TP132, for what is no path.
    """
    if not isinstance(folder, str | os.PathLike) or "\0" in str(folder):
        raise BadUsage(
            f"a {type(folder).__name__} names no folder",
            where="folder",
            fix="its path, as text or a Path",
        )
    return Path(folder)
