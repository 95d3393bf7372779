"""Every code is raised by some test that looks at its message."""

import re
from pathlib import Path

import pytest

from jaxtp.errors import JaxtpError

TESTS = Path(__file__).parent
RESERVED = {"TP002"}
"""Codes whose meaning is fixed but that nothing raises yet."""

SOURCES = {
    path.name: path.read_text()
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.name not in {"test_messages.py", "test_errors.py", "test_surface.py"}
}


@pytest.mark.parametrize("code", sorted(set(JaxtpError.registry) - RESERVED))
def test_a_test_raises_it_and_reads_its_text(code):
    name = JaxtpError.registry[code].__name__
    shown = re.compile(rf"\b{name}\b|\b{code}\b")
    readers = [t for t in SOURCES.values() if shown.search(t) and re.search(r"match=|\.err\b", t)]
    assert readers, f"no test shows the message of {code} {name}"


@pytest.mark.parametrize("code", sorted(RESERVED))
def test_reserved_codes_are_raised_nowhere(code):
    name = JaxtpError.registry[code].__name__
    package = TESTS.parent / "jaxtp"
    users = [p.name for p in package.rglob("*.py") if f"{name}(" in p.read_text()]
    assert users == ["planning.py"]
