"""Examples in docstrings and pages run, and print what the pages say."""

import doctest
import importlib
import re
import shlex
from pathlib import Path

import pytest

from jaxtp.cli import commands
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


PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if "```python" in p.read_text()], ids=lambda p: p.stem
)
def test_code_of_a_page_runs_and_prints_what_it_says(page, capsys, monkeypatch, tmp_path):
    """One block after the other in one namespace; lines of `text` blocks are printed so far."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page.stem}
    printed = set()
    for kind, block in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(compile(block, page.name, "exec"), names)
            printed.update(line.rstrip() for line in capsys.readouterr().out.splitlines())
        elif kind == "text":
            said = [line for line in block.splitlines() if line != "..."]
            assert [line for line in said if line not in printed] == []


def jaxtp_commands(page):
    for _, block in BLOCK.findall(page.read_text()):
        for line in block.splitlines():
            words = shlex.split(
                re.split(r"\s{2,}", line)[0], comments=True
            )  # what it does may follow
            if words[:1] == ["jaxtp"]:
                yield words[1:]


def test_commands_of_pages_run(capsys, monkeypatch, tmp_path):
    """What needs neither a file nor minutes runs; of all others the command and flags exist."""
    monkeypatch.chdir(tmp_path)
    ran = 0
    for words in {tuple(words) for page in PAGES for words in jaxtp_commands(page)}:
        if words[0] in {"plan", "explain", "view", "errors"} and not {"TREE.json"} & set(words):
            commands.main(words)
            assert capsys.readouterr().out
            ran += 1
        else:
            with pytest.raises(SystemExit, match="0"):
                commands.main((words[0], "--help"))
            shown = capsys.readouterr().out
            assert [w for w in words if w.startswith("--") and w not in shown] == []
    assert ran >= 3


def test_links_between_pages_lead_somewhere():
    for page in [*PAGES, *ROOT.glob("*.md")]:
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([\w-]+))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            heads = re.findall(r"^#+ (.+)$", path.read_text(), re.M) if anchor else []
            slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads]
            assert not anchor or anchor in slugs, f"{page.name}: #{anchor}"


def test_recipes_name_at_most_three_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    recipes = page.split("\n## ")[1:]
    assert len(recipes) == 6
    for recipe in recipes:
        steps = re.findall(r"^\d\. (.*(?:\n   .*)*)", recipe, re.MULTILINE)
        assert 1 <= len(steps) <= 3
        for name in re.findall(r"`((?:jaxtp|tests|scripts)/[\w/.]+\.(?:py|txt))`", recipe):
            assert "NAME" in name or (ROOT / name).exists(), name
