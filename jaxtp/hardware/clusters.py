"""GPUs of several kinds: which stage runs on which, and what reaches across.

Nothing here touches a device.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping

from jaxtp.errors import BadMesh, BadTarget, join
from jaxtp.hardware.gpus import LAUNCH_SECONDS, DeviceKind, Target
from jaxtp.mesh.axes import Axis, Shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Parts that each are of one kind, numbered one after the other.

    Attributes:
        parts: The parts, e.g. a host of A100s and two hosts of H100s.
    """

    parts: tuple[Target, ...]

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Reads `KIND:HOSTSxGPUS`, or several of them joined by `+`.

        Raises:
            BadTarget: TP116, if a part is no target.
            BadTopology: TP012, for a description file that cannot be used.

        >>> Cluster.parse("a100-80:1x8+h100:2x8").num_devices
        24
        """
        return cls(parts=tuple(Target.parse(part) for part in text.split("+")))

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return sum(part.num_devices for part in self.parts)

    @functools.cached_property
    def kinds(self) -> tuple[DeviceKind, ...]:
        """The kind of every device, by number."""
        return tuple(part.device for part in self.parts for _ in range(part.num_devices))

    @property
    def smallest(self) -> Target:
        """As many devices, all of the kind with the least memory: what a program has to fit.

        One program runs on all stages, and every device holds as much as the fullest.

        Raises:
            BadTarget: TP116, if hosts have different numbers of GPUs.
        """
        gpus = {part.gpus for part in self.parts}
        if len(gpus) > 1:
            raise BadTarget(
                f"hosts of {join(sorted(gpus))} GPUs in {self}",
                fix="parts with equally many GPUs in a host",
            )
        hosts = sum(part.slices * part.hosts for part in self.parts)
        weakest = min((part.device for part in self.parts), key=lambda kind: kind.memory_bytes)
        return Target(device=weakest, hosts=hosts, gpus=gpus.pop())

    def stage_kinds(self, sizes: Mapping[str, int]) -> tuple[DeviceKind, ...]:
        """The kind of GPU of each pipeline stage.

        Args:
            sizes: Axis -> devices along it, major to minor, `pp` first if there are stages.

        Raises:
            BadTarget: TP116, if the mesh has another number of devices.
            BadMesh: TP010, if a group within a stage would be of several kinds.
        """
        if math.prod(sizes.values()) != self.num_devices:
            raise BadTarget(
                f"{self} has {self.num_devices} GPUs, the mesh {math.prod(sizes.values())}",
                fix="a target and a mesh of the same size",
            )
        # Stages may have unequal work; all other axes divide a stage's work equally.
        unequal = set(Axis.that_shard(Shards.LAYERS))
        num_stages = math.prod(size for axis, size in sizes.items() if axis in unequal)
        per_stage = self.num_devices // num_stages
        width = 1
        for axis in reversed([axis for axis in sizes if axis not in unequal]):
            width *= sizes[axis]
            for first in range(0, self.num_devices, width):
                names = [kind.name for kind in self.kinds[first : first + width]]
                if len(set(names)) > 1:
                    raise self._mixed_group(axis, first, names)
        return self.kinds[::per_stage]

    def _mixed_group(self, axis: str, first: int, names: list[str]) -> BadMesh:
        counts = join(f"{names.count(name)} {name}" for name in dict.fromkeys(names))
        common = math.gcd(*(part.num_devices for part in self.parts))
        legal = [n for n in range(1, common + 1) if common % n == 0]
        return BadMesh(
            f"the {axis} group of devices {first} to {first + len(names) - 1} of {self} holds "
            f"{counts}: it does equal work on both and waits for the slower",
            where=f"mesh.{axis}",
            fix="kinds in different stages, by a mesh.pp with as many GPUs in a stage as one of "
            f"{join(legal)}",
        )

    def permute_seconds(self, num_bytes: float, source: int, target: int) -> float:
        """Modelled seconds in which a device sends an array of `num_bytes` to another.

        Between parts it goes through both network cards; inside one as `Target` has it.
        """
        first = 0
        for part in self.parts:
            ids = range(first, first + part.num_devices)
            if source in ids and target in ids:
                pair = (source - first, target - first)
                return part.collective_seconds("collective-permute", num_bytes, [pair])
            first += part.num_devices
        slower = min(self.kinds[device].nic_bandwidth for device in (source, target))
        return LAUNCH_SECONDS + num_bytes / slower
