"""What users read keeps to docs/glossary.md: one word a thing, and the field's word."""

import ast
import pkgutil
import re
from pathlib import Path

import pytest

from jaxtp.cli import commands
from jaxtp.errors import JaxtpError, page

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "jaxtp").rglob("*.py"))
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
TESTS = sorted({*(ROOT / "tests").rglob("*.py")} - {Path(__file__)})
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()

INSTEAD = {
    r"\bwhole\b": ("replicated", "of an array; elsewhere `all of` says it"),
    r"\bcuts?\b": ("sharded", "`cut` left open whether a program slices or a mesh axis shards"),
    r"\bheld\b": ("sharded", "a device stores its shard"),
    r"\bdealt\b|\bdeals?\b": ("assigned", "layers are assigned to stages"),
    r"\bodd\b": ("not divisible", "oddness is about 2; the axis may have any size"),
    r"\b(the|a|this) cards?\b": ("GPU memory", "a card may carry several GPUs"),
    r"\bdegrees?\b": ("size of an axis", "an axis has a size"),
    r"\bthe grain\b": ("unit", ""),
    r"\bon the wire\b": ("wire bytes", "bytes are sent"),
    r"\b(?<!residual )(?<!residual\n)streams?\b(?=\s)": ("residual stream", "in full"),
    r"\bmatrix units?\b": ("unit", "a unit is a head or an expert; GPUs have tensor cores"),
    r"\bStage (in|out):": ("stage", "signatures say what goes in and out"),
}
"""Banned in text that users meet -> the glossary's word, and why."""

IN_PROSE = {
    r"\b(kept|keep|keeps|stay|stays) whole\b": "replicated",
    r"\bdealt out\b": "assigned",
    r"\b(is|are|lies|lie) whole\b(?! path)": "replicated",
    r"\bcut (over|along)\b": "sharded",
    r"\bStage (in|out):": "stage",
    r"\bmatrix units?\b": "unit",
}
"""Banned in docstrings and pages too, where common words have their common meaning as well."""


def literals(tree):
    """`(line, text)` of every string that is not a docstring of code nor a name of an attribute."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            skipped.add(node.body[0].value if isinstance(node.body[0], ast.Expr) else None)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            skipped.update(ast.walk(node))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in skipped:
            yield node.lineno, node.value


def found(text, banned):
    return [match.group() for word in banned for match in re.finditer(word, text)]


def test_the_table_is_the_glossary():
    words = {word for row in re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.M) for word in [row]}
    known = " | ".join(words)
    assert [say for say, _ in INSTEAD.values() if say not in known] == []
    assert [say for say in IN_PROSE.values() if say not in known] == []


def test_a_banned_word_is_found():
    tree = ast.parse('f"{n} units: whole"\nclass A:\n    __slots__ = ("cuts",)\n')
    assert [w for _, text in literals(tree) for w in found(text, INSTEAD)] == ["whole"]
    assert found("adds to the stream of", INSTEAD) == ["stream"]
    assert found("adds to the residual stream of", INSTEAD) == []


def test_strings_and_docstrings():
    said = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in (*CODE, *SCRIPTS)
        for line, text in literals(ast.parse(path.read_text()))
        for word in found(text, INSTEAD)
    ]
    assert said == []
    everything = (*CODE, *SCRIPTS, *TESTS)
    assert {path: w for path in everything if (w := found(path.read_text(), IN_PROSE))} == {}


def test_pages():
    tables = re.compile(r"^\|.*\|$", re.M)  # the glossary's say what not to say
    texts = {path: path.read_text() for path in PAGES}
    texts[ROOT / "docs" / "glossary.md"] = tables.sub("", GLOSSARY)
    assert {path: w for path, text in texts.items() if (w := found(text, IN_PROSE))} == {}


def test_pages_of_errors():
    assert {code: w for code in JaxtpError.registry if (w := found(page(code), INSTEAD))} == {}


def test_help(capsys):
    def shown(*command):
        with pytest.raises(SystemExit):
            commands.main([*command, "--help"])
        return capsys.readouterr().out

    names = re.findall(r"• (\w+)", shown())
    assert {"plan", "preflight", "errors"} <= set(names)
    assert {n: w for n in names if (w := found(shown(n), INSTEAD))} == {}
    assert found(shown(), INSTEAD) == []


def test_no_citation_of_what_is_not_here():
    """A page that a comment or docstring names is in the repository; its anchor is a heading."""
    sources = [path.read_text() for path in CODE]
    assert [w for s in sources for w in re.findall(r"\bDESIGN\b|\bD\d+\)", s)] == []
    cited = re.compile(r"\b((?:[\w-]+/)*[\w-]+\.md)(?:#([\w-]+))?")
    found_here = {c for source in sources for c in cited.findall(source)}
    assert len(found_here) > 3
    for name, anchor in found_here:
        text = (ROOT / name).read_text()
        slugs = [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings(text)]
        assert not anchor or anchor in slugs


def test_what_text_calls_by_a_full_name_exists():
    """A module that has moved leaves its old name behind in prose, where no import fails."""
    texts = {path: path.read_text() for path in (*CODE, *SCRIPTS, *PAGES)}
    texts.pop(ROOT / "CHANGELOG.md")  # it says what things were called
    cited = {name: p for p, t in texts.items() for name in re.findall(r"`(jaxtp(?:\.\w+)+)", t)}
    assert len(cited) > 50
    assert {name: path for name, path in cited.items() if not is_found(name)} == {}


def is_found(name):
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def headings(text):
    return re.findall(r"^#+ (.+)$", text, re.M)
