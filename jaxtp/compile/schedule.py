"""How much of the communication a schedule hides: a model with a clock for each resource.

The model walks the program in launch order. Work advances the compute clock: matrix products and
attention as `jaxtp search` prices them by their sizes (`jaxtp.cost.products`), elementwise and
copying work at a share of the memory bandwidth. A collective starts when it is launched and its
links are free. NVLink and the network have a clock each, so that tensor parallelism inside a host
and ZeRO across hosts move at once; on one link collectives follow each other, and take their bytes
over the measured bandwidth. The `-done` stalls the compute clock until the collective has ended.
That stall is *exposed* time of what moves meanwhile, also of collectives in front of it; a
synchronous one on a free link is exposed entirely. A loop's body is walked for its first turn and
once more for all later ones; of a conditional's branches the slowest counts.

What it leaves out: the slow-down of work by the communication beside them, and launch times. It
says what a schedule permits, not what the hardware delivers.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxtp.compile.collectives import Collective, site
from jaxtp.compile.hlo import Computation, Instruction, Module
from jaxtp.compile.instruction_work import MatrixProducts, matrix_products, memory_bytes
from jaxtp.cost.products import COMPILED_MEMORY_SHARE, fused_attention_seconds, product_seconds
from jaxtp.hardware.gpus import NETWORK, NVLINK, DeviceKind, Target


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeWindow:
    """Matrix products of one instruction, or other work when `flops` is 0.

    Attributes:
        name: The instruction.
        op_name: Its JAX operation.
        start: Seconds on the compute clock.
        seconds: How long it runs.
        flops: FLOPs on one device.
        repeat: How many runs it stands for.
    """

    name: str
    op_name: str
    start: float
    seconds: float
    flops: float
    repeat: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """One collective in time.

    Attributes:
        collective: What moves.
        start: Seconds, when the link takes it up.
        seconds: How long it moves.
        exposed: Seconds that the compute clock waits while it moves.
        links: Seconds that it keeps each link busy, by LINKS.
        products: The matrix products launched between its start and its done.
        repeat: How many runs it stands for.
    """

    collective: Collective
    start: float
    seconds: float
    exposed: float
    links: Mapping[str, float]
    products: tuple[ComputeWindow, ...]
    repeat: int

    @property
    def link(self) -> str:
        """The slowest of its links: the network where it leaves the NVLink domain."""
        return NETWORK if NETWORK in self.links else NVLINK


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step in time.

    Attributes:
        seconds: The modelled step.
        windows: Every collective; a loop's first turn and the later ones are two entries.
        work: What runs on the compute clock, in order, repeated likewise.
    """

    seconds: float
    windows: tuple[Window, ...]
    work: tuple[ComputeWindow, ...]

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products that one device runs per step, recomputation included."""
        return sum(one.flops * one.repeat for one in self.work)

    def communication(self, keep: Callable[[Collective], bool] = lambda _: True) -> float:
        """Seconds per step that the collectives that `keep` selects take, one by one."""
        return sum(one.seconds * one.repeat for one in self.windows if keep(one.collective))

    def exposed(self, keep: Callable[[Collective], bool] = lambda _: True) -> float:
        """Seconds per step that a device waits for the collectives that `keep` selects."""
        return sum(one.exposed * one.repeat for one in self.windows if keep(one.collective))

    def busy(self, link: str) -> float:
        """Seconds per step that a link moves something."""
        return sum(one.links.get(link, 0.0) * one.repeat for one in self.windows)

    def waits(self, link: str) -> float:
        """Seconds per step that a device waits for a link."""
        return sum(one.exposed * one.repeat for one in self.windows if one.link == link)

    @property
    def product_seconds(self) -> float:
        """Seconds per step of the matrix products alone."""
        return sum(one.seconds * one.repeat for one in self.work if one.flops)

    def timeline(self) -> list[dict[str, Any]]:
        """All clocks as boxes to draw, in order of their start.

        Each has `lane` ("compute", or a link of `LINKS`), `name`, `start`, `seconds`, `exposed` and
        `repeat`. A loop shows its first turn and the one that stands for the rest, so boxes do not
        fill the whole step.
        """
        work = [
            {
                "lane": "compute",
                "name": site(one.op_name) or one.name,
                "start": one.start,
                "seconds": one.seconds,
                "exposed": 0.0,
                "repeat": one.repeat,
            }
            for one in self.work
        ]
        moves = [
            {
                "lane": one.link,
                "name": f"{one.collective.kind} {one.collective.site}".strip(),
                "start": one.start,
                "seconds": one.seconds,
                "exposed": one.exposed,
                "repeat": one.repeat,
            }
            for one in self.windows
        ]
        return sorted([*work, *moves], key=lambda box: box["start"])

    def hidden_share(self, keep: Callable[[Collective], bool] = lambda _: True) -> float:
        """1 - exposed / communication; 1 when there is nothing to hide."""
        total = self.communication(keep)
        return 1 - self.exposed(keep) / total if total else 1.0


def simulate(
    module: Module,
    collectives: Iterable[Collective],
    target: Target,
) -> Schedule:
    """Walks a scheduled program with the clocks of the module's docstring.

    Args:
        module: The compiled program; its order of instructions is the schedule.
        collectives: What `compile/collectives` found in it.
        target: Whose links, memory and tensor cores.

    Raises:
        ValueError: If the program is not scheduled.
    """
    if not module.is_scheduled:
        raise ValueError("the program's text is not a schedule")
    sites = {(one.computation, one.start): one for one in collectives}
    walk = _Walk(module, sites, target)
    walk.run(module.entry, repeat=1)
    return Schedule(seconds=walk.clock, windows=tuple(walk.windows), work=tuple(walk.done))


@dataclasses.dataclass(frozen=True, slots=True)
class _Transfer:
    """A collective on its links.

    Attributes:
        start: Seconds.
        end: Likewise.
        links: Seconds on each link.
        behind: The transfer that it had to let pass on a link; None where it started at once.
        number: Of all transfers of the walk.
    """

    start: float
    end: float
    links: Mapping[str, float]
    behind: "_Transfer | None"
    number: int


def products_seconds(one: MatrixProducts, device: DeviceKind) -> float:
    """Seconds of the matrix products of one instruction on a GPU, modelled."""
    if not one.attention:
        return float(product_seconds(device, one.rows, one.columns, one.depth, count=one.count))
    seconds = fused_attention_seconds(
        device,
        one.rows,
        one.columns,
        one.depth,
        one.count,
        backward=one.attention == "backward",
        own_kernel=True,
    )
    return float(seconds) * (1 if one.is_causal else 2)  # what is priced is causal


class _Walk:
    """The clocks, and what happened on them."""

    def __init__(
        self, module: Module, sites: Mapping[tuple[str, str], Collective], target: Target
    ) -> None:
        self.module, self.sites, self.target = module, sites, target
        self.clock = 0.0
        # Of each link: when it is free, and whose transfer it was last.
        self.free: dict[str, tuple[float, _Transfer]] = {}
        # Of every transfer so far: how long the compute clock has waited while it moved.
        self.waits: list[float] = []
        self.windows: list[Window] = []
        self.done: list[ComputeWindow] = []

    def run(self, computation: Computation, repeat: int) -> None:
        """Launches a computation's instructions once; each result stands for `repeat` runs."""
        # done instruction -> (collective, its transfer, work launched before it)
        pending: dict[str, tuple[Collective, _Transfer, int]] = {}
        for instruction in computation:
            if collective := self.sites.get((computation.name, instruction.name)):
                moving = self.transfer(collective)
                pending[collective.done] = (collective, moving, len(self.done))
            else:
                self.compute(computation, instruction, repeat)
            if waiting := pending.pop(instruction.name, None):
                self.wait(*waiting, repeat)

    def transfer(self, collective: Collective) -> _Transfer:
        """Puts a collective on its links."""
        what = (collective.kind, collective.num_bytes, collective.groups)
        links = self.target.link_seconds(*what)
        taken = [self.free[link] for link in links if link in self.free]
        start, behind = max(taken, key=lambda one: one[0], default=(0.0, None))
        if start <= self.clock:
            start, behind = self.clock, None
        end = start + self.target.collective_seconds(*what)
        moving = _Transfer(start, end, links, behind, len(self.waits))
        self.waits.append(0.0)
        for link, seconds in links.items():
            self.free[link] = (start + seconds, moving)
        return moving

    def wait(self, collective: Collective, moving: _Transfer, before: int, repeat: int) -> None:
        """Stalls the compute clock until a collective has ended."""
        # What is waited for is this one and, while it has not started, those in front of it.
        one, until = moving, moving.end
        while one is not None and until > self.clock:
            self.waits[one.number] += until - max(one.start, self.clock)
            one, until = one.behind, one.start
        self.clock = max(self.clock, moving.end)
        inside = tuple(one for one in self.done[before:] if one.flops)
        self.windows.append(
            Window(
                collective=collective,
                start=moving.start,
                seconds=moving.end - moving.start,
                exposed=self.waits[moving.number],
                links=moving.links,
                products=inside,
                repeat=repeat,
            )
        )

    def compute(self, computation: Computation, instruction: Instruction, repeat: int) -> None:
        """Runs anything that is not a collective."""
        bodies = [self.module.computations[name] for name in instruction.calls]
        if instruction.opcode == "while":
            body = self.module.computations[instruction.attribute("body").strip("%")]
            self.loop(body, instruction.trip_count or 1, repeat)
        elif instruction.opcode == "conditional":
            self.branch(bodies, repeat)
        elif instruction.opcode == "call":
            for body in bodies:
                self.run(body, repeat)
        else:
            self.work(computation, instruction, repeat)

    def work(self, computation: Computation, instruction: Instruction, repeat: int) -> None:
        """Advances the compute clock by one instruction's own work."""
        device = self.target.device
        products = matrix_products(self.module, computation, instruction)
        flops = sum(one.flops for one in products)
        seconds = sum(products_seconds(one, device) for one in products)
        if not flops:
            moved = memory_bytes(self.module, computation, instruction)
            seconds = moved / (COMPILED_MEMORY_SHARE * device.hbm_bandwidth)
        if seconds:
            self.done.append(
                ComputeWindow(
                    name=instruction.name,
                    op_name=instruction.op_name,
                    start=self.clock,
                    seconds=seconds,
                    flops=flops,
                    repeat=repeat,
                )
            )
            self.clock += seconds

    def loop(self, body: Computation, trips: int, repeat: int) -> None:
        """Walks the first turn, whose link may still be busy, and one that stands for the rest."""
        if trips > 0:
            self.run(body, repeat)
        if trips > 1:
            begin = self.clock
            self.run(body, repeat * (trips - 1))
            self.clock += (self.clock - begin) * (trips - 2)

    def branch(self, bodies: list[Computation], repeat: int) -> None:
        """Walks every branch from here and keeps the slowest."""
        walks: list[_Walk] = []
        for body in bodies:
            walk = copy.copy(self)
            walk.windows, walk.done = list(self.windows), list(self.done)
            walk.free, walk.waits = dict(self.free), list(self.waits)
            walk.run(body, repeat)
            walks.append(walk)
        vars(self).update(vars(max(walks, key=lambda walk: walk.clock)))
