"""Layers of a program without a loop: segments of equations that hand on one array.

A model that runs its layers in a Python loop is a straight line of equations. It can be cut where a
single array made so far is needed later, such as the residual stream between two blocks. What lies
between two cuts and takes matrices is a segment; segments that come again in the same order, such
as attention and MLP, make up a layer.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxtp.activations.ahead.passes import is_float
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import checkpoint, inline
from jaxtp.rules.jaxpr.walk import Kind, Scope

IsMatrix = Callable[[Any], bool]
"""Whether an input of a program is a parameter that is to be gathered, and large."""

Segment = tuple[int, int]
"""Positions of the first equation and of the last one."""

MANY = 3
"""Segments that take parameters of the same shapes, from which on they are no single layer."""


@dataclasses.dataclass
class StraightLine:
    """The equations of a program, in order.

    Attributes:
        scope: The program.
        is_matrix: Which of its inputs are gathered.
        closed: Positions of equations that no segment holds.
    """

    scope: Scope
    is_matrix: IsMatrix
    closed: Collection[int]

    def __post_init__(self) -> None:
        equations = self.scope.jaxpr.eqns
        self._made: dict[Any, int] = {}
        self._last: dict[Any, int] = {}
        self._roots: dict[Any, frozenset[Any]] = {}
        self._same: dict[Any, Any] = {}
        for position, equation in enumerate(equations):
            self._last |= dict.fromkeys(_variables(equation.invars), position)
            self._made |= dict.fromkeys(equation.outvars, position)
            self._same |= self._returned(position)
            if not self.moves(position):
                roots = frozenset[Any]().union(*map(self.roots, _variables(equation.invars)))
                self._roots |= dict.fromkeys(equation.outvars, roots)
        self._last |= dict.fromkeys(_variables(self.scope.jaxpr.outvars), len(equations))
        self._taken = [self._matrices(position) for position in range(len(equations))]

    def moves(self, position: int) -> bool:
        """Whether an equation has anything of the model's inputs in it, or does more than give."""
        equation = self.scope.jaxpr.eqns[position]
        values = map(self.scope.values.get, equation.outvars)
        return bool(equation.effects) or any(v and v.kind is Kind.ACTIVATION for v in values)

    def roots(self, var: Any) -> frozenset[Any]:
        """The inputs of the program that a value without activations is made from."""
        var = self._same.get(var, var)
        if var in self._made:
            return self._roots.get(var, frozenset())
        value = self.scope.values.get(var)
        return frozenset([var] if value and value.kind is Kind.PARAMETER else [])

    def held(self, segment: Segment) -> list[int]:
        """Positions of a segment's equations, and of what they need that has no activations."""
        found, todo = set[int](), [p for p in range(segment[0], segment[1] + 1) if self.moves(p)]
        while todo:
            if (here := todo.pop()) in found:
                continue
            found.add(here)
            variables = _variables(self.scope.jaxpr.eqns[here].invars)
            made = [self._made[var] for var in variables if var in self._made]
            todo += [before for before in made if not self.moves(before)]
        return sorted(found)

    def inputs(self, held: Sequence[int]) -> list[Any]:
        """What equations take from elsewhere, but constants."""
        equations = [self.scope.jaxpr.eqns[position] for position in held]
        own = {*self.scope.jaxpr.constvars, *(var for eqn in equations for var in eqn.outvars)}
        taken = [var for equation in equations for var in _variables(equation.invars)]
        return [var for var in dict.fromkeys(taken) if var not in own]

    def same(self, held: Iterable[int]) -> dict[Any, Any]:
        """Results of equations that are inputs of the program -> those inputs."""
        made = [var for p in held for var in self.scope.jaxpr.eqns[p].outvars]
        return {var: self._same[var] for var in made if var in self._same}

    def result(self, segment: Segment) -> Any:
        """The one array that a segment hands on."""
        equations = self.scope.jaxpr.eqns[segment[0] : segment[1] + 1]
        made = [var for equation in equations for var in equation.outvars]
        (found,) = (var for var in made if self._goes_on(var, segment[1]))
        return found

    def _goes_on(self, var: Any, position: int) -> bool:
        moves = self.moves(self._made[var]) and var not in self._same
        return moves and self._last.get(var, -1) > position

    def _returned(self, position: int) -> dict[Any, Any]:
        """Results that an equation takes from inputs of the program as they are.

        `nnx.remat` gives back all variables of the module that it runs.
        """
        equation = self.scope.jaxpr.eqns[position]
        row = PRIMITIVES.get(equation.primitive.name)
        if position not in self.scope.calls or not row or row.again not in (inline, checkpoint):
            return {}
        inner = self.scope.calls[position][0].jaxpr
        given = dict(zip(inner.invars, equation.invars, strict=True))
        pairs = zip(equation.outvars, inner.outvars, strict=True)
        found = {out: given[v] for out, v in pairs if not isinstance(v, Literal) and v in given}
        found = {out: self._same.get(var, var) for out, var in found.items()}
        inputs = {*self.scope.jaxpr.invars}
        return {out: v for out, v in found.items() if not isinstance(v, Literal) and v in inputs}

    def layers(self, first: int = 0, stop: int | None = None) -> list[list[Segment]]:
        """Chains of layers, each of which hands on one array to the next.

        Args:
            first: Position from which on they are looked for.
            stop: Position in front of which they end; by default that of the last equation.
        """
        found: list[list[Segment]] = []
        stop = len(self._taken) if stop is None else stop
        while (start := self._next(first, stop)) is not None:
            end = min([at for at in self.closed if at >= start], default=stop)
            segments = self._segments(start, min(end, stop))
            first = segments[-1][1] + 1 if segments else start + 1
            found.append([])
            for segment in segments:
                inner = self._segments(segment[0], segment[1] + 1, outside=True)
                if self._most(inner) < MANY:
                    found[-1].append(segment)
                else:
                    # What follows starts from what the last of them hands on, be it behind a skip.
                    found.append([*inner[:-1], (inner[-1][0], segment[1])])
        return [self._grouped(one) for one in found if self._most(one) > 1]

    def _next(self, first: int, stop: int) -> int | None:
        places = range(first, stop)
        return next((p for p in places if self._taken[p] and p not in self.closed), None)

    def _matrices(self, position: int) -> frozenset[Any]:
        """The matrices that an equation works with."""
        if not self.moves(position):
            return frozenset()
        operands = _variables(_worked_with(self.scope, position))
        return frozenset(filter(self.is_matrix, frozenset[Any]().union(*map(self.roots, operands))))

    def _segments(self, start: int, stop: int, *, outside: bool = False) -> list[Segment]:
        """Cuts equations, the first of which takes a matrix.

        Args:
            start: Position of the first.
            stop: Position behind the last.
            outside: Whether what was made in front of it is of no account.
        """
        if outside:
            start = self._next(start, stop) or start
        alive, cuts = set[Any](), list[tuple[int, Any]]()
        for position in range(start, stop):
            if not self.moves(position):
                continue
            equation = self.scope.jaxpr.eqns[position]
            alive |= {var for var in equation.outvars if self._goes_on(var, position)}
            alive -= {v for v in _variables(equation.invars) if self._last[v] <= position}
            if len(alive) == 1:
                cuts += [(position, var) for var in alive if is_float(var.aval)]
        found: list[Segment] = []
        for cut, handed_on in cuts:
            if not self._shapes((start, cut)):  # nothing that comes from elsewhere
                if found and self._next(cut + 1, stop) is not None:
                    found[-1] = found[-1][0], cut
                    start = cut + 1
            elif self._made[handed_on] >= start:  # else nobody takes what was made since
                found.append((start, cut))
                start = cut + 1
        return self._with_first(found)

    def _most(self, segments: Sequence[Segment]) -> int:
        """How many segments take matrices of the same shapes, at most."""
        counts = collections.Counter(map(self._shapes, segments))
        return max(counts.values(), default=0)

    def _grouped(self, segments: Sequence[Segment]) -> list[Segment]:
        """Layers of segments: a layer begins where one like its first comes again."""
        shapes, at = [self._shapes(one) for one in segments], 0
        periods: dict[Any, int] = {}
        found: list[Segment] = []
        while at < len(segments):
            again = [n for n in range(at + 1, len(shapes)) if shapes[n] == shapes[at]]
            period = again[0] - at if again else periods.get(shapes[at], 1)
            periods[shapes[at]] = period
            last = min(at + period, len(segments)) - 1
            found.append((segments[at][0], segments[last][1]))
            at += period
        return found

    def _with_first(self, segments: list[Segment]) -> list[Segment]:
        """Segments, the first several of which are one where all of them are like a later one.

        What the first layer takes was made in front of it and is not counted: cuts may lie inside.
        """
        shapes = [self._shapes(one) for one in segments]
        for num in range(2, len(segments)):
            if tuple(sorted(itertools.chain(*shapes[:num]))) in shapes[num:]:
                return [(segments[0][0], segments[num - 1][1]), *segments[num:]]
        return segments

    def _shapes(self, segment: Segment) -> tuple[Any, ...]:
        """Shapes of the matrices that equations take."""
        taken = frozenset[Any]().union(*self._taken[segment[0] : segment[1] + 1])
        return tuple(sorted(var.aval.shape for var in taken))


def _worked_with(scope: Scope, position: int) -> list[Any]:
    """Operands of an equation but tables, of which some rows are taken."""
    equation = scope.jaxpr.eqns[position]
    if equation.primitive.name == "gather":
        return list(equation.invars[1:])
    row = PRIMITIVES.get(equation.primitive.name)
    if position not in scope.calls or row is None or row.again is not inline:
        return list(equation.invars)
    inner = scope.calls[position][0]
    places = range(len(inner.jaxpr.eqns))
    used = {var for place in places for var in _variables(_worked_with(inner, place))}
    pairs = zip(equation.invars, inner.jaxpr.invars, strict=True)
    return [outer for outer, var in pairs if var in used]


def _variables(operands: Iterable[Any]) -> list[Any]:
    return [var for var in operands if not isinstance(var, Literal)]
