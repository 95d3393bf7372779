"""What one device holds at the fullest moment of a traced step, its arguments left out.

Arrays live from the operation that makes them to the last one that reads them, in program order; a
value that XLA computes in the kernel of its reader (`work.FUSED`) lives as what it is made of.
"""

import dataclasses

from jaxtp.cost.traced.program import VIEWS, Array, Block, Operation
from jaxtp.cost.traced.work import FUSED
from jaxtp.rules.jaxpr.walk import Kind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What a strategy makes of the sizes of a block.

    Attributes:
        batch: Sequences of its micro-batch on one device, over those traced.
        gradients: Devices that share gradients.
        gathers: Whether parameters are sharded and gathered where they are used.
    """

    batch: float
    gradients: int = 1
    gathers: bool = False

    def num_bytes(self, array: Array) -> float:
        """Bytes of an array on one device; constants are computed where they are read."""
        if array.kind is Kind.CONSTANT:
            return 0.0
        if array.batch is not None:
            return array.num_bytes * self.batch
        # What depends on the data and has no batch is a sum over it.
        return array.num_bytes / (self.gradients if array.kind is Kind.ACTIVATION else 1)


def peak_bytes(block: Block, share: Share) -> float:
    """Bytes at the fullest moment; arguments count where they are gathered for their use."""
    return _peak(block, share, held=frozenset(block.inputs))


def _peak(block: Block, share: Share, held: frozenset[Array]) -> float:
    roots = _roots(block)
    last: dict[Array, int] = {}
    for position, operation in enumerate(block.operations):
        for array in (*operation.operands, *operation.results):
            for root in roots.get(array, (array,)):
                last[root] = position
    for array in block.outputs:
        for root in roots.get(array, (array,)):
            last[root] = len(block.operations)
    ends: dict[int, list[Array]] = {}
    for array, position in last.items():
        ends.setdefault(position, []).append(array)
    alive: dict[Array, float] = {}
    now = most = 0.0
    for position, operation in enumerate(block.operations):
        made = [a for a in operation.results if a not in roots]
        gathered = _gathered(operation, held) if share.gathers else []
        for array in (*made, *gathered):
            if array not in alive:
                alive[array] = share.num_bytes(array)
                now += alive[array]
        inside = max((_peak(b, share, _arrives(operation, b)) for b in operation.bodies), default=0)
        most = max(most, now + inside)
        for array in ends.get(position, ()):
            now -= alive.pop(array, 0.0)
    return most


def _arrives(loop: Operation, body: Block) -> frozenset[Array]:
    """Inputs of a loop's body that are the loop's own operands, held outside."""
    return frozenset(
        inside
        for outside, inside in zip(loop.operands, body.inputs, strict=False)
        if outside.steps > 1
    )


def _gathered(operation: Operation, held: frozenset[Array]) -> list[Array]:
    """Sharded parameters that an operation reads as they are; loops gather their own.

    One that is cast first is gathered in its new type, which is an array of its own.
    """
    if operation.name in FUSED or operation.name in VIEWS or operation.bodies:
        return []
    return [
        a for a in operation.operands if a in held and a.kind is Kind.PARAMETER and a.steps == 1
    ]


def _roots(block: Block) -> dict[Array, tuple[Array, ...]]:
    """Values without memory of their own -> the arrays that they are made of.

    A value that is read by something other than such a value has memory, and so has an output.
    """
    stored: set[Array] = set(block.outputs)
    for operation in block.operations:
        if operation.name not in FUSED and operation.name not in VIEWS:
            stored |= set(operation.operands)
    found: dict[Array, tuple[Array, ...]] = {}
    for operation in block.operations:
        is_view = operation.name in VIEWS
        if not is_view and operation.name not in FUSED:
            continue
        sources = {r for a in operation.operands for r in found.get(a, (a,))}
        for array in operation.results:
            if is_view or array not in stored:
                found[array] = tuple(sources)
    return found
