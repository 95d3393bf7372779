"""Codes, pages and the collector."""

import pickle
import re

import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn

import jaxtp
from jaxtp import errors
from jaxtp.errors import BadConfig, BadMesh, JaxtpError, Problems, SizeMismatch, page

CODES = sorted(JaxtpError.registry)


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_page_with_a_fix(code):
    text = page(code)
    assert text.startswith(f"{code} {JaxtpError.registry[code].__name__}\n")
    assert "Fix:" in text
    assert re.fullmatch(r"TP\d{3}", code)


def test_every_error_is_also_a_builtin_one():
    for cls in JaxtpError.registry.values():
        assert any(b.__module__ == "builtins" and b is not Exception for b in cls.__mro__[2:-3]), (
            cls
        )


def test_a_message_says_what_where_and_how():
    error = SizeMismatch("7 does not divide by 2", where="a/kernel", fix="use 1 or 7")
    assert str(error) == "TP003 at a/kernel: 7 does not divide by 2\n  fix: use 1 or 7"
    assert isinstance(error, ValueError)


def test_errors_survive_pickling():
    error = SizeMismatch("what", where="where", fix="fix")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.where) == (SizeMismatch, str(error), "where")


def test_a_code_is_taken_once():
    with pytest.raises(TypeError, match="TP003 is already taken by SizeMismatch"):
        type("Another", (JaxtpError,), {"code": "TP003"})


def test_an_unknown_code_lists_the_known_ones():
    with pytest.raises(errors.BadUsage, match="TP001, TP002, TP003"):
        page("TP999")


def test_problems_are_raised_together():
    problems = Problems()
    problems.raise_any()
    problems.add(BadConfig("first", where="a", fix="do a"))
    with pytest.raises(BadConfig, match="first"):
        problems.raise_any()
    problems.add(BadMesh("second", fix="do b"))
    with pytest.raises(BadConfig, match=r"first\n  fix: .*\n  also:\n  - TP010: second\n    fix: "):
        problems.raise_any()


def test_long_lists_are_cut_short():
    assert errors.join(range(3)) == "0, 1, 2"
    assert errors.join(range(10), 2) == "0, 1 and 8 more"


def test_warnings_show_the_line_of_the_caller():
    """However many functions of jaxtp lie between."""
    annotated = {"up": nn.Partitioned(jnp.ones((8, 16)), ("model", None))}
    mesh = jaxtp.make_mesh(tp=2, dp=-1)
    calls = (
        lambda: jaxtp.make_plan(annotated, mesh),
        lambda: jaxtp.shard(annotated, mesh),
        lambda: jaxtp.init_sharded(lambda: annotated, optax.sgd(0.1), mesh),
        lambda: jaxtp.make_plan({"up": jnp.ones((8, 16))}, {"dp": 2, "x": 2, "tp": 2}),
    )
    for call in calls:
        with pytest.warns(jaxtp.JaxtpWarning) as seen:
            call()
        assert {warning.filename for warning in seen} == {__file__}
