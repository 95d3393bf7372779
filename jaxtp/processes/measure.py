"""Measured rates of the machine in hand, as the description that `--target` takes."""

import dataclasses
import functools
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtp.hardware.gpus import KINDS, DeviceKind, kind_of
from jaxtp.hardware.links import TABLE_BYTES, Tables, wire_bytes
from jaxtp.processes.faults import watchdog
from jaxtp.processes.startup import agree, gather

REPEATS = 5
"""Timed runs of each program; their median counts."""

PRODUCT_SIZES = (1024, 2048, 4096, 8192)
"""Rows, columns and depth of the products; the best rate is what large ones sustain."""

STREAM_BYTES = 2**30
"""Array that is read and written to measure memory; far more than any cache."""

KINDS_MEASURED = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How large the measured arrays are; simulated devices take small ones.

    Attributes:
        product_sizes: Rows, columns and depth of products.
        stream_bytes: Of the array that measures memory.
        message_bytes: Full buffers of collectives.
    """

    product_sizes: Sequence[int] = PRODUCT_SIZES
    stream_bytes: int = STREAM_BYTES
    message_bytes: Sequence[int] = TABLE_BYTES


SMALL = Effort(product_sizes=(128, 256), stream_bytes=2**22, message_bytes=(2**16, 2**18, 2**20))
"""For simulated devices: a rehearsal, whose numbers describe this computer's cores."""


def measure(*, effort: Effort | None = None, timeout: float = 600.0) -> DeviceKind:
    """The kind of GPU in this machine with measured rates in place of the data sheet's.

    Every process calls it; all get the same description. Measured are the rate of matrix products
    over sizes, memory bandwidth, and for each collective its bandwidth over sizes, inside a host
    over 2, 4, ... GPUs and, with several hosts, across them. Peak FLOP/s, memory and the compiler's
    description of the chip stay the data sheet's.

    Args:
        effort: Sizes to measure; by default `SMALL` on CPUs.
        timeout: Seconds for all of it; then the process ends with TP002.

    Raises:
        BadTopology: TP012, for a GPU of unknown kind.
        ProcessesDisagree: TP014, if processes or hosts have different numbers of devices.
    """
    on_cpu = jax.default_backend() == "cpu"
    effort = effort or (SMALL if on_cpu else Effort())
    base = KINDS["h100"] if on_cpu else kind_of(jax.devices()[0].device_kind)
    devices, here = _by_host(timeout)
    with watchdog(timeout, place="measuring"):
        product = max(map(_product_rate, effort.product_sizes))
        memory = _memory_rate(effort.stream_bytes)
        tables, network = _collectives(devices, here, effort)
    found = gather("measured", [product, memory], timeout).values()
    slowest_product, slowest_memory = (min(rates) for rates in zip(*found, strict=True))
    joins_hosts = base.nvlink_domain > base.host_gpus
    return dataclasses.replace(
        base,
        name="measured",
        description=jax.devices()[0].device_kind,
        matmul_flops=slowest_product,
        hbm_bandwidth=slowest_memory,
        memory_share=1.0,
        nic_bandwidth=network or base.nic_bandwidth,
        network_share=1.0 if network else base.network_share,
        nvlink_domain=base.nvlink_domain if joins_hosts else here,
        host_gpus=here,
        link_share=1.0 if tables else base.link_share,
        tables=tables or base.tables,
    )


def _seconds(run: Callable[[], Any]) -> float:
    """Median seconds of a program, compiled before."""
    jax.block_until_ready(run())
    taken: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _product_rate(size: int) -> float:
    """FLOP/s of one bfloat16 product of square matrices on one device."""
    x = jnp.ones((size, size), jnp.bfloat16, device=jax.local_devices()[0])
    return 2.0 * size**3 / _seconds(functools.partial(jax.jit(jnp.matmul), x, x))


def _memory_rate(num_bytes: int) -> float:
    """Bytes/s of a kernel that reads one array and writes another."""
    x = jnp.ones(num_bytes // 4, jnp.float32, device=jax.local_devices()[0])
    return 2.0 * x.nbytes / _seconds(functools.partial(jax.jit(jnp.negative), x))


def _by_host(timeout: float) -> tuple[list[Any], int]:
    """All devices, those of a host side by side, and how many a host has.

    Processes that run on one host, such as one per GPU, call it by one name.
    """
    names = gather("name of the host", platform.node(), timeout)
    first = {name: min(i for i in names if names[i] == name) for name in names.values()}
    here = jax.local_device_count() * list(names.values()).count(platform.node())
    agree({"devices of a process": jax.local_device_count(), "devices of a host": here})
    return sorted(jax.devices(), key=lambda d: (first[names[d.process_index]], d.id)), here


def _collectives(devices: Sequence[Any], here: int, effort: Effort) -> tuple[Tables, float]:
    """Bandwidth tables inside a host, in GB/s, and bytes/s of a GPU across hosts, 0 for one."""
    rows: dict[str, dict[int, Sequence[float]]] = {}
    size = 2
    while size <= here:
        mesh = _mesh(devices, size)
        for kind in KINDS_MEASURED:
            rows.setdefault(kind, {})[size] = _row(mesh, kind, size, effort)
        size *= 2
    if rows:
        # Half of what two devices exchange stays where it is: a send is no slower than that.
        rows["collective-permute"] = {2: rows["all-to-all"][2]}
    if len(devices) == here:
        return rows, 0.0
    # Neighbours across hosts: the same local device of each, a ring over the network.
    groups = len(devices) // here
    mesh = Mesh(
        [[devices[h * here + d] for h in range(groups)] for d in range(here)],
        ("rest", "group"),
        axis_types=(AxisType.Auto,) * 2,
    )
    num_bytes = effort.message_bytes[-1]
    seconds = _agreed(_collective_seconds(mesh, "all-reduce", groups, num_bytes))
    return rows, wire_bytes("all-reduce", num_bytes, groups) / seconds


def _mesh(devices: Sequence[Any], size: int) -> Mesh:
    groups = [list(devices[at : at + size]) for at in range(0, len(devices), size)]
    return Mesh(groups, ("rest", "group"), axis_types=(AxisType.Auto,) * 2)


def _row(mesh: Mesh, kind: str, size: int, effort: Effort) -> tuple[float, ...]:
    """GB/s of the full buffer at each of TABLE_BYTES; sizes that are not measured take the last."""
    found: list[float] = []
    for num_bytes in TABLE_BYTES:
        if num_bytes in effort.message_bytes:
            seconds = _agreed(_collective_seconds(mesh, kind, size, num_bytes))
            found.append(num_bytes / seconds / 1e9)
        else:
            found.append(found[-1])
    return tuple(found)


def _agreed(seconds: float) -> float:
    """The slowest process's time; all processes go on with it."""
    return max(gather("measured collective", seconds, 120.0).values())


def _collective_seconds(mesh: Mesh, kind: str, size: int, num_bytes: int) -> float:
    """Median seconds of one collective that all groups of the mesh run at once.

    Args:
        mesh: Axes `rest` and `group`; groups run along the latter.
        kind: One of KINDS_MEASURED.
        size: Devices in a group.
        num_bytes: Full buffer, as in `links.wire_bytes`.
    """
    cells = num_bytes // 4 // size // size * size * size
    split, whole = PartitionSpec("rest", "group"), PartitionSpec("rest", None)
    bodies: Mapping[str, tuple[PartitionSpec, PartitionSpec, Callable[[jax.Array], jax.Array]]] = {
        "all-reduce": (whole, whole, lambda x: jax.lax.psum(x, "group")),
        "all-gather": (split, whole, lambda x: jax.lax.all_gather(x, "group", axis=1, tiled=True)),
        "reduce-scatter": (
            whole,
            split,
            lambda x: jax.lax.psum_scatter(x, "group", scatter_dimension=1, tiled=True),
        ),
        "all-to-all": (whole, whole, lambda x: jax.lax.all_to_all(x, "group", 1, 1, tiled=True)),
    }
    given, made, body = bodies[kind]
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=given, out_specs=made, check_vma=False))
    shape = (mesh.shape["rest"], cells)
    make = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=NamedSharding(mesh, given))
    return _seconds(functools.partial(run, make()))
