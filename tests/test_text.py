"""Text as batches: rows, packing, tokenizers, and steps that come back."""

import dataclasses

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxtp.config.settings import Batch, Config, Data, Run
from jaxtp.errors import BadConfig, BadData
from jaxtp.train.data import is_validation
from jaxtp.train.text import Rows, read_text

CONFIG = Config(seq_len=16, batch=Batch(size=4), run=Run(eval_windows=3))


@pytest.fixture
def folder(tmp_path):
    """Files whose text says where it comes from, on both sides of the split."""
    names = [f"part{i}.txt" for i in range(40)]
    assert 0 < sum(is_validation(name, 0.1) for name in names) < 40
    for i, name in enumerate(names):
        (tmp_path / name).write_text(f"{i:02} words of a file. " * 3)
    return tmp_path


def text_of(folder, **settings):
    data = Data(files=str(folder), **settings)
    return read_text(dataclasses.replace(CONFIG, data=data), 256)


def test_rows_predict_every_token_once():
    rows = Rows(np.arange(50, dtype=np.int32), None, 16)
    assert len(rows) == 3
    targets = np.concatenate([rows[i]["tokens"][1:] for i in range(3)])
    np.testing.assert_array_equal(targets, np.arange(1, 49))


def test_batches_come_back_by_step(folder):
    one, other = text_of(folder), text_of(folder)
    for step in (5, 0, 1000):
        np.testing.assert_array_equal(one.train(step)["tokens"], other.train(step)["tokens"])
    assert one.train(0)["tokens"].shape == (4, 17)
    assert one.train(0)["tokens"].dtype == np.int32
    assert (one.train(0)["tokens"] != one.train(1)["tokens"]).any()
    assert one.validation["tokens"].shape == (3, 17)

    # Each row comes once in a pass; another pass has another order.
    rows = len(one.train(0)["tokens"])
    firsts = [one.train(step)["tokens"].tobytes() for step in range(40)]
    assert rows == 4
    assert len(set(firsts)) == 40


def test_packed_rows_know_their_documents(folder):
    batch = text_of(folder, packed=True).train(0)
    assert batch["segments"].shape == batch["tokens"].shape
    for tokens, segments in zip(batch["tokens"], batch["segments"], strict=True):
        assert segments[0] == 1
        # A document ends with the border, and there alone a segment does too.
        np.testing.assert_array_equal(np.diff(segments) == 1, tokens[:-1] == 0)
    assert "segments" not in text_of(folder).train(0)


def test_tokenizer_is_read_from_a_file(folder, tmp_path):
    words = {"[UNK]": 0, "words": 1, "of": 2, "a": 3, "file": 4, ".": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    config = dataclasses.replace(
        CONFIG, data=Data(files=f"{folder}/part*.txt", tokenizer=str(path), packed=True)
    )
    text = read_text(config, 6)
    assert text.train(0)["tokens"].max() == 5
    assert {1, 2, 3, 4} <= set(text.train(0)["tokens"].ravel())
    with pytest.raises(BadConfig, match=r"TP020 at data\.tokenizer: the text has 6 .* knows 5"):
        read_text(config, 5)


def test_digests_tell_other_contents_of_the_same_paths(folder):
    before = text_of(folder).digests
    assert text_of(folder).digests == before
    path = sorted(folder.iterdir())[0]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    after = text_of(folder).digests
    assert {name for name in before if after[name] != before[name]} == {"SHA-256 of the text"}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({"tokenizer": "missing.json"}, BadConfig, r"TP020 at data\.tokenizer: not a tokenizer"),
        ({"files": "nowhere/*.txt"}, BadData, r"TP130 at nowhere"),
    ],
)
def test_text_that_cannot_be_read_is_refused(folder, data, error, message):
    settings = {"files": str(folder), **data}
    with pytest.raises(error, match=message):
        read_text(dataclasses.replace(CONFIG, data=Data(**settings)), 256)


def test_text_shorter_than_a_row_is_refused(folder):
    config = dataclasses.replace(CONFIG, seq_len=100_000, data=Data(files=str(folder)))
    with pytest.raises(BadData, match="one sequence needs 100001"):
        read_text(config, 256)
    with pytest.raises(BadConfig, match=r"TP020 at model: the text has 256 .* knows 255"):
        read_text(CONFIG, 255)
