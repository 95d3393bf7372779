"""Memory traffic of a compiled program, products included: what bounds a step of few tokens.

A train step is bound by products. A token of generation reads every weight for a few FLOPs a byte:
here every instruction takes what it reads and writes over the memory's bandwidth, or what its
products take, whichever is longer.
"""

import dataclasses
from collections.abc import Iterable

from jaxtp.compile.collectives import Collective
from jaxtp.compile.hlo import Computation, Instruction, Module
from jaxtp.compile.instruction_work import (
    MatrixProducts,
    matrix_products,
    memory_bytes,
    parameter_bytes,
)
from jaxtp.compile.schedule import products_seconds
from jaxtp.cost.products import COMPILED_MEMORY_SHARE, TILES
from jaxtp.hardware.gpus import Target

CALLS = ("while", "conditional", "call")
"""Instructions that run other computations; every branch of a conditional counts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """One run of a program on one device; a loop of unknown length counts once.

    Attributes:
        stored_bytes: Read of what was there before: arguments, and what a loop carries. Weights and
            cache come from memory, whatever the L2 cache does.
        passed_bytes: Read of what an instruction before has written; up to some megabytes of it are
            still in the L2 cache, for which the seconds make no allowance.
        written_bytes: Written.
        seconds: Modelled: each instruction after the other, and every collective in full.
        collective_seconds: The collectives' part of it.
    """

    stored_bytes: float
    passed_bytes: float
    written_bytes: float
    seconds: float
    collective_seconds: float


def traffic(module: Module, collectives: Iterable[Collective], target: Target) -> Traffic:
    """What a program reads, writes and waits for.

    Args:
        module: The compiled program.
        collectives: What `compile/collectives` found in it.
        target: Whose memory, tensor cores and links. Memory is used at the rate that copying
            kernels reach, see `cost.products.COMPILED_MEMORY_SHARE`.
    """
    walk = _Walk(module, target)
    walk.run(module.entry, 1)
    waits = sum(
        one.count * target.collective_seconds(one.kind, one.num_bytes, one.groups)
        for one in collectives
    )
    return Traffic(walk.stored, walk.passed, walk.written, walk.seconds + waits, waits)


class _Walk:
    """Sums over the computations that run; those inside a fusion are that one's own."""

    def __init__(self, module: Module, target: Target) -> None:
        self.module, self.device = module, target.device
        self.bandwidth = COMPILED_MEMORY_SHARE * target.device.hbm_bandwidth
        self.stored = self.passed = self.written = self.seconds = 0.0

    def run(self, computation: Computation, times: int) -> None:
        for instruction in computation:
            if instruction.opcode in CALLS:
                trips = (instruction.trip_count or 1) if instruction.opcode == "while" else 1
                for name in instruction.calls:
                    self.run(self.module.computations[name], times * trips)
                continue
            stored, passed, written = moved(self.module, computation, instruction)
            products = matrix_products(self.module, computation, instruction)
            computing = sum(self.seconds_of(one) for one in products)
            longest = max((stored + passed + written) / self.bandwidth, computing)
            self.stored += times * stored
            self.passed += times * passed
            self.written += times * written
            self.seconds += times * longest

    def seconds_of(self, one: MatrixProducts) -> float:
        """Products that give every core a tile as in a train step; FLOPs over their rate below.

        There cuBLAS divides the contracted dim between the idle cores, which the price by tiles
        knows nothing of.
        """
        rows, columns, _ = TILES[0]
        if one.rows * one.columns * one.count < rows * columns * self.device.cores:
            return one.flops / self.device.matmul_flops
        return products_seconds(one, self.device)


def moved(
    module: Module, computation: Computation, instruction: Instruction
) -> tuple[float, float, float]:
    """Bytes of one instruction: read of what is stored, of what is passed on, and written.

    Collectives count nothing, and of a slice that a product or a fusion takes, the slice.
    """
    operands = [computation.instructions[n] for n in instruction.operands]
    if instruction.opcode == "fusion":
        (body,) = [module.computations[name] for name in instruction.calls]
        inside = [one for one in body if one.opcode == "parameter"]
        inside.sort(key=lambda one: int(one.arguments))
        # Single numbers, the positions of slices among them, count nothing.
        reads = [parameter_bytes(body, p) * (p.shapes[0].num_elements > 1) for p in inside]
        products = [one for one in body if _product(one)]
    else:
        reads = [operand.shapes[0].num_bytes for operand in operands]
        products = [instruction] if _product(instruction) else []
    total = memory_bytes(module, computation, instruction)
    if not products and not total:
        return 0.0, 0.0, 0.0
    if not products and instruction.opcode != "fusion":
        # Copies, slices and the like write as much as they read.
        reads = [total / 2 / len(operands)] * len(operands) if operands else []
    stored = sum(n for n, one in zip(reads, operands, strict=True) if _is_stored(computation, one))
    passed = sum(reads) - stored
    # Beside the result of a product stands the workspace of its library.
    written = products[0].shapes[0].num_bytes if products else max(total - sum(reads), 0)
    return float(stored), float(passed), float(written)


def _is_stored(computation: Computation, instruction: Instruction) -> bool:
    while instruction.opcode in ("bitcast", "get-tuple-element"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction.opcode == "parameter"


def _product(instruction: Instruction) -> bool:
    config = instruction.config if instruction.opcode == "custom-call" else {}
    return instruction.opcode == "dot" or any(
        key in config for key in ("gemm_backend_config", "cudnn_fmha_backend_config")
    )
