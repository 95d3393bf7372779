"""Installed, not cloned: the distributions, in an environment that holds nothing else; takes build.

python -m pytest tests/legs/test_installed.py
"""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import jax
import pytest

import jaxtp

ROOT = Path(__file__).parents[2]

# What tests set for themselves, and what would lead back to the clone.
OURS = ("JAX", "XLA", "PYTHON", "TF_", "VIRTUAL_ENV")


def call(*command, cwd):
    """Runs a command in a folder with an environment of its own; output and errors are one text."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return subprocess.run(
        command,
        cwd=cwd,
        env=clean,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    made = call(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    assert made.returncode == 0, made.stdout
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(distributions, tmp_path_factory):
    """Runs a command of an environment into which the wheel was installed, in an empty folder."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, with_pip=True)
    stacks = ("constraints-newest.txt", "constraints-oldest.txt")
    pins = next(s for s in stacks if f"\njax=={jax.__version__}\n" in (ROOT / s).read_text())
    pip = [environment / "bin" / "python", "-m", "pip", "install", "-qq", "-c", ROOT / pins]
    made = call(*pip, distributions[1], cwd=environment)
    assert made.returncode == 0, made.stdout

    empty = tmp_path_factory.mktemp("empty")

    def run(program, *arguments):
        return call(environment / "bin" / program, *arguments, cwd=empty)

    run.environment, run.folder = environment, empty
    return run


def test_both_hold_every_file_of_the_package(distributions):
    sdist, wheel = distributions
    files = (p for p in (ROOT / "jaxtp").rglob("*") if p.is_file() and p.suffix != ".pyc")
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    # Names come from the stub when the program runs.
    assert {"jaxtp/__init__.pyi", "jaxtp/py.typed", "jaxtp/cli/quickstart.toml"} <= expected
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if not name.split("/")[0].endswith("dist-info")}
        assert held == expected
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        assert {name for name in names if name.startswith("jaxtp/")} == expected
        assert {"README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml"} <= names


def test_every_public_name_is_there_without_extras(installed):
    program = "import jaxtp; [getattr(jaxtp, n) for n in jaxtp.__all__]; "
    program += "print(jaxtp.__version__, len(jaxtp.__all__), jaxtp.__file__)"
    ran = installed("python", "-W", "error", "-c", program)
    assert ran.returncode == 0, ran.stdout
    version, count, file = ran.stdout.split()
    assert (version, int(count)) == (jaxtp.__version__, len(jaxtp.__all__))
    assert Path(file).is_relative_to(installed.environment)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("--help", "quickstart"),
        ("plan llama-tiny --tp 4", "P(-, tp)"),
        ("errors TP003", "vocab 32001 on tp=2"),
    ],
)
def test_commands_run(installed, arguments, text):
    ran = installed("jaxtp", *arguments.split())
    assert ran.returncode == 0, ran.stdout
    assert text in ran.stdout


def test_a_run_trains(installed):
    sizes = "--mesh.tp 2 --batch.size 4 --seq-len 32 --steps 2 --run.folder run"
    ran = installed("jaxtp", "train", *sizes.split())
    assert ran.returncode == 0, ran.stdout
    assert "plan for tp=2" in ran.stdout
    assert len((installed.folder / "run" / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "extra"),
    [
        ("preflight --model llama-tiny --tp 4", "TP113", "preflight"),
        ("train --steps 1 --data.tokenizer tokenizer.json", "TP020 at data.tokenizer", "hf"),
        ("train --steps 1 --run.tensorboard", "TP020 at run.tensorboard", "tensorboard"),
    ],
)
def test_what_is_missing_names_its_extra(installed, arguments, code, extra):
    ran = installed("jaxtp", *arguments.split())
    assert ran.returncode == 2, ran.stdout
    assert code in ran.stdout
    assert f'fix: pip install "jaxtp[{extra}]"' in ran.stdout
    assert "Traceback" not in ran.stdout
    assert "plan for" not in ran.stdout  # it is said before anything is made
