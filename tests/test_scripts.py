"""The scripts a stranger runs: choosing a Python, making the environment, the quickstart."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxtp.hardware.gpus import Target

ROOT = Path(__file__).parent.parent
SETUP = ROOT / "scripts" / "setup.sh"

# A stand-in for an interpreter: answers `-c CODE` as the real one would if it were another version
# or build, and makes environments whose pip only writes down what it is asked.
FAKE = """#!/bin/sh
case "$1 $2" in
  "-m venv")
    mkdir -p "$3/bin"
    cat > "$3/bin/python" <<'END'
#!/bin/sh
[ "$1" = -c ] && exit 0
echo "$@" >> "{log}"
exit ${{PIP_STATUS:-0}}
END
    chmod +x "$3/bin/python" ;;
  *)
    exec {real} -c 'import collections, sys, types
V = collections.namedtuple("V", "major minor micro releaselevel serial")
sys.version_info, sys.executable = V({version}, "{level}", 0), "{path}"
{lie}
exec(sys.argv[1])' "$2" ;;
esac
"""


def add_python(folder, name, version, *, level="final", lie=""):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(
        FAKE.format(
            real=sys.executable,
            version=version.replace(".", ", "),
            level=level,
            lie=lie,
            path=path,
            log=folder / "pip.log",
        )
    )
    path.chmod(0o755)
    return path


def add_broken_shim(folder, name):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\necho 'version not selected' >&2\nexit 127\n")
    (folder / name).chmod(0o755)


def setup(*arguments, **variables):
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", **variables}
    command = ["bash", str(SETUP), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_newest_python_that_runs_is_found(tmp_path):
    add_python(tmp_path / "a", "python3", "3.9.18")
    add_python(tmp_path / "a", "python3.11", "3.11.7")
    add_broken_shim(tmp_path / "a", "python3.13")
    expected = add_python(tmp_path / "b", "python3.12", "3.12.1")
    add_python(tmp_path / "b", "python3.11", "3.11.9")
    found = setup("--find", JAXTP_SEARCH=f"{tmp_path}/a:{tmp_path}/b:{tmp_path}/missing")
    assert found.stdout == f"003.012.001 {expected}\n"


@pytest.mark.parametrize(
    "lie",
    [
        'sys.modules["ensurepip"] = None',
        'sys.implementation = types.SimpleNamespace(name="pypy")',
        'import sysconfig; sysconfig.get_config_var = {"Py_GIL_DISABLED": 1}.get',
        'sys.version_info = V(3, 13, 0, "candidate", 1)',
        'sys.version_info = V(3, 15, 0, "final", 0)',
        'sys.version_info = V(3, 10, 13, "final", 0)',
    ],
    ids=["no ensurepip", "pypy", "free-threaded", "candidate", "too new", "too old"],
)
def test_unusable_pythons_are_passed_over(tmp_path, lie):
    add_python(tmp_path, "python3.13", "3.13.0", lie=lie)
    good = add_python(tmp_path, "python3.11", "3.11.7")
    assert setup("--find", JAXTP_SEARCH=str(tmp_path)).stdout == f"003.011.007 {good}\n"


def test_pyenv_and_uv_keep_pythons_too(tmp_path):
    pyenv, uv = tmp_path / "pyenv/versions/3.11.7/bin", tmp_path / "uv/cpython-3.14/bin"
    pyenv.mkdir(parents=True)
    uv.mkdir(parents=True)
    add_python(pyenv, "python3.11", "3.11.998")
    add_python(uv, "python3.14", "3.14.999")
    variables = {"PYENV_ROOT": f"{tmp_path}/pyenv", "UV_PYTHON_INSTALL_DIR": f"{tmp_path}/uv"}
    assert setup("--find", **variables).stdout == f"003.014.999 {uv}/python3.14\n"
    found = setup("--find", JAXTP_PYTHON="3.11", **variables)
    assert found.stdout == f"003.011.998 {pyenv}/python3.11\n"


def test_one_python_can_be_forced(tmp_path):
    add_python(tmp_path, "python3.13", "3.13.0")
    old = add_python(tmp_path, "python3.11", "3.11.7")
    by_path = setup("--find", JAXTP_SEARCH=str(tmp_path), JAXTP_PYTHON=str(old))
    assert by_path.stdout == f"003.011.007 {old}\n"


@pytest.mark.parametrize("wanted", [{}, {"JAXTP_PYTHON": "3.12"}, {"JAXTP_PYTHON": "/no/python"}])
def test_no_python_says_what_to_do(tmp_path, wanted):
    add_broken_shim(tmp_path, "python3.13")
    found = setup("--find", JAXTP_SEARCH=str(tmp_path), **wanted)
    assert found.returncode == 3
    assert wanted.get("JAXTP_PYTHON", "3.11 to 3.14") in found.stderr
    assert "fix: install one" in found.stderr


@pytest.mark.parametrize(
    ("version", "pins"), [("3.11.7", "constraints-oldest"), ("3.12.1", "constraints-newest")]
)
def test_stack_follows_the_python_and_is_installed_once(tmp_path, version, pins):
    add_python(tmp_path, "python3", version)
    variables = {"JAXTP_SEARCH": str(tmp_path), "JAXTP_VENV": str(tmp_path / "venv")}
    assert setup(**variables).returncode == 0
    log = (tmp_path / "pip.log").read_text()
    jax = next(
        line.removeprefix("jax==")
        for line in (ROOT / f"{pins}.txt").read_text().splitlines()
        if line.startswith("jax==")
    )
    assert f"-c {pins}.txt -e .[test]" in log
    if sys.platform == "linux":
        assert f"--no-deps jax-cuda12-plugin=={jax} jax-cuda12-pjrt=={jax}" in log

    again = setup(**variables)
    assert (again.returncode, again.stderr) == (0, "")
    assert (tmp_path / "pip.log").read_text() == log

    # What changes is installed into the environment that stands.
    (tmp_path / "venv" / "kept").touch()
    assert setup(**variables, JAXTP_EXTRAS="test,lint").returncode == 0
    assert "-e .[test,lint]" in (tmp_path / "pip.log").read_text()
    assert (tmp_path / "venv" / "kept").exists()


def test_half_made_environment_is_made_anew(tmp_path):
    add_python(tmp_path, "python3", "3.12.1")
    variables = {"JAXTP_SEARCH": str(tmp_path), "JAXTP_VENV": str(tmp_path / "venv")}
    failed = setup(**variables, PIP_STATUS="1")
    assert failed.returncode == 1
    assert "error: pip install" in failed.stderr
    (tmp_path / "venv" / "debris").touch()
    assert setup(**variables).returncode == 0
    assert not (tmp_path / "venv" / "debris").exists()


def test_foreign_environment_is_not_touched(tmp_path):
    add_python(tmp_path, "python3", "3.12.1")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "mine").touch()
    refused = setup(JAXTP_SEARCH=str(tmp_path), JAXTP_VENV=str(tmp_path / "venv"))
    assert refused.returncode == 1
    assert "was not made by this script" in refused.stderr
    assert (tmp_path / "venv" / "mine").exists()


def test_constraints_are_plain_pins():
    for name in ("oldest", "newest"):
        pins = (ROOT / f"constraints-{name}.txt").read_text().splitlines()
        assert pins
        assert all(line.count("==") == 1 and "/" not in line for line in pins)


def test_the_gate_runs_every_leg():
    gate = (ROOT / ".ci" / "run").read_text()
    legs = {f"tests/legs/{path.name}" for path in (ROOT / "tests" / "legs").glob("test_*.py")}
    assert {leg for leg in legs if leg not in gate} == set()


def quickstart(folder, *arguments, **variables):
    tiny = ["--steps", "4", "--batch-size", "4", "--seq-len", "16", "--eval-windows", "8"]
    command = [
        sys.executable,
        "-m",
        "jaxtp.cli.commands",
        "quickstart",
        "--folder",
        str(folder),
        *tiny,
        *arguments,
    ]
    # As a stranger's shell: what the harness set for itself is not passed on.
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX", "XLA", "TF_"))}
    environment |= variables
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_quickstart_trains_reports_and_saves(tmp_path):
    variables = {"JAXTP_REPORT_COMMUNICATION": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    run = quickstart(tmp_path, **variables)
    assert run.returncode == 0, run.stderr
    (folder,) = tmp_path.iterdir()
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert all(m["grad_norm"] > 0 and m["tokens_per_s"] > 0 and "lr" in m for m in metrics)
    assert metrics[-1]["validation_loss"] < metrics[0]["loss"]
    assert (folder / "checkpoints" / "4").is_dir()
    for text in (
        "plan for dp=2 x tp=4",
        "layers/self_attn/q_proj/kernel",
        "what one step moves",
        "this step runs on cpu, which moves other bytes",
        "step     4 of 4",
        "pairs of bytes",
        "class Reader",
        "arrays equal",
    ):
        assert text in run.stdout


def test_quickstart_fails_when_the_loss_is_not_finite(tmp_path):
    run = quickstart(tmp_path, "--learning-rate", "inf", JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert run.returncode == 2  # final: the same command would diverge again
    assert "TP131" in run.stderr
    assert "fix: lower the learning rate" in run.stderr


def bench_gpu(folder, *arguments):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "bench_gpu.py", *arguments],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_benchmark_can_be_rehearsed(tmp_path):
    run = bench_gpu(tmp_path, "--rehearse", "--json")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["tokens_per_s"] == pytest.approx(2 * 64 / found["step_seconds"])
    assert found["mfu_causal"] < found["mfu_full"]
    assert found["peak_bytes_predicted"] > 16e6  # state and gradients of a million parameters
    # The description that it saves is a target of its own.
    assert Target.parse(f"{tmp_path / 'gpu.json'}:1x8").device.description == "cpu"


def test_gpu_benchmark_without_a_gpu_says_so(tmp_path):
    run = bench_gpu(tmp_path)
    assert run.returncode == 1
    assert "TP116: jax runs on cpu" in run.stderr
