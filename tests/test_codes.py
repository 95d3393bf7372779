"""Every code is raised by what a user does wrong, and its message is read: path, cause, fix."""

import inspect
import re

import pytest
from coded_mistakes import CASES

from jaxtp.errors import JaxtpError


@pytest.mark.parametrize("code", sorted(CASES))
def test_what_is_said(code, tmp_path, monkeypatch):
    act, where, what, fix = CASES[code]
    fixtures = {"folder": tmp_path, "tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = {n: fixtures[n] for n in inspect.signature(act).parameters}
    with pytest.raises(JaxtpError) as caught:
        act(**wanted)
    error = caught.value
    assert type(error).code == code, error
    assert re.search(what, error.what, re.DOTALL), error
    assert re.search(where, error.where) if where else error.where == "", error
    assert re.search(fix, error.fix, re.DOTALL), error
    place = f" at {error.where}" if where else ""
    assert str(error) == f"{code}{place}: {error.what}\n  fix: {error.fix}"
