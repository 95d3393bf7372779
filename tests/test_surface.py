"""What users may rely on is frozen: a change shows as a change of `tests/golden/surface.txt`."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
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
    assert len(jaxtp.__all__) <= 44
    assert all(hasattr(jaxtp, name) for name in jaxtp.__all__)
    assert len(Path(jaxtp.__file__).with_suffix(".pyi").read_text().splitlines()) <= 60


def test_the_changelog_says_where_modules_went():
    changes = (Path(__file__).parent.parent / "CHANGELOG.md").read_text()
    moved = re.findall(r"^  \| `(jaxtp[\w.]+)`.* \| `(jaxtp[\w.]+)` \|$", changes, re.M)
    assert len(moved) > 60
    assert [new for _, new in moved if importlib.util.find_spec(new) is None] == []
    assert len(dict(moved)) == len(moved)


def test_the_version_is_the_packages():
    text = (Path(jaxtp.__file__).parent.parent / "pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["version"] == jaxtp.__version__


def test_plans_do_not_depend_on_the_hash_seed():
    # Sets of names are walked in another order in every process; a plan must not show it.
    code = (
        "import jaxtp; from jaxtp import models; "
        "print(jaxtp.make_plan(models.abstract('llama-tiny'), {'tp': 8}).to_json())"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "3")
    }
    assert len(plans) == 1
