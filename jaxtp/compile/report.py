"""What a compiled step will do, as data and as text."""

import dataclasses
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxtp.compile.options import Value
from jaxtp.compile.schedule import Schedule
from jaxtp.errors import join
from jaxtp.hardware.links import GIB

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}
WIDTH = 132
"""Columns of the text form."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """Collectives of one place in the user's program, summed over where the compiler put them.

    Attributes:
        kind: For example `all-reduce`.
        axes: Mesh axes it runs along.
        crosses_hosts: Whether a group has members on more than one host.
        dtype: Element type that moves.
        num_bytes: Full buffer of one run in bytes.
        size: Devices in a group.
        count: Runs per step.
        backward: Whether it belongs to the backward pass.
        site: The JAX operation, without the transformations around it.
        source: The user's line.
        synchronous: How many of the runs nothing can overlap.
        products: Distinct matrix products launched inside its windows, most work first.
        wire_bytes: Bytes one device sends per step.
        seconds: Modelled seconds per step that it takes.
        exposed_seconds: How many of them the device waits.
    """

    kind: str
    axes: tuple[str, ...]
    crosses_hosts: bool
    dtype: str
    num_bytes: int
    size: int
    count: int
    backward: bool
    site: str
    source: str
    synchronous: int
    products: tuple[str, ...]
    wire_bytes: float
    seconds: float
    exposed_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
    """One link of a device in a step; seconds per step.

    Attributes:
        name: `NVLink` or `network`.
        busy_seconds: How long it moves something.
        exposed_seconds: How long the device waits for it.
        needed_seconds: How long it moves what the strategy needs (`jaxtp.cost.bound`); None when
            that is not known.
    """

    name: str
    busy_seconds: float
    exposed_seconds: float
    needed_seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """One compiled step on one target. Everything in seconds is modelled (`compile/schedule`).

    Attributes:
        target: As text.
        mesh: Axis name -> size.
        tensor_axes: The axes whose communication `wire_bytes` and the hidden shares are about;
            all axes when the mesh has no tensor axis.
        axes_across_hosts: Axes along which some devices are on different hosts.
        argument_bytes: Memory of the step's arguments on one device.
        output_bytes: Memory of its results.
        alias_bytes: Results that reuse an argument's memory: what is really donated.
        temp_bytes: The block of temporaries.
        card_bytes: Memory of one GPU; 0 without a target.
        not_donated: Arguments that could be donated, because a result has their shape and type, but
            are not: name -> bytes.
        collectives: One row per place, most bytes first.
        unexpected: Place -> why the compiler made a collective that tensor parallelism does not
            need.
        wire_bytes: Bytes one device sends along the tensor axes per step, by the ring formula.
        wire_bytes_by_axes: The same for every combination of axes, joined by ` x `.
        floor_bytes: What the model needs at least, or None when not given.
        hidden_share: Share of the tensor axes' communication time that passes beside work.
        hidden_forward: The same for the forward pass.
        hidden_backward: The same for the backward pass, recomputation included.
        links: NVLink and the network, as far as the step uses them.
        step_seconds_modelled: Matrix products, elementwise and copying work, and exposed
            communication.
        product_seconds: Matrix products alone, recomputation included and idle ticks of pipeline
            stages left out.
        flops_per_device: FLOPs of the matrix products one device runs, recomputation included.
        hfu_modelled: flops_per_device / (step_seconds_modelled x the data sheet's peak).
        mfu_modelled: model FLOPs / (devices x step_seconds_modelled x the data sheet's peak), or
            None when the model's FLOPs are not given.
        options: Compile options used.
        unknown_options: Asked for, but unknown to this jaxlib.
        compile_seconds: Time in the compiler.
        versions: jax and jaxlib.
        notes: Sentences about what the numbers leave out or warn of.
        schedule: The modelled step in time, for drawing; not part of the JSON.
    """

    target: str
    mesh: Mapping[str, int]
    tensor_axes: tuple[str, ...]
    axes_across_hosts: tuple[str, ...]
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    card_bytes: int
    not_donated: Mapping[str, int]
    collectives: tuple[Row, ...]
    unexpected: Mapping[str, str]
    wire_bytes: float
    wire_bytes_by_axes: Mapping[str, float]
    floor_bytes: float | None
    hidden_share: float
    hidden_forward: float
    hidden_backward: float
    links: tuple[Link, ...]
    step_seconds_modelled: float
    product_seconds: float
    flops_per_device: float
    hfu_modelled: float
    mfu_modelled: float | None
    options: Mapping[str, Value]
    unknown_options: Mapping[str, Value]
    compile_seconds: float
    versions: Mapping[str, str]
    notes: tuple[str, ...] = ()
    schedule: Schedule = dataclasses.field(repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """What the runtime allocates: arguments, results that reuse none of them, temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def fits(self) -> bool:
        """Whether the peak is within the GPU's memory."""
        return self.peak_bytes <= self.card_bytes

    @property
    def ratio(self) -> float | None:
        """Wire bytes over the floor, or None when no floor is given."""
        return self.wire_bytes / self.floor_bytes if self.floor_bytes else None

    @property
    def bound_seconds(self) -> float | None:
        """What no schedule of the same strategy goes below, or None when its needs are not known.

        The longest of the matrix products' time and, for each link, the time of what the strategy
        has to move.
        """
        needed = [link.needed_seconds for link in self.links]
        if any(one is None for one in needed):
            return None
        return max(self.product_seconds, *filter(None, needed), 0.0)

    @property
    def bound_ratio(self) -> float | None:
        """The modelled step over its bound, or None without one."""
        return self.step_seconds_modelled / self.bound_seconds if self.bound_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data: every field but `schedule`, and the properties."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "schedule"
        }
        return {
            **fields,
            "collectives": [dataclasses.asdict(row) for row in self.collectives],
            "links": [dataclasses.asdict(link) for link in self.links],
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
            "spare_bytes": self.card_bytes - self.peak_bytes,
            "ratio": self.ratio,
            "bound_seconds": self.bound_seconds,
            "bound_ratio": self.bound_ratio,
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    def __str__(self) -> str:
        return _render([*_head(self), *_body(self)])

    def communication(self) -> str:
        """Only the table of collectives and what is wrong with them."""
        return _render(list(_body(self)))


def _render(parts: Iterable[Any]) -> str:
    """Lines and tables as text."""
    from rich.console import Console

    out = io.StringIO()
    console = Console(
        file=out, width=WIDTH, highlight=False, markup=False, emoji=False, force_jupyter=False
    )
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _body(report: Report) -> Iterator[Any]:
    """The table of collectives, and what a reader should look at."""
    if report.collectives:
        yield _table(report)
    for place, cause in report.unexpected.items():
        yield f"unexpected    {place}\n              {cause}"
    for note in report.notes:
        yield f"note          {note}"


def _head(report: Report) -> Iterator[str]:
    """Memory, totals, overlap, time and options, one subject a line."""
    mesh = " ".join(f"{name}={size}" for name, size in report.mesh.items())
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    seconds = f"{report.compile_seconds:.1f} s"
    yield f"preflight     {report.target}, mesh {mesh}; {versions}; compiled in {seconds}"
    if report.axes_across_hosts:
        yield f"              across hosts: {', '.join(report.axes_across_hosts)}"
    spare = report.card_bytes - report.peak_bytes
    verdict = (
        f"fits, {_size(spare)} to spare" if report.fits else f"DOES NOT FIT by {_size(-spare)}"
    )
    peak = f"{_size(report.peak_bytes)} of {_size(report.card_bytes)}"
    yield f"memory        peak {peak} per GPU: {verdict}"
    parts = f"arguments {_size(report.argument_bytes)}, temporaries {_size(report.temp_bytes)}"
    reused = f"of which {_size(report.alias_bytes)} reuse donated arguments"
    yield f"              {parts}, results {_size(report.output_bytes)}, {reused}"
    if report.not_donated:
        largest = sorted(report.not_donated, key=lambda name: -report.not_donated[name])
        total = _size(sum(report.not_donated.values()))
        yield f"              not donated but could be ({total}): {join(largest, limit=4)}"
    axes = " x ".join(report.tensor_axes)
    ratio = f", {report.ratio:.3f}x the floor" if report.ratio is not None else ""
    yield f"communication {_size(report.wire_bytes)} sent per GPU and step along {axes}{ratio}"
    passes = f"forward {report.hidden_forward:.1%}, backward {report.hidden_backward:.1%}"
    yield f"hidden        {report.hidden_share:.1%} of it ({passes}), modelled"
    for link in report.links:
        yield f"{link.name:<13} {_link(link)}"
    step = f"{report.step_seconds_modelled * 1e3:.3f} ms modelled"
    products = f"{report.product_seconds * 1e3:.3f} ms of matrix products"
    mfu = f", MFU {report.mfu_modelled:.1%}" if report.mfu_modelled is not None else ""
    yield f"step          {step} ({products}), HFU {report.hfu_modelled:.1%}{mfu}"
    if report.bound_seconds and report.bound_ratio is not None:
        times = f"the step is {report.bound_ratio:.3f}x"
        yield f"bound         {report.bound_seconds * 1e3:.3f} ms; {times}"
    options = ", ".join(f"{name}={value}" for name, value in report.options.items())
    yield f"options       {options or 'none'}"
    if report.unknown_options:
        yield f"              unknown to this jaxlib: {', '.join(report.unknown_options)}"


def _link(link: Link) -> str:
    busy = f"busy {link.busy_seconds * 1e3:.3f} ms, exposed {link.exposed_seconds * 1e3:.3f} ms"
    if link.needed_seconds is None:
        return busy
    return f"{busy}; the strategy needs {link.needed_seconds * 1e3:.3f} ms"


def _table(report: Report) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("collective", "axes", "pass"):
        table.add_column(name, no_wrap=True)
    for name in ("type", "MiB", "times", "sync", "ms/step", "hidden"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("beside")
    table.add_column("operation", overflow="fold")
    for row in report.collectives:
        share = 1 - row.exposed_seconds / row.seconds if row.seconds else 1.0
        table.add_row(
            row.kind,
            " x ".join(row.axes) + (" (hosts)" if row.crosses_hosts else ""),
            "backward" if row.backward else "forward",
            row.dtype,
            f"{row.num_bytes / 2**20:.2f}",
            str(row.count),
            str(row.synchronous),
            f"{row.seconds * 1e3:.3f}",
            f"{share:.0%}",
            f"{len(row.products)} products" if row.products else "-",
            " ".join(part for part in (row.site, f"[{row.source}]" if row.source else "") if part),
        )
    return table


def _size(num_bytes: float) -> str:
    """Bytes with the unit that leaves one to three digits before the point."""
    unit = next((u for u in ("GiB", "MiB", "KiB") if num_bytes >= UNITS[u]), "KiB")
    return f"{num_bytes / UNITS[unit]:.2f} {unit}"
