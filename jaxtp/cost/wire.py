"""Seconds of collectives, by message size and by where the group's members sit.

Arrays in, arrays out. The form for one collective of a compiled program is
`Target.collective_seconds`; both read the same tables and the same shares.
"""

import dataclasses
import functools

import numpy as np

from jaxtp.cost.strategy import Number
from jaxtp.hardware.gpus import LAUNCH_SECONDS, DeviceKind, Target
from jaxtp.hardware.links import TABLE_BYTES


@dataclasses.dataclass(frozen=True)
class Wires:
    """The links of one machine.

    Attributes:
        device: The GPU, whose tables and NIC they are.
        domain: GPUs that reach each other over NVLink in this machine.
    """

    device: DeviceKind
    domain: int

    @classmethod
    def of(cls, target: Target) -> "Wires":
        """The links of a target."""
        full = max(target.gpus, target.device.host_gpus)
        hosts = min(target.hosts, target.device.nvlink_domain // full)
        return cls(target.device, hosts * target.gpus)

    @functools.cached_property
    def network(self) -> float:
        """Bytes/s that a GPU sends out of its domain in training."""
        return self.device.network_share * self.device.nic_bandwidth

    def inside(self, kind: str, num_bytes: Number, size: Number) -> Number:
        """Seconds of a collective within one NVLink domain; 0 for groups of one.

        Args:
            kind: As in `links.wire_bytes`.
            num_bytes: The full buffer in bytes, as there.
            size: Members of the group.
        """
        num_bytes, size = np.broadcast_arrays(np.asarray(num_bytes, float), np.asarray(size))
        by_size = self.device.tables.get(kind) or self.device.tables["all-to-all"]
        least = np.maximum(num_bytes, TABLE_BYTES[0])
        logs = np.log(least)
        seconds = np.zeros(num_bytes.shape)
        for members in np.unique(size[size > 1]):
            row = by_size[min((n for n in by_size if n >= members), default=max(by_size))]
            bandwidth = np.interp(logs, np.log(TABLE_BYTES), row) * 1e9 * self.device.link_share
            seconds = np.where(size == members, least / bandwidth, seconds)
        return seconds

    def seconds(self, kind: str, num_bytes: Number, size: Number, inner: Number) -> Number:
        """Seconds of a collective over an axis; 0 for groups of one.

        Across domains, hierarchical as in NCCL: each member in a domain moves its share of the
        buffer through its own NIC while NVLink moves the rest; the slower of the two counts. The
        tree over the domains starts up once per level.

        Args:
            kind: As in `links.wire_bytes`.
            num_bytes: The full buffer in bytes, as there.
            size: Devices along the axis.
            inner: Devices along all faster axes: the distance between neighbours of the group.
        """
        size = np.asarray(size)
        members = np.clip(self.domain // np.maximum(inner, 1), 1, size)
        domains = np.ceil(size / members)
        passes = 2 if kind == "all-reduce" else 1
        # Of an all-to-all every member has another buffer.
        parts = 1 if kind == "all-to-all" else members
        leaving = passes * (domains - 1) / domains * np.asarray(num_bytes) / parts
        within = self.inside(kind, num_bytes, members)
        start = LAUNCH_SECONDS * np.log2(np.maximum(domains, 2))
        across = start + np.maximum(within, leaving / self.network)
        return np.where(domains > 1, across, within)

    def send_seconds(self, num_bytes: Number, inner: Number) -> Number:
        """Seconds in which bytes reach the neighbour along an axis.

        Args:
            num_bytes: Of one message.
            inner: Devices along all faster axes.
        """
        across = LAUNCH_SECONDS + np.asarray(num_bytes) / self.network
        within = self.inside("collective-permute", num_bytes, 2)
        return np.where(np.asarray(inner) >= self.domain, across, within)
