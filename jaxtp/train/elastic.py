"""A run that continues with fewer devices than it was set up for, and with all when they are back.

In: settings, what the newest checkpoint says of the run, processes and devices that there are. Out:
settings whose mesh is the largest that these accept, and how many processes take part. Never knows:
a device; every process comes to the same answer by itself, before any of them has started JAX.

The batch stays what it was, so the loss curve does: what fewer devices cannot hold at a time is
accumulated. A mesh that the devices do hold is never changed, which is also how a run grows back.
"""

import dataclasses
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Mapping

from jaxtp.config.batch_sizes import resolve
from jaxtp.config.settings import Config
from jaxtp.errors import JaxtpError
from jaxtp.io.checkpoint_metadata import Summary
from jaxtp.mesh.axes import Axis, Shards
from jaxtp.processes.launch import Launch, count_gpus
from jaxtp.train.planning import Build, plan_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """How a run goes on.

    Attributes:
        config: Its settings, with another mesh if the one that they ask for does not fit.
        num_processes: How many take part, the first ones; None for all.
        cpu_devices: Devices to simulate over all of these where there is no GPU; None to leave that
            to the environment.
        line: What has changed, for people; empty if nothing has.
    """

    config: Config
    num_processes: int | None
    cpu_devices: int | None
    line: str = ""


def adapt(
    config: Config,
    before: Summary | None,
    launch: Launch | None,
    environ: Mapping[str, str] = os.environ,
) -> Elastic:
    """What to start with on the processes and devices that there are.

    Args:
        config: Settings as the user gave them.
        before: The newest checkpoint; None for a run that begins.
        launch: This process among the others; None if it is alone.
        environ: Says how many devices are simulated, if the user does.
    """
    asked = math.prod(map(abs, config.mesh.sizes.values()))
    num_processes = launch.num_processes if launch else 1
    # For JAX both hold for each process, and they are no concern of settings.
    is_pinned = "JAX_NUM_CPU_DEVICES" in environ or "host_platform_device" in environ.get(
        "XLA_FLAGS", ""
    )
    unchanged = Elastic(config=config, num_processes=None, cpu_devices=None if is_pinned else asked)
    if before is None or num_processes is None or not config.faults.elastic:
        return unchanged
    each = _devices_each(launch, environ) or (
        before.num_devices // before.num_processes if asked % num_processes else None
    )
    if each is None or _holds(config, before, num_processes * each):
        return unchanged
    full = _full(config, before)
    if full is None:
        return unchanged
    # Simulated devices of one process are one host's. Of GPUs a process mostly has one, and what
    # divides the tensor axis that is asked for stays inside of its hosts.
    host = 0 if count_gpus(environ) else each
    for count in range(num_processes, 0, -1):
        for candidate in _candidates(full, count * each):
            if _is_accepted(candidate, count * each, host):
                return Elastic(
                    config=candidate,
                    num_processes=count if launch else None,
                    cpu_devices=None if is_pinned else count * each,
                    line=_line(full, candidate, num_processes * each, count * each),
                )
    return unchanged


def _devices_each(launch: Launch | None, environ: Mapping[str, str]) -> int | None:
    """Devices of a process; None where as many are simulated as a run asks for."""
    if launch is not None and launch.local_device_ids is not None:
        return len(launch.local_device_ids)
    if gpus := count_gpus(environ):
        return gpus
    pinned = environ.get("JAX_NUM_CPU_DEVICES", "")
    flag = environ.get("XLA_FLAGS", "").rpartition("--xla_force_host_platform_device_count=")[2]
    return next((int(n) for n in (pinned, flag.partition(" ")[0]) if n.isdecimal()), None)


def _holds(config: Config, before: Summary, num_devices: int) -> bool:
    """Whether the devices hold the mesh that is asked for, or more than it."""
    if -1 not in config.mesh.sizes.values():
        return num_devices >= math.prod(config.mesh.sizes.values())
    try:
        batch = resolve(config, num_devices).batch
    except JaxtpError:
        return False
    size, micro_size = (before.settings.get(f"batch.{name}") for name in ("size", "micro_size"))
    return (batch.size, batch.micro_size) <= (size or batch.size, micro_size or batch.micro_size)


def _full(config: Config, before: Summary) -> Config | None:
    """The settings on the mesh that they ask for; with an open axis, on the one before."""
    sizes = config.mesh.sizes.values()
    devices = math.prod(sizes) if -1 not in sizes else math.prod(before.mesh.values())
    try:
        full = resolve(config, devices)
    except JaxtpError:
        return None
    if config.batch.size:
        return full
    # It followed from the devices; from now on it is what it was.
    size = before.settings.get("batch.size", full.batch.size)
    return dataclasses.replace(full, batch=dataclasses.replace(full.batch, size=size))


def _candidates(full: Config, num_devices: int) -> Iterator[Config]:
    """Settings for so many devices, those first that change the fewest axes."""
    sizes = full.mesh.sizes
    # Those over which the batch is split take what the others leave, but for experts.
    kept = [axis for axis in sizes if Shards.BATCH not in axis.shards or axis is Axis.EP]
    choices = itertools.product(*(_divisors(sizes[axis]) for axis in kept))
    for chosen in sorted(choices, key=lambda sizes: (-math.prod(sizes), sizes)):
        if num_devices % math.prod(chosen):
            continue
        ways = num_devices // math.prod(chosen)
        for fsdp in reversed(_divisors(ways)) if full.mesh.fsdp > 1 else (1,):
            found = {axis.value: size for axis, size in zip(kept, chosen, strict=True)}
            found |= {Axis.FSDP.value: fsdp, Axis.DP.value: ways // fsdp}
            mesh = dataclasses.replace(full.mesh, **found)
            yield from _batches(dataclasses.replace(full, mesh=mesh), full, mesh.data_ways)


def _batches(config: Config, full: Config, ways: int) -> Iterator[Config]:
    """The same batch, in micro-batches that are no larger than on the full mesh."""
    num_rows = full.batch.size // ways if full.batch.size % ways == 0 else 0
    stages = config.mesh.pp > 1
    pipeline = dataclasses.replace(
        full.pipeline, micro_batches=0, rounds=full.pipeline.rounds if stages else 1
    )
    for count in _divisors(num_rows):
        if num_rows // count <= full.batch.micro_size:
            batch = dataclasses.replace(full.batch, accumulation=count, micro_size=0)
            yield dataclasses.replace(config, batch=batch, pipeline=pipeline)


def _is_accepted(config: Config, num_devices: int, host: int) -> bool:
    if config.tensor.strict and host % config.mesh.tp:
        return False
    try:
        resolved = resolve(config, num_devices)
        ways = resolved.mesh.data_ways
        if resolved.run.eval_windows % (
            ways * resolved.batch.accumulation if resolved.mesh.pp > 1 else ways
        ):
            return False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan_of(Build.of(resolved))
    except JaxtpError:
        return False
    return True


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _line(full: Config, now: Config, there: int, used: int) -> str:
    mesh = ", ".join(f"{axis}={size}" for axis, size in now.mesh.sizes.items() if size > 1)
    ways = now.mesh.data_ways
    micro = now.batch.size // (now.batch.accumulation * ways)
    asked = math.prod(full.mesh.sizes.values())
    return (
        f"{there} of {asked} devices are there: continuing on {used}, mesh "
        f"{mesh or 'of one device'}; the batch stays {now.batch.size} = {micro} x "
        f"{now.batch.accumulation} accumulated x {ways} data-parallel (faults.elastic)"
    )
