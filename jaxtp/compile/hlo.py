"""Compiled program text as data.

Nothing here knows about collectives or time; `collectives`, `instruction_work` and `schedule` do.
"""

import dataclasses
import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1]

BITS = {
    "pred": 8, "token": 0, "opaque": 0, "bf16": 16,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (1, 2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": bits for bits in (16, 32, 64)},
    "c64": 64, "c128": 128, "f4e2m1fn": 4,
}  # fmt: skip
"""Bits per element; every other f8 format takes 8."""

_ASSIGNMENT = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = ")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([0-9,<=]*)\]")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"%([\w.\-]+)")
_TABLE_ROW = re.compile(r"(\d+) (?:\"(.*)\"|\{(.*)\})$")
_TOKEN = re.compile(r"\"(?:[^\"\\]|\\.)*\"|[(){}\[\], ]")


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One array's element type and dims, as one device holds it."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements on one device."""
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        """Bytes on one device, unpadded."""
        return self.num_elements * BITS.get(self.dtype, 8) // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: Unique within its computation.
        opcode: For example `all-reduce-start` or `custom-call`.
        shapes: The result's arrays; a tuple's are flattened, however deep.
        arguments: The text between the parentheses: operand names, or a literal.
        attributes: The rest of the line.
        root: Whether it is the computation's result.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    arguments: str
    attributes: str
    root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return tuple(_NAME.findall(self.arguments))

    @property
    def num_bytes(self) -> int:
        """Bytes of all result arrays on one device."""
        return sum(shape.num_bytes for shape in self.shapes)

    def attribute(self, key: str) -> str:
        """The text of one attribute, for example `replica_groups`; empty when absent."""
        found = re.search(rf"(?:^|, ){key}=", self.attributes)
        return _span(self.attributes, found.end(), stop=",") if found else ""

    @functools.cached_property
    def config(self) -> Mapping[str, Any]:
        """The backend's own attributes; empty when there are none."""
        text = self.attribute("backend_config")
        return json.loads(text) if text.startswith("{") else {}

    @functools.cached_property
    def op_name(self) -> str:
        """The path of the JAX operation, e.g. `jit(step)/jvp()/while/body/dot_general`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @functools.cached_property
    def calls(self) -> tuple[str, ...]:
        """Computations that run as part of this instruction, except a reducer's scalar function."""
        keys = ["calls", "body", "condition", "branch_computations"]
        keys += ["true_computation", "false_computation", "called_computations"]
        if self.opcode in ("call", "async-start"):
            keys.append("to_apply")
        return tuple(name for key in keys for name in _NAME.findall(self.attribute(key)))

    @property
    def trip_count(self) -> int | None:
        """How often a loop's body runs, or None when the compiler does not know."""
        count = self.config.get("known_trip_count")
        return int(count["n"]) if count else None


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, in the order in which they are launched."""

    name: str
    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @functools.cached_property
    def root(self) -> Instruction:
        """The instruction whose result is the computation's."""
        return next(instruction for instruction in self if instruction.root)

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """Instruction name -> instructions that take its result."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for operand in dict.fromkeys(instruction.operands):
                found[operand].append(instruction)
        return {name: tuple(users) for name, users in found.items()}


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """One line of the user's program that an instruction comes from."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        # `make.<locals>.layer.<locals>.<lambda>` is best known as `layer`.
        names = [name for name in self.function.split(".<locals>.") if not name.startswith("<")]
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line} {names[-1] if names else ''}".strip()

    @property
    def is_model(self) -> bool:
        """Whether a model is written here: not in an installed library, nor in jaxtp's own."""
        path = Path(self.file)
        if PACKAGE in path.parents:
            return PACKAGE / "models" in path.parents and path.stem != "projections"
        return "site-packages" not in self.file and not self.file.startswith("<frozen")


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program.

    Attributes:
        header: The first line: name, aliases, layouts.
        computations: By name.
        entry: The computation that runs once.
        frames: Stack frame id -> (frame, id of its caller or 0).
    """

    header: str
    computations: Mapping[str, Computation]
    entry: Computation
    frames: Mapping[int, tuple[SourceLine, int]]

    @property
    def num_partitions(self) -> int:
        """Devices that run the program."""
        found = re.search(r"num_partitions=(\d+)", self.header)
        return int(found[1]) if found else 1

    @property
    def is_scheduled(self) -> bool:
        """Whether the order of instructions is the order in which they are launched."""
        return "is_scheduled=true" in self.header

    @functools.cached_property
    def aliases(self) -> Mapping[int, int]:
        """Number of an entry parameter -> number of the result that reuses its memory."""
        found = re.search(r"input_output_alias=", self.header)
        text = _span(self.header, found.end(), stop=",") if found else ""
        pairs = re.findall(r"\{(\d*)\}: \((\d+),", text)
        return {int(parameter): int(result or 0) for result, parameter in pairs}

    @functools.cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """The step's arguments on one device, in order."""
        found = [one for one in self.entry if one.opcode == "parameter"]
        return tuple(sorted(found, key=lambda one: int(one.arguments)))

    @functools.cached_property
    def counts(self) -> Mapping[str, int]:
        """How often each computation runs per step.

        A loop of unknown length counts once (see `unknown_loops`); every branch of a conditional
        counts as if it were taken, so that no collective is missed.
        """
        counts = dict.fromkeys(self.computations, 0)

        def visit(computation: Computation, times: int) -> None:
            counts[computation.name] += times
            for instruction in computation:
                trips = (instruction.trip_count or 1) if instruction.opcode == "while" else 1
                for name in instruction.calls:
                    visit(self.computations[name], times * trips)

        visit(self.entry, 1)
        return counts

    @functools.cached_property
    def callers(self) -> Mapping[str, tuple[tuple[Computation, Instruction], ...]]:
        """Computation name -> where it is called from."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {n: [] for n in self.computations}
        for computation in self.computations.values():
            for instruction in computation:
                for name in instruction.calls:
                    found[name].append((computation, instruction))
        return {name: tuple(callers) for name, callers in found.items()}

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Loops that run, but whose length the compiler does not know."""
        return tuple(
            instruction.name
            for computation in self.computations.values()
            for instruction in computation
            if instruction.opcode == "while"
            and instruction.trip_count is None
            and self.counts[computation.name]
        )

    @property
    def num_conditionals(self) -> int:
        """Places that run where one of several branches is taken."""
        return sum(
            instruction.opcode == "conditional" and self.counts[computation.name] > 0
            for computation in self.computations.values()
            for instruction in computation
        )

    def stack(self, instruction: Instruction) -> list[SourceLine]:
        """The lines an instruction comes from, innermost first; empty when not recorded."""
        found = re.search(r"stack_frame_id=(\d+)", instruction.attributes)
        frame_id, seen = (int(found[1]) if found else 0), dict[int, SourceLine]()
        while frame_id in self.frames and frame_id not in seen:
            seen[frame_id], frame_id = self.frames[frame_id]
        return list(seen.values())

    def source(self, instruction: Instruction) -> str:
        """The innermost line of the stack that is a model's; may be empty."""
        stack = self.stack(instruction)
        own = [frame for frame in stack if frame.is_model]
        return str((own or stack)[0]) if stack else ""


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`.

    Raises:
        ValueError: If the text is not an HLO module.
    """
    lines = text.splitlines()
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, body, table = "", dict[str, Instruction](), dict[int, str]()
    for line in lines:
        if header := _HEADER.match(line):
            body = {}
            computations[header[2]] = Computation(header[2], body)
            entry = header[2] if header[1] else entry
        elif assignment := _ASSIGNMENT.match(line):
            instruction = _instruction(line, assignment)
            body[instruction.name] = instruction
        elif row := _TABLE_ROW.match(line):
            table[int(row[1])] = row[2] or row[3] or ""
        elif line.isalpha():  # FileNames, FunctionNames, FileLocations, StackFrames
            table = tables.setdefault(line, {})
    if not entry:
        raise ValueError(f"not a compiled program: {text[:80]!r}")
    return Module(lines[0], computations, computations[entry], _frames(tables))


def _instruction(line: str, assignment: re.Match[str]) -> Instruction:
    result = _span(line, assignment.end(), stop=" ")
    opcode = _OPCODE.match(line, assignment.end() + len(result))
    assert opcode, line
    arguments = _span(line, opcode.end())
    return Instruction(
        name=assignment[2],
        opcode=opcode[1],
        shapes=tuple(
            Shape(dtype, tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim))
            for dtype, dims in _ARRAY.findall(result)
        ),
        arguments=arguments,
        attributes=line[opcode.end() + len(arguments) + 1 :].removeprefix(", "),
        root=bool(assignment[1]),
    )


def _span(text: str, start: int, stop: str = "") -> str:
    """The text up to the first `stop`, or unopened bracket, outside brackets and quotes."""
    depth = 0
    for token in _TOKEN.finditer(text, start):
        if token[0] in "({[":
            depth += 1
        elif token[0] in ")}]":
            depth -= 1
        if depth < 0 or (depth == 0 and token[0] == stop):
            return text[start : token.start()]
    return text[start:]


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[SourceLine, int]]:
    def number(row: str, key: str) -> int:
        found = re.search(rf"\b{key}=(\d+)", row)
        return int(found[1]) if found else 0

    frames: dict[int, tuple[SourceLine, int]] = {}
    for frame_id, row in tables.get("StackFrames", {}).items():
        location = tables["FileLocations"][number(row, "file_location_id")]
        frame = SourceLine(
            file=tables["FileNames"][number(location, "file_name_id")],
            line=number(location, "line"),
            function=tables["FunctionNames"][number(location, "function_name_id")],
        )
        # The printed parent is one more than the id it means; 1 stands for none.
        frames[frame_id] = (frame, number(row, "parent_frame_id") - 1)
    return frames
