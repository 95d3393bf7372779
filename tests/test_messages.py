"""Every code is raised by some test that looks at its message."""

import re
from pathlib import Path

import pytest

from jaxtp.errors import JaxtpError

TESTS = Path(__file__).parent

SOURCES = {
    path.name: path.read_text()
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.name not in {"test_messages.py", "test_errors.py", "test_surface.py"}
}


@pytest.mark.parametrize("code", sorted(JaxtpError.registry))
def test_a_test_raises_it_and_reads_its_text(code):
    name = JaxtpError.registry[code].__name__
    shown = re.compile(rf"\b{name}\b|\b{code}\b")
    readers = [t for t in SOURCES.values() if shown.search(t) and re.search(r"match=|\.err\b", t)]
    assert readers, f"no test shows the message of {code} {name}"
