"""What an instruction costs besides communication: matrix-product FLOPs and memory traffic.

XLA's own cost analysis is not used: it counts a loop's body once and, for a device that is not
there, returns nothing.
"""

import math
from collections.abc import Iterable

from jaxtp.compile.hlo import Computation, Instruction, Module, Shape

_FREE = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "while", "conditional",
    "call", "after-all", "partition-id", "replica-id", "iota", "custom-call",
}  # fmt: skip


def matmul_flops(module: Module, computation: Computation, instruction: Instruction) -> float:
    """FLOPs of the matrix products that one instruction runs, nested computations included.

    A product counts 2 x result elements x contracted elements. cuDNN attention is two products of
    (query, key) scores forward and, with its recomputation, five backward; a causal mask halves
    both, because the kernel skips the masked blocks.
    """
    if instruction.opcode in ("while", "conditional"):
        return 0.0
    nested = sum(
        matmul_flops(module, module.computations[name], inner)
        for name in instruction.calls
        for inner in module.computations[name]
    )
    return nested + _own_flops(computation, instruction)


def _own_flops(computation: Computation, instruction: Instruction) -> float:
    if instruction.opcode == "dot":
        dims = instruction.attribute("lhs_contracting_dims").strip("{}")
        return _product(computation, instruction, [int(dim) for dim in dims.split(",") if dim])
    config = instruction.config
    if "gemm_backend_config" in config:
        numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
        contracting = [int(dim) for dim in numbers["lhs_contracting_dimensions"]]
        return _product(computation, instruction, contracting)
    if "cudnn_fmha_backend_config" in config:
        attention = config["cudnn_fmha_backend_config"]
        scores = math.prod(int(d) for d in attention["intermediate_tensor_shape"]["dimensions"])
        head_dim = _operand(computation, instruction, 0).dims[-1]
        products = 5 if "Backward" in instruction.attribute("custom_call_target") else 2
        kept = 0.5 if "CAUSAL" in attention["mask_type"] else 1.0
        return products * kept * 2.0 * scores * head_dim
    return 0.0


def _operand(computation: Computation, instruction: Instruction, index: int) -> Shape:
    return computation.instructions[instruction.operands[index]].shapes[0]


def _product(computation: Computation, instruction: Instruction, dims: Iterable[int]) -> float:
    left = _operand(computation, instruction, 0)
    # cuBLASLt returns its workspace beside the result, which comes first.
    return 2.0 * instruction.shapes[0].num_elements * math.prod(left.dims[dim] for dim in dims)


def memory_bytes(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an elementwise, copying or reducing instruction reads and writes in device memory.

    Matrix products, collectives and bookkeeping count nothing. A fusion reads of a stacked array
    only the slice it takes, and writes of one only the slice it updates.
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
        return 2 * computation.instructions[instruction.operands[1]].num_bytes
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
    return sum(
        body.instructions[one.operands[1]].num_bytes
        if one.opcode == "dynamic-update-slice"
        else one.num_bytes
        for one in roots
    )


def _read(body: Computation) -> int:
    total = 0
    for parameter in body:
        if parameter.opcode != "parameter":
            continue
        users = _through_bitcasts(body, parameter)
        sliced = [u for u in users if u.opcode in ("dynamic-slice", "slice", "gather")]
        updated = [u for u in users if u.opcode == "dynamic-update-slice"]
        if users and len(sliced) + len(updated) == len(users):
            total += sum(user.num_bytes for user in sliced)
        else:
            total += parameter.num_bytes
    return total


def _through_bitcasts(body: Computation, instruction: Instruction) -> list[Instruction]:
    found: list[Instruction] = []
    for user in body.users[instruction.name]:
        found += _through_bitcasts(body, user) if user.opcode == "bitcast" else [user]
    return found
