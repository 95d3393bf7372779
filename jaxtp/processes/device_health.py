"""Device health: whether every device computes and exchanges rightly, and as fast as the others."""

import dataclasses
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from numpy.typing import NDArray

from jaxtp.errors import UnhealthyDevice, join
from jaxtp.errors.arguments import FUNCTION, checked, number, whole
from jaxtp.processes.faults import watchdog
from jaxtp.processes.startup import gather

Tamper = Callable[[Any, str, jax.Array], jax.Array]
"""(device, `product` or `collective`, result) -> result; stands inside of what is timed."""

SLOW_RATIO = 1.5
"""Times the median of its kind from which a GPU is slow. Simulated devices share their cores, so
their times say nothing."""

REPEATS = 5
"""Timed runs of each program; their median counts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One device.

    Attributes:
        device: Its number in the run.
        process: The process that it belongs to.
        host: The name of its host.
        kind: What it is.
        product_seconds: Time of a matrix product.
        collective_seconds: Time of a sum over all devices, until its copy of the result was there.
        wrong: What gave a wrong result, `product` or `collective` or both; else empty.
    """

    device: int
    process: int
    host: str
    kind: str
    product_seconds: float
    collective_seconds: float
    wrong: str

    def __str__(self) -> str:
        return f"device {self.device} ({self.kind}, process {self.process} on {self.host})"


@dataclasses.dataclass(frozen=True, slots=True)
class Health:
    """All devices of a run.

    Attributes:
        readings: By device number.
        slow_ratio: Times the median from which a device is slow; None where times say nothing.
    """

    readings: tuple[Reading, ...]
    slow_ratio: float | None = None

    @property
    def wrong(self) -> tuple[Reading, ...]:
        """Devices with a wrong result."""
        return tuple(reading for reading in self.readings if reading.wrong)

    @property
    def slow(self) -> tuple[Reading, ...]:
        """Devices whose product takes too long, against the median of their kind."""
        ratio = self.slow_ratio
        if ratio is None:
            return ()
        return tuple(r for r in self.readings if r.product_seconds > ratio * self.median(r.kind))

    def median(self, kind: str) -> float:
        """Seconds of a product on the median device of a kind."""
        return statistics.median(r.product_seconds for r in self.readings if r.kind == kind)

    def refuse_wrong(self) -> None:
        """Raises if a device is wrong.

        Raises:
            UnhealthyDevice: TP016, naming all of them and their hosts.
        """
        if self.wrong:
            listed = join(f"{reading} in its {reading.wrong}" for reading in self.wrong)
            raise UnhealthyDevice(
                f"wrong results from {listed}",
                fix=f"leave out {join(sorted({r.host for r in self.wrong}))}, and start again",
            )

    def to_json(self) -> str:
        """The readings as a JSON list."""
        return json.dumps([dataclasses.asdict(reading) for reading in self.readings], indent=1)

    def __str__(self) -> str:
        bad = [f"  WRONG {r.wrong}: {r}" for r in self.wrong]
        bad += [
            f"  SLOW product, {r.product_seconds / self.median(r.kind):.1f} x the median: {r}"
            for r in self.slow
        ]
        kinds = sorted({reading.kind for reading in self.readings})
        times = join(f"{self.median(kind) * 1e3:.2f} ms on {kind}" for kind in kinds)
        slowest = max(reading.collective_seconds for reading in self.readings)
        head = (
            f"probed {len(self.readings)} devices, {len(self.wrong)} wrong, {len(self.slow)} slow; "
            f"product {times}, sum over all {slowest * 1e3:.2f} ms"
        )
        return "\n".join((head, *bad))


@checked(
    size=whole(1, 2**17).or_none(),
    slow_ratio=number(above=0).or_none(),
    timeout=number(above=0),
    tamper=FUNCTION.or_none(),
)
def probe(
    *,
    size: int | None = None,
    slow_ratio: float | None = None,
    timeout: float = 120.0,
    tamper: Tamper | None = None,
) -> Health:
    """Runs a matrix product on every device, and a sum over all of them, and times both.

    Every process calls it; all get the same answer. Results are compared on the host, exactly: all
    numbers are small integers.

    Args:
        size: Rows and columns of the matrices; by default 4096 on GPUs, 256 on CPUs.
        slow_ratio: Times the median from which a device counts as slow; by default `SLOW_RATIO` on
            GPUs, and no device is slow on CPUs.
        timeout: Seconds for all of it; then the process ends with TP002.
        tamper: For tests of what follows from a sick device.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = size or (256 if on_cpu else 4096)
    ratio = slow_ratio if slow_ratio is not None or on_cpu else SLOW_RATIO
    change = tamper or _unchanged
    with watchdog(timeout, place="the probe"):
        products = [_product(device, size, change) for device in jax.local_devices()]
        sums = _sums(change)
    found: list[dict[str, Any]] = [
        {
            "device": device.id,
            "process": device.process_index,
            "host": platform.node(),
            "kind": device.device_kind,
            "product_seconds": product_seconds,
            "collective_seconds": sum_seconds,
            "wrong": " and ".join(
                ["product"] * (not is_right) + ["collective"] * (not is_sum_right)
            ),
        }
        for device, (product_seconds, is_right), (sum_seconds, is_sum_right) in zip(
            jax.local_devices(), products, sums, strict=True
        )
    ]
    everywhere = gather("probe", found, timeout).values()
    readings = [Reading(**values) for part in everywhere for values in part]
    return Health(tuple(sorted(readings, key=lambda reading: reading.device)), ratio)


def _unchanged(device: Any, what: str, result: jax.Array) -> jax.Array:
    del device, what
    return result


def _product(device: Any, size: int, change: Tamper) -> tuple[float, bool]:
    """Median seconds of `x @ y` on one device, and whether each result was right.

    x = outer(a, s) and y = outer(s, b) with s of ones and minus ones give size x outer(a, b).
    """
    a, b = np.arange(size) % 3 + 1.0, np.arange(size) % 4 + 1.0
    signs = np.where(np.arange(size) % 5 < 2, -1.0, 1.0)
    x, y = (
        jax.device_put(np.outer(*sides).astype(np.float32), device)
        for sides in ((a, signs), (signs, b))
    )
    expected = size * np.outer(a, b).astype(np.float32)
    return _timed(lambda: change(device, "product", _matmul(x, y)), expected)


@jax.jit
def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, preferred_element_type=jnp.float32)


def _timed(run: Callable[[], jax.Array], expected: NDArray[np.float32]) -> tuple[float, bool]:
    is_right = np.array_equal(run(), expected)  # compiles
    seconds: list[float] = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        result = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
        is_right = is_right and np.array_equal(result, expected)
    return statistics.median(seconds), is_right


def _sums(change: Tamper) -> list[tuple[float, bool]]:
    """Seconds of a sum over all devices of all processes, and rightness, for each local device."""
    devices = jax.devices()
    mesh = jax.make_mesh((len(devices),), ("all",), axis_types=(AxisType.Auto,), devices=devices)
    numbers = np.arange(1, len(devices) + 1, dtype=np.float32)[:, None] * np.ones(1024, np.float32)
    spread = NamedSharding(mesh, PartitionSpec("all"))
    x = jax.make_array_from_callback(numbers.shape, spread, lambda index: numbers[index])
    add = jax.jit(
        lambda x: x.sum(0),  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType]
        out_shardings=NamedSharding(mesh, PartitionSpec()),
    )
    jax.block_until_ready(add(x))
    expected = numbers.sum(0)
    start = time.perf_counter()
    shards = {shard.device: shard.data for shard in add(x).addressable_shards}
    found: list[tuple[float, bool]] = []
    for device in jax.local_devices():
        result = jax.block_until_ready(change(device, "collective", shards[device]))
        found.append((time.perf_counter() - start, bool(np.array_equal(result, expected))))
    return found
