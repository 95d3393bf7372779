"""Every family answers alike on several meshes: greedy as transformers, and the same draws.

python -m pytest tests/legs/test_generate_meshes.py

Two programs a family and mesh; greedy at tp 8 is in `tests/test_generation.py`. Three minutes on
two cores.
"""

import functools
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import test_generation as small

import jaxtp
from jaxtp.models.registry import FAMILIES

pytestmark = pytest.mark.filterwarnings("ignore:TP043")
GREEDY = ({"tp": 1}, {"tp": 2}, {"tp": 4}, {"dp": 2, "tp": 4})
DRAWN = ({"tp": 1}, {"dp": 2, "tp": 4})
small.load = functools.cache(small.load)  # both tests take what one of them has read


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_and_their_log_probabilities_are_those_of_one_device(family):
    key = jax.random.key(7)
    drawn = [
        jaxtp.generate(small.load(family, **sizes), small.PROMPTS, key=key, **small.SAMPLED)
        for sizes in DRAWN
    ]
    for answers in drawn[1:]:
        assert [a.tokens for a in answers] == [a.tokens for a in drawn[0]]
        for got, want in zip(answers, drawn[0], strict=True):
            np.testing.assert_allclose(got.log_probabilities, want.log_probabilities, atol=1e-4)


@pytest.mark.parametrize("sizes", GREEDY, ids=[small.row("", sizes)[1:] for sizes in GREEDY])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_on_other_meshes_are_those_of_transformers(family, sizes):
    small.test_greedy_tokens_are_those_of_transformers(family, sizes)
