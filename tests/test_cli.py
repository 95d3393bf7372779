"""The command line on real listings."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxtp
from jaxtp.cli import commands
from jaxtp.cli.commands import main
from jaxtp.config.named_files import check_writable
from jaxtp.errors import BadUsage

PRICED = ["search", "llama-tiny", "--batch", "8", "--compiled", "0"]
COMPILED = ["preflight", "--model", "llama-tiny", "--tp", "2"]


@pytest.fixture
def listing(tmp_path):
    tree = {
        "attn": {n: jax.ShapeDtypeStruct((768, 768), jnp.bfloat16) for n in ("q", "k", "v", "o")},
        "mlp": {"up": jnp.zeros((768, 3072)), "down": jnp.zeros((3072, 768))},
    }
    path = tmp_path / "tree.json"
    jaxtp.dump_tree(tree, path, {"num_attention_heads": 12})
    return str(path)


def test_a_listing_comes_back_as_it_was(listing):
    tree, config = jaxtp.load_tree(listing)
    assert tree["attn/q"].dtype == jnp.bfloat16
    assert tree["mlp/up"].shape == (768, 3072)
    assert config == {"num_attention_heads": 12}


def test_plan_prints_a_table(listing, capsys):
    main(["plan", listing, "--tp", "8"])
    out = capsys.readouterr().out
    assert out.startswith("plan for tp_0=4 x tp_1=2: 6 parameters")
    assert "12 units on tp=8: 4-way" in out


def test_plan_prints_json_for_programs(listing, capsys):
    main(["plan", listing, "--tp", "8", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == {"tp_0": 4, "tp_1": 2}
    assert data["params"]["mlp/up"]["spec"] == [[], ["tp_0", "tp_1"]]
    assert data["params"]["attn/q"]["bytes_per_device"] == 768 * 768 * 2 // 4
    assert data["params"]["attn/q"]["reasons"]


def test_sizes_can_be_given_or_withheld(listing, capsys):
    main(["plan", listing, "--tp", "8", "--no-use-config", "--heads", "8", "--json"])
    data = json.loads(capsys.readouterr().out)
    assert data["mesh"] == {"tp": 8}


def test_explain(listing, capsys):
    main(["explain", listing, "attn/o", "--tp", "4"])
    out = capsys.readouterr().out
    assert "P(tp, -) on tp=4" in out
    assert "12 heads were given" in out


def test_explain_names_the_lines_of_a_preset(capsys):
    main(["explain", "llama-tiny", "layers/self_attn/k_proj/kernel", "--tp", "2"])
    out = capsys.readouterr().out
    assert re.search(r"contracted with `layers/self_attn/o_proj/kernel` at model\.py:\d+", out)


def test_explain_names_the_lines_of_anybodys_function(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text(
        "import jax\n"
        "def forward(p, x):\n"
        "    gate, up = jax.numpy.split(x @ p['both'], 2, -1)\n"
        "    return x + (gate * up) @ p['down']\n"
        "def model():\n"
        "    shape = lambda *n: jax.ShapeDtypeStruct(n, 'float32')\n"
        "    params = {'both': shape(64, 256), 'down': shape(128, 64)}\n"
        "    return forward, params, (shape(2, 8, 64),)\n"
        "def broken():\n"
        "    return 3\n"
        "def raises():\n"
        "    return {}['nothing']\n"
    )
    monkeypatch.chdir(tmp_path)
    main(["explain", "mine:model", "both"])
    out = capsys.readouterr().out
    assert "a product sums over 64 at mine.py:3 (forward)" in out
    assert "contracted with `down` at mine.py:4 (forward)" in out
    (tmp_path / "torn.py").write_text("def model(:\n")
    mistakes = {"mine:broken": "int", "mine:none": "'none'", "nobody:f": "nobody"}
    mistakes |= {"mine:raises": f"KeyError: 'nothing' ({tmp_path / 'mine.py'}:12)"}
    mistakes |= {"torn:model": "SyntaxError: invalid syntax (torn.py, line 1)"}
    for wrong, why in mistakes.items():
        with pytest.raises(SystemExit):
            main(["plan", wrong])
        error = capsys.readouterr().err
        assert f"TP132 at {wrong}: it gives no model" in error
        assert why in error


def test_errors_prints_a_page_or_the_list(capsys):
    main(["errors", "tp003"])
    assert "TP003 SizeMismatch" in capsys.readouterr().out
    main(["errors"])
    assert "TP013  NoTensorAxis: The mesh has no axis" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["plan", "no/such/file"], "TP132 at no/such/file"),
        (["errors", "TP999"], "TP132: no error has the code"),
        (["plan", "LISTING", "--heads", "7"], "TP003 at attn: 7 heads"),
        (["plan", "LISTING", "--policy", "error"], "TP041 at attn/q"),
        (["explain", "LISTING", "attn/x"], "TP045 at attn/x"),
        (["plan", "LISTING", "--tp", "0"], "TP010"),
        (["plan", "LISTING", "--policy", "nonsense"], "TP020 at policy"),
        ([*PRICED, "--seq", "-5"], "TP132 at seq: seq is -5"),
        ([*PRICED, "--batch", "-5"], "TP132 at batch: batch is -5"),
        ([*PRICED, "--limit", "0"], "TP132 at limit"),
        ([*PRICED, "--compiled", "-1"], "TP132 at compile_best"),
        ([*PRICED, "--network", "1.2.3gbps"], "TP132 at network"),
        ([*PRICED, "--network", "0gbps"], "TP132 at network"),
        ([*PRICED, "--html", "no/such/folder/page"], "TP132 at no/such/folder/page"),
        ([*PRICED, "--write", "/"], "TP132 at /"),
        ([*PRICED, "--generate", "--limit", "3"], "TP132 at generate"),
        (["search", "llama-tiny", "--generate", "--compiled", "-1"], "TP132 at compile_best"),
        (["search", "nobody:f", "--write", "b.toml"], "TP132 at write: b.toml would hold a module"),
        ([*COMPILED, "--quantize", "int8"], "TP132 at quantize: --quantize without --generate"),
        ([*COMPILED, "--context", "4096"], "TP132 at context: --context without --generate"),
        ([*COMPILED, "--new-tokens", "8"], "TP132 at new_tokens: --new-tokens without"),
        ([*COMPILED, "--generate", "--seq", "64"], "TP132 at generate"),
        ([*COMPILED, "--html", "no/such/folder/page"], "TP132 at no/such/folder/page"),
        (["generate", "no/model", "--prompt", "a", "--out", "no/such/a"], "TP132 at no/such/a"),
    ],
)
def test_mistakes_give_a_code_and_exit_2(args, text, listing, capsys, monkeypatch):
    monkeypatch.chdir(Path(listing).parent)
    with pytest.raises(SystemExit) as exit_:
        main([listing if a == "LISTING" else a for a in args])
    assert exit_.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"params": {"a": [1, "x"]}}', '{"params": {"a": [-1]}}']
)
def test_files_that_are_no_listing(text, tmp_path):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(BadUsage, match="not a shape listing"):
        jaxtp.load_tree(path)


def test_what_cannot_be_written_is_said(listing, tmp_path):
    with pytest.raises(SystemExit) as end:
        main(["view", listing, "--html", str(tmp_path / "no" / "page.html")])
    assert end.value.code == BadUsage.exit_code


def test_a_reader_that_goes_ends_it_without_a_traceback(listing):
    command = [sys.executable, "-c", "from jaxtp.cli.commands import main; main()"]
    with subprocess.Popen(
        [*command, "plan", listing], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        run.stdout.close()
        said = run.stderr.read()
    # The jaxlib of the oldest stack says on stderr that there is no CUDA driver.
    assert "Traceback" not in said
    assert "TP" not in said
    assert run.returncode == 141


@pytest.mark.parametrize("unbuffered", ["", "1"])  # noticed at the end, or as it is printed
def test_output_that_is_not_taken_is_said_without_a_traceback(unbuffered):
    command = [sys.executable, "-c", "from jaxtp.cli.commands import main; main()"]
    with open("/dev/full", "w") as full:
        run = subprocess.run(
            [*command, "errors"],
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert run.stderr.startswith("TP132 at standard output: cannot write it: No space left")
    assert "Traceback" not in run.stderr
    assert run.returncode == BadUsage.exit_code


def test_a_file_is_as_it_was_after_a_look_at_it(tmp_path):
    there, new = tmp_path / "there", tmp_path / "new"
    there.write_text("text")
    check_writable(there)
    check_writable(new)
    assert there.read_text() == "text"
    assert not new.exists()
    os.mkfifo(tmp_path / "pipe")
    check_writable(tmp_path / "pipe")


def test_interrupted(monkeypatch):
    def interrupt(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "command", interrupt)
    with pytest.raises(SystemExit) as end:
        main(["plan"])
    assert end.value.code == 130


@pytest.mark.parametrize(
    "text",
    [
        '{"params": {"a": [4], "a": [8]}}',
        '{"params": {"a": [1e3]}}',
        '{"params": {"a": [true]}}',
        '{"params": {"a": "4"}}',
        "[]",
        "",
    ],
)
def test_listings_that_say_nothing_or_two_things(text, tmp_path):
    path = tmp_path / "tree.json"
    path.write_text(text)
    with pytest.raises(BadUsage, match="TP132"):
        jaxtp.load_tree(path)


def test_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"jaxtp {jaxtp.__version__}\n"
