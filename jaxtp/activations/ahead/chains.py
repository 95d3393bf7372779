"""Layers that stand in a program one after the other, whose weights are gathered one ahead."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.activations.ahead.chain_passes import ChainRun
from jaxtp.activations.ahead.passes import is_float
from jaxtp.activations.ahead.product_types import product_type
from jaxtp.activations.ahead.scan_layer import Body, Turn
from jaxtp.activations.ahead.scan_loop import BatchCut, LeftAlone, Loop
from jaxtp.activations.ahead.segments import Segment, StraightLine
from jaxtp.activations.ahead.specs import spec_of
from jaxtp.activations.ahead.weights import SMALL_BYTES, StackedArray, Weights
from jaxtp.activations.batch_parts import along_batch
from jaxtp.activations.fused_products import value_of
from jaxtp.activations.placer import Placer
from jaxtp.plan.specs import Spec
from jaxtp.rules.jaxpr.halves import Halves, compare, lies_by_size
from jaxtp.rules.jaxpr.rows import Lies, MixesBatch
from jaxtp.rules.jaxpr.walk import UNKNOWN, Kind, Scope, where


@dataclasses.dataclass(frozen=True)
class UnrolledLayer:
    """One layer, by the variables of the program that it stands in.

    Attributes:
        held: Positions of its equations.
        context: What it takes beside what the layer in front of it hands on, and weights.
        carried: What that is.
        weights: Its parameters.
        result: What it hands on.
    """

    held: Sequence[int]
    context: Sequence[Any]
    carried: Any
    weights: Sequence[Any]
    result: Any

    def program(self, scope: Scope, names: Mapping[Any, Any]) -> Scope:
        """Its equations as a program of their own.

        Args:
            scope: What it stands in, or the same on a part of the batch.
            names: The variables there.
        """
        jaxpr = scope.jaxpr
        given = [names[var] for var in (*self.context, self.carried, *self.weights)]
        own = jaxpr.replace(
            eqns=[jaxpr.eqns[position] for position in self.held],
            invars=given,
            outvars=[names[self.result]],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        )
        calls = {n: scope.calls[p] for n, p in enumerate(self.held) if p in scope.calls}
        return Scope(own, scope.values, calls, scope.consts)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Layers with weights one ahead, in place of the equations that they are made of.

    Attributes:
        layers: They.
        loops: Each of them as a loop of one turn.
        programs: Each on a part of the batch, with what runs there.
        first: Position of the first equation that has activations.
        held: Positions of all that have.
        same: Their results that are inputs of the program -> those inputs.
    """

    layers: Sequence[UnrolledLayer]
    loops: Sequence[Loop]
    programs: Sequence[tuple[Scope, Halves]]
    first: int
    held: Collection[int]
    same: Mapping[Any, Any]

    def __call__(self, placer: Placer, known: dict[Any, Any]) -> None:
        """Adds what the last layer hands on, for all of the batch, to what is known."""
        known |= {var: known[given] for var, given in self.same.items()}
        cut, lies = self.loops[0].cut, dict[Any, Lies | None]()
        for layer, loop in zip(self.layers, self.loops, strict=True):
            lies |= zip(layer.context, loop.lies, strict=False)
        places = {var: n for n, var in enumerate(lies)}
        run = ChainRun(
            layers=[self._run(*one) for one in zip(self.layers, self.loops, strict=True)],
            picks=[[places[var] for var in layer.context] for layer in self.layers],
            shared=[at is None for at in lies.values()],
        )
        context = [cut.split(value_of(var, known), at) for var, at in lies.items()]
        params = [
            {str(n): value_of(var, known) for n, var in enumerate(layer.weights)}
            for layer in self.layers
        ]
        first, last = self.loops[0], self.loops[-1]
        x = cut.split(value_of(self.layers[0].carried, known), first.lies[first.first - 1])
        (at,) = last.results
        assert at is not None
        out = cut.join(run(params, x, context), at)
        known[self.layers[-1].result] = along_batch(placer, out, at.dim)

    def _run(self, layer: UnrolledLayer, loop: Loop) -> Any:
        operands = [var.aval for var in (*layer.context, layer.carried)]
        stacked = {
            str(n): jax.ShapeDtypeStruct((1, *var.aval.shape), var.aval.dtype)
            for n, var in enumerate(layer.weights)
        }
        return loop.run(operands, stacked, {})


@dataclasses.dataclass
class ChainFinder:
    """Looks for chains in a program, on the whole batch and on a part of it.

    Attributes:
        whole: Runs the first.
        cut: How arrays are cut.
        body: A program on pieces of one replica's rows.
        sharded: Paths of parameters that the batch axes shard.
        left: Why layers were left as they are.
        met: Paths of parameters of layers, left or not.
    """

    whole: Placer
    cut: BatchCut
    body: Callable[[Scope, Halves], Body]
    sharded: Collection[str]
    left: list[str] = dataclasses.field(default_factory=list)
    met: set[str] = dataclasses.field(default_factory=set)

    def search(
        self, scope: Scope, part: Scope, closed: Collection[int]
    ) -> tuple[list[Chain], set[int]]:
        """The chains of a program, and the positions of all that are layers.

        Args:
            scope: The program.
            part: It on a part of the batch.
            closed: Positions of equations that are no part of a layer.
        """

        def is_matrix(var: Any) -> bool:
            value = self.whole.analysis.value(scope, var)
            return value.path in self.sharded and sum(size > 1 for size in value.shape) > 1

        line = StraightLine(scope, is_matrix, closed)
        found: list[Chain] = []
        taken = set[int]()
        for segments in line.layers():
            taken |= {n for first, last in segments for n in range(first, last + 1)}
            layers = list(self._layers(line, segments))
            self.met |= {scope.values[var].path for one in layers for var in one.weights}
            made = [(layer, self._made(layer, scope, part)) for layer in layers]
            for is_layer, group in itertools.groupby(made, lambda one: one[1] is not None):
                if is_layer and len(some := list(group)) > 1:
                    links, parts = zip(*some, strict=True)
                    loops, programs = zip(*parts, strict=True)
                    held = {n for link in links for n in link.held if line.moves(n)}
                    same = line.same(held)
                    found.append(Chain(links, loops, programs, min(held), held, same))
        return found, taken

    def _layers(self, line: StraightLine, segments: Sequence[Segment]) -> Iterator[UnrolledLayer]:
        held = [line.held(segment) for segment in segments]
        inputs = [line.inputs(one) for one in held]
        times = collections.Counter(var for one in inputs for var in one)
        carried = None
        for positions, taken, segment in zip(held, inputs, segments, strict=True):
            values = {var: self.whole.analysis.value(line.scope, var) for var in taken}
            if carried not in values:
                moving = [v for v in taken if values[v].kind is Kind.ACTIVATION]
                floats = [var for var in moving if is_float(var.aval)]
                carried = max(floats, key=lambda var: var.aval.size, default=None)
            own = [
                var
                for var, value in values.items()
                if value.kind is Kind.PARAMETER
                and value.path
                and is_float(var.aval)
                and times[var] == 1
            ]
            context = [var for var in taken if var is not carried and var not in own]
            result = line.result(segment)
            yield UnrolledLayer(positions, context, carried, own, result)
            carried = result

    def _made(
        self, layer: UnrolledLayer, scope: Scope, part: Scope
    ) -> tuple[Loop, tuple[Scope, Halves]] | None:
        """A layer as a loop of one turn, and its program; None if it stays as it is."""
        reason = "weights are gathered in their own layer"
        try:
            return self._loop(layer, scope, part)
        except MixesBatch as error:
            self.left.append(f"{reason}: rows meet in {error}")
        except LeftAlone as error:
            self.left.append(f"{reason}: {error}")
        return None

    def _loop(
        self, layer: UnrolledLayer, scope: Scope, part: Scope
    ) -> tuple[Loop, tuple[Scope, Halves]]:
        if layer.carried is None:
            raise LeftAlone(f"nothing comes in at {self._at(scope, layer)}")
        two = layer.program(scope, _names(scope, scope))
        one = layer.program(part, _names(scope, part))
        for equation in two.jaxpr.eqns:
            if equation.effects:
                line = where(equation) or UNKNOWN
                raise LeftAlone(f"`{equation.primitive.name}` at {line} has effects")
        given = one.jaxpr.invars, two.jaxpr.invars
        rows, parts = self.cut.rows, self.cut.pieces * self.whole.plan.mesh.batch_ways
        lies = lies_by_size(*given, rows, parts)
        halves = compare(one.jaxpr, two.jaxpr, lies, rows, inside=True, parts=parts)
        first = len(layer.context) + 1
        results = [halves.where(var) for var in one.jaxpr.outvars]
        if not all((*results, lies[first - 1])):
            raise LeftAlone(f"it hands on numbers that all rows share: {self._at(scope, layer)}")
        if any(lies[first:]):
            raise LeftAlone(f"the batch lies in its weights: {self._at(scope, layer)}")
        leaves = {
            str(n): self._leaf(two, var, self._spec(scope, var))
            for n, var in enumerate(layer.weights)
        }
        loop = Loop(
            cut=self.cut,
            turn=Turn(self.body(one, halves), 1, [var.aval.dtype for var in layer.weights]),
            weights=Weights(self.cut.replicas, leaves),
            num_layers=1,
            lies=lies,
            results=results,
            first=first,
        )
        return loop, (one, halves)

    def _spec(self, scope: Scope, var: Any) -> Spec:
        value = self.whole.analysis.value(scope, var)
        spec = spec_of(self.whole.analysis, self.whole.plan, value)
        if spec is None:
            raise LeftAlone(f"{value.path} comes in another shape")
        return spec

    @staticmethod
    def _at(scope: Scope, layer: UnrolledLayer) -> str:
        lines = (where(scope.jaxpr.eqns[position]) for position in layer.held)
        return next(filter(None, lines), UNKNOWN)

    @staticmethod
    def _leaf(program: Scope, var: Any, spec: Spec) -> StackedArray:
        """How one parameter comes and its gradient goes."""
        dtype = product_type(program.jaxpr, var)
        size = var.aval.size * jnp.dtype(dtype).itemsize
        return StackedArray(spec, str(dtype), reduces_late=size < SMALL_BYTES)


def _names(scope: Scope, other: Scope) -> dict[Any, Any]:
    """Variable of a program -> the same one of that program on another part of the batch."""
    found = dict(zip(scope.jaxpr.invars, other.jaxpr.invars, strict=True))
    for one, two in zip(scope.jaxpr.eqns, other.jaxpr.eqns, strict=True):
        found |= zip(one.outvars, two.outvars, strict=True)
    return found
