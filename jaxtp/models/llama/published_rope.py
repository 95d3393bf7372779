"""Rotary positions in a config.json: the fields of transformers 4 and of 5, as ours and back."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtp.errors import JaxtpError, join
from jaxtp.models.llama.config import LinearRopeScaling, LlamaConfig, RopeScaling, YarnRopeScaling
from jaxtp.models.published import Fields, refuse, refuse_contradiction

SCALINGS: dict[str, type[RopeScaling] | type[LinearRopeScaling] | type[YarnRopeScaling]] = {
    "llama3": RopeScaling,
    "linear": LinearRopeScaling,
    "yarn": YarnRopeScaling,
}
"""`rope_type` -> what we call it."""


def merge_rope(fields: Fields, where: str) -> Fields:
    """Fields with the one `rope_parameters` of transformers 5 as the several of version 4.

    Raises:
        UnsupportedModel: TP096, if two spellings are there and say different things.
    """
    found = dict(fields)
    rope = found.pop("rope_parameters", None)
    scaling = _one_type(found.get("rope_scaling"), where)
    if scaling is not None:
        found["rope_scaling"] = scaling
    for name, value in _apart(rope, where).items():
        given = found.get(name)
        if given is not None and given != value:
            raise refuse_contradiction(where, f"{name} = {given!r}", f"rope_parameters = {rope!r}")
        found[name] = value
    theta = (found.get("rope_scaling") or {}).get("rope_theta") if scaling is not None else None
    if theta is not None and theta != found.get("rope_theta", theta):
        raise refuse_contradiction(
            where, f"rope_theta = {found['rope_theta']!r}", f"rope_scaling = {scaling!r}"
        )
    return found


def _apart(rope: Any, where: str) -> dict[str, Any]:
    """`rope_parameters` as the fields of version 4; Gemma 3 has one set for each kind of layer."""
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        raise refuse(where, f"rope_parameters is {rope!r}", "an object")
    if isinstance(rope.get("full_attention"), Mapping):
        if set(rope) - {"full_attention", "sliding_attention"}:
            raise refuse(where, f"rope_parameters is {dict(rope)!r}", "full and sliding attention")
        local = _apart(rope.get("sliding_attention"), where)
        if local.get("rope_scaling") is not None:
            raise refuse(
                where,
                f"rope_parameters.sliding_attention is {local!r}",
                "only frequencies of full attention are stretched",
            )
        values = _apart(rope["full_attention"], where)
        return values | {"rope_local_base_freq": local["rope_theta"]} if local else values
    scaling = _one_type(rope, where) or {}
    values = {
        name: scaling.pop(name)
        for name in ("rope_theta", "partial_rotary_factor")
        if name in scaling
    }
    return values | {"rope_scaling": scaling or None}


def _one_type(scaling: Any, where: str) -> dict[str, Any] | None:
    """A scaling whose kind is under `rope_type`; the default kind without settings is none."""
    if not isinstance(scaling, Mapping):
        if scaling is not None:
            raise refuse(where, f"rope_scaling is {scaling!r}", "null or an object")
        return None
    found = dict(scaling)
    old, new = found.pop("type", None), found.pop("rope_type", None)
    if old is not None and new is not None and old != new:
        raise refuse_contradiction(where, f"rope_scaling.type = {old!r}", f"rope_type = {new!r}")
    kind = old if new is None else new
    if kind in (None, "default"):
        return found or None
    return {"rope_type": kind, **found}


def read_rope(given: Fields, where: str) -> dict[str, Any]:
    """`rope_scaling` as ours.

    Raises:
        UnsupportedModel: TP096, if it is of a kind that is not built.
    """
    scaling = given.get("rope_scaling")
    if scaling is None:
        return {"rope_scaling": None}
    rest = {
        name: value
        for name, value in scaling.items()
        if name not in ("rope_type", "rope_theta") and value is not None
    }
    kind = SCALINGS.get(str(scaling.get("rope_type")))
    fields = dataclasses.fields(kind) if kind else ()
    known = {field.name for field in fields}
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    flags = {field.name for field in fields if field.type is bool}
    numbers = all(
        isinstance(value, bool) if name in flags else _is_number(value)
        for name, value in rest.items()
    )
    if kind is None or not needed <= rest.keys() <= known or not numbers:
        missing = f" without {join(sorted(needed - rest.keys()))}" if needed - rest.keys() else ""
        raise refuse(
            where,
            f"rope_scaling is {dict(scaling)!r}{missing}",
            "supported: null; rope_type linear with factor; rope_type llama3 with "
            + join(sorted(field.name for field in dataclasses.fields(RopeScaling)))
            + "; rope_type yarn with factor and original_max_position_embeddings",
        )
    try:
        return {"rope_scaling": kind(**rest)}
    except JaxtpError as err:
        raise refuse(where, f"rope_scaling: {err.what}", err.fix) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_rope(config: LlamaConfig) -> dict[str, Any]:
    """`rope_scaling` as theirs."""
    scaling = config.rope_scaling
    if scaling is None:
        return {"rope_scaling": None}
    kind = next(name for name, ours in SCALINGS.items() if isinstance(scaling, ours))
    fields = dataclasses.asdict(scaling)
    whole = fields.pop("truncate", True)
    given = {name: value for name, value in fields.items() if value}
    given |= {} if whole else {"truncate": whole}
    return {"rope_scaling": {"rope_type": kind, **given}}
