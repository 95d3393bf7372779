"""`jaxtp errors`: what an error code means and what to do."""

from typing import Annotated

import tyro

from jaxtp.errors import JaxtpError, page


def errors(code: Annotated[str, tyro.conf.Positional] = "") -> None:
    """Print the page of an error code, or the list of codes.

    Args:
        code: For example TP003.
    """
    if code:
        print(page(code))
        return
    for known, cls in sorted(JaxtpError.registry.items()):
        print(f"{known}  {cls.__name__}: {(cls.__doc__ or '').splitlines()[0]}")
