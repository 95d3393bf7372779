"""Training text as batches that depend on the step alone.

Stage in: the `data` settings. Stage out: `Text`, whose batches are dicts for `NextToken`, on the
host and the same in every process.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from jaxtp.config import Config
from jaxtp.errors import BadConfig
from jaxtp.train import data

Batch = Mapping[str, NDArray[np.int32]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Text:
    """What a run reads.

    Attributes:
        train: Step, from 0 -> its batch.
        validation: One fixed batch of text that training never sees.
        description: One line on what it is.
    """

    train: Callable[[int], Batch]
    validation: Batch
    description: str


def read_text(config: Config, vocab_size: int) -> Text:
    """The text of a resolved config.

    Raises:
        BadConfig: TP020, if the model's vocabulary is smaller than the text's.
        BadData: TP130, for text that is missing or too short.
    """
    corpus = _corpus(config.data.files)
    if vocab_size < 256:
        raise BadConfig(
            f"the model knows {vocab_size} tokens, bytes are 256", where="model", fix="llama-tiny"
        )
    batches = data.Batches(corpus.train, config.batch.size, config.seq_len, config.seed)
    windows = data.fixed_windows(corpus.validation, config.run.eval_windows, config.seq_len)
    return Text(
        train=lambda step: {"tokens": batches[step]},
        validation={"tokens": windows},
        description=f"{corpus.num_files[0]} files, {corpus.train.size:,} bytes; "
        f"validation on {corpus.num_files[1]} others",
    )


def _corpus(files: str) -> data.Corpus:
    if not files:
        return data.standard_library()
    if Path(files).is_dir():
        return data.read_corpus(Path(files), "*")
    root, _, pattern = files.partition("*")
    # `text/**/*.md` is everything below `text` that is called `*.md`.
    folder = Path(root or ".") if root.endswith("/") or not root else Path(root).parent
    return data.read_corpus(folder, ("*" + pattern).rpartition("/")[2])
