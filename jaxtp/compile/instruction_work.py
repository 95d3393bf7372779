"""What an instruction costs besides communication: matrix-product FLOPs and memory traffic.

XLA's own cost analysis is not used: it counts a loop's body once and, for a device that is not
there, returns nothing.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from jaxtp.compile.hlo import Computation, Instruction, Module, Shape

_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "iota", "custom-call",
}  # fmt: skip


_IN_PLACE = {"dynamic-update-slice": 1, "scatter": 2}
"""Instructions that write some of their first operand's memory: the operand that says how much."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProducts:
    """Equal products of one instruction: `count` of (rows, depth) by (depth, columns), in elements.

    Attributes:
        rows: Rows of the results; positions of queries, of attention.
        columns: Columns of the results; positions of keys.
        depth: The contracted dim; the width of a head.
        count: How many; heads of all sequences.
        attention: "forward" or "backward" for the products of cuDNN's attention.
        is_causal: Whether those leave out what a causal mask hides.
    """

    rows: int
    columns: int
    depth: int
    count: int = 1
    attention: str = ""
    is_causal: bool = False

    @property
    def flops(self) -> float:
        """2 x elements of the results x depth.

        cuDNN's attention is two products of scores forward and, with its recomputation, five
        backward; a causal mask halves both, because the kernel skips the masked blocks.
        """
        products = {"": 1, "forward": 2, "backward": 5}[self.attention]
        kept = 0.5 if self.is_causal else 1.0
        return products * kept * 2.0 * self.count * self.rows * self.columns * self.depth


def matmul_flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """FLOPs of the matrix products that one instruction runs, nested computations included."""
    return sum(one.flops for one in matrix_products(module, computation, instruction))


def matrix_products(
    module: Module, computation: Computation, instruction: Instruction
) -> list[MatrixProducts]:
    """The matrix products that one instruction runs, nested computations included.

    A loop and a conditional run none themselves.
    """
    if instruction.opcode in ("while", "conditional"):
        return []
    nested = [
        one
        for name in instruction.calls
        for inner in module.computations[name]
        for one in matrix_products(module, module.computations[name], inner)
    ]
    return nested + own_products(computation, instruction)


def own_products(computation: Computation, instruction: Instruction) -> list[MatrixProducts]:
    """The same without nested computations."""
    if instruction.opcode == "dot":
        contracting, batch = (
            [int(dim) for dim in instruction.attribute(name).strip("{}").split(",") if dim]
            for name in ("lhs_contracting_dims", "lhs_batch_dims")
        )
        return [_product(computation, instruction, contracting, batch)]
    config = instruction.config
    if "gemm_backend_config" in config:
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        contracting = [int(dim) for dim in numbers["lhs_contracting_dimensions"]]
        batch = [int(dim) for dim in numbers.get("lhs_batch_dimensions", ())]
        return [_product(computation, instruction, contracting, batch)]
    if "cudnn_fmha_backend_config" in config:
        attention = config["cudnn_fmha_backend_config"]
        *outer, queries, keys = (
            int(d) for d in attention["intermediate_tensor_shape"]["dimensions"]
        )
        is_backward = "Backward" in instruction.attribute("custom_call_target")
        return [
            MatrixProducts(
                rows=queries,
                columns=keys,
                depth=_operand(computation, instruction, 0).dims[-1],
                count=math.prod(outer),
                attention="backward" if is_backward else "forward",
                is_causal="CAUSAL" in attention["mask_type"],
            )
        ]
    return []


def _operand(computation: Computation, instruction: Instruction, index: int) -> Shape:
    return computation.instructions[instruction.operands[index]].shapes[0]


def _product(
    computation: Computation,
    instruction: Instruction,
    contracting: Sequence[int],
    batch: Sequence[int],
) -> MatrixProducts:
    left = _operand(computation, instruction, 0)
    depth, count = (math.prod(left.dims[dim] for dim in dims) for dims in (contracting, batch))
    # cuBLASLt returns its workspace beside the result, which comes first.
    results = instruction.shapes[0].num_elements
    rows = max(left.num_elements // max(depth * count, 1), 1)
    columns = results // max(rows * count, 1)
    return MatrixProducts(rows=rows, columns=columns, depth=depth, count=count)


def memory_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an elementwise, copying or reducing instruction reads and writes in device memory.

    Matrix products, collectives and bookkeeping count nothing. A fusion reads of a stacked array
    only the slice it takes, and writes of one only the slice it updates; a scatter reads and writes
    the rows that it adds to, not the table.
    """
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    fused = [module.computations[name] for name in instruction.calls]
    if not fused:
        # A collective has groups or pairs; the asynchronous start of a copy has neither.
        if "replica_groups=" in instruction.attributes or "-permute" in opcode:
            return 0
        return _slice_bytes(instruction, computation)
    if any(_is_heavy(inner) for body in fused for inner in body):
        return 0
    return sum(_written(body) + _read(body) for body in fused)


def _is_heavy(instruction: Instruction) -> bool:
    """A product or a collective, whose time is counted elsewhere."""
    return (
        instruction.opcode in ("dot", "custom-call") or "replica_groups=" in instruction.attributes
    )


def _slice_bytes(instruction: Instruction, computation: Computation) -> int:
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _updated(computation, instruction)
    if instruction.opcode == "scatter":
        return 3 * _updated(computation, instruction)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * instruction.num_bytes
    operands = [computation.instructions[name] for name in instruction.operands]
    return instruction.num_bytes + sum(operand.num_bytes for operand in operands)


def _written(body: Computation) -> int:
    root = body.root
    while root.opcode == "bitcast":
        root = body.instructions[root.operands[0]]
    roots = (
        [body.instructions[name] for name in root.operands] if root.opcode == "tuple" else [root]
    )
    return sum(_updated(body, one) if one.opcode in _IN_PLACE else one.num_bytes for one in roots)


def _updated(computation: Computation, instruction: Instruction) -> int:
    update = instruction.operands[_IN_PLACE[instruction.opcode]]
    return computation.instructions[update].num_bytes


def _read(body: Computation) -> int:
    return sum(parameter_bytes(body, one) for one in body if one.opcode == "parameter")


def parameter_bytes(body: Computation, parameter: Instruction) -> int:
    """Bytes that a fusion reads of one of its parameters: of what it only slices, the slices.

    Of a table that it adds to, the rows; nothing of a stack that it updates in place.
    """
    sliced = 0
    for name, user in _uses(body, parameter.name):
        if user.operands[0] != name:
            return parameter.num_bytes  # an index, or what is put into a stack
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            sliced += user.num_bytes
        elif user.opcode == "scatter":
            sliced += _updated(body, user)
        elif user.opcode != "dynamic-update-slice":
            return parameter.num_bytes
    return min(sliced, parameter.num_bytes)


def _uses(body: Computation, name: str) -> Iterator[tuple[str, Instruction]]:
    """Who takes a value, and by which name: its own, or that of a bitcast of it."""
    for user in body.users[name]:
        if user.opcode == "bitcast":
            yield from _uses(body, user.name)
        else:
            yield name, user
