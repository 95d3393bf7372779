"""Collectives that tensor parallelism does not need, and why the compiler made them."""

from collections.abc import Iterable, Iterator

from jaxtp.activations.sequences import GATHERED
from jaxtp.compile.collectives import Collective
from jaxtp.compile.hlo import Computation, Instruction, Module

# What moves bytes without computing anything new from them.
_CARRIES = {
    "bitcast", "copy", "convert", "transpose", "reshape", "slice", "dynamic-slice", "fusion",
    "get-tuple-element", "tuple", "copy-start", "copy-done", "fusion-start", "fusion-done",
    "optimization-barrier",
}  # fmt: skip

_PERMUTE = (
    "a dim that is sharded over AXES is shifted, sliced or joined: look for sizes that "
    "are not divisible, and for slices, rolls and concatenations along it"
)
_ALL_TO_ALL = (
    "an array changes which of its dims is sharded over AXES: its producer and its user want "
    "different specs"
)
_GATHER = (
    "sharded over AXES and gathered before use: the spec does not fit the product that takes it"
)
_TOKENS = "all tokens of sequences are gathered over AXES: something needs them in one place"


def unexpected(
    module: Module,
    collectives: Iterable[Collective],
    *,
    tensor_axes: Iterable[str],
    stage_axes: Iterable[str] = ("pp",),
    expert_axes: Iterable[str] = ("ep",),
    token_axes: Iterable[str] = ("cp",),
) -> Iterator[tuple[Collective, str]]:
    """Collectives that a tensor-parallel step does not need, each with its likely cause.

    Args:
        module: The compiled program.
        collectives: What `compile/collectives` found in it.
        tensor_axes: Mesh axes of tensor parallelism, along which no weight should be gathered.
        stage_axes: Axes of pipeline stages, along which permutes are expected.
        expert_axes: Axes of experts, along which all-to-alls are expected.
        token_axes: Axes that sequences are sharded over, along which keys and values go around.
    """
    tensor, stages, experts = set(tensor_axes), set(stage_axes), set(expert_axes)
    tokens = set(token_axes)
    for one in collectives:
        axes = set(one.axes)
        cause = ""
        permutes = stages | tokens if is_written(one) else stages
        if one.kind == "collective-permute" and not axes <= permutes:
            cause = _PERMUTE
        elif one.kind == "all-to-all" and not axes <= experts:
            cause = _ALL_TO_ALL
        elif one.kind == "all-gather" and axes & (tensor | tokens):
            computation = module.computations[one.computation]
            operands = computation.instructions[one.start].operands
            weights = [w for name in operands for w in arguments_behind(module, computation, name)]
            if axes & tensor:
                cause = f"{', '.join(weights)}: {_GATHER}" if weights else ""
            elif axes <= tokens and not (
                # Weights may be sharded over cp too; ids and positions are small, and may be dealt.
                weights or one.dtype[0] in "su" or is_written(one) or GATHERED in one.op_name
            ):
                cause = _TOKENS
        if cause:
            yield one, cause.replace("AXES", " x ".join(one.axes))


def is_written(one: Collective) -> bool:
    """Whether the program itself asks for a collective, and not the partitioner."""
    return one.op_name.rsplit("/", 1)[-1].startswith(("ppermute", "all_gather"))


def arguments_behind(module: Module, computation: Computation, value: str) -> list[str]:
    """Names of the step's arguments that a value is a copy of; none if anything is computed.

    Arguments that a loop carries unchanged are followed out of the loop; scalars, such as a loop's
    counter, are not looked at.
    """
    arguments: list[str] = []
    queue = [(computation.name, value)]
    for place in queue:  # grows while it is read
        where = module.computations[place[0]]
        one = where.instructions[place[1]]
        if one.opcode == "constant" or (one.shapes and not any(s.dims for s in one.shapes)):
            continue
        if one.opcode == "parameter" and where is module.entry:
            arguments.append(argument_name(one))
            continue
        sources = list(_sources(module, where, one))
        if not sources:
            return []
        queue += [source for source in sources if source not in queue]
    return arguments


def argument_name(parameter: Instruction) -> str:
    """The path of an entry parameter among the step's arguments, as JAX names it."""
    return parameter.op_name.replace("\\'", "'") or parameter.name


def _sources(module: Module, where: Computation, one: Instruction) -> Iterator[tuple[str, str]]:
    """Where a copied value comes from; nothing if it is computed, or changes from turn to turn."""
    if one.opcode == "get-tuple-element":
        inner, index = where.instructions[one.operands[0]], int(one.attribute("index"))
        if inner.opcode == "tuple":
            yield where.name, inner.operands[index]
        elif inner.opcode == "while":
            yield from _before_loop(module, where, inner, index)
        elif inner.opcode == "parameter":
            for caller_where, caller in module.callers[where.name]:
                if caller.opcode == "while":
                    yield from _before_loop(module, caller_where, caller, index)
        elif _only_moves(module, inner):
            yield where.name, inner.name
    elif _only_moves(module, one):
        yield from ((where.name, name) for name in one.operands)


def _only_moves(module: Module, one: Instruction) -> bool:
    """Whether an instruction computes nothing but indices."""
    inside = [inner for name in one.calls for inner in module.computations[name]]
    return one.opcode in _CARRIES and all(
        inner.opcode in _CARRIES or inner.opcode in ("parameter", "constant")
        for inner in inside
        if any(shape.dims for shape in inner.shapes)
    )


def _before_loop(
    module: Module, where: Computation, loop: Instruction, index: int
) -> Iterator[tuple[str, str]]:
    """What a loop is started with at one place of its state, if its body leaves that alone."""
    body = module.computations[loop.attribute("body").strip("%")]
    start = where.instructions[loop.operands[0]]
    if start.opcode != "tuple" or body.root.opcode != "tuple":
        return
    one = body.instructions[body.root.operands[index]]
    while one.opcode in ("copy", "bitcast"):
        one = body.instructions[one.operands[0]]
    unchanged = (
        one.opcode == "get-tuple-element"
        and int(one.attribute("index")) == index
        and body.instructions[one.operands[0]].opcode == "parameter"
    )
    if unchanged:
        yield where.name, start.operands[index]
