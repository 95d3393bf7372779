"""Axis names and sizes of a mesh, as data; no device is touched."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from jaxtp.errors import BadMesh, NoTensorAxis, join


class Axis(StrEnum):
    """What a mesh axis is for, outermost first; `tp` is innermost, inside the NVLink domain."""

    PP = "pp"
    """Pipeline stages."""

    DP = "dp"
    """Replicas: the batch is split, parameters are not."""

    FSDP = "fsdp"
    """The batch and the parameters are split."""

    EP = "ep"
    """Experts."""

    TP = "tp"
    """Tensor parallelism."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """Ordered axis sizes and what each axis is for.

    Attributes:
        sizes: `(name, devices along the axis)`, major to minor.
        tp: Axes that together are the tensor-parallel axis, major to minor: one, or its factors.
        tp_name: How users spell the whole tensor axis in a PartitionSpec.
        dp: The replica axis, or "" without one; `fsdp`, `pp`, `ep` alike.
    """

    sizes: tuple[tuple[str, int], ...]
    tp: tuple[str, ...] = ("tp",)
    tp_name: str = "tp"
    dp: str = ""
    fsdp: str = ""
    pp: str = ""
    ep: str = ""

    @classmethod
    def of(cls, mesh: Any, axis_names: Mapping[str, str] | None = None) -> "MeshShape":
        """The shape of `mesh`: a jax Mesh or AbstractMesh, `{"dp": 2, "tp": 4}`, or a MeshShape.

        Args:
            mesh: Anything with a `.shape` mapping, or the mapping itself.
            axis_names: What jaxtp calls an axis -> what the mesh calls it, e.g. `{"tp": "model"}`.

        Raises:
            NoTensorAxis: TP013, if no axis of the mesh is the tensor axis.
            BadMesh: TP010, if `axis_names` names an axis that the mesh does not have, or a size is
                below 1.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        sizes = {str(k): int(v) for k, v in dict(getattr(mesh, "shape", mesh)).items()}
        names = {str(k): v for k, v in (axis_names or {}).items()}
        if unknown := sorted(set(names) - set(Axis)):
            raise BadMesh(
                f"axis_names has unknown keys {unknown}",
                fix=f"keys are {join(Axis)}, values mesh axes",
            )
        if missing := sorted(v for v in names.values() if v not in sizes):
            raise BadMesh(
                f"axis_names points at {join(missing)}, the mesh has {join(sizes) or 'no axes'}",
                fix="values of axis_names are axes of the mesh",
            )
        if bad := {k: v for k, v in sizes.items() if v < 1}:
            raise BadMesh(f"sizes below 1: {bad}", fix="every axis has at least one device")
        found = {a: names.get(a, a.value if a in sizes else "") for a in Axis}
        if not found[Axis.TP]:
            last = next(reversed(sizes), "model")
            raise NoTensorAxis(
                f"the mesh has axes {dict(sizes)} and none is called 'tp'",
                fix=f'axis_names={{"tp": "{last}"}}, or jaxtp.make_mesh(tp=...)',
            )
        tp = found.pop(Axis.TP)
        rest = {a.value: name for a, name in found.items()}
        return cls(tuple(sizes.items()), tp=(tp,), tp_name=tp, **rest)

    def __getitem__(self, axis: str) -> int:
        """Devices along one axis.

        Raises:
            KeyError: if the mesh has no such axis.
        """
        return dict(self.sizes)[axis]

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, major to minor."""
        return tuple(name for name, _ in self.sizes)

    @property
    def num_devices(self) -> int:
        """Devices in the whole mesh."""
        return math.prod(size for _, size in self.sizes)

    @property
    def tp_size(self) -> int:
        """Devices along the whole tensor axis."""
        return self.ways(self.tp)

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes that split the batch, major to minor."""
        return tuple(name for name in self.names if name in (self.dp, self.fsdp))

    def ways(self, axes: Iterable[str]) -> int:
        """In how many pieces these axes together cut a dim."""
        sizes = dict(self.sizes)
        return math.prod(sizes[a] for a in axes)

    def prefixes(self) -> tuple[tuple[str, ...], ...]:
        """Prefixes of the factored tensor axis, widest first, the empty one last."""
        return tuple(self.tp[:n] for n in range(len(self.tp), -1, -1))

    def fit(self, units: Sequence[int]) -> tuple[str, ...]:
        """The widest prefix of the tensor axis that keeps these units whole; `()` if none does.

        Args:
            units: Counts of indivisible pieces, major to minor, e.g. (kv heads, query heads per kv
                head).
        """
        return next(p for p in self.prefixes() if splits(units, self.ways(p)))

    def expand(self, axes: Iterable[str]) -> tuple[str, ...]:
        """`axes` with the user's name for the tensor axis replaced by its factors."""
        return tuple(
            itertools.chain.from_iterable(self.tp if a == self.tp_name else (a,) for a in axes)
        )

    def factored(self, factors: Sequence[int]) -> "MeshShape":
        """This shape with the tensor axis cut into `factors`, major to minor.

        >>> str(MeshShape((("dp", 2), ("tp", 8))).factored((4, 2)))
        'dp=2 x tp_0=4 x tp_1=2'
        """
        assert len(self.tp) == 1
        assert math.prod(factors) == self.tp_size
        if len(factors) == 1:
            return self
        parts = tuple((f"{self.tp_name}_{i}", f) for i, f in enumerate(factors))
        sizes = tuple(
            itertools.chain.from_iterable(parts if s[0] == self.tp[0] else (s,) for s in self.sizes)
        )
        return dataclasses.replace(self, sizes=sizes, tp=tuple(name for name, _ in parts))


def splits(units: Sequence[int], ways: int) -> bool:
    """Whether cutting a dim `ways` ways keeps its units whole on one device each.

    The units are read as a mixed-radix number, major to minor: a cut may go into a minor factor
    only where the factor before it is already cut into single pieces. With (4 kv heads, 8 query
    heads each) an 8-way cut puts one kv head with half of its query heads on each device; with (10,
    4) a 4-way cut would leave a kv head's query heads on two devices that hold different kv heads.

    >>> splits((4, 8), 8), splits((10, 4), 4), splits((10, 4), 2)
    (True, False, True)
    """
    for count in units:
        if count % ways == 0:
            return True
        if ways % count:
            return False
        ways //= count
    return ways == 1


def legal_ways(units: Sequence[int]) -> list[int]:
    """All tensor-parallel sizes that keep these units whole, ascending.

    >>> legal_ways((4, 7))
    [1, 2, 4, 28]
    """
    total = math.prod(units)
    return [w for w in range(1, total + 1) if total % w == 0 and splits(units, w)]
