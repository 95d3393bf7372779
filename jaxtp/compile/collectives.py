"""The collectives of a compiled program: what moves, how often, along which axes, and why.

Four things differ between jax versions and are met here once: an asynchronous collective is any
`-start` whose result a `-done` takes, whether XLA calls it `all-reduce-start`, `async-start` or
`fusion-start` (its own all-reduce kernel, since 0.12); 0.10 prints synchronous ones as such pairs
too, with a mark; the size is read off the `-done`, because the `-start` prints in several tuple
forms; and a collective without metadata (0.10 drops it when it combines several) takes the name
of the nearest operation that produced its operand.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping

from jaxtp.compile.device_groups import Groups, device_groups, mesh_axes
from jaxtp.compile.hlo import Computation, Instruction, Module
from jaxtp.hardware.links import wire_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

# Wrappers that say how an operation came to be, not what it is.
_WRAPPER = re.compile(r"^(?:jit|jvp|transpose|vmap|remat|checkpoint|shard_map)\(")
_COMBINED = re.compile(r"(.*/)?\((.*)\)")
_PLUMBING = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|eval_jaxpr|call_exported|pjit|remat|checkpoint|"
    r"rematted_computation|shard_map|custom_[jv]+p_call"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective in the program's text.

    Attributes:
        kind: One of KINDS.
        computation: Where it is.
        start: The instruction that launches it.
        done: The instruction that waits for it; `start` itself when it is synchronous.
        dtype: Element type of what moves; types of a combined message are joined by `+`.
        num_bytes: The full buffer in bytes: an all-gather's output, a reduce-scatter's input, for
            the others the array as one device holds it. Summed over combined arrays.
        groups: Device ids of each group; a permute's (source, target) pairs.
        axes: The mesh axes it runs along.
        count: Times per step.
        op_name: The JAX operation it belongs to.
        source: The user's line it belongs to, or empty.
    """

    kind: str
    computation: str
    start: str
    done: str
    dtype: str
    num_bytes: int
    groups: Groups
    axes: tuple[str, ...]
    count: int
    op_name: str
    source: str

    @property
    def is_async(self) -> bool:
        """Whether anything may run while it is under way."""
        return self.start != self.done

    @property
    def size(self) -> int:
        """Devices in a group."""
        return len(self.groups[0])

    @property
    def wire_bytes(self) -> float:
        """Bytes one device sends per run, by the ring formula."""
        return wire_bytes(self.kind, self.num_bytes, self.size)

    @property
    def backward(self) -> bool:
        """Whether it belongs to the backward pass, recomputation included.

        JAX writes `transpose(` into the name of every operation that reverse-mode differentiation
        makes, and into the names of what it recomputes there.
        """
        return "transpose(" in self.op_name

    @property
    def site(self) -> str:
        """The operation's name without the transformations around it."""
        return site(self.op_name)


def site(op_name: str) -> str:
    """An operation's name without loops, transformations and calls.

    A combined message, which XLA names `prefix/(first:second:...)`, has the name of its first
    part and the number of the others.

    >>> site("jit(step)/transpose(jvp())/while/body/closed_call/btf,fd->btd/dot_general")
    'btf,fd->btd/dot_general'
    >>> site("jit(step)/transpose(jvp())/(q/transpose:k/transpose:norm/reduce_sum)")
    'q/transpose + 2 more'
    """
    if combined := _COMBINED.fullmatch(op_name):
        first, *others = combined[2].split(":")
        more = f" + {len(others)} more" if others else ""
        return site((combined[1] or "") + first) + more
    parts: list[str] = []
    for part in op_name.split("/"):
        name = part
        while _WRAPPER.match(name) and name.endswith(")"):
            name = name[name.index("(") + 1 : -1]
        # `jit(step)` names the program or a helper; both say less than what stands inside.
        if name and not _PLUMBING.fullmatch(name) and not part.startswith("jit("):
            parts.append(name)
    return "/".join(parts)


def find(module: Module, mesh: Mapping[str, int]) -> tuple[Collective, ...]:
    """Every collective that runs, in program order.

    Args:
        module: The compiled program.
        mesh: Axis name -> size, devices numbered with the last axis fastest.
    """
    found: list[Collective] = []
    for computation in module.computations.values():
        count = module.counts[computation.name]
        if not count or _is_fused(module, computation):
            continue
        for start in computation:
            collective = _wrapped(module, start)
            if collective is None:
                continue
            done = _done(computation, start)
            kind = collective.opcode.removesuffix("-start")
            groups = device_groups(collective.attributes, module.num_partitions)
            scale = len(groups[0]) if kind == "reduce-scatter" else 1
            named = _named(computation, start)
            found.append(
                Collective(
                    kind=kind,
                    computation=computation.name,
                    start=start.name,
                    done=start.name if _blocks(start) else done.name,
                    dtype="+".join(dict.fromkeys(shape.dtype for shape in done.shapes)),
                    num_bytes=done.num_bytes * scale,
                    groups=groups,
                    axes=mesh_axes(groups, mesh),
                    count=count,
                    op_name=named.op_name,
                    source=module.source(named),
                )
            )
    return tuple(found)


def _is_fused(module: Module, computation: Computation) -> bool:
    """Whether it is the inside of a fusion or asynchronous wrapper, which count at the caller."""
    callers = module.callers[computation.name]
    return bool(callers) and all(
        caller.opcode.startswith(("fusion", "async")) for _, caller in callers
    )


def _wrapped(module: Module, instruction: Instruction) -> Instruction | None:
    """The collective that an instruction launches, itself or inside what it calls."""
    if instruction.opcode.removesuffix("-start") in KINDS:
        return instruction
    if instruction.opcode not in ("fusion", "fusion-start", "async-start"):
        return None
    inner = (one for name in instruction.calls for one in module.computations[name])
    return next((one for one in inner if one.opcode in KINDS), None)


def _done(computation: Computation, start: Instruction) -> Instruction:
    if not start.opcode.endswith("-start"):
        return start
    # An async-update may stand between the two.
    waiting = list(computation.users[start.name])
    while waiting:
        user = waiting.pop()
        if user.opcode.endswith("-done"):
            return user
        waiting += computation.users[user.name]
    return start


def _blocks(start: Instruction) -> bool:
    """Whether a collective that prints as a pair runs on the compute stream all the same."""
    settings = start.config.get("collective_backend_config", {})
    return bool(settings.get("is_sync", False))


def _named(computation: Computation, instruction: Instruction) -> Instruction:
    """The instruction, or the nearest producer of its operands that carries a name."""
    for producer in _upstream(computation, instruction):
        if producer.op_name:
            return producer
    return instruction


def _upstream(computation: Computation, instruction: Instruction) -> Iterator[Instruction]:
    queue, seen = [instruction.name], {instruction.name}
    for name in queue:  # grows while it is read: breadth first
        yield computation.instructions[name]
        for operand in computation.instructions[name].operands:
            if operand not in seen:
                seen.add(operand)
                queue.append(operand)
