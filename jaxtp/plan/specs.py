"""Where the dims of an array lie: specs in one canonical spelling.

In: what JAX calls a PartitionSpec. Out: one tuple of mesh axes per dim, and back.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

from jax.sharding import PartitionSpec

from jaxtp.errors import BadSpec

Spec = tuple[tuple[str, ...], ...]
"""One tuple of mesh axes per array dim, major to minor; `()` means "not sharded"."""


def canonical(spec: PartitionSpec | Iterable[Any], rank: int, where: str = "") -> Spec:
    """A PartitionSpec with one tuple of axes per dim, so that equal specs compare equal.

    JAX itself treats `P("tp")` and `P("tp", None)` as different.

    Raises:
        BadSpec: TP044, if there are more entries than dims or an axis appears twice.

    >>> canonical(PartitionSpec(None, "tp"), 3)
    ((), ('tp',), ())
    """
    given: Any = spec
    if not isinstance(given, Iterable) or isinstance(given, str | Mapping):
        own = getattr(given, "spec", None)  # a NamedSharding has one
        raise BadSpec(
            f"a {type(given).__name__} is no PartitionSpec: {given!r:.80}",
            where=where,
            fix="PartitionSpec(None, 'tp')" if own is None else f"its .spec, {own}",
        )
    entries = tuple(spec)
    if strange := [e for e in entries if not _is_entry(e)]:
        raise BadSpec(
            f"the spec {spec} has the entries {strange}",
            where=where,
            fix="an entry is a mesh axis, a tuple of mesh axes, or None",
        )
    if len(entries) > rank:
        raise BadSpec(
            f"spec {spec} has {len(entries)} entries for an array of {rank} dims",
            where=where,
            fix=f"at most {rank} entries",
        )
    dims = tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)
    used = [axis for axes in dims for axis in axes]
    if len(used) != len(set(used)):
        raise BadSpec(
            f"spec {spec} uses a mesh axis twice",
            where=where,
            fix="each axis at most once per array",
        )
    return dims + ((),) * (rank - len(dims))


def _is_entry(entry: object) -> bool:
    if isinstance(entry, tuple | list):
        return all(isinstance(axis, str) for axis in cast("Iterable[object]", entry))
    return entry is None or isinstance(entry, str)


def partition_spec(spec: Spec) -> PartitionSpec:
    """The PartitionSpec of a canonical spec, without trailing Nones; `P()` for a replicated array.

    >>> partition_spec(((), ("tp",), ())) == PartitionSpec(None, "tp")
    True
    """
    entries = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in spec]
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def spec_text(spec: Spec) -> str:
    """A spec for tables and messages, the same under every JAX version.

    >>> spec_text(((), ("tp_0", "tp_1"), ()))
    'P(-, tp_0+tp_1, -)'
    """
    return f"P({', '.join('+'.join(axes) or '-' for axes in spec)})" if any(spec) else "P()"
