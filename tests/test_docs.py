"""Examples in docstrings, and the migration page, are true."""

import doctest
import importlib
import re
from pathlib import Path

import pytest

from jaxtp.config.deepspeed import TABLE
from jaxtp.config.files import parse

ROOT = Path(__file__).parent.parent
WITH_EXAMPLES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in (ROOT / "jaxtp").rglob("*.py")
    if ">>> " in path.read_text()
)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_docstring_examples(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 0
    assert result.failed == 0


def test_the_migration_page_says_what_is_printed():
    page = (ROOT / "MIGRATION.md").read_text()
    files = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    printed = [f"| `{x.key}` | {x.action} | {x.text} |" for text in files for x in parse(text)[1]]
    refused = [f"| `{k}` | {row.text} |" for k, row in TABLE.items() if row.action == "refused"]
    assert len(files) == 2
    assert [row for row in page.splitlines() if row.startswith("| `")][-len(refused) :] == refused
    assert [row for row in printed if row not in page] == []
