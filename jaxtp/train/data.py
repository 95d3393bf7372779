"""Training text as bytes: a corpus split by file, batches that depend on the step alone."""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtp.errors import BadData

Tokens = NDArray[np.uint8]

# Stands between files, so that a model can learn where one begins. Text files do not contain it.
END_OF_FILE = b"\0"
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Bytes to train on and bytes to judge by, which share no file.

    Attributes:
        train: `(bytes,)`, files joined by `END_OF_FILE`.
        validation: `(bytes,)`, alike.
        num_files: Files in `train` and in `validation`.
    """

    train: Tokens
    validation: Tokens
    num_files: tuple[int, int]


def read_corpus(root: Path, pattern: str = "*.py", *, validation_share: float = 0.1) -> Corpus:
    """All files below `root` that match, in path order, split by a hash of each relative path.

    The split depends on the paths alone: a file keeps its side when others come or go. Folders of
    installed packages and of tests are left out.

    Args:
        root: Folder to read.
        pattern: File name pattern.
        validation_share: Expected share of the files on the validation side.

    Raises:
        BadData: TP130, if either side is empty.
    """
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    paths = {path.relative_to(root): path for path in root.rglob(pattern)}
    for name, path in sorted(paths.items()):
        if _LEFT_OUT.isdisjoint(name.parts) and path.is_file():
            sides[is_validation(name.as_posix(), validation_share)].append(path.read_bytes())
    if not all(map(any, sides)):
        raise BadData(
            f"{pattern!r} gives {len(sides[0])} files to train on, {len(sides[1])} to validate on",
            where=str(root),
            fix="name a folder with more files; it is the files that are split, not their text",
        )
    train, validation = (np.frombuffer(END_OF_FILE.join(side), np.uint8) for side in sides)
    return Corpus(train, validation, (len(sides[0]), len(sides[1])))


def standard_library() -> Corpus:
    """The sources of the running Python's standard library: real text that every machine has."""
    return read_corpus(Path(sysconfig.get_path("stdlib")))


def is_validation(name: str, share: float) -> bool:
    """Whether a file is kept for validation, from its relative path alone.

    >>> [is_validation(name, 0.5) for name in ("ast.py", "json/decoder.py")]
    [False, True]
    """
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < share * 2**64


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Batches:
    """Random windows of a text; batch `step` is a pure function of the seed and the step.

    So a run that resumes at step 1000 sees what it would have seen, with no state to save.

    Attributes:
        text: `(tokens,)` of any integer type.
        batch_size: Windows in a batch, over all devices.
        seq_len: Tokens the model reads of each window; one more is there, as the last target.
        seed: Any non-negative integer.
    """

    text: NDArray[np.integer]
    batch_size: int
    seq_len: int
    seed: int = 0

    def __getitem__(self, step: int) -> NDArray[np.int32]:
        """`(batch_size, seq_len + 1)` token ids of one step, 0 or later.

        Raises:
            BadData: TP130, if the text is shorter than one window.
        """
        random = np.random.default_rng((self.seed, step))
        starts = random.integers(0, _num_windows(self.text, self.seq_len), self.batch_size)
        return _windows(self.text, starts, self.seq_len)


def fixed_windows(text: NDArray[np.integer], count: int, seq_len: int) -> NDArray[np.int32]:
    """`(count, seq_len + 1)` windows at equal distances over the whole text.

    Raises:
        BadData: TP130, if the text is shorter than one window.
    """
    starts = np.linspace(0, _num_windows(text, seq_len) - 1, count).astype(np.int64)
    return _windows(text, starts, seq_len)


def unigram_entropy(train: Tokens, windows: NDArray[np.int32]) -> float:
    """Cross-entropy, in nats per byte, of the byte frequencies of `train` on `windows`.

    Add-one smoothing: a byte that training never saw still has a probability.
    """
    counts = np.bincount(train, minlength=256) + 1.0
    return float(-np.log(counts / counts.sum())[windows[:, 1:]].mean())


def bigram_entropy(train: Tokens, windows: NDArray[np.int32]) -> float:
    """Cross-entropy, in nats per byte, of the best guess from one byte of context on `windows`.

    Counts of pairs in `train`, plus one pseudo-pair per context that is spread like the byte
    frequencies (a Dirichlet prior): pairs that training never saw fall back to the unigram.
    """
    unigram = np.bincount(train, minlength=256) + 1.0
    pairs = np.bincount(train[:-1].astype(np.int64) * 256 + train[1:], minlength=65536)
    counts = pairs.reshape(256, 256) + unigram / unigram.sum()
    nats = -np.log(counts / counts.sum(axis=1, keepdims=True))
    return float(nats[windows[:, :-1], windows[:, 1:]].mean())


def _num_windows(text: NDArray[np.integer], seq_len: int) -> int:
    if text.size <= seq_len:
        raise BadData(
            f"the text has {text.size} tokens, one window needs {seq_len + 1}",
            fix="use more text or a shorter seq_len",
        )
    return text.size - seq_len


def _windows(
    text: NDArray[np.integer], starts: NDArray[np.int64], seq_len: int
) -> NDArray[np.int32]:
    return text[starts[:, None] + np.arange(seq_len + 1)].astype(np.int32)
