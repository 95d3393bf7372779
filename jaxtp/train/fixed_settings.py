"""Settings that every candidate of a search has, as a user gives them."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtp.cost.candidates import POLICIES, SETTINGS
from jaxtp.errors import BadUsage, join


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
        BadUsage: TP132, for a setting that is not searched.
    """
    unknown = sorted(set(fixed) - set(searched))
    if unknown:
        raise BadUsage(
            f"{join(unknown)} is not searched", where="fix", fix=f"one of {join(searched, 20)}"
        )
    words = {name: int(policy) for name, policy in POLICIES.items()}
    words |= {"aggressive": 1, "auto": 0, "off": 0, "true": 1, "false": 0}
    values: dict[str, int] = {}
    for name, value in fixed.items():
        text = str(value).lower()
        try:
            values[SETTINGS[name]] = words[text] if text in words else int(text)
        except ValueError:
            raise BadUsage(
                f"{name}={value}", where="fix", fix=f"a number, or one of {join(words, 20)}"
            ) from None
    return values
