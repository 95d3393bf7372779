"""A folder with text and settings for `scripts/train.py`, for tests that start it many times."""

import json
import os
import random


def make(root, config, words):
    """Writes `root/text` and `root/config.json`; the environment that keeps compiled programs."""
    (root / "text").mkdir()
    for number in range(30):
        text = " ".join(random.Random(number).choices(words, k=400))
        (root / "text" / f"{number}.txt").write_text(text)
    settings = config | {"data": {"files": f"{root}/text/*.txt"}}
    (root / "config.json").write_text(json.dumps(settings))
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "JAX_COMPILATION_CACHE_DIR": str(root / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
