"""Reads a compiled step: memory, communication, overlap, and what should not be there."""

import dataclasses
import importlib.metadata
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxtp.compile.causes import argument_name, unexpected
from jaxtp.compile.collectives import Collective, find, site
from jaxtp.compile.expert_work import costly_experts
from jaxtp.compile.hlo import Module, parse
from jaxtp.compile.options import CompileOptions
from jaxtp.compile.report import Link, Report, Row
from jaxtp.compile.schedule import Schedule, Window, simulate
from jaxtp.cost.bound import Need, seconds_of
from jaxtp.hardware.gpus import LINKS, Target
from jaxtp.hardware.links import GIB

NOTICED_BYTES = 2**20
"""Arguments below this size are not worth a line about donation."""

RUNTIME_BYTES = 2 * GIB
"""Device memory that CUDA contexts, cuBLAS workspaces and NCCL buffers take, roughly."""


def analyse(
    text: str,
    memory: Mapping[str, int],
    target: Target,
    mesh: Mapping[str, int],
    *,
    tensor_axes: Sequence[str] = ("tp",),
    options: CompileOptions | None = None,
    floor_bytes: float | None = None,
    model_flops: float | None = None,
    needs: Sequence[Need] | None = None,
    idle_share: float = 0.0,
    compile_seconds: float = 0.0,
    ragged_groups: int = 0,
) -> Report:
    """Reads a compiled step.

    Args:
        text: `compiled.as_text()`.
        memory: `argument_bytes`, `output_bytes`, `alias_bytes` and `temp_bytes` of one device.
        target: The machine that the program is for, or is costed on.
        mesh: Axis name -> size, devices numbered with the last axis fastest.
        tensor_axes: Axes of tensor parallelism; those the mesh lacks are ignored.
        options: What it was compiled with.
        floor_bytes: What the model must move at least (`cost/floor`).
        model_flops: FLOPs of one step of the whole model without recomputation, for MFU.
        needs: What the strategy has to move (`cost/bound`), for the bound.
        idle_share: Share of the matrix products that a pipeline stage runs in idle ticks.
        compile_seconds: Time in the compiler.
        ragged_groups: Most groups of a ragged product in what was compiled; 0 without any.
    """
    module = parse(text)
    found = find(module, mesh)
    schedule = simulate(module, found, target)
    tensor = tuple(axis for axis in tensor_axes if mesh.get(axis, 1) > 1) or tuple(mesh)
    used = options or CompileOptions(options={}, unknown={})

    def along(one: Collective) -> bool:
        return bool(set(one.axes) & set(tensor))

    available = schedule.seconds * target.device.peak_flops
    report = Report(
        target=str(target),
        mesh=dict(mesh),
        tensor_axes=tensor,
        axes_across_hosts=tuple(axis for axis in mesh if _leaves(mesh, axis, target.host)),
        argument_bytes=memory["argument_bytes"],
        output_bytes=memory["output_bytes"],
        alias_bytes=memory["alias_bytes"],
        temp_bytes=memory["temp_bytes"],
        card_bytes=target.device.memory_bytes,
        not_donated=_not_donated(module),
        collectives=_rows(found, schedule, target),
        unexpected={
            _place(one): cause for one, cause in unexpected(module, found, tensor_axes=tensor_axes)
        },
        wire_bytes=sum(one.wire_bytes * one.count for one in found if along(one)),
        wire_bytes_by_axes=_by_axes(found),
        floor_bytes=floor_bytes,
        hidden_share=schedule.hidden_share(along),
        hidden_forward=schedule.hidden_share(lambda one: along(one) and not one.backward),
        hidden_backward=schedule.hidden_share(lambda one: along(one) and one.backward),
        links=_links(schedule, mesh, target, needs),
        step_seconds_modelled=schedule.seconds,
        product_seconds=schedule.product_seconds * (1 - idle_share),
        flops_per_device=schedule.flops,
        hfu_modelled=schedule.flops / available if available else 0.0,
        mfu_modelled=model_flops / target.num_devices / available if model_flops else None,
        options=used.options,
        unknown_options=used.unknown,
        compile_seconds=compile_seconds,
        versions={name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        schedule=schedule,
    )
    experts = costly_experts(module, found, ragged_groups, schedule.flops)
    return dataclasses.replace(report, notes=(*_notes(module, report, target), *experts))


def _links(
    schedule: Schedule, mesh: Mapping[str, int], target: Target, needs: Sequence[Need] | None
) -> tuple[Link, ...]:
    """Links that the program uses or the strategy needs."""
    needed = None if needs is None else seconds_of(needs, mesh, target)
    return tuple(
        Link(
            name=link,
            busy_seconds=schedule.busy(link),
            exposed_seconds=schedule.waits(link),
            needed_seconds=None if needed is None else needed[link],
        )
        for link in LINKS
        if schedule.busy(link) or (needed and needed[link])
    )


def _leaves(mesh: Mapping[str, int], axis: str, place: Callable[[int], int]) -> bool:
    """Whether a group along one axis has members in more than one place."""
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    along = np.moveaxis(ids, list(mesh).index(axis), -1).reshape(-1, mesh[axis])
    return any(len({place(int(device)) for device in group}) > 1 for group in along)


def _by_axes(found: Iterable[Collective]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for one in found:
        key = " x ".join(one.axes)
        totals[key] = totals.get(key, 0.0) + one.wire_bytes * one.count
    return totals


def _place(one: Collective) -> str:
    parts = [one.kind, "along " + " x ".join(one.axes), one.site, one.source]
    return ", ".join(part for part in parts if part)


def _rows(found: Iterable[Collective], schedule: Schedule, target: Target) -> tuple[Row, ...]:
    """Collectives alike in everything the user sees become one row."""
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for one in found:
        what = (one.kind, one.axes, one.dtype, one.num_bytes, one.count)
        groups.setdefault((*what, one.backward, one.site, one.source), []).append(one)
    windows: dict[tuple[str, str], list[Window]] = {}
    for window in schedule.windows:
        place = window.collective.computation, window.collective.start
        windows.setdefault(place, []).append(window)
    rows = [
        _row(
            members,
            [w for one in members for w in windows.get((one.computation, one.start), [])],
            target,
        )
        for members in groups.values()
    ]
    return tuple(sorted(rows, key=lambda row: -row.wire_bytes))


def _row(members: Sequence[Collective], windows: Sequence[Window], target: Target) -> Row:
    first = members[0]
    work: dict[str, float] = {}
    for window in windows:
        for product in window.products:
            name = site(product.op_name) or product.name
            work[name] = work.get(name, 0.0) + product.flops * product.repeat
    return Row(
        kind=first.kind,
        axes=first.axes,
        crosses_hosts=any(len({target.host(d) for d in group}) > 1 for group in first.groups),
        dtype=first.dtype,
        num_bytes=first.num_bytes,
        size=first.size,
        count=sum(one.count for one in members),
        backward=first.backward,
        site=first.site,
        source=first.source,
        synchronous=sum(one.count for one in members if not one.is_async),
        products=tuple(sorted(work, key=lambda name: -work[name])),
        wire_bytes=sum(one.wire_bytes * one.count for one in members),
        seconds=sum(window.seconds * window.repeat for window in windows),
        exposed_seconds=sum(window.exposed * window.repeat for window in windows),
    )


def _not_donated(module: Module) -> dict[str, int]:
    """Arguments whose memory a result of the same shape and type could take, but does not."""
    reused = set(module.aliases.values())
    free = [shape for number, shape in enumerate(module.entry.root.shapes) if number not in reused]
    found: dict[str, int] = {}
    for number, one in enumerate(module.parameters):
        shape = one.shapes[0]
        if number not in module.aliases and shape in free and shape.num_bytes >= NOTICED_BYTES:
            free.remove(shape)
            found[argument_name(one)] = shape.num_bytes
    return found


def _notes(module: Module, report: Report, target: Target) -> Iterator[str]:
    """What a reader must know to judge the numbers."""
    for axis in report.tensor_axes:
        if _leaves(report.mesh, axis, target.domain):
            yield (
                f"{axis} leaves the NVLink domain of {target}: its messages take the network, at "
                f"{target.device.nic_bandwidth / 1e9:.0f} GB/s per GPU"
            )
    spare = report.card_bytes - report.peak_bytes
    if 0 <= spare < RUNTIME_BYTES:
        yield (
            f"{spare / GIB:.2f} GiB to spare, but CUDA, cuBLAS and NCCL take about "
            f"{RUNTIME_BYTES / GIB:.0f} GiB that the compiler does not see"
        )
    if spare < 0 and "xla_gpu_memory_limit_slop_factor" in report.options:
        yield (
            "the raised scheduler limit of overlap='aggressive' keeps more alive at once than this "
            "GPU has: use overlap='auto', a smaller batch, or more devices"
        )
    if report.options.get("xla_gpu_enable_triton_gemm") is False:
        yield (
            "compiled with cuBLASLt products: Triton ones need a GPU to be tuned on, so on "
            "hardware some products may be fused otherwise"
        )
    if module.unknown_loops:
        yield (
            f"{len(module.unknown_loops)} loops have a length that the compiler does not know; "
            "their bodies count once"
        )
    if module.num_conditionals:
        yield (
            f"{module.num_conditionals} conditionals, whose longest branch counts every time; "
            "in pipeline stages idle ticks count as work in HFU and in bytes sent"
        )
