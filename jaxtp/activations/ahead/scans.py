"""Loops over layers in anybody's model, whose weights are then gathered one turn ahead.

A scan is such a loop if it slices parameters that the batch axes shard. It is written anew where
its body treats rows of the batch alone, which comparing it with itself on one replica's rows shows;
wherever its operands come from, and whatever runs behind it. Layers that stand in the program one
after the other are a chain, which is treated alike: `chains`. With tensor parallelism the body runs
on two halves of a replica's rows in turns, if the rows halve and a sum in it can be taken apart.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.activations.ahead.chains import Chain, ChainFinder
from jaxtp.activations.ahead.passes import is_float
from jaxtp.activations.ahead.product_types import product_type
from jaxtp.activations.ahead.scan_layer import Body, Turn
from jaxtp.activations.ahead.scan_loop import BatchCut, LeftAlone, Loop
from jaxtp.activations.ahead.specs import spec_of
from jaxtp.activations.ahead.weights import SMALL_BYTES, Replicas, StackedArray, Weights, other_axes
from jaxtp.activations.batch_parts import another, batch_of, traced_on_part
from jaxtp.activations.by_name import ActivePlan
from jaxtp.activations.half_batches import check_sums
from jaxtp.activations.half_placer import HalfPlacer
from jaxtp.activations.interleaved import HalvesInTurns
from jaxtp.activations.placer import Placer
from jaxtp.errors import NotInterleaved, join
from jaxtp.mesh.axes import Axis, Shards
from jaxtp.plan.specs import Spec
from jaxtp.rules.jaxpr import analyse_jaxpr
from jaxtp.rules.jaxpr.halves import Halves, compare_scan
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import checkpoint, inline, same_rank
from jaxtp.rules.jaxpr.rows import Lies, MixesBatch
from jaxtp.rules.jaxpr.walk import UNKNOWN, Kind, Scope, bare, where
from jaxtp.rules.roles import Role

Place = tuple[Scope, int]
"""An equation, by the scope that it stands in and its position."""


class AheadPlacer(Placer):
    """A placer that runs some scans with weights one turn ahead, and looks up in gathered tables.

    Left alone, XLA looks up in the shards of a table and exchanges what it finds, which is more as
    soon as a batch has many tokens, and the layout of the exchange makes it copy all that loops
    keep. A table from which less is taken than it holds stays in shards.
    """

    def __init__(
        self, whole: Placer, loops: Mapping[Place, Loop], chains: Mapping[Place, Chain]
    ) -> None:
        super().__init__(whole.analysis, whole.plan, whole.mesh)
        self._loops = loops
        self._chains = {
            (scope, position): (chain, position == first)
            for (scope, first), chain in chains.items()
            for position in chain.held
        }

    def step(
        self, scope: Scope, position: int, known: dict[Any, Any], gathered: dict[Any, Any]
    ) -> None:
        """Runs one equation; a chain where its first equation stands."""
        chain, is_first = self._chains.get((scope, position), (None, False))
        if chain is None:
            super().step(scope, position, known, gathered)
        elif is_first:
            chain(self, known)

    def _equation(
        self, scope: Scope, position: int, operands: list[Any], gathered: dict[Any, Any]
    ) -> list[Any]:
        if loop := self._loops.get((scope, position)):
            return loop(self, operands)
        equation = scope.jaxpr.eqns[position]
        if equation.primitive.name == "gather":
            operands = [self._table(scope, equation, operands[0]), *operands[1:]]
        return super()._equation(scope, position, operands, gathered)

    def _table(self, scope: Scope, lookup: Any, table: Any) -> Any:
        """A table on all replicas, if all replicas take as much of it; others as they are."""
        spec = spec_of(self.analysis, self.plan, self.analysis.value(scope, lookup.invars[0]))
        batch = self.plan.mesh.batch
        if spec is None or not any(axis in batch for axes in spec for axis in axes):
            return table
        # Both are of one type: elements compare as bytes do.
        if len(spec) != 2 or lookup.outvars[0].aval.size < lookup.invars[0].aval.size:
            return table
        held = self.constrain(table, [axes or None for axes in spec])
        whole = [tuple(a for a in axes if a not in batch) or None for axes in spec]
        return self.constrain(held, whole, even_whole=True)


def overlapped(
    whole: Placer,
    fn: Callable[..., Any],
    paths: Sequence[str],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> tuple[list[Any] | None, list[str]]:
    """The results of a function with the weights of its loops ahead, and what is to be said.

    There are no results if there are no such loops.

    Args:
        whole: Runs the function as it is.
        fn: Of the trees in `args`.
        paths: Of its parameters.
        args: Trees of parameters, then of inputs.
        keywords: What else it is called with.
    """
    try:
        finder = _found(whole, fn, paths, args, keywords)
    except NotInterleaved as error:
        return None, [str(error)]
    notes = [
        str(NotInterleaved(reason, fix='overlap="auto", or a model of jaxtp'))
        for reason in finder.left
    ]
    if others := finder.missed():
        axes = sorted({axis for path in others for axis in _batch_axes(whole, path)})
        what = f"weights are sharded over {join(axes)}, and no loop gathers them ahead"
        error = NotInterleaved(
            f"{what}: {join(others, 3)}",
            fix="a scan that slices them, or layers that hand on one array",
        )
        notes.append(str(error))
    notes += dict.fromkeys(finder.notes)
    if not finder.loops and not finder.chains:
        return None, notes
    placer = AheadPlacer(whole, finder.loops, finder.chains)
    results = placer.run(whole.analysis.scope, jax.tree.leaves(args))
    whole.left |= placer.left | finder.placer.left
    return results, notes


def _found(
    whole: Placer,
    fn: Callable[..., Any],
    paths: Sequence[str],
    args: tuple[Any, ...],
    keywords: Mapping[str, Any],
) -> "_Finder":
    """The loops of a function; arguments as for `overlapped`.

    Raises:
        NotInterleaved: TP073, if the function is not the same on a part of the batch.
    """
    mesh = whole.plan.mesh
    sharded, replicas = _sharded(whole, paths), mesh.batch_ways
    rows, lies = batch_of(whole, replicas)

    def search(pieces: int) -> _Finder:
        part_name = "one replica's part" if pieces == 1 else "half of one replica's part"
        try:
            part = traced_on_part(fn, args, lies, rows // (replicas * pieces))
        except Exception as error:  # what code of theirs raises, which takes a whole batch only
            raise another(error, keywords, rows, part_name) from error
        finder = _Finder(whole, _inside(whole, part, paths), sharded, rows, pieces)
        finder.search(whole.analysis.scope, finder.placer.analysis.scope)
        return finder

    if mesh.ways(mesh.tp) == 1:
        return search(1)
    if rows % (2 * replicas):
        why = f"{rows // replicas} rows on each replica are not divisible into two halves"
        fix = f"a multiple of {2 * replicas} rows"
        return search(1).noting(str(NotInterleaved(why, fix=fix)))
    try:
        finder = search(2)
    except NotInterleaved as error:  # half of one replica's rows are too few for code of theirs
        return search(1).noting(str(error))
    return finder.with_others(search(1)) if finder.in_vain else finder


def _inside(whole: Placer, part: Any, paths: Sequence[str]) -> HalfPlacer:
    """Runs equations inside of one replica."""
    mesh = whole.plan.mesh.without(Axis.that_shard(Shards.BATCH))
    plan = dataclasses.replace(whole.plan, mesh=mesh)
    return HalfPlacer(analyse_jaxpr(part, paths), plan, whole.mesh)


def shards_weights(whole: Placer, paths: Sequence[str]) -> bool:
    """Whether the batch axes shard parameters, so that there is something to gather."""
    return any(_batch_axes(whole, path) for path in paths)


def _batch_axes(whole: Placer, path: str) -> set[str]:
    mesh = whole.plan.mesh
    batch = {axis for axis in mesh.batch if mesh.ways((axis,)) > 1}
    return batch & {axis for axes in whole.plan[path].spec for axis in axes}


def _sharded(whole: Placer, paths: Sequence[str]) -> set[str]:
    """Paths of the parameters that the batch axes shard.

    Raises:
        NotInterleaved: TP073, if devices communicate along other axes.
    """
    if others := other_axes(whole.plan.mesh):
        raise NotInterleaved(f"the model communicates along {others}", fix='overlap="auto"')
    return {path for path in paths if _batch_axes(whole, path)}


@dataclasses.dataclass
class _Finder:
    """Goes through a function on the whole batch and on a part of it.

    Attributes:
        whole: Runs the first.
        placer: Runs the second.
        sharded: Paths of parameters that the batch axes shard.
        rows: Of the whole batch.
        pieces: How many such parts one replica has.
        loops: What was found.
        chains: Layers without a loop that were found, by the first of their equations.
        left: Why others were left as they are, by line.
        notes: What else is to be said.
        tables: Paths of the parameters that something is looked up in.
        met: Paths of the parameters that loops slice, or that stand in loops that were left.
        in_vain: The loops that have nothing that two pieces would hide.
    """

    whole: Placer
    placer: HalfPlacer
    sharded: set[str]
    rows: int
    pieces: int
    loops: dict[Place, Loop] = dataclasses.field(default_factory=dict)
    chains: dict[Place, Chain] = dataclasses.field(default_factory=dict)
    left: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    tables: set[str] = dataclasses.field(default_factory=set)
    met: set[str] = dataclasses.field(default_factory=set)
    in_vain: set[Place] = dataclasses.field(default_factory=set)

    def noting(self, note: str) -> "_Finder":
        """Itself, with more to be said."""
        self.notes.append(note)
        return self

    def with_others(self, one: "_Finder") -> "_Finder":
        """Itself, with loops that gain nothing from two pieces as `one` has them."""
        found = {place: one.loops[place] for place in self.in_vain if place in one.loops}
        self.loops |= found
        self.chains |= {p: one.chains[p] for p in self.in_vain if p in one.chains}
        one.placer.left = self.placer.left
        return self

    def missed(self) -> list[str]:
        """Paths of sharded matrices that no loop gathers; tables and heads stand in none."""
        plan = self.whole.plan
        found = [
            path
            for path in sorted(self.sharded - self.met - self.tables)
            if plan[path].role not in (Role.VOCAB, Role.POSITION)
            and sum(size > 1 for size in plan[path].shape) > 1
        ]
        return found or ([] if self.met else sorted(self.sharded))

    def search(self, scope: Scope, part: Scope) -> None:
        """Finds the loops of a program, and of those that it calls."""
        if len(scope.jaxpr.eqns) != len(part.jaxpr.eqns):
            raise NotInterleaved(
                "the function is another program on one replica's part of the batch",
                fix="sizes that follow from the arguments",
            )
        taken = self._unrolled(scope, part)
        for position, equation in enumerate(scope.jaxpr.eqns):
            row = PRIMITIVES.get(equation.primitive.name)
            if position in taken:
                continue
            if equation.primitive.name == "gather":
                table = self.whole.analysis.value(scope, equation.invars[0])
                self.tables.add(table.path)
            if position not in scope.calls or position not in part.calls:
                continue
            if equation.primitive.name == "scan":
                self._scan(scope, part, position)
            elif row and row.again in (inline, checkpoint):
                self.search(scope.calls[position][0], part.calls[position][0])

    def _unrolled(self, scope: Scope, part: Scope) -> set[int]:
        """Finds layers without a loop; gives the positions of their equations."""
        closed = {position for position in scope.calls if self._has_loop(scope, position)}
        cut = BatchCut(self._replicas(), self.rows, self.pieces)
        finder = ChainFinder(self.whole, cut, partial(self._body, behind=True), self.sharded)
        chains, taken = finder.search(scope, part, closed)
        self.left += finder.left
        self.met |= finder.met & self.sharded
        for chain in chains:
            place = scope, chain.first
            self.chains[place] = chain
            if self.pieces == 2:
                self._check_halves(place, chain.programs)
        return taken

    def _has_loop(self, scope: Scope, position: int) -> bool:
        """Whether an equation is a scan that slices what is to be gathered, or holds one."""
        equation = scope.jaxpr.eqns[position]
        if equation.primitive.name == "scan":
            return bool(self._slices(scope, equation))
        calls = scope.calls[position]
        return any(self._has_loop(inner, n) for inner in calls for n in inner.calls)

    def _slices(self, scope: Scope, scan: Any) -> set[str]:
        """Paths of the parameters that a scan slices and of which it has shards."""
        values = [self.whole.analysis.value(scope, var) for var in scan.invars]
        pairs = list(zip(values, scan.invars, strict=True))
        rows = {v.path for v, var in pairs[_first_row(scan) :] if is_float(var.aval)}
        return rows & self.sharded

    def _scan(self, scope: Scope, part: Scope, position: int) -> None:
        two, one = scope.jaxpr.eqns[position], part.jaxpr.eqns[position]
        values = [self.whole.analysis.value(scope, var) for var in two.invars]
        held = {value.path for value in values if value.path in self.sharded}
        if not (sliced := self._slices(scope, two)):  # nothing of the next turn's is to be gathered
            return
        line = where(two) or UNKNOWN
        try:
            mesh = self.whole.plan.mesh
            parts = mesh.batch_ways * self.pieces
            found = compare_scan(one, two, (part.jaxpr, scope.jaxpr), self.rows, parts)
            inner = part.calls[position][0]
            self.loops[scope, position] = self._loop(found, two, one, inner, values)
            if self.pieces == 2:
                self._check_halves((scope, position), [(inner, found.calls[0])])
            self.met |= sliced
            return
        except MixesBatch as error:
            self.left.append(f"weights are gathered in their own turn: rows meet in {error}")
        except LeftAlone as error:
            self.left.append(f"weights are gathered in their own turn of `scan` at {line}: {error}")
        self.met |= held

    def _loop(self, found: Halves, two: Any, one: Any, inner: Scope, values: Sequence[Any]) -> Loop:
        """A scan whose body treats rows alone."""
        body_two: Any = bare(two.params["jaxpr"])
        first = _first_row(two)
        num_carry = same_rank(two.outvars, body_two.outvars).count(True)
        cut = BatchCut(self._replicas(), self.rows, self.pieces)
        lies = [found.where(var) for var in one.invars]
        body = found.calls[0]
        results = [body.where(var) for var in body.half.outvars]
        _check(two, lies, results, first, num_carry)
        rows = two.invars[first:]
        leaves = {
            str(n): self._leaf(body_two, body_two.invars[first + n], values[first + n], var)
            for n, var in enumerate(rows)
            if is_float(var.aval)
        }
        turn = Turn(self._body(inner, body), num_carry, [var.aval.dtype for var in rows])
        return Loop(
            cut=cut,
            turn=turn,
            weights=Weights(cut.replicas, leaves),
            num_layers=two.params["length"],
            lies=lies,
            results=results,
            first=first,
        )

    def _replicas(self) -> Replicas:
        whole = self.whole
        return Replicas(ActivePlan(whole.plan.mesh, sequence_parallel=False, mesh=whole.mesh))

    def _body(self, inner: Scope, halves: Halves, *, behind: bool = False) -> Body:
        """A scan's body on one replica, or on both halves of its rows in turns."""
        placer = self.placer
        if self.pieces == 2:
            turns = HalvesInTurns(placer, behind=behind)
            return lambda given: [tuple(one) for one in turns.body(inner, halves, *given)]
        return lambda given: [(one,) for one in placer.run(inner, [one for (one,) in given])]

    def _check_halves(self, place: Place, programs: Sequence[tuple[Scope, Halves]]) -> None:
        """Says which sums of a loop its halves do not hide."""
        try:
            self.notes += check_sums(self.placer, programs)
        except NotInterleaved as error:
            self.in_vain.add(place)
            self.notes.append(str(error))

    def _leaf(self, jaxpr: Any, var: Any, value: Any, outer: Any) -> StackedArray:
        """How one row with gradients is sharded."""
        dtype = product_type(jaxpr, var)
        size = var.aval.size * jnp.dtype(dtype).itemsize
        spec = self._spec(value, len(outer.aval.shape))
        return StackedArray(spec, str(dtype), reduces_late=size < SMALL_BYTES)

    def _spec(self, value: Any, ndim: int) -> Spec:
        """Mesh axes of each dim of a row of a parameter that a scan slices."""
        analysis = self.whole.analysis
        if not value.path:
            if value.kind is Kind.CONSTANT:
                return ((),) * (ndim - 1)
            raise LeftAlone("what it slices is computed from parameters or inputs")
        spec = spec_of(analysis, self.whole.plan, value)
        if spec is None:
            raise LeftAlone(f"{value.path} comes in another shape")
        if spec[0]:
            raise LeftAlone(f"the layers of {value.path} are sharded over {join(spec[0])}")
        return spec[1:]


def _first_row(scan: Any) -> int:
    """The number of its first operand that it slices."""
    body: Any = bare(scan.params["jaxpr"])
    return len(scan.invars) - same_rank(scan.invars, body.invars).count(False)


def _check(
    scan: Any,
    lies: Sequence[Lies | None],
    results: Sequence[Lies | None],
    first: int,
    num_carry: int,
) -> None:
    """Refuses scans that are not written anew.

    Raises:
        LeftAlone: Always with the reason.
    """
    carried = [var.aval for var in scan.outvars[:num_carry]]
    pairs = list(zip(carried, results[:num_carry], strict=True))
    if scan.params["reverse"]:
        raise LeftAlone("it runs backward")
    if any(lies[first:]):
        raise LeftAlone("it slices what has rows of the batch")
    if not all(results[num_carry:]):
        raise LeftAlone("it stacks what has no rows of the batch")
    if not any(results[:num_carry]):
        raise LeftAlone("it carries no rows of the batch")
    if any(is_float(aval) and not where for aval, where in pairs):
        raise LeftAlone("it carries numbers that all rows share")
    if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in carried):
        raise LeftAlone("it carries random keys")
