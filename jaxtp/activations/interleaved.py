"""A traced model run on two halves of the batch that take turns.

Each half is a coroutine that runs the same equations and stops at two kinds of places: where a row
product leaves a region, with the parts of a sum that every device has a share of (its *message*),
and in front of the first column product behind it. One turn holds one half's products and the
other half's message, with the little that follows it, and ends in a barrier over everything alive.
Between two barriers XLA's scheduler has one message and one chain of products to place. A barrier's
transpose is a barrier, so the derivative has the same turns in reverse.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxtp.activations.fused_products import joined, value_of
from jaxtp.activations.half_placer import HalfPlacer
from jaxtp.activations.sums_apart import SplitProduct
from jaxtp.rules.jaxpr.halves import Halves
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import checkpoint, inline, read, same_rank, scan
from jaxtp.rules.jaxpr.rows import Lies
from jaxtp.rules.jaxpr.walk import Scope

Pair = tuple[Any, Any]


@dataclasses.dataclass
class HalfFrame:
    """A program that a half is inside of."""

    scope: Scope
    halves: Halves
    known: dict[Any, Any]
    last_use: Mapping[Any, int]
    position: int = 0
    copies: dict[Any, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Stop:
    """Where a half waits, with what it hands over.

    Attributes:
        why: "begin" in front of everything, "enter" in front of products, "leave" with the parts of
            a sum, "call" at an equation that both halves enter together, "end".
        arrays: Handed over.
        frame: Where.
        equation: At which.
    """

    why: Literal["begin", "enter", "leave", "call", "end"]
    arrays: list[Any]
    frame: HalfFrame | None = None
    equation: Any = None


Run = Generator[Stop, Any, list[Any]]


@dataclasses.dataclass
class SharedResults:
    """Results of equations that have nothing of the batch, by position; both halves use them."""

    results: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    inside: dict[int, "SharedResults"] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class HalfRun:
    """One half on its way."""

    frames: list[HalfFrame] = dataclasses.field(default_factory=list)
    entered: bool = False  # since the last message


class HalvesInTurns:
    """Runs programs on both halves.

    Args:
        placer: Runs single equations.
        behind: Whether the second half begins behind the first one's first products, so that what
            it takes may still be on its way. Else XLA merges the norms of both halves, and the
            first one's products wait for it, too.
    """

    def __init__(self, placer: HalfPlacer, *, behind: bool = False) -> None:
        self._placer, self._behind = placer, behind

    def both(
        self, scope: Scope, halves: Halves, args: Sequence[Pair]
    ) -> tuple[list[Pair], list[dict[Any, Any]]]:
        """The outputs of a program on both halves, and everything that each has computed.

        Args:
            scope: The program on half of the batch.
            halves: What of it runs there.
            args: Each input of both halves.
        """
        once, sides = SharedResults(), (HalfRun(), HalfRun())
        runs: list[Run] = []
        tops: list[dict[Any, Any]] = []
        for n, side in enumerate(sides):
            known = dict(zip(scope.jaxpr.constvars, scope.consts, strict=True))
            known |= {v: pair[n] for v, pair in zip(scope.jaxpr.invars, args, strict=True)}
            tops.append(known)
            runs.append(self._program(side, scope, halves, known, once))
        stops = [_next(runs[0]), Stop("begin", []) if self._behind else _next(runs[1])]
        me = 0
        while any(stop.why != "end" for stop in stops):
            if all(stop.why == "call" for stop in stops):
                results = self._call(stops)
                stops = [_next(run, [r[n] for r in results]) for n, run in enumerate(runs)]
                me = 0
                continue
            other = 1 - me
            message = stops[other] if stops[other].why == "leave" else None
            if stops[me].why == "begin":
                stops[me] = _next(runs[me])
                # Backward this is where the turn ends: what the half sends there moves beside the
                # other's products.
                _barrier(sides, stops, barrier=_backward_only)
            if stops[me].why == "enter":
                stops[me] = _next(runs[me])
            if message:
                (parts,) = message.arrays
                # In its own type: `jnp.sum` would add and send float32.
                stops[other] = _next(runs[other], jax.lax.reduce_sum(parts, (0,)))
            if any(stop.why != "end" for stop in stops):
                if stops[1].why == "begin":
                    _barrier(sides, stops, _floats(scope, halves, tops[1]), _forward_only)
                else:
                    _barrier(sides, stops)
            me = other
        return list(zip(stops[0].arrays, stops[1].arrays, strict=True)), tops

    def _program(
        self,
        side: HalfRun,
        scope: Scope,
        halves: Halves,
        known: dict[Any, Any],
        once: SharedResults,
    ) -> Run:
        """One half's way through a program; what mixes the batch is left out."""
        frame = HalfFrame(scope, halves, known, _last_use(scope))
        gathered: dict[Any, Any] = {}
        side.frames.append(frame)
        for position, equation in enumerate(scope.jaxpr.eqns):
            frame.position = position
            if position in halves.mixing:
                continue
            if position in halves.shared:
                if position not in once.results:
                    self._placer.step(scope, position, known, gathered)
                    once.results[position] = [known[var] for var in equation.outvars]
                known.update(zip(equation.outvars, once.results[position], strict=True))
                continue
            row = PRIMITIVES.get(equation.primitive.name)
            again = row and row.again
            if again is inline and position in scope.calls:
                inner = scope.calls[position][0]
                own = dict(zip(inner.jaxpr.constvars, inner.consts, strict=True))
                given = [read(var, known) for var in equation.invars]
                own |= dict(zip(inner.jaxpr.invars, given, strict=True))
                below = once.inside.setdefault(position, SharedResults())
                results = yield from self._program(side, inner, halves.calls[position], own, below)
                self._placer.put(scope, equation, results, known)
            elif again in (checkpoint, scan) and position in scope.calls:
                given = [value_of(var, known) for var in equation.invars]
                results = yield Stop("call", given, frame, equation)
                self._placer.put(scope, equation, results, known)
            elif product := self._placer.apart(scope, equation):
                yield from self._product(side, frame, equation, product)
            else:
                if not side.entered and self._placer.enters(scope, equation):
                    side.entered = True
                    yield Stop("enter", [])
                self._placer.step(scope, position, known, gathered)
        side.frames.pop()
        if halves.mixing:
            outputs = [read(v, known) if _has(v, known) else None for v in scope.jaxpr.outvars]
        else:
            outputs = [read(var, known) for var in scope.jaxpr.outvars]
        return outputs

    def _product(
        self, side: HalfRun, frame: HalfFrame, equation: Any, product: SplitProduct
    ) -> Generator[Stop, Any, None]:
        placer, known = self._placer, frame.known
        var, weight = equation.invars[1 - product.weight], equation.invars[product.weight]
        w = placer.place_parts(product.parts(value_of(weight, known)), product.split)
        if product.is_row:
            parts = placer.place_parts(product.row(value_of(var, known), w), 0)
            side.entered = False
            result = yield Stop("leave", [parts], frame, equation)
        else:
            if var not in frame.copies:
                x = value_of(var, known)
                frame.copies[var] = placer.copies(frame.scope, var, x)
                if not side.entered:
                    side.entered = True
                    yield Stop("enter", [])
            result = product.column(frame.copies[var], w)
        placer.put(frame.scope, equation, [result], known)

    def _call(self, stops: Sequence[Stop]) -> list[Pair]:
        """The results of an equation that both halves enter together."""
        frame, equation = stops[0].frame, stops[0].equation
        assert frame is not None
        inner, halves = frame.scope.calls[frame.position][0], frame.halves.calls[frame.position]
        lies = [frame.halves.where(var) for var in equation.invars]
        given = [
            (a, b) if where else (a,)
            for a, b, where in zip(stops[0].arrays, stops[1].arrays, lies, strict=True)
        ]
        if equation.primitive.name == "scan":
            return self._scan(equation, inner, halves, given)
        params = equation.params
        run = functools.partial(self.body, inner, halves)
        again = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return [_pair(one) for one in again(*given)]

    def body(self, scope: Scope, halves: Halves, *given: Any) -> list[Any]:
        """The outputs, of one array where the batch does not lie in them; likewise its inputs."""
        results, _ = self.both(scope, halves, [_pair(one) for one in given])
        outs = scope.jaxpr.outvars
        arrays = [tuple(map(joined, pair)) for pair in results]  # JAX takes no pieces
        return [pair if halves.where(v) else pair[:1] for v, pair in zip(outs, arrays, strict=True)]

    def _scan(
        self, equation: Any, inner: Scope, halves: Halves, given: Sequence[Any]
    ) -> list[Pair]:
        params = equation.params
        first = len(given) - same_rank(equation.invars, inner.jaxpr.invars).count(False)
        num_carry = same_rank(equation.outvars, inner.jaxpr.outvars).count(True)
        consts, init = given[: first - num_carry], given[first - num_carry : first]

        def step(carry: Any, row: Any) -> tuple[Any, Any]:
            out = self.body(inner, halves, *consts, *carry, *row)
            return out[:num_carry], out[num_carry:]

        kept = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, rows = jax.lax.scan(step, list(init), list(given[first:]), **kept)
        return [_pair(one) for one in (*carry, *rows)]


def half_of(x: Any, half: int) -> Any:
    """Every other row, so that each half lies on all replicas."""
    return x.reshape(-1, 2, *x.shape[1:])[:, half]


def whole_of(pair: Pair, lies: Lies | None, spread: Callable[[Any, int], Any]) -> Any:
    """The array of all rows that two halves are of.

    Args:
        pair: Both halves.
        lies: Where the batch lies.
        spread: Shards a dim of an array along the batch axes, so that nothing moves.
    """
    if lies is None:
        return joined(pair[0])
    dim = lies.dim

    def by_row(x: Any) -> Any:
        rest = x.shape[dim + 1 :]
        x = x.reshape(*x.shape[:dim], x.shape[dim] // lies.inner, 1, lies.inner, *rest)
        return spread(x, dim)

    one, two = map(joined, pair)
    one_row, two_row = by_row(one), by_row(two)
    # A choice for each element: of a concatenation XLA exchanges rows between devices.
    is_second = jnp.arange(2).reshape(2, *[1] * (one_row.ndim - dim - 2)) == 1
    is_second = is_second.reshape(*[1] * (dim + 1), *is_second.shape)
    both = jnp.where(is_second, two_row, one_row)
    shape = (*one.shape[:dim], 2 * one.shape[dim], *one.shape[dim + 1 :])
    return spread(spread(both, dim).reshape(shape), dim)


def _next(run: Run, value: Any = None) -> Stop:
    try:
        return run.send(value)
    except StopIteration as end:
        return Stop("end", end.value)


def _barrier(
    sides: Sequence[HalfRun],
    stops: Sequence[Stop],
    late: Sequence[tuple[Any, Any]] = (),
    barrier: Callable[[list[Any]], list[Any]] = jax.lax.optimization_barrier,
) -> None:
    """Everything alive of both halves waits for all of it.

    Args:
        sides: The halves.
        stops: Where they wait.
        late: Further arrays that do, by what holds them.
        barrier: How they wait.
    """
    places: list[tuple[Any, Any]] = []
    for side, stop in zip(sides, stops, strict=True):
        for frame in side.frames:
            for var in frame.known:
                alive = frame.last_use.get(var, -1) > frame.position
                if alive and frame.halves.where(var):
                    places.append((frame.known, var))
            places += [
                (frame.copies, v) for v in frame.copies if frame.last_use[v] >= frame.position
            ]
        places += [(stop.arrays, n) for n in range(len(stop.arrays))]
    places += late
    arrays: dict[int, Any] = {}
    for holder, key in places:
        for x in jax.tree.leaves(holder[key]):
            if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.inexact):
                arrays[id(x)] = x
    if not arrays:
        return
    behind = dict(zip(arrays, barrier([*arrays.values()]), strict=True))
    for holder, key in places:
        if id(holder[key]) in behind:
            holder[key] = behind[id(holder[key])]


@jax.custom_jvp
def _forward_only(arrays: list[Any]) -> list[Any]:
    """A barrier, of whose derivative nothing waits."""
    return jax.lax.optimization_barrier(arrays)


@_forward_only.defjvp
def _forward_jvp(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    return _forward_only(*primals), tangents[0]


@jax.custom_jvp
def _backward_only(arrays: list[Any]) -> list[Any]:
    """Nothing, of whose derivative all waits for all."""
    return arrays


@_backward_only.defjvp
def _backward_jvp(primals: Any, tangents: Any) -> Any:  # pyright: ignore[reportUnusedFunction]
    return _backward_only(*primals), jax.lax.optimization_barrier(tangents[0])


def _floats(scope: Scope, halves: Halves, known: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """What a half takes, as places of arrays."""
    taken = [var for var in scope.jaxpr.invars if halves.where(var)]
    return [(known, var) for var in taken if jnp.issubdtype(known[var].dtype, jnp.inexact)]


def _last_use(scope: Scope) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for position, equation in enumerate(scope.jaxpr.eqns):
        found |= {v: position for v in equation.invars if not isinstance(v, core.Literal)}
    last = len(scope.jaxpr.eqns)
    return found | {v: last for v in scope.jaxpr.outvars if not isinstance(v, core.Literal)}


def _has(var: Any, known: Mapping[Any, Any]) -> bool:
    return isinstance(var, core.Literal) or var in known


def _pair(one: Sequence[Any]) -> Pair:
    return (one[0], one[-1])
