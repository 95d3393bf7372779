"""The text of compiled programs as data: real texts of both jax versions."""

import re
from pathlib import Path

import compiled_programs
import pytest

from jaxtp.compile.hlo import Shape, parse

DATA = Path(__file__).parent / "data" / "hlo"
VERSIONS = ("0.10.2", "0.12.0.1")
ABBREVIATED = {"exp": "exponential"}  # the only opcode whose enum and text differ here


def load(name, version):
    return parse((DATA / f"{name}-{version}.txt").read_text())


@pytest.fixture(scope="module")
def compiled():
    return compiled_programs.compile_here(2, 4)


@pytest.mark.parametrize("file", sorted(DATA.glob("*.txt")), ids=lambda file: file.stem)
def test_every_line_becomes_an_instruction(file):
    text = file.read_text()
    module = parse(text)
    found = sum(len(computation.instructions) for computation in module.computations.values())
    assert found == sum(" = " in line for line in text.splitlines() if line.startswith("  "))
    assert module.is_scheduled
    assert module.num_partitions == 8
    for computation in module.computations.values():
        assert computation.root.root
        for instruction in computation:
            assert set(instruction.operands) <= set(computation.instructions)
            assert set(instruction.calls) <= set(module.computations)


def test_agrees_with_the_compilers_own_objects(compiled):
    """Every computation, instruction, opcode and operand of a whole train step."""
    module = parse(compiled.as_text())
    theirs = compiled.runtime_executable().hlo_modules()[0].computations()
    # The text prints an asynchronous wrapper as the one instruction inside it.
    hidden = {one.name for one in theirs} - set(module.computations)
    assert all(name.startswith("async_computation") for name in hidden)
    compared = 0
    for computation in theirs:
        if computation.name in hidden:
            continue
        mine = module.computations[computation.name].instructions
        # Their order is the order of creation; only the text has the schedule.
        assert {one.name for one in computation.instructions()} == set(mine)
        for other in computation.instructions():
            instruction = mine[other.name]
            assert tuple(one.name for one in other.operands()) == instruction.operands
            opcode = re.sub("([A-Z])", r"-\1", other.opcode.name.removeprefix("k"))
            opcode = ABBREVIATED.get(opcode := opcode.strip("-").lower(), opcode)
            if not opcode.startswith("async"):
                assert opcode == instruction.opcode
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize("version", VERSIONS)
def test_instruction_parts(version):
    module = load("row_product", version)
    start = next(one for one in module.entry if one.opcode == "all-reduce-start")
    assert start.shapes[-1] == Shape("bf16", (1024, 1024))
    assert start.attribute("channel_id") == "1"
    assert start.attribute("no_such_attribute") == ""
    assert start.config["collective_backend_config"]["is_sync"] is False
    assert start.op_name == "jit(fn)/dot_general"
    assert re.fullmatch(r"make.py:\d+ fn", module.source(start))
    assert [frame.function for frame in module.stack(start)][-2:] == ["main", "<module>"]
    done = module.entry.users[start.name][0]
    assert done.opcode == "all-reduce-done"
    assert done.num_bytes == 1024 * 1024 * 2


@pytest.mark.parametrize("version", VERSIONS)
def test_loops_multiply_and_unknown_ones_are_named(version):
    module = load("layers", version)
    body = next(
        one for c in module.computations.values() for one in c if one.trip_count == 5
    ).attribute("body")
    assert module.counts[body.strip("%")] == 5
    assert len(module.unknown_loops) == 1
    doubled = load("layers_double", version)
    trips = [one.trip_count for c in doubled.computations.values() for one in c if one.trip_count]
    assert trips == [2]


@pytest.mark.parametrize("version", VERSIONS)
def test_branches_count_as_taken(version):
    module = load("manual", version)
    conditional = next(one for one in module.entry if one.opcode == "conditional")
    assert module.num_conditionals == 1
    assert len(conditional.calls) == 2
    assert [module.counts[name] for name in conditional.calls] == [1, 1]


def test_aliases(compiled):
    module = parse(compiled.as_text())
    weights = len(compiled_programs.SPECS)
    assert module.aliases == {number: number for number in range(weights)}
    assert len(module.parameters) == weights + 1
    assert module.parameters[-1].op_name == "tokens"
    assert load("row_product", "0.12.0.1").aliases == {}


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [
        (Shape("bf16", (2, 3)), 12),
        (Shape("f8e4m3fn", (8,)), 8),
        (Shape("s4", (8,)), 4),
        (Shape("f32", ()), 4),
        (Shape("token", ()), 0),
    ],
)
def test_shape_bytes(shape, num_bytes):
    assert shape.num_bytes == num_bytes


def test_text_that_is_no_program():
    with pytest.raises(ValueError, match="not a compiled program"):
        parse("hello")
