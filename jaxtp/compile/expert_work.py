"""Experts of anybody's model that cost more than they need to, in a compiled program.

Two ways of writing a mixture of experts are right everywhere and fast nowhere: matrices picked by
index, one set for every choice of every token; and every expert on every token, times zero where it
was not chosen. The third, ragged products, is in `jaxtp.compile.ragged`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from jaxtp.activations.left_alone import UNCHOSEN
from jaxtp.compile.causes import arguments_behind
from jaxtp.compile.collectives import Collective
from jaxtp.compile.hlo import Computation, Instruction, Module
from jaxtp.compile.instruction_work import own_products
from jaxtp.compile.ragged import INSTEAD, dense_ragged
from jaxtp.errors import join

_UNCHOSEN = re.compile(rf"{UNCHOSEN}_(\d+)_(\d+)")
_GATHERS = ("all-gather", "all-gather-start", "all-gather-done")


def costly_experts(
    module: Module, collectives: Iterable[Collective], ragged_groups: int, all_flops: float
) -> Iterator[str]:
    """Notes on all three ways, each with its lines and what it costs.

    Args:
        module: The compiled program.
        collectives: What `compile/collectives` found in it.
        ragged_groups: Most groups of a ragged product in what was compiled; 0 without any.
        all_flops: FLOPs of all matrix products of a device and step.
    """
    if ragged := dense_ragged(module, ragged_groups, all_flops):
        yield ragged
    yield from unchosen_experts(module, all_flops)
    yield from picked_experts(module, collectives)


def unchosen_experts(module: Module, all_flops: float) -> Iterator[str]:
    """A note for each number of experts that all work on every token.

    Products of one operand that the compiler has merged count as one of them, by its name.

    Args:
        module: The compiled program; `jaxtp.parallelize` names its products.
        all_flops: FLOPs of all matrix products of a device and step.
    """
    work: dict[tuple[int, int], float] = defaultdict(float)
    lines: dict[tuple[int, int], dict[str, None]] = defaultdict(dict)
    for computation in module.computations.values():
        for one in computation:
            share = _UNCHOSEN.search(one.op_name)
            products = own_products(computation, one) if share else []
            if share and products:
                key = int(share[1]), int(share[2])
                flops = sum(product.flops for product in products)
                work[key] += module.counts[computation.name] * flops
                lines[key].setdefault(module.source(one))
    for (experts, chosen), flops in work.items():
        at = join(filter(None, lines[experts, chosen]), 4)
        yield (
            f"all {experts} experts work on every token{f' at {at}' if at else ''}, of which each "
            f"chose {chosen}: {flops:.3g} FLOPs a device and step, {experts / chosen:.3g} x those "
            f"needed and {flops / all_flops:.0%} of the step's. {INSTEAD}"
        )


def picked_experts(module: Module, collectives: Iterable[Collective]) -> Iterator[str]:
    """A note for each line that gives every token matrices of its own.

    Args:
        module: The compiled program.
        collectives: What `compile/collectives` found in it.
    """
    sent: dict[str, float] = defaultdict(float)
    for one in collectives:
        if one.site.rsplit("/", 1)[-1] == "gather":
            sent[one.source] += one.count * one.wire_bytes
    moved: dict[str, float] = defaultdict(float)
    largest: dict[str, tuple[int, int]] = {}
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for computation in module.computations.values():
        for one in computation:
            times = module.counts[computation.name]
            weights = _picked_from(module, computation, one) if times else []
            if not weights:
                continue
            source = module.source(one)
            moved[source] += times * one.num_bytes
            stored = computation.instructions[one.operands[0]].num_bytes
            largest[source] = max(largest.get(source, (0, 0)), (one.num_bytes, stored))
            names[source] |= dict.fromkeys(weights)
    for source, num_bytes in moved.items():
        once, stored = largest[source]
        across = f", and {sent[source]:,.0f} sent" if sent[source] else ""
        yield (
            f"{join(names[source], 4)}: experts are picked by index{f' at {source}' * bool(source)}"
            f", one set for every choice of every token: {num_bytes:,.0f} bytes of matrices a "
            f"device and step{across}, {once / stored:.3g} x what its experts have each time. "
            f"{INSTEAD}"
        )


def _picked_from(module: Module, computation: Computation, one: Instruction) -> list[str]:
    """Arguments of the step that an instruction picks matrices from, more than they have."""
    if one.opcode != "gather":
        return []
    sizes = [int(size) for size in re.findall(r"\d+", one.attribute("slice_sizes"))]
    table = computation.instructions[one.operands[0]]
    num_dims = sum(size > 1 for size in sizes)
    if num_dims < 2 or one.num_bytes <= table.num_bytes:
        return []
    while table.opcode == "parameter" and computation is not module.entry:
        callers = [c for c in module.callers[computation.name] if c[1].opcode == "fusion"]
        if not callers:
            break
        number = int(table.arguments)
        computation, caller = callers[0]
        table = computation.instructions[caller.operands[number]]
    while table.opcode in _GATHERS:
        table = computation.instructions[table.operands[0]]
    return arguments_behind(module, computation, table.name)
