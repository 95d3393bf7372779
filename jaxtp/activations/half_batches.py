"""Anybody's model on two halves of the batch, as far as rows of the batch are treated alone."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxtp.activations.batch_parts import along_batch, another, batch_of, traced_on_part
from jaxtp.activations.half_placer import HalfPlacer
from jaxtp.activations.interleaved import HalvesInTurns, half_of, whole_of
from jaxtp.activations.left_alone import PRODUCTS, matters
from jaxtp.activations.placer import Placer
from jaxtp.errors import NotInterleaved, join
from jaxtp.mesh.axes import Axis
from jaxtp.rules.jaxpr import analyse_jaxpr
from jaxtp.rules.jaxpr.halves import Halves, compare
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import checkpoint, inline, read, scan
from jaxtp.rules.jaxpr.rows import MixesBatch
from jaxtp.rules.jaxpr.walk import UNKNOWN, Scope, where


def on_halves(
    whole: Placer,
    fn: Callable[..., Any],
    paths: Sequence[str],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
    closed: Any,
) -> tuple[list[Any] | None, list[str]]:
    """The results of a function whose halves of the batch take turns, and what is to be said.

    There are no results if no halves can take turns.

    Args:
        whole: Runs the function on the whole batch.
        fn: Of the trees in `args`.
        paths: Of its parameters.
        args: Trees of parameters, then of inputs.
        keywords: What else it is called with, the same for both halves.
        closed: Its jaxpr.
    """
    if whole.plan.mesh.ways(whole.plan.mesh.tp) == 1:
        return None, []  # nothing to hide
    try:
        _refuse_cp(whole)
        rows, lies = batch_of(whole, 2 * whole.plan.mesh.batch_ways)
        try:
            half = traced_on_part(fn, args, lies, rows // 2)
        except Exception as error:  # what code of theirs raises, which takes a whole batch only
            raise another(error, keywords, rows) from error
        try:
            halves = compare(half, closed, lies, rows)
        except MixesBatch as error:
            raise another(error, keywords, rows) from error
        notes = _check_products(halves, whole.analysis.scope)
        analysis = analyse_jaxpr(half, paths)
        placer = HalfPlacer(analysis, whole.plan, whole.mesh)
        notes += check_sums(placer, [(placer.analysis.scope, halves)])
    except NotInterleaved as error:
        return None, [str(error)]
    flat = jax.tree.leaves(args)
    pairs = [
        tuple(along_batch(whole, half_of(x, n), 0) for n in (0, 1)) if where else (x, x)
        for x, where in zip(flat, lies, strict=True)
    ]
    _, computed = HalvesInTurns(placer).both(analysis.scope, halves, pairs)
    whole.left |= placer.left
    return _rest(whole, halves, flat, computed), notes


def _refuse_cp(whole: Placer) -> None:
    """Each half would send all keys of cp around."""
    mesh = whole.plan.mesh
    if mesh.size_of(Axis.CP) > 1:
        raise NotInterleaved(
            "devices along cp share every sequence",
            where=mesh.name_of(Axis.CP),
            fix='overlap="auto"',
        )


def check_sums(placer: HalfPlacer, programs: Iterable[tuple[Scope, Halves]]) -> list[str]:
    """Says which sums over devices stay in one piece; refuses where all of them do.

    Args:
        placer: Runs the halves.
        programs: Each with what of it runs there.

    Raises:
        NotInterleaved: TP073, if there is no message that the other half's products could hide.
    """
    found = [one for program in programs for one in _sums(placer, *program)]
    whole = list(dict.fromkeys(line for is_apart, line in found if not is_apart))
    tensor = join(placer.plan.mesh.tp)
    fix = f"heads and widths that all of {tensor} divides, outside of custom derivative rules"
    if not any(is_apart for is_apart, _ in found):
        lines = join(whole, 3) or "no product of the halves has one"
        raise NotInterleaved(f"no sum over {tensor} can be taken apart: {lines}", fix=fix)
    if not whole:
        return []
    what = f"sums over {tensor} that cannot be taken apart: {join(whole, 3)}"
    return [str(NotInterleaved(what, fix=fix))]


def _sums(placer: HalfPlacer, scope: Scope, halves: Halves) -> Iterator[tuple[bool, str]]:
    """Products of the halves that end in a sum over devices: whether it is apart, and where."""
    for position, equation in enumerate(scope.jaxpr.eqns):
        if position in halves.mixing or position in halves.shared:
            continue
        line = f"`{equation.primitive.name}` at {where(equation) or UNKNOWN}"
        row, inside = PRIMITIVES.get(equation.primitive.name), scope.calls.get(position)
        if inside and row and row.again in (inline, checkpoint, scan):
            yield from _sums(placer, inside[0], halves.calls[position])
        elif inside and any(_has_sum(placer, one) for one in inside):
            yield False, line
        elif placer.sums(scope, equation):
            yield placer.apart(scope, equation) is not None, line


def _has_sum(placer: HalfPlacer, scope: Scope) -> bool:
    """Whether a program, or one that it holds, has a product that ends in a sum over devices."""
    inside = [one for calls in scope.calls.values() for one in calls]
    own = any(placer.sums(scope, equation) for equation in scope.jaxpr.eqns)
    return own or any(_has_sum(placer, one) for one in inside)


def _check_products(halves: Halves, scope: Scope) -> list[str]:
    """Says which products stay behind; refuses where no product is left.

    Raises:
        NotInterleaved: TP073, if no product with the model's weights runs on halves.
    """
    behind = {n for n in range(len(scope.jaxpr.eqns)) if _multiplies(scope, n)}
    if not behind & set(halves.mixing):
        return []
    reasons = list(dict.fromkeys(filter(None, halves.mixing.values())))
    error = NotInterleaved(
        f"rows of the batch meet in {join(reasons, 3)}",
        fix="what follows runs on all of the batch",
    )
    if behind <= set(halves.mixing):
        raise error
    return [str(error)]


def _multiplies(scope: Scope, position: int) -> bool:
    """Whether an equation is or holds a product by a parameter."""
    if any(map(matters, scope.calls.get(position, ()))):
        return True
    equation = scope.jaxpr.eqns[position]
    values = [scope.values.get(v) for v in equation.invars if not isinstance(v, Literal)]
    return equation.primitive.name in PRODUCTS and any(v and v.path for v in values)


def _rest(
    whole: Placer, halves: Halves, flat: Sequence[Any], computed: Sequence[dict[Any, Any]]
) -> list[Any]:
    """The results, once both halves are done: what mixes the batch runs on all of it."""
    scope = whole.analysis.scope
    known = dict(zip(scope.jaxpr.constvars, scope.consts, strict=True))
    known |= dict(zip(scope.jaxpr.invars, flat, strict=True))
    pairs = zip(scope.jaxpr.eqns, halves.half.eqns, strict=True)
    on_half = {v: h for one, two in pairs for v, h in zip(one.outvars, two.outvars, strict=True)}

    def learn(var: Any) -> None:
        if isinstance(var, Literal) or var in known:
            return
        half = on_half[var]
        pair = computed[0][half], computed[1][half]
        known[var] = whole_of(pair, halves.where(half), functools.partial(along_batch, whole))

    gathered: dict[Any, Any] = {}
    for position in sorted(halves.mixing):
        for var in scope.jaxpr.eqns[position].invars:
            learn(var)
        whole.step(scope, position, known, gathered)
    for var in scope.jaxpr.outvars:
        learn(var)
    return [read(var, known) for var in scope.jaxpr.outvars]
