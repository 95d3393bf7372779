"""Settings that every candidate of a search has, as a user gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtp.cost.candidates import POLICIES, SETTINGS
from jaxtp.errors import BadUsage, join

WORDS: Mapping[str, Mapping[str, int]] = {
    "recompute": {name: int(policy) for name, policy in POLICIES.items()},
    "interleaved": {"aggressive": 1, "auto": 0, "off": 0},
    "sequence_parallel": {"true": 1, "false": 0},
}
"""Field of `Strategy` -> what its setting is called; all others are numbers."""


def checked_fixed(fixed: Any) -> dict[str, Any]:
    """Fixed settings by name; none for None.

    Raises:
        BadUsage: TP132, for what is no mapping.
    """
    if not isinstance(fixed, Mapping | None):
        raise BadUsage(
            f"a {type(fixed).__name__} fixes nothing", where="fixed", fix='{"mesh.tp": 8}'
        )
    return {str(name): value for name, value in (fixed or {}).items()}


def fixed_fields(
    fixed: Mapping[str, Any], searched: Sequence[str] = tuple(SETTINGS)
) -> dict[str, int]:
    """Fixed settings as fields of `Strategy`.

    Args:
        fixed: Setting -> value.
        searched: Settings that the search chooses.

    Raises:
        BadUsage: TP132, for a setting that is not searched, or what is none of its values.
    """
    unknown = sorted(set(fixed) - set(searched))
    if unknown:
        raise BadUsage(
            f"{join(unknown)} is not searched", where="fix", fix=f"one of {join(searched, 20)}"
        )
    values: dict[str, int] = {}
    for name, value in fixed.items():
        field, text = SETTINGS[name], str(value).lower()
        words = WORDS.get(field)
        try:
            values[field] = words[text] if words else int(text)
        except (KeyError, ValueError):
            known = f"one of {join(words)}" if words else "a number"
            raise BadUsage(f"{name}={value}", where="fix", fix=known) from None
    return values
