"""`jaxtp generate` on a folder as a hub gives it: fixture weights, a tokenizer, a chat template."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Tokens
from tokenizers import decoders, models, pre_tokenizers

from jaxtp.cli.commands import main
from jaxtp.errors import BadPrompt
from jaxtp.io.hf import tokenizer as hf_tokenizer
from jaxtp.io.hf.tokenizer import Tokenizer, read_published

FIXTURES = Path(__file__).parent / "fixtures" / "hf"
TEMPLATE = (
    "{{ bos_token }}{% for turn in messages %}{% if turn.role == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %}{{ turn.role[0] }}: {{ turn.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


def write_tokenizer(folder, letters=95):
    """One token a printable letter, then three special ones."""
    vocab = {chr(32 + i): i for i in range(letters)}
    special = ["<s>", "</s>", "<u>"]
    vocab |= {name: letters + i for i, name in enumerate(special)}
    tokenizer = Tokens(models.WordLevel(vocab, unk_token="<u>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.fixture
def folder(tmp_path):
    target = tmp_path / "llama"
    shutil.copytree(FIXTURES / "llama", target)
    write_tokenizer(target)
    return target


def run(folder, *flags):
    command = [sys.executable, "-m", "jaxtp.cli.commands", "generate", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout, done.stderr


def test_text_comes_as_it_is_made_and_the_speed_at_the_end(folder):
    out, err = run(folder, "--tp", "4", "--prompt", "hello", "--max-new-tokens", "20")
    assert len(out.rstrip("\n")) >= 10
    last = err.rstrip().splitlines()[-1]
    pattern = r"\d+ tokens; the first after \d+\.\d{3} s, then [\d,.]+ tokens/s; compiled in .* s"
    assert re.fullmatch(pattern, last), last


def test_files_of_prompts_become_files_of_answers(folder, tmp_path):
    asked = [{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "oh"}]
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(map(json.dumps, asked)) + "\n\n")
    flags = ["--file", str(prompts), "--out", str(answers), "--tp", "2", "--dp", "2"]
    run(folder, *flags, "--samples", "2", "--temperature", "0.8", "--max-new-tokens", "5")
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        (i, j) for i in range(3) for j in (0, 1)
    ]
    assert rows[2]["asked"] == asked[1]["messages"]
    assert all(len(row["tokens"]) == len(row["log_probabilities"]) for row in rows)
    tokenizer = Tokenizer(folder)
    assert all(row["text"] == tokenizer.decode(row["tokens"]) for row in rows)


def test_chats_are_what_the_template_makes_of_them(folder):
    tokenizer = Tokenizer(folder)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.chat(chat) == [95, *tokenizer.encode("u: hi"), 97, *tokenizer.encode("a:")]
    assert tokenizer.decode(tokenizer.encode("a b")) == "a b"
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "ab"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer(folder).chat(chat) == tokenizer.encode("ab")
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }}")
    assert Tokenizer(folder).chat(chat) == tokenizer.encode(json.dumps(chat))


def test_what_the_authors_draw_with_is_read(folder):
    assert read_published(folder).temperature == 0
    settings = {"eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    found = read_published(folder)
    assert (found.end_tokens, found.temperature, found.top_p) == ((2, 3), 0.6, 0.9)
    assert (found.top_k, found.min_p) == (None, None)


def change(folder, name, **changes):
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def lose(name):
    return lambda folder: (folder / name).unlink()


BAD = {
    "no tokenizer": (lose("tokenizer.json"), [], "TP140 at .*llama: the folder has no tokenizer"),
    "a damaged one": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"), [], "not a tokenizer",
    ),
    "another model's": (
        lambda folder: write_tokenizer(folder, 120), [],
        "token 122, '<u>', of a model with 99 tokens",
    ),
    "no template": (
        lose("tokenizer_config.json"), [], "a chat, and neither chat_template.jinja nor",
    ),
    "a template that refuses": (
        lambda folder: None, ["tool"], "the chat template says: no tools",
    ),
    "no generation config": (
        lose("generation_config.json"), [], "no generation_config.json, so that no token is known",
    ),
    "no end": (
        lambda folder: change(folder, "generation_config.json", eos_token_id=None), [],
        "eos_token_id is None",
    ),
    "no room": (
        lambda folder: None, ["--max-new-tokens", "60"], r"9 tokens and 60 new ones, where 64 fit",
    ),
    "no room asked for": (
        lambda folder: None, ["--max-context", "12"], "9 tokens and 4 new ones, where 12 fit",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("damage", "flags", "message"), BAD.values(), ids=BAD)
def test_bad_folders_and_prompts_fail_before_a_weight_is_read(
    folder, tmp_path, capsys, damage, flags, message
):
    (folder / "model.safetensors").unlink()
    damage(folder)
    asked = ["--prompt", "hi"]
    if flags == ["tool"]:
        file = tmp_path / "asked.jsonl"
        file.write_text(json.dumps({"messages": [{"role": "tool", "content": "x"}]}))
        asked, flags = ["--file", str(file)], []
    flags = flags if "--max-new-tokens" in flags else [*flags, "--max-new-tokens", "4"]
    with pytest.raises(SystemExit):
        main(["generate", str(folder), *asked, *flags])
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "TP132 at prompt: prompts come from the command line or from a file"),
        (["--prompt", "x", "--file", "y"], "TP132 at prompt"),
        (["--file", "missing.jsonl"], "TP132 at missing.jsonl: cannot be read"),
    ],
)
def test_prompts_are_asked_for(folder, capsys, flags, message):
    with pytest.raises(SystemExit):
        main(["generate", str(folder), *flags])
    assert message in capsys.readouterr().err


def test_a_line_that_is_no_prompt_is_named(folder, tmp_path, capsys):
    file = tmp_path / "asked.jsonl"
    file.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(SystemExit):
        main(["generate", str(folder), "--file", str(file)])
    assert f"TP140 at {file}:2: no prompt" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["tokenizers", "jinja2"])
def test_a_missing_package_is_named_with_its_extra(folder, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # what an import of a missing package finds
    with pytest.raises(BadPrompt, match=rf"{package} is not installed\n.*jaxtp\[hf\]"):
        hf_tokenizer.Tokenizer(folder).chat([{"role": "user", "content": "x"}])
