"""What users may rely on is frozen: a change shows as a change of `tests/golden/surface.txt`."""

import os
from pathlib import Path

import jaxtp
from jaxtp.errors import JaxtpError

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name, text):
    """Compares with `tests/golden/NAME`; run pytest with JAXTP_REGOLD=1 to rewrite it."""
    path = GOLDEN / name
    if os.environ.get("JAXTP_REGOLD"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} changed; review the difference, then regold"


def test_public_names_and_error_codes():
    names = sorted(jaxtp.__all__)
    errors = [f"{code} {cls.__name__}" for code, cls in sorted(JaxtpError.registry.items())]
    check_golden("surface.txt", "\n".join((*names, "", *errors, "")))


def test_front_door_is_small_and_true():
    assert len(jaxtp.__all__) <= 40
    assert all(hasattr(jaxtp, name) for name in jaxtp.__all__)
    assert len(Path(jaxtp.__file__).read_text().splitlines()) <= 60
