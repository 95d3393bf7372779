"""Every code has a mistake that raises it; `test_codes` makes them all."""

from coded_mistakes import CASES

from jaxtp.errors import JaxtpError


def test_every_code_has_a_mistake():
    assert set(CASES) == set(JaxtpError.registry)
