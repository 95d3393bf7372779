"""What a GPU can do: arithmetic, memory, links, and how long one collective takes.

Nothing here touches a device; only the target `local:...` asks for one's name.

Sources of the numbers:

- memory bytes, HBM bandwidth, clocks, cores, caches: the device descriptions that XLA ships
  (`xla/backends/gpu/target_config/specs`, embedded as text in the CUDA plugin of jax 0.12);
- collective bandwidths: the tables of `hardware/links`;
- peak FLOP/s: NVIDIA's data sheets, dense bfloat16;
- NIC bandwidth: one port per GPU as in DGX systems: HDR 25 GB/s (A100), XDR 100 GB/s (B300, GB300:
  ConnectX-8), NDR 50 GB/s (the others).

Assumptions, where no measured number exists: an A100's links are an H100's at 600/900 of the
bandwidth; an H200's are an H100's; a GB200's in groups of up to 8, and a B300's, are a B200's; a
GB300's are a GB200's.

Attention by kernels that are written for Hopper, causal, 16,384 tokens, cuDNN 9.1 on an H100 SXM at
1,830 MHz (Shah et al. 2024, FlashAttention-3, figures 5 and 6): forward 539 TFLOP/s with heads of
128, where the same without a mask is at 595; backward 516 without a mask, with one taken to lose
the same share. With heads of 64, without a mask, 413 and 433. Training sustains less than such a
run, as of products: 700 of the 805 TFLOP/s that XLA's table has.

What training sustains of the data sheet is fitted on published runs of A100s, H100s and B200s
(`scripts/fit_cost.py`); H200 takes the shares of H100, and GB200, B300 and GB300 those of B200. Of
an H100's products it is 700/989, as cuBLASLt does in XLA's table.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax

from jaxtp.errors import BadTarget, BadTopology
from jaxtp.hardware.links import BLACKWELL, HOPPER, MIB, RACK, Tables, table_seconds, wire_bytes

NVLINK, NETWORK = "NVLink", "network"
LINKS = (NVLINK, NETWORK)
"""The two links of a GPU: inside its NVLink domain, and out of it."""

LAUNCH_SECONDS = 45e-6
"""Start-up of a collective that leaves the NVLink domain: JAX-Toolbox's constant for H100s."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of GPU as data; `to_json` and `from_json` are the description file.

    Attributes:
        name: What a target is called by, e.g. `h100`.
        description: The name the driver reports.
        peak_flops: Dense bfloat16 FLOP/s on the data sheet; what MFU is measured against.
        matmul_flops: FLOP/s that large matrix products sustain.
        memory_bytes: Device memory.
        hbm_bandwidth: Bytes/s.
        nic_bandwidth: Bytes/s that leave the NVLink domain, per GPU and direction.
        nvlink_domain: GPUs that reach each other over NVLink.
        host_gpus: GPUs in a full host; a domain may join several hosts.
        link_share: Bandwidth relative to the `tables`.
        tables: Collective bandwidths inside the domain.
        config: The compiler's description of the chip (`gpu_device_info`), as a text proto;
            minimal, so that jax 0.10 parses it too. 0.12 takes more, which changes small
            all-reduces only.
        memory_share: Share of `hbm_bandwidth` that elementwise kernels reach in training.
        attention_share: FLOP/s of fused attention, forward, relative to `matmul_flops`, as runs
            that were published sustained; on Hopper with kernels written for Ampere.
        attention_flops: FLOP/s of causal attention by kernels written for this kind: rows of (width
            of a head, forward, backward); none if those of `attention_share` are.
        network_share: Share of `nic_bandwidth` that collectives reach in training.
    """

    name: str
    description: str
    peak_flops: float
    matmul_flops: float
    memory_bytes: int
    hbm_bandwidth: float
    nic_bandwidth: float
    nvlink_domain: int
    host_gpus: int
    link_share: float
    tables: Tables
    config: str
    memory_share: float = 0.8
    attention_share: float = 0.6
    attention_flops: tuple[tuple[int, float, float], ...] = ()
    network_share: float = 0.45

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise BadTopology(
                    f"{field.name} is {value}", where=self.name, fix="give a positive number"
                )

    @functools.cached_property
    def cores(self) -> int:
        """Streaming multiprocessors, as the compiler's description says; 132 where it does not."""
        found = re.search(r"core_count: (\d+)", self.config)
        return int(found[1]) if found else 132

    def to_json(self) -> str:
        """The description file's text; `Target.parse("FILE.json:1x8")` reads it."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "") -> "DeviceKind":
        """Inverse of `to_json`.

        Raises:
            BadTopology: TP012, for text that is not JSON, or unknown, missing or impossible fields.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        fix = f"a JSON object with {', '.join(known)}"
        try:
            values = json.loads(text)
            tables = {
                kind: {int(size): tuple(row) for size, row in by_size.items()}
                for kind, by_size in values.pop("tables").items()
            }
            rows = tuple(map(tuple, values.pop("attention_flops", ())))
            return cls(**values, tables=tables, attention_flops=rows)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            what = f"cannot read the description: {error}"
            raise BadTopology(what, where=where, fix=fix) from None


def _kind(
    name: str,
    description: str,
    peak: float,
    memory: int,
    hbm: float,
    chip: tuple[int, int, int, int, float, float, int, int],
    *,
    tables: Tables,
    link_share: float = 1.0,
    sustained: tuple[float, float, float, float],
    attention: tuple[tuple[int, float, float], ...] = (),
    nic: float = 50e9,
    domain: int = 8,
    host: int = 8,
) -> DeviceKind:
    """One row of KINDS; `chip` lists what XLA's own description says about cores and caches."""
    product, memory_share, attention_share, network = sustained
    cores, fpus, core_kib, optin_kib, l2_mib, clock, major, minor = chip
    config = f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {core_kib * 1024}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(hbm)}
  l2_cache_size: {int(l2_mib * MIB)}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {optin_kib * 1024}
  cuda_compute_capability {{ major: {major}{f" minor: {minor}" if minor else ""} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{description}"
"""
    return DeviceKind(
        name=name,
        description=description,
        peak_flops=peak,
        matmul_flops=peak * product,
        memory_bytes=memory,
        hbm_bandwidth=hbm,
        nic_bandwidth=nic,
        nvlink_domain=domain,
        host_gpus=host,
        link_share=link_share,
        tables=tables,
        config=config,
        memory_share=memory_share,
        attention_share=attention_share,
        attention_flops=attention,
        network_share=network,
    )


# cores, FPUs per core, KiB of shared memory per core and opt-in per block, MiB of L2, GHz, compute
# capability
_SM80 = (108, 64, 164, 163, 40, 1.41, 8, 0)
_SM90 = (132, 128, 228, 227, 50, 1.98, 9, 0)
_SM100_B200 = (148, 128, 228, 227, 126.5, 1.965, 10, 0)
_SM100_GB200 = (152, 128, 228, 227, 129.25, 2.062, 10, 0)
_SM103_B300 = (158, 128, 228, 227, 129.25, 1.965, 10, 3)
_SM103_GB300 = (152, 128, 228, 227, 129.25, 2.07, 10, 3)
# Shares of the data sheet that training sustains: products, memory, attention relative to products,
# network. Fitted, see the docstring of the module.
_AMPERE = (0.765, 0.9, 0.605, 0.46)
_HOPPER = (700 / 989, 0.53, 0.363, 0.5)
_MASKED, _COOL = 539 / 595, 700 / 805
_HOPPER_ATTENTION = (
    (64, 413e12 * _MASKED * _COOL, 433e12 * _MASKED * _COOL),
    (128, 539e12 * _COOL, 516e12 * _MASKED * _COOL),
)
_BLACKWELL = (0.6, 0.35, 0.7, 0.5)
# The best products measured on a B200 and on a GB200 run at 1,745 and 1,822 TFLOP/s (S. Bekman,
# Machine Learning Engineering, compute/accelerator).
_GRACE_BLACKWELL = (0.6 * (1822 / 2500) / (1745 / 2250), *_BLACKWELL[1:])
_GB200_LINKS: Tables = {kind: {**BLACKWELL[kind], **RACK[kind]} for kind in RACK}

KINDS: Mapping[str, DeviceKind] = {
    kind.name: kind
    for kind in (
        _kind(
            "a100-40", "NVIDIA A100-SXM4-40GB", 312e12, 42331013120, 1.5552e12, _SM80,
            tables=HOPPER, sustained=_AMPERE, link_share=600 / 900, nic=25e9,
        ),
        _kind(
            "a100-80", "NVIDIA A100-SXM4-80GB", 312e12, 85100068864, 2.03904e12, _SM80,
            tables=HOPPER, sustained=_AMPERE, link_share=600 / 900, nic=25e9,
        ),
        _kind(
            "h100", "NVIDIA H100 80GB HBM3", 989e12, 84942979072, 3.35232e12, _SM90,
            tables=HOPPER, sustained=_HOPPER, attention=_HOPPER_ATTENTION,
        ),
        _kind(
            "h200", "NVIDIA H200 141GB HBM3e", 989e12, 151397597184, 4.8e12, _SM90,
            tables=HOPPER, sustained=_HOPPER, attention=_HOPPER_ATTENTION,
        ),
        _kind(
            "b200", "NVIDIA B200", 2250e12, 191514411008, 7.67232e12, _SM100_B200,
            tables=BLACKWELL, sustained=_BLACKWELL,
        ),
        _kind(
            "gb200", "NVIDIA GB200", 2500e12, 197897748480, 7.928064e12, _SM100_GB200,
            tables=_GB200_LINKS, sustained=_GRACE_BLACKWELL, domain=72, host=4,
        ),
        _kind(
            "b300", "NVIDIA B300", 2250e12, 297021865984, 7.936e12, _SM103_B300,
            tables=BLACKWELL, sustained=_BLACKWELL, nic=100e9,
        ),
        _kind(
            "gb300", "NVIDIA GB300", 2500e12, 297021079552, 7.928064e12, _SM103_GB300,
            tables=_GB200_LINKS, sustained=_GRACE_BLACKWELL, domain=72, host=4, nic=100e9,
        ),
    )
}  # fmt: skip
"""The kinds that need no description file."""


def kind_of(device_kind: str) -> DeviceKind:
    """The kind that a live device's name stands for, e.g. `NVIDIA H200`.

    Raises:
        BadTopology: TP012, if no known kind fits.
    """
    name = device_kind.lower()
    for kind in ("gb300", "gb200", "b300", "b200", "h200", "h100"):
        if kind in name:
            return KINDS[kind]
    if "a100" in name:
        return KINDS["a100-80" if "80" in name else "a100-40"]
    raise BadTopology(
        f"no numbers for {device_kind!r}", fix=f"a description file, or one of {', '.join(KINDS)}"
    )


def _local_kind() -> DeviceKind:
    try:
        return kind_of(jax.devices("gpu")[0].device_kind)
    except RuntimeError:  # what jax raises when no GPU backend is there
        raise BadTarget(
            "jax sees no GPU in this machine", fix=f"name a kind: {', '.join(KINDS)}"
        ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A machine to plan and compile for: so many GPUs of one kind, numbered host by host.

    Attributes:
        device: The GPU.
        slices: Groups of hosts; 1 unless the target text has three numbers.
        hosts: Hosts per slice.
        gpus: GPUs per host.
    """

    device: DeviceKind
    slices: int = 1
    hosts: int = 1
    gpus: int = 1

    def __post_init__(self) -> None:
        if min(self.slices, self.hosts, self.gpus) < 1:
            raise BadTarget(f"{self.topology} has no devices", fix="sizes are at least 1")
        if self.gpus > self.device.nvlink_domain:
            raise BadTopology(
                f"{self.gpus} GPUs per host, but {self.device.name} joins "
                f"{self.device.nvlink_domain} over NVLink",
                fix=f"{self.device.name}:HOSTSxGPUS with at most {self.device.nvlink_domain} GPUs",
            )

    @classmethod
    def of(cls, given: "Target | str") -> "Target":
        """A target as it is, or the one that a text names.

        Raises:
            BadTarget: TP116, as `parse`.
        """
        return given if isinstance(given, Target) else cls.parse(given)

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Reads `KIND:HOSTSxGPUS` or `KIND:SLICESxHOSTSxGPUS`.

        KIND is one of KINDS, a description file, or `local` for the GPU in this machine. A
        description file without sizes is one host of it, as `jaxtp probe --measure` writes it.

        Raises:
            BadTarget: TP116, for an unknown kind or malformed sizes.
            BadTopology: TP012, for a description file that cannot be used.

        >>> Target.parse("h100:32x8").num_devices
        256
        """
        if not hasattr(text, "rpartition") or hasattr(text, "decode"):
            raise BadTarget(f"a {type(text).__name__} is no target", fix="such as h100:1x8")
        if text.endswith(".json") and Path(text).is_file():
            # A description alone is one full host of it.
            device = DeviceKind.from_json(Path(text).read_text(), where=text)
            return cls(device=device, gpus=device.host_gpus)
        name, colon, shape = text.rpartition(":")
        known = f"{', '.join(KINDS)}, local, or a description file"
        try:
            sizes = [int(part) for part in shape.split("x")]
        except ValueError:
            sizes = []
        if not colon or len(sizes) not in (2, 3):
            raise BadTarget(
                f"{text!r} is not KIND:HOSTSxGPUS or KIND:SLICESxHOSTSxGPUS",
                fix=f"for example h100:1x8 or h100:4x32x8; kinds: {known}",
            )
        if name == "local":
            device = _local_kind()
        elif name in KINDS:
            device = KINDS[name]
        elif Path(name).is_file():
            device = DeviceKind.from_json(Path(name).read_text(), where=name)
        else:
            raise BadTarget(f"no device kind or file {name!r}", fix=f"use one of {known}")
        slices, hosts, gpus = ([1] * (3 - len(sizes))) + sizes
        return cls(device=device, slices=slices, hosts=hosts, gpus=gpus)

    def __str__(self) -> str:
        return f"{self.device.name}:{self.topology.removeprefix('1x')}"

    @property
    def topology(self) -> str:
        """The sizes as the compiler takes them: SLICESxHOSTSxGPUS."""
        return f"{self.slices}x{self.hosts}x{self.gpus}"

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.slices * self.hosts * self.gpus

    def host(self, device_id: int) -> int:
        """The host that a device sits in."""
        return device_id // self.gpus

    def domain(self, device_id: int) -> int:
        """The NVLink domain of a device: as many hosts of one slice as the kind joins."""
        slice_size = self.hosts * self.gpus
        hosts = self.device.nvlink_domain // max(self.gpus, self.device.host_gpus)
        per_domain = hosts * self.gpus
        domains = -(-slice_size // per_domain)
        return device_id // slice_size * domains + device_id % slice_size // per_domain

    def collective_seconds(
        self, kind: str, num_bytes: float, groups: Iterable[Sequence[int]]
    ) -> float:
        """Seconds of one collective that all groups run at once; the slowest group counts.

        Inside an NVLink domain: the tables. Across domains, assumed hierarchical as in NCCL: each
        of the k members in a domain moves 1/k of the buffer through its own NIC, in chunks, while
        NVLink moves the rest; the slower of the two counts, plus LAUNCH_SECONDS a level of the
        tree over domains.

        Args:
            kind: As in `wire_bytes`.
            num_bytes: Full buffer in bytes, as in `wire_bytes`.
            groups: Device ids of each group; for a permute the (source, target) pairs.
        """
        shapes = {_spread([self.domain(device) for device in group]) for group in groups}
        return max((self._seconds(kind, num_bytes, *shape) for shape in shapes), default=0.0)

    def link_seconds(
        self, kind: str, num_bytes: float, groups: Iterable[Sequence[int]]
    ) -> dict[str, float]:
        """Seconds that one collective keeps each link busy, by NVLINK and NETWORK.

        A link that moves nothing is left out. Across domains NVLink is busy as long as the part
        inside takes, and the network as long as the collective.

        Args:
            kind: As in `collective_seconds`.
            num_bytes: Likewise.
            groups: Likewise.
        """
        shapes = {_spread([self.domain(device) for device in group]) for group in groups}
        inside = max((self._inside(kind, num_bytes, members) for _, members in shapes), default=0.0)
        across = [shape for shape in shapes if shape[0] > 1]
        network = max((self._seconds(kind, num_bytes, *shape) for shape in across), default=0.0)
        return {name: one for name, one in ((NVLINK, inside), (NETWORK, network)) if one}

    def _inside(self, kind: str, num_bytes: float, members: int) -> float:
        """Seconds of the part of a collective that stays in a domain."""
        if members == 1:
            return 0.0
        return table_seconds(self.device.tables, kind, num_bytes, members) / self.device.link_share

    def _seconds(self, kind: str, num_bytes: float, domains: int, members: int) -> float:
        inside = self._inside(kind, num_bytes, members)
        if domains == 1:
            return inside
        network = self.device.network_share * self.device.nic_bandwidth
        # Of an all-to-all every member has another buffer.
        parts = 1 if kind == "all-to-all" else members
        leaving = wire_bytes(kind, num_bytes / parts, domains) / network
        start = LAUNCH_SECONDS * math.log2(domains)
        return start + max(inside, leaving)


def _spread(domains: Sequence[int]) -> tuple[int, int]:
    """How many domains a group touches, and its members in the fullest of them."""
    counts = {domain: list(domains).count(domain) for domain in set(domains)}
    return len(counts), max(counts.values(), default=0)
