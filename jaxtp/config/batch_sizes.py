"""The sizes of a run, checked before anything starts.

No device is touched.
"""

import dataclasses
import math
from collections.abc import Mapping

from jaxtp.config.settings import Batch, Config, Mesh, check_ranges
from jaxtp.errors import BadConfig, BadMesh, SizeMismatch, join
from jaxtp.plan.stages import check_micro_batches


def resolve(config: Config, num_devices: int) -> Config:
    """The same settings with every size filled in, checked before anything runs.

    Args:
        config: Settings as a user gave them.
        num_devices: Devices that there are.

    Returns:
        A config whose mesh sizes multiply to `num_devices`, whose `zero.stage` is a number, and
        whose batch.size = micro_size x accumulation x dp x fsdp. With stages the accumulation is
        the number of micro-batches that go through them.

    Raises:
        BadMesh: TP010, if the sizes of the axes do not multiply to the devices.
        SizeMismatch: TP003, if the batch does not divide.
        BadStages: TP074, if stages and micro-batches do not go together.
        BadConfig: TP020, if settings are out of range or contradict each other.
    """
    check_ranges(config)
    mesh, zero = config.mesh, config.zero
    stage = zero.stage if zero.stage is not None else 0 if mesh.fsdp == 1 else 3
    if stage and mesh.fsdp == 1:
        mesh = dataclasses.replace(mesh, fsdp=mesh.dp, dp=1)
    if stage >= 2 and config.precision.gradients == "float32":
        raise BadConfig(
            f"ZeRO stage {stage} sums gradients layer by layer, in precision.compute",
            where="precision.gradients",
            fix="compute; or zero.stage of 0 or 1",
        )
    mesh = _fill_mesh(mesh, num_devices)
    _check_length(config, mesh)
    micro_batches = _micro_batches(config, mesh.pp)
    # What accumulates without stages follows each other through them.
    accumulation = micro_batches or config.batch.accumulation
    batch = dataclasses.replace(config.batch, accumulation=accumulation)
    return dataclasses.replace(
        config,
        mesh=mesh,
        zero=dataclasses.replace(zero, stage=stage),
        batch=_fill_batch(batch, mesh.data_ways),
        pipeline=dataclasses.replace(config.pipeline, micro_batches=micro_batches),
    )


def _check_length(config: Config, mesh: Mesh) -> None:
    """Whether the tokens of a sequence divide over the devices that share them."""
    length, ways = config.seq_len, mesh.tp * mesh.cp if is_sequence_parallel(config) else mesh.cp
    # Each device along cp has an early and a late piece: docs/long-sequences.md.
    pieces = math.lcm(ways, 2 * mesh.cp) if mesh.cp > 1 else ways
    if length % pieces == 0:
        return
    near = (length // pieces * pieces, -(-length // pieces) * pieces)
    what = f"cp={mesh.cp} assigns two pieces of {length} tokens to each device"
    if mesh.cp == 1 or length % (2 * mesh.cp) == 0:
        what = f"sequence parallelism shards {length} tokens {ways} ways"
    raise SizeMismatch(what, where="seq_len", fix=f"seq_len of {join(n for n in near if n)}")


def _micro_batches(config: Config, num_stages: int) -> int:
    """Micro-batches of a pipeline, which are those of accumulation; 0 without stages."""
    pipeline, accumulation = config.pipeline, config.batch.accumulation
    if num_stages == 1:
        if pipeline.rounds > 1 or pipeline.micro_batches:
            raise BadConfig(
                "there are no stages", where="pipeline", fix="mesh.pp of 2 or more, or no pipeline"
            )
        return 0
    if pipeline.micro_batches not in (0, accumulation) and accumulation > 1:
        raise BadConfig(
            f"{pipeline.micro_batches} micro-batches, but batch.accumulation is {accumulation}",
            where="pipeline.micro_batches",
            fix="give one of them: a pipeline's micro-batches are what it accumulates",
        )
    count = pipeline.micro_batches or (accumulation if accumulation > 1 else num_stages)
    check_micro_batches(count, num_stages, pipeline.rounds)
    return count


def is_sequence_parallel(config: Config) -> bool:
    """Whether the residual stream is sharded along the sequence, by jaxtp's name or DeepSpeed's."""
    return config.communication.sequence_parallel or config.zero.partition_activations


def _fill_mesh(mesh: Mesh, num_devices: int) -> Mesh:
    sizes = {axis.value: size for axis, size in reversed(mesh.sizes.items())}
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise BadConfig("dp and fsdp are both -1", where="mesh", fix="give one of them")
    known = math.prod(size for size in sizes.values() if size != -1)
    text = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != -1)
    if num_devices % known or (not open_axes and known != num_devices):
        raise BadMesh(
            f"{text} = {known} devices, there are {num_devices}",
            where="mesh",
            fix=f"{_nearest_mesh(sizes, num_devices)}; -1 for dp or fsdp takes what is left",
        )
    return dataclasses.replace(mesh, **{name: num_devices // known for name in open_axes})


def _nearest_mesh(sizes: Mapping[str, int], num_devices: int) -> str:
    """Legal sizes that change one axis, the smallest change first."""
    found: list[tuple[float, str]] = []
    has_open = -1 in sizes.values()
    for name, size in sizes.items():
        rest = math.prod(n for other, n in sizes.items() if n != -1 and other != name)
        if size == -1 or num_devices % rest:
            continue
        left = num_devices // rest
        legal = [n for n in range(1, left + 1) if left % n == 0] if has_open else [left]
        best = min(legal, key=lambda n: abs(math.log(n / size)))
        found.append((abs(math.log(best / size)), f"{name}={best}"))
    return " or ".join(text for _, text in sorted(found)) or f"sizes that divide {num_devices}"


def _fill_batch(batch: Batch, ways: int) -> Batch:
    pieces = batch.accumulation * ways
    if not batch.size and not batch.micro_size:
        raise BadConfig(
            "neither size nor micro_size is given", where="batch", fix="give batch.size"
        )
    size = batch.size or batch.micro_size * pieces
    if size % pieces:
        below, above = size // pieces * pieces, -(-size // pieces) * pieces
        legal = [n for n in range(1, size // ways + 1) if size % (n * ways) == 0]
        near = sorted(legal, key=lambda n: abs(n - batch.accumulation))[:2]
        raise SizeMismatch(
            f"a batch of {size} does not divide by accumulation {batch.accumulation} x "
            f"{ways} data-parallel devices",
            where="batch.size",
            fix=join(f"batch.size={n}" for n in (below, above) if n)
            + "".join(f", or batch.accumulation={n}" for n in near),
        )
    if batch.micro_size and batch.micro_size * pieces != size:
        raise SizeMismatch(
            f"micro_size {batch.micro_size} x accumulation {batch.accumulation} x {ways} "
            f"data-parallel devices = {batch.micro_size * pieces}, but size is {size}",
            where="batch",
            fix=f"micro_size={size // pieces}, or size={batch.micro_size * pieces}",
        )
    return dataclasses.replace(batch, size=size, micro_size=size // pieces)
