"""Evidence from the model's own program: findings of `rules/jaxpr` as votes."""

import contextlib
import dataclasses
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxtp.errors import BadTree, JaxtpError, join
from jaxtp.plan.stored_form import masks_seen
from jaxtp.plan.trees import PyTree
from jaxtp.rules.jaxpr import Analysis, Finding, Option, analyse
from jaxtp.rules.jaxpr.unmasked import unmasked_reads
from jaxtp.rules.roles import Fused, Placement, Role, Source, Vote

ROLES: dict[str, Role] = {
    "replicated": Role.REPLICATED,
    "follower": Role.HEAD_TABLE,
}
"""Roles that the analysis words differently; the others have the same name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """What one traced forward call shows; nothing, if there was nothing to trace.

    Attributes:
        votes: One for every parameter that the call uses.
        masked: Vocabulary sizes, in elements, for which the model masks padded logits.
        unmasked: Of those, what reads logits in front of the mask as well.
        analysis: What all of this comes from; None if nothing was traced.
    """

    votes: tuple[Vote, ...] = ()
    masked: frozenset[int] = frozenset()
    unmasked: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict[int, list[str]])
    analysis: Analysis | None = None


def trace(fn: Any, params: PyTree, inputs: Sequence[Any] | None) -> Traced:
    """Votes, and what else is seen, from one forward call.

    Args:
        fn: A function of the parameters and the inputs, a Linen module, or None for an
            `nnx.Module`, which is called itself.
        params: The parameters, as given to `make_plan`.
        inputs: Example inputs after the parameters: arrays or `jax.ShapeDtypeStruct`.

    Raises:
        BadTree: TP046, if there are inputs but nothing to call.
    """
    check_inputs(inputs)
    if fn is None and inputs is None:
        return Traced()
    call = forward(fn, params, inputs)
    if inputs is None:
        _check_needs_no_inputs(fn)
    with masks_seen() as masked, tracing(inputs):
        analysis = analyse(call, params, *(inputs or ()))
    check_outputs(analysis.outputs)
    reads = {size: unmasked_reads(analysis, size) for size in masked}
    return Traced(tuple(finding_votes(analysis)), frozenset(masked), reads, analysis)


@contextlib.contextmanager
def tracing(
    inputs: Any,
    fix: str = "it takes the parameters and these inputs, and no values, only shapes: try "
    "jax.eval_shape(fn, params, *inputs)",
) -> Generator[None]:
    """Inside the block a function is traced; what it raises then is said by its inputs.

    Raises:
        BadTree: TP046, for any error that has no code of its own.
    """
    try:
        yield
    except JaxtpError:
        raise
    except Exception as err:
        given = join(_shape_of(x) for x in jax.tree.leaves(inputs)) or "no inputs"
        first = f"{err}".strip().partition("\n")[0]
        raise BadTree(
            f"raises {type(err).__name__} when it is traced with {given}: {first}",
            where="fn",
            fix=fix,
        ) from err


def _shape_of(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else repr(x)


def check_outputs(outputs: Any) -> None:
    """Refuses a function that returns nothing.

    Raises:
        BadTree: TP046.
    """
    if not jax.tree.leaves(outputs):
        raise BadTree(
            "returns no array", where="fn", fix="return what the model computes, such as logits"
        )


def check_inputs(inputs: Any) -> None:
    """Refuses inputs that are no sequence of arguments.

    Raises:
        BadTree: TP046, for one array, a dict or text.
    """
    if inputs is not None and (hasattr(inputs, "shape") or not isinstance(inputs, list | tuple)):
        raise BadTree(
            f"inputs is a {type(inputs).__name__}",
            where="inputs",
            fix="a tuple of the arguments after the parameters: inputs=(x,)",
        )


def _is_module(fn: Any) -> bool:
    return hasattr(fn, "apply") and hasattr(fn, "init")


def _called(fn: Any) -> tuple[Any, bool]:
    """What has the signature of a call, and whether the parameters are its first argument.

    A pair of functions `(init, apply)`, as Haiku has it, cannot be called itself.
    """
    if not _is_module(fn):
        return fn, True
    return (fn.__call__, False) if callable(fn) else (fn.apply, True)


def _check_needs_no_inputs(fn: Any) -> None:
    """Refuses a function of more than the parameters where there are no inputs."""
    call, takes_params = _called(fn)
    needed: list[str] = []
    with contextlib.suppress(TypeError, ValueError):  # some callables have no signature
        needed = [
            p.name
            for p in inspect.signature(call).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    if len(needed) > takes_params:
        raise BadTree(
            f"fn takes {join(needed)}, and no inputs are given",
            where="inputs",
            fix="inputs=(x,), arrays or jax.ShapeDtypeStruct, one for each argument after the "
            "parameters",
        )


def _check_takes(fn: Any, params: PyTree, inputs: Sequence[Any]) -> None:
    """Refuses inputs that are too few or too many for what is called.

    Raises:
        BadTree: TP046.
    """
    call, takes_params = (params, False) if fn is None else _called(fn)
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*((params, *inputs) if takes_params else inputs))
    except TypeError as err:
        name = getattr(fn, "__name__", type(params if fn is None else fn).__name__)
        raise BadTree(
            f"{name} takes {signature} and is given {len(inputs)} "
            f"input{'s' * (len(inputs) != 1)}{' after the parameters' * takes_params}: {err}",
            where="inputs",
            fix="a tuple with one entry for each argument after the parameters; flags and what "
            "is given by name go into a function of yours: fn=lambda params, x: ...",
        ) from None


def forward(fn: Any, params: PyTree, inputs: Sequence[Any] | None = None) -> Callable[..., Any]:
    """The function of `(params, *inputs)` that a function, a Linen module or None stands for.

    Raises:
        BadTree: TP046, if there is nothing to call, or it does not take so many inputs.
    """
    if fn is None:
        if not callable(params):
            raise BadTree(
                f"inputs were given, but a {type(params).__name__} cannot be called",
                fix="pass fn=, a function of (params, *inputs), or the nnx.Module itself",
            )
        if inputs is not None:
            _check_takes(None, params, inputs)
        return lambda module, *args: module(*args)
    if not callable(fn) and not _is_module(fn):
        raise BadTree(
            f"fn is a {type(fn).__name__}, which cannot be called",
            where="fn",
            fix="a function of (params, *inputs), or a Linen module",
        )
    owner = getattr(fn, "__self__", None)
    if getattr(fn, "__name__", "") == "apply" and hasattr(owner, "init"):
        fn = owner  # `model.apply` takes variables, and `params` may be without the others
    if inputs is not None:
        _check_takes(fn, params, inputs)
    model: Any = fn
    if _is_module(model):
        wrapped = "params" in params
        return lambda tree, *args: model.apply(tree if wrapped else {"params": tree}, *args)
    return fn


def finding_votes(analysis: Analysis) -> Iterator[Vote]:
    """One vote per finding."""
    groups: defaultdict[str, list[Finding]] = defaultdict(list)
    for finding in analysis.findings.values():
        groups[finding.group].append(finding)
    for finding in analysis.findings.values():
        # Too few rows to be called a vocabulary is a price, not a fact: names may know better.
        role = Role.UNKNOWN if finding.small else ROLES.get(finding.role) or Role(finding.role)
        reason = "; ".join(finding.reasons)
        placements: tuple[Placement | None, ...] = ()
        fused = None
        if finding.pieces and finding.dim is not None and finding.use:
            kept = sum(stop - start for start, stop in finding.replicated)
            fused = Fused(finding.dim, finding.units, finding.use, kept)
        elif finding.pieces:
            reason += "; replicated, since contiguous shards would mix the pieces"
        elif finding.dim is not None:
            placements = tuple(_choices(finding, groups[finding.group]))
            if placements[:1] == (None,):
                reason += "; replicated, since its leading units are minor elsewhere in the group"
        yield Vote(
            finding.path,
            Source.DATAFLOW,
            role,
            reason,
            placements,
            finding.group,
            fused=fused,
            stacked_dims=finding.stacked_dims,
        )


def _choices(finding: Finding, group: Sequence[Finding]) -> Iterator[Placement | None]:
    """Where the parameter may be split, in the order of its group's choices.

    Members that lead with another class than the group's largest array (keys whose heads are tiled,
    so that they are minor in the queries) would hold other heads on a device than it does.
    """
    rank = 1 + max(len(f.alternatives) for f in group)
    for i in range(rank):
        mine = _option(finding, i)
        options = [o for f in group if (o := _option(f, i)) and not o.pieces]
        lead = max(options, key=lambda o: math.prod(o.units)).classes[:1] if options else ()
        same = mine is not None and not mine.pieces and mine.classes[:1] == lead
        yield Placement(mine.dim, mine.units) if mine and same else None


def _option(finding: Finding, index: int) -> Option | None:
    if index:
        return finding.alternatives[index - 1] if index <= len(finding.alternatives) else None
    if finding.dim is None:
        return None
    return Option(finding.dim, finding.units, finding.classes, finding.pieces)
