"""Training text as batches that depend on the seed and the step alone.

A run that resumes at step 1000 sees what it would have seen, with no state to save: Grain's map
datasets are read by index.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grain
import numpy as np
from numpy.typing import NDArray

from jaxtp.config.settings import Config
from jaxtp.errors import BadConfig, BadData
from jaxtp.train import data

Batch = Mapping[str, NDArray[np.int32]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What a run reads.

    Attributes:
        train: Step, from 0 -> its batch.
        validation: One fixed batch of text that training never sees.
        description: One line on what it is.
        digests: SHA-256 of all bytes, and of the tokenizer's file: the same paths may lead to other
            contents on another host, or after a restart.
    """

    train: Callable[[int], Batch]
    validation: Batch
    description: str
    digests: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Documents one after the other, cut into rows; a source for Grain.

    Neighbouring rows share one token, the last target of one and the first input of the next, so
    that every token but the first is predicted once.

    Attributes:
        tokens: `(tokens,)` ids.
        documents: `(tokens,)`, the number of the document that each token belongs to; None if
            tokens may look across borders.
        seq_len: Tokens the model reads of a row; a row has one more.
    """

    tokens: NDArray[np.int32]
    documents: NDArray[np.int32] | None
    seq_len: int

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.seq_len

    def __getitem__(self, index: int) -> Batch:
        """`tokens`, `(seq + 1,)`, and with `documents` also `segments`, numbered from 1."""
        cut = slice(index * self.seq_len, (index + 1) * self.seq_len + 1)
        if self.documents is None:
            return {"tokens": self.tokens[cut]}
        numbers = self.documents[cut]
        return {"tokens": self.tokens[cut], "segments": numbers - numbers[0] + 1}


def read_text(config: Config, vocab_size: int) -> Text:
    """The text of a resolved config.

    Raises:
        BadConfig: TP020, if the tokenizer cannot be read, or knows more tokens than the model.
        BadData: TP130, for text that is missing or too short.
    """
    corpus = _corpus(config.data.files)
    tokenizer = _tokenizer_of(config)
    encode, known = _tokenizer(tokenizer)
    if vocab_size < known:
        raise BadConfig(
            f"the text has {known:,} different tokens, {config.weights or config.model} knows "
            f"{vocab_size:,}",
            where="data.tokenizer" if tokenizer else "model",
            fix="a tokenizer and a model that belong together",
        )
    train, validation = (_rows(encode(side), config) for side in (corpus.train, corpus.validation))
    dataset = grain.MapDataset.source(train).seed(config.seed).shuffle().repeat()
    batches: Any = dataset.batch(config.batch.size)
    every = np.linspace(0, len(validation) - 1, config.run.eval_windows).astype(int)
    held_out = [validation[int(row)] for row in every]
    return Text(
        train=lambda step: batches[step],
        validation={name: np.stack([row[name] for row in held_out]) for name in held_out[0]},
        description=f"{corpus.num_files[0]} files, {train.tokens.size:,} tokens; "
        f"validation on {corpus.num_files[1]} others",
        digests={
            "SHA-256 of the text": _digest(corpus.train, corpus.validation),
            "SHA-256 of the tokenizer": _digest(_bytes_of(tokenizer)),
        },
    )


def _tokenizer_of(config: Config) -> str:
    """The tokenizer's file: the one that is set, or the one beside the weights; "" for bytes."""
    beside = Path(config.weights) / "tokenizer.json"
    return config.data.tokenizer or (str(beside) if config.weights and beside.exists() else "")


def _digest(*parts: data.Tokens | bytes) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8))
        found.update(part)
    return found.hexdigest()


def _bytes_of(file: str) -> bytes:
    return Path(file).read_bytes() if file else b""


def _rows(documents: list[NDArray[np.int32]], config: Config) -> Rows:
    tokens = np.concatenate(documents)
    if tokens.size <= config.seq_len:
        raise BadData(
            f"the text has {tokens.size} tokens, one sequence needs {config.seq_len + 1}",
            where=config.data.files,
            fix="use more text or a shorter seq_len",
        )
    numbers = np.repeat(np.arange(len(documents), dtype=np.int32), [len(d) for d in documents])
    return Rows(tokens, numbers if config.data.packed else None, config.seq_len)


Encode = Callable[[data.Tokens], list[NDArray[np.int32]]]


def _tokenizer(file: str) -> tuple[Encode, int]:
    """How to turn bytes into documents of ids, and how many different ids there are.

    Raises:
        BadConfig: TP020, if the file is not a tokenizer.
    """
    if not file:
        return lambda text: [np.frombuffer(d, np.uint8).astype(np.int32) for d in _split(text)], 256
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise BadConfig(
            "tokenizers is not installed", where="data.tokenizer", fix='pip install "jaxtp[hf]"'
        ) from None
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as err:  # the package raises nothing narrower
        raise BadConfig(
            f"not a tokenizer: {err}", where="data.tokenizer", fix="a Hugging Face tokenizer.json"
        ) from None

    def encode(text: data.Tokens) -> list[NDArray[np.int32]]:
        texts = [document.decode(errors="replace") for document in _split(text)]
        return [np.asarray(one.ids, np.int32) for one in tokenizer.encode_batch(texts)]

    return encode, tokenizer.get_vocab_size()


def _split(text: data.Tokens) -> list[bytes]:
    """Documents of a corpus, each with the border at its end that a model can learn."""
    documents = text.tobytes().split(data.END_OF_FILE)
    return [document + data.END_OF_FILE for document in documents[:-1]] + documents[-1:]


def _corpus(files: str) -> data.Corpus:
    """A folder, or a pattern: `text/**/*.md` is everything below `text` called `*.md`."""
    if not files:
        return data.standard_library()
    if Path(files).is_dir():
        return data.read_corpus(Path(files), "*")
    root, star, rest = files.partition("*")
    folder, _, start = root.rpartition("/")
    pattern = (start + star + rest).rpartition("/")[2]
    return data.read_corpus(Path(folder or "."), pattern)
