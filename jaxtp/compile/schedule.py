"""How much of the communication a schedule hides behind matrix products: a model with two clocks.

The model walks the program in launch order. Matrix products advance the compute clock at the rate
that large products sustain; everything else takes no time. A collective starts when it is launched
and the link is free, one after the other on one link, and takes its bytes over the measured
bandwidth. Its `-done` stalls the compute clock until then. That stall is *exposed* time of whatever
the link carries meanwhile, also of collectives in front of it; a synchronous one on a free link is
exposed entirely. A loop's body is walked for its first turn and once more for all later ones; of a
conditional's branches the slowest counts.

What it leaves out: the slow-down of products by the communication beside them, launch times, and
that narrow products run below the sustained rate. It says what a schedule permits, not what the
hardware delivers. `memory_bound=True` adds the time that elementwise and copying work takes at
MEMORY_SHARE of the memory bandwidth; it hides communication too, though both compete in reality.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxtp.compile.collectives import Collective, site
from jaxtp.compile.hlo import Computation, Instruction, Module
from jaxtp.compile.instruction_work import matmul_flops, memory_bytes
from jaxtp.hardware.gpus import Target

MEMORY_SHARE = 2.6 / 3.35
"""Share of the data sheet's memory bandwidth that elementwise work reaches: 2.6 TB/s on an H100."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Product:
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
        products: The matrix products launched between its start and its done.
        repeat: How many runs it stands for.
    """

    collective: Collective
    start: float
    seconds: float
    exposed: float
    products: tuple[Product, ...]
    repeat: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A step in time.

    Attributes:
        seconds: The modelled step.
        windows: Every collective; a loop's first turn and the later ones are two entries.
        products: The work on the compute clock, in order, repeated likewise.
    """

    seconds: float
    windows: tuple[Window, ...]
    products: tuple[Product, ...]

    @property
    def flops(self) -> float:
        """FLOPs of the matrix products that one device runs per step, recomputation included."""
        return sum(product.flops * product.repeat for product in self.products)

    def communication(self, keep: Callable[[Collective], bool] = lambda _: True) -> float:
        """Seconds per step that the link is busy with the collectives that `keep` selects."""
        return sum(one.seconds * one.repeat for one in self.windows if keep(one.collective))

    def exposed(self, keep: Callable[[Collective], bool] = lambda _: True) -> float:
        """Seconds per step that a device waits for the collectives that `keep` selects."""
        return sum(one.exposed * one.repeat for one in self.windows if keep(one.collective))

    def timeline(self) -> list[dict[str, Any]]:
        """Both clocks as boxes to draw, in order of their start.

        Each has `lane` ("compute" or "link"), `name`, `start`, `seconds`, `exposed` and `repeat`.
        A loop shows its first turn and the one that stands for the rest, so boxes do not fill the
        whole step.
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
            for one in self.products
        ]
        moves = [
            {
                "lane": "link",
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
    *,
    memory_bound: bool = False,
) -> Schedule:
    """Walks a scheduled program with the two clocks of the module's docstring.

    Args:
        module: The compiled program; its order of instructions is the schedule.
        collectives: What `compile/collectives` found in it.
        target: Whose links and tensor cores.
        memory_bound: Whether elementwise and copying work takes time too.

    Raises:
        ValueError: If the program is not scheduled.
    """
    if not module.is_scheduled:
        raise ValueError("the program's text is not a schedule")
    sites = {(one.computation, one.start): one for one in collectives}
    walk = _Walk(module, sites, target, memory_bound)
    walk.run(module.entry, repeat=1)
    return Schedule(seconds=walk.clock, windows=tuple(walk.windows), products=tuple(walk.products))


class _Walk:
    """The two clocks, and what happened on them."""

    def __init__(
        self,
        module: Module,
        sites: Mapping[tuple[str, str], Collective],
        target: Target,
        memory_bound: bool,
    ) -> None:
        self.module, self.sites, self.target = module, sites, target
        self.memory_bound = memory_bound
        self.clock = self.link = 0.0
        # Of every transfer so far: start and end, and how long the clock has waited in between.
        self.transfers: list[tuple[float, float]] = []
        self.waits: list[float] = []
        self.windows: list[Window] = []
        self.products: list[Product] = []

    def run(self, computation: Computation, repeat: int) -> None:
        """Launches a computation's instructions once; each result stands for `repeat` runs."""
        # done instruction -> (collective, number of its transfer, products launched before it)
        pending: dict[str, tuple[Collective, int, int]] = {}
        for instruction in computation:
            if collective := self.sites.get((computation.name, instruction.name)):
                number = self.transfer(collective)
                pending[collective.done] = (collective, number, len(self.products))
            else:
                self.compute(computation, instruction, repeat)
            if waiting := pending.pop(instruction.name, None):
                self.wait(*waiting, repeat)

    def transfer(self, collective: Collective) -> int:
        """Puts a collective on the link; returns the number of the transfer."""
        start = max(self.clock, self.link)
        self.link = start + self.target.collective_seconds(
            collective.kind, collective.num_bytes, collective.groups
        )
        self.transfers.append((start, self.link))
        self.waits.append(0.0)
        return len(self.transfers) - 1

    def wait(self, collective: Collective, number: int, before: int, repeat: int) -> None:
        """Stalls the compute clock until a collective has ended."""
        start, end = self.transfers[number]
        # One after the other on the link: what is waited for is this one and those in front of it.
        for n in range(number, -1, -1):
            begin, until = self.transfers[n]
            if until <= self.clock:
                break
            self.waits[n] += until - max(begin, self.clock)
        self.clock = max(self.clock, end)
        inside = tuple(one for one in self.products[before:] if one.flops)
        self.windows.append(
            Window(
                collective=collective,
                start=start,
                seconds=end - start,
                exposed=self.waits[number],
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
        flops = matmul_flops(self.module, computation, instruction)
        seconds = flops / self.target.device.matmul_flops
        if self.memory_bound and not flops:
            moved = memory_bytes(self.module, computation, instruction)
            seconds = moved / (MEMORY_SHARE * self.target.device.hbm_bandwidth)
        if seconds:
            self.products.append(
                Product(
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
            walk.windows, walk.products = list(self.windows), list(self.products)
            walk.transfers, walk.waits = list(self.transfers), list(self.waits)
            walk.run(body, repeat)
            walks.append(walk)
        vars(self).update(vars(max(walks, key=lambda walk: walk.clock)))
