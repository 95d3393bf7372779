"""The table of mesh axes, and the axis names and sizes of one mesh, as data.

Adding an axis is one row of `Axis`; no device is touched here.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, cast

from jaxtp.errors import BadMesh, NoTensorAxis, join
from jaxtp.errors.arguments import NAMES, TEXT, is_whole


class Shards(StrEnum):
    """What an axis may shard."""

    BATCH = "batch"
    PARAMETERS = "parameters"
    OPTIMIZER_STATE = "optimizer state"
    EXPERTS = "experts"
    SEQUENCE = "sequence"
    LAYERS = "layers"


class Links(StrEnum):
    """Which links an axis prefers."""

    FAST = "inside the NVLink domain"
    NETWORK = "the network between hosts"


class Axis(StrEnum):
    """The table of mesh axes, outermost first: what each one shards and where it belongs.

    A mesh is built in this order. Everything that asks about an axis asks its row: which axes
    shard the batch, what a size of 2 along an axis would do, which axis may span hosts.

    Attributes:
        shards: What the axis may shard.
        links: The links that its collectives need.
        purpose: What it is for, for messages.
    """

    shards: frozenset[Shards]
    links: Links
    purpose: str

    def __new__(cls, name: str, shards: Iterable[Shards], links: Links, purpose: str) -> "Axis":
        """A row: its name, and what the table says of it."""
        row = str.__new__(cls, name)
        row._value_ = name
        row.shards, row.links, row.purpose = frozenset(shards), links, purpose
        return row

    # fmt: off
    PP = "pp", [Shards.LAYERS], Links.NETWORK, "pipeline stages"
    DP = "dp", [Shards.BATCH], Links.NETWORK, "replicas"
    FSDP = (
        "fsdp", [Shards.BATCH, Shards.PARAMETERS, Shards.OPTIMIZER_STATE], Links.NETWORK,
        "batch, parameters and optimizer state",
    )
    CP = (
        "cp", [Shards.SEQUENCE, Shards.PARAMETERS, Shards.OPTIMIZER_STATE], Links.NETWORK,
        "long sequences",
    )
    EP = (
        "ep", [Shards.BATCH, Shards.EXPERTS, Shards.PARAMETERS, Shards.OPTIMIZER_STATE],
        Links.FAST, "experts, and batch",
    )
    TP = (
        "tp", [Shards.PARAMETERS, Shards.OPTIMIZER_STATE, Shards.EXPERTS, Shards.SEQUENCE],
        Links.FAST, "tensor parallelism",
    )
    # fmt: on

    @classmethod
    def that_shard(cls, what: Shards) -> tuple["Axis", ...]:
        """The rows of the axes that may shard `what`."""
        return tuple(axis for axis in cls if what in axis.shards)


Widths = Mapping[int, tuple[str, ...]]
"""Ways that a tensor axis offers, the widest first, 1 last -> the axes that they are along."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeshShape:
    """Ordered axis sizes and what each axis is for.

    Attributes:
        sizes: `(name, devices along the axis)`, major to minor.
        tp: Axes that together are the tensor-parallel axis, major to minor: one, or its factors.
        tp_name: How users spell all of the tensor axis in a PartitionSpec.
        others: `(row of the axis table, name of the mesh axis)` for the other axes of the mesh
            that jaxtp knows the purpose of, in the table's order.
    """

    sizes: tuple[tuple[str, int], ...]
    tp: tuple[str, ...] = (Axis.TP.value,)
    tp_name: str = Axis.TP.value
    others: tuple[tuple[Axis, str], ...] = ()

    def __post_init__(self) -> None:
        if not (
            _are_pairs(self.sizes, str)
            and all(is_whole(size) and size > 0 for _, size in self.sizes)
            and NAMES.accepts(self.tp)
            and TEXT.accepts(self.tp_name)
            and _are_pairs(self.others, Axis)
        ):
            raise BadMesh(
                f"no mesh has sizes {self.sizes!r:.60}, tp {self.tp!r:.60}",
                fix='MeshShape.of({"dp": 2, "tp": 4}), or MeshShape((("dp", 2), ("tp", 4)))',
            )

    @classmethod
    def of(cls, mesh: Any, axis_names: Mapping[str, str] | None = None) -> "MeshShape":
        """The shape of `mesh`: a jax Mesh or AbstractMesh, `{"dp": 2, "tp": 4}`, or a MeshShape.

        Args:
            mesh: Anything with a `.shape` mapping, or the mapping itself.
            axis_names: What jaxtp calls an axis -> what the mesh calls it, e.g. `{"tp": "model"}`.

        Raises:
            NoTensorAxis: TP013, if no axis of the mesh is the tensor axis.
            BadMesh: TP010, if this is no mesh, a size is not a whole number of 1 or more, or
                `axis_names` names an axis that the mesh does not have, or one axis twice.
        """
        if isinstance(mesh, MeshShape):
            return mesh
        sizes = _sizes(mesh)
        names = _names(axis_names, sizes)
        found = {a: names.get(a, a.value if a in sizes else "") for a in Axis}
        if taken := [name for name, n in Counter(filter(None, found.values())).items() if n > 1]:
            both = join(a.value for a in Axis if found[a] == taken[0])
            raise BadMesh(
                f"axis_names makes one mesh axis, {taken[0]!r}, stand for {both}",
                fix="each mesh axis has one purpose; leave the others out of axis_names",
            )
        tp = found.pop(Axis.TP)
        if not tp:
            last = next(reversed(sizes), "model")
            raise NoTensorAxis(
                f"the mesh has axes {dict(sizes)} and none is called 'tp'",
                fix=f'axis_names={{"tp": "{last}"}}, or jaxtp.make_mesh(tp=...)',
            )
        others = tuple((axis, name) for axis, name in found.items() if name)
        return cls(tuple(sizes.items()), tp=(tp,), tp_name=tp, others=others)

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
    def whole(self) -> tuple[tuple[str, int], ...]:
        """Sizes with the tensor axis in one piece, as on the mesh that was planned for."""
        first = self.tp[:1]
        return tuple(
            (self.tp_name, self.tp_size) if name in first else (name, size)
            for name, size in self.sizes
            if name in first or name not in self.tp
        )

    @property
    def num_devices(self) -> int:
        """Devices in the mesh."""
        return math.prod(size for _, size in self.sizes)

    @property
    def tp_size(self) -> int:
        """Devices along all of the tensor axis."""
        return self.ways(self.tp)

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes that shard the batch, major to minor."""
        return self.sharding(Shards.BATCH)

    @property
    def batch_ways(self) -> int:
        """Into how many shards the axes of the batch together divide it."""
        return self.ways(self.batch)

    @property
    def sequence(self) -> tuple[str, ...]:
        """Axes that may shard activations along the sequence, major to minor."""
        return self.sharding(Shards.SEQUENCE)

    @property
    def data(self) -> tuple[str, ...]:
        """Axes that shard the tokens of a batch, its rows and along them: gradients are summed."""
        along = self.name_of(Axis.CP)
        return tuple(name for name in self.names if name in self.batch or name == along)

    @property
    def zero(self) -> tuple[str, ...]:
        """Axes that ZeRO may shard the train state over, major to minor: all but the tensor axis.

        All of them see other tokens; experts lie along ep already.
        """
        return tuple(name for name in self.sharding(Shards.OPTIMIZER_STATE) if name not in self.tp)

    def sharding(self, what: Shards) -> tuple[str, ...]:
        """Axes that may shard `what`, major to minor; of the tensor axis all factors."""
        rows = {name: axis for axis, name in self.others} | dict.fromkeys(self.tp, Axis.TP)
        return tuple(name for name in self.names if name in rows and what in rows[name].shards)

    def name_of(self, axis: Axis) -> str:
        """What this mesh calls an axis of the table; "" if it has none of the kind."""
        return self.tp_name if axis is Axis.TP else dict(self.others).get(axis, "")

    def size_of(self, axis: Axis) -> int:
        """Devices along an axis of the table; 1 if the mesh has none of the kind."""
        if axis is Axis.TP:
            return self.tp_size
        name = self.name_of(axis)
        return self[name] if name else 1

    def without(self, axes: Iterable[Axis]) -> "MeshShape":
        """This shape with some axes of no purpose: what counts where they are not to be used."""
        gone = set(axes)
        return dataclasses.replace(
            self,
            tp=() if Axis.TP in gone else self.tp,
            others=tuple((axis, name) for axis, name in self.others if axis not in gone),
        )

    def to_data(self) -> dict[str, Any]:
        """A form for JSON; `from_data` reads it."""
        return {
            "sizes": [list(size) for size in self.sizes],
            "tp": list(self.tp),
            "tp_name": self.tp_name,
            **{axis.value: self.name_of(axis) for axis in Axis if axis is not Axis.TP},
        }

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> "MeshShape":
        """What `to_data` wrote; a row that is not in `data` is an axis that mesh does not have.

        Raises:
            BadMesh: TP010, for anything else.
        """
        try:
            rows = [(axis, str(data.get(axis.value, ""))) for axis in Axis if axis is not Axis.TP]
            return cls(
                sizes=tuple((str(name), int(size)) for name, size in data["sizes"]),
                tp=tuple(data["tp"]),
                tp_name=data["tp_name"],
                others=tuple((axis, name) for axis, name in rows if name),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as err:
            raise BadMesh(
                f"not the data of a mesh: {err!r:.80}", fix="what MeshShape.to_data returned"
            ) from None

    def ways(self, axes: Iterable[str]) -> int:
        """Into how many shards these axes together divide a dim."""
        sizes = dict(self.sizes)
        return math.prod(sizes[a] for a in axes)

    def pieces(self, spec: Iterable[Iterable[str]]) -> int:
        """Into how many shards a spec, axes for each dim, divides an array."""
        return math.prod(self.ways(axes) for axes in spec)

    def tp_ways(self, spec: Iterable[Iterable[str]]) -> int:
        """Into how many shards the tensor axis alone divides an array of this spec."""
        return self.ways(axis for axes in spec for axis in axes if axis in self.tp)

    def prefixes(self) -> tuple[tuple[str, ...], ...]:
        """Prefixes of the factored tensor axis, widest first, the empty one last."""
        return tuple(self.tp[:n] for n in range(len(self.tp), -1, -1))

    @property
    def widths(self) -> Widths:
        """The prefixes of the tensor axis by the ways that each offers; `()` where that is 1."""
        return {self.ways(axes): axes for axes in self.prefixes()}

    def fit(self, units: Sequence[int]) -> tuple[str, ...]:
        """The widest prefix of the tensor axis that divides these units; `()` if none does.

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
        """This shape with the tensor axis factored into `factors`, major to minor.

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


def _are_pairs(value: Any, first: type) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], first) for pair in value
    )


def _sizes(mesh: Any) -> dict[str, int]:
    """Devices along each axis of anything that has a shape, checked to be whole numbers."""
    shape = getattr(mesh, "shape", mesh)
    if not isinstance(shape, Mapping) or not shape:
        raise BadMesh(
            f"a {type(mesh).__name__} is no mesh: {mesh!r:.60}",
            fix='a jax Mesh such as jaxtp.make_mesh(tp=8), or sizes such as {"dp": 2, "tp": 4}',
        )
    sizes = {str(name): size for name, size in cast("Mapping[Any, Any]", shape).items()}
    if bad := {name: size for name, size in sizes.items() if not is_whole(size) or size < 1}:
        raise BadMesh(f"sizes {bad}", fix="each size is an integer, 1 or more")
    return {name: int(size) for name, size in sizes.items()}


def _names(axis_names: Any, sizes: Mapping[str, int]) -> dict[str, str]:
    if not isinstance(axis_names, Mapping | None):
        raise BadMesh(
            f"axis_names is a {type(axis_names).__name__}",
            fix='a mapping from jaxtp\'s name to the mesh\'s: {"tp": "model", "dp": "data"}',
        )
    names = {str(k): v for k, v in cast("Mapping[Any, Any]", axis_names or {}).items()}
    if unknown := sorted(set(names) - set(Axis)):
        raise BadMesh(
            f"axis_names has unknown keys {unknown}",
            fix=f"keys are {join(Axis)}, values mesh axes",
        )
    if missing := sorted(str(v) for v in names.values() if v not in sizes):
        raise BadMesh(
            f"axis_names points at {join(missing)}, the mesh has {join(sizes)}",
            fix="values of axis_names are axes of the mesh",
        )
    return names


def splits(units: Sequence[int], ways: int) -> bool:
    """Whether sharding a dim `ways` ways leaves each of its units on one device.

    The units are read as a mixed-radix number, major to minor: a minor factor may be
    sharded only where the factor before it is already down to single entries. With (4 kv heads, 8
    query heads each) 8-way puts one kv head with half of its query heads on each device; with (10,
    4) 4-way would leave a kv head's query heads on two devices that have different kv heads.

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
    """All tensor-parallel sizes that divide these units, ascending.

    >>> legal_ways((4, 7))
    [1, 2, 4, 28]
    """
    total = math.prod(units)
    return [w for w in range(1, total + 1) if total % w == 0 and splits(units, w)]
