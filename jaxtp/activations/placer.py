"""Runs a traced model again with sharding constraints: the equations of `by_dataflow`."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.source_info_util import user_context
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.activations import lookups, windows
from jaxtp.activations.exchanged import Exchange
from jaxtp.activations.fused_attention import FusedAttention
from jaxtp.activations.fused_products import (
    Pieces,
    by_result,
    by_weight,
    depthwise,
    over_pieces,
    product_of_piece,
    value_of,
)
from jaxtp.activations.grouped_kernels import CONVOLUTION, convolve
from jaxtp.activations.left_alone import PRODUCTS, lost, matters, named, stays_manual
from jaxtp.activations.sequences import GATHERED, Meeting, Sequences, gather_tokens
from jaxtp.activations.shared_products import convolution_at, product_at, shared, widest
from jaxtp.activations.token_gathers import gathers_of_tokens
from jaxtp.plan.decisions import Plan
from jaxtp.rules.inputs import leads
from jaxtp.rules.jaxpr import Analysis, DimClass
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import Call, bind, checkpoint, cond, inline, read, scan
from jaxtp.rules.jaxpr.walk import UNKNOWN, Kind, Scope, Value, where

Entry = Any
"""One entry of a PartitionSpec."""

FREE = PartitionSpec.UNCONSTRAINED


class Placer:
    """Runs a jaxpr with constraints; holds what all of its equations need."""

    def __init__(self, analysis: Analysis, plan: Plan, mesh: Mesh | AbstractMesh) -> None:
        self.analysis, self.plan, self.mesh = analysis, plan, mesh
        self._leads = leads(analysis, plan)
        self._shares_batch = plan.mesh.batch_ways > 1
        self._widest = widest(analysis, plan, self._leads)
        self._classes: dict[Value, tuple[DimClass, ...]] = {}
        self._exchange = Exchange(analysis, plan, self.axes, self.constrain)
        self._sequences = Sequences(analysis, plan, mesh)
        self.scores = self._sequences.attentions.scores
        self._fused = FusedAttention(self._sequences, plan, mesh)
        self.left = lost(analysis, self.axes) | gathers_of_tokens(analysis, self._sequences)

    def inputs(self, arrays: Sequence[Any]) -> list[Any]:
        """What the function takes beside parameters, with its tokens sharded over cp."""
        values = self.analysis.inputs
        return [
            self.constrain(x, self.held(value)) if self.has_tokens(value) else x
            for x, value in zip(arrays, values, strict=True)
        ]

    def run(self, scope: Scope, args: Sequence[Any], *, in_pieces: bool = False) -> list[Any]:
        """The outputs of one jaxpr for these inputs; pieces are put together unless wanted."""
        jaxpr = scope.jaxpr
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, scope.consts, strict=True))
        known |= dict(zip(jaxpr.invars, args, strict=True))
        gathered: dict[Any, Any] = {}

        for position in range(len(jaxpr.eqns)):
            self.step(scope, position, known, gathered)
        if in_pieces:
            return [read(v, known) for v in jaxpr.outvars]
        return [value_of(var, known) for var in jaxpr.outvars]

    def step(
        self, scope: Scope, position: int, known: dict[Any, Any], gathered: dict[Any, Any]
    ) -> None:
        """Runs one equation on what is known so far, and adds its results."""
        equation = scope.jaxpr.eqns[position]
        raw = [known.get(var) for var in equation.invars if not isinstance(var, Literal)]
        results = None
        if any(isinstance(operand, Pieces) for operand in raw):
            results = self._on_pieces(scope, position, known)
        if results is None:
            operands = [value_of(var, known) for var in equation.invars]
            # Reports name the user's line, not this one.
            with (
                user_context(equation.source_info.traceback),
                self._sequences.running(scope, position, known),
                named(self.analysis.unchosen.get(id(equation))),
            ):
                results = self._equation(scope, position, operands, gathered)
        self.put(scope, equation, results, known)

    def put(
        self, scope: Scope, equation: Any, results: Sequence[Any], known: dict[Any, Any]
    ) -> None:
        """Adds an equation's results to what is known, constrained where they matter."""
        for var, result in zip(equation.outvars, results, strict=True):
            value = scope.values.get(var)
            placed = self._exchange.result(scope, equation, var, result)
            if placed is None and value is not None:
                placed = self._place(scope, equation, value, result)
            known[var] = result if placed is None else placed

    def _equation(
        self, scope: Scope, position: int, operands: list[Any], gathered: dict[Any, Any]
    ) -> list[Any]:
        """The results of one equation."""
        equation = scope.jaxpr.eqns[position]
        name = equation.primitive.name
        calls = scope.calls.get(position, [])
        kernel = self._fused.call_in(scope, position)
        if kernel is not None:
            return self._fused.run(equation, kernel, operands)
        if calls and self._enters_call(equation, calls):
            return self._call(scope, equation, calls, operands)
        operands = self._exchange.operands(scope, equation, operands)
        if name in PRODUCTS and self.plan.sequence_parallel:
            operands = self._gather(scope, equation, operands, gathered)
        meeting = self._sequences.meeting(scope, equation)
        if meeting is not None:
            return [self._meet(scope, equation, operands, meeting)]
        if (apart := self._apart(scope, equation)) is not None:
            return apart(equation, operands)
        if name in PRODUCTS:
            result = self._product(scope, equation, operands)
            if result is not None:
                return [result]
        if name == "gather" and self._looks_up_one(scope, equation):
            return [lookups.twice(equation, *operands)]
        return bind(equation, operands)

    def _apart(self, scope: Scope, equation: Any) -> Callable[[Any, Sequence[Any]], Any] | None:
        """How windows and grouped convolutions run where XLA would lose gradients, as `bind`."""
        params, rows = equation.params, ()
        if equation.primitive.name == CONVOLUTION and params["feature_group_count"] > 1:
            value = self.analysis.value(scope, equation.invars[0])
            rows = self._batch_axes(value.dims[params["dimension_numbers"].lhs_spec[0]])
        window = windows.window_of(scope, equation, self._sequences)
        if window is not None:
            axis, split = self._sequences.axis, self._split
            return functools.partial(window.run, axis=axis, rows=rows, mesh=self.mesh, place=split)
        return functools.partial(convolve, axes=rows, mesh=self.mesh) if rows else None

    def _looks_up_one(self, scope: Scope, equation: Any) -> bool:
        """Whether each device takes a single row of a table that is sharded along its rows."""
        table, indices = (
            scope.values.get(v) for v in equation.invars if not isinstance(v, Literal)
        )
        rows = lookups.rows_of(equation)
        if table is None or indices is None or not table.shape or not rows:
            return False
        spread = any(self._batch_axes(dim) for dim in indices.dims)
        ways = self.plan.mesh.batch_ways if spread else 1
        return rows == ways and bool(self.axes(self.dims(table)[0]))

    def _enters_call(self, equation: Any, calls: Sequence[Scope]) -> bool:
        """Whether an equation that holds programs is built anew around constrained ones."""
        name = equation.primitive.name
        row = PRIMITIVES.get(name)
        if row is not None and row.again in (inline, checkpoint, scan, cond):
            return True
        if not any(map(matters, calls)):
            return False
        reason = "" if row and row.again else "nothing is known about how to run it again"
        if name == "shard_map":
            reason = stays_manual(equation, self.plan)
        if reason:
            self.left[id(equation)] = f"`{name}` at {where(equation) or UNKNOWN}: {reason}"
        return not reason

    def _call(
        self, scope: Scope, equation: Any, calls: list[Scope], operands: list[Any]
    ) -> list[Any]:
        again = PRIMITIVES[equation.primitive.name].again
        assert again is not None
        recomputes = self._sequences.recomputing if again is checkpoint else contextlib.nullcontext
        call = Call(
            equation,
            [functools.partial(self._body, inner) for inner in calls],
            [self.analysis.value(scope, var) for var in equation.invars],
            [self.analysis.value(scope, var) for var in equation.outvars],
            self._run_rule,
        )
        with recomputes():
            return again(call, operands)

    def _body(self, scope: Scope, *args: Any) -> list[Any]:
        return self.run(scope, args)

    def _run_rule(
        self, fn: Callable[..., Any], values: Sequence[Value], args: Sequence[Any]
    ) -> tuple[Any, list[Value]]:
        """As in `Call.run`."""
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        scope, results = self.analysis.read(closed, values)
        leaves = self.run(scope, list(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves), results

    def _on_pieces(self, scope: Scope, position: int, known: Mapping[Any, Any]) -> list[Any] | None:
        """The results of an equation on pieces that were computed apart, or None."""
        equation = scope.jaxpr.eqns[position]
        value = scope.values.get(equation.outvars[0])
        operands = [read(v, known) for v in equation.invars]
        if calls := scope.calls.get(position):
            row = PRIMITIVES.get(equation.primitive.name)
            inlined = row is not None and row.again is inline
            return self.run(calls[0], operands, in_pieces=True) if inlined else None
        if equation.primitive.name == CONVOLUTION:
            convolved = depthwise(equation, operands, self._apart(scope, equation) or bind)
            return None if convolved is None else [convolved]
        elementwise = value is not None and value.elementwise
        return over_pieces(equation, operands, self._split, elementwise=elementwise)

    def _product(self, scope: Scope, equation: Any, operands: Sequence[Any]) -> Any:
        """The product by a shared or a fused weight, or a piece of one; None for any other."""
        groups = operands[2] if len(operands) > 2 else None
        for index, var in enumerate(equation.invars[:2]):
            value = None if isinstance(var, Literal) else scope.values.get(var)
            if value is None or value.kind is not Kind.PARAMETER or not value.path:
                continue
            if groups is not None and index == 0:
                continue  # groups stack the right side
            x, w = operands[1 - index], operands[index]
            ranks = [len(v.aval.shape) for v in equation.invars[:2]]
            for dim, c in enumerate(self.dims(value)):
                wide = self._widest.get(c.group, ())
                if not wide:
                    product = None
                elif equation.primitive.name == CONVOLUTION:
                    product = convolution_at(equation.params, index, dim)
                else:
                    product = product_at(equation.params, ranks, index, dim, groups)
                if product is None:
                    continue
                axes = self.plan.axes_for(c.units)
                if not axes:
                    continue
                finding = self.analysis.findings[value.path]
                if c.pieces and self.plan[value.path].dim_on(self.plan.mesh.tp) == finding.dim:
                    around = self._way_around(scope, equation, product.out, axes)
                    return by_result(product, self._split, c.pieces, axes, around, x, w)
                if c.pieces:
                    ways = {cut: () if cut in c.replicated else axes for cut in c.pieces}
                    return by_weight(product, self._split, ways, x, w)
                if finding.pieces:
                    return product_of_piece(product, self._split, axes, x, w)
                rest = wide[len(axes) :]
                plain = groups is None and not product.convolves
                if rest and plain and self.plan.mesh.ways(axes) == c.units[0]:
                    copies = self.plan.mesh.ways(rest)
                    return shared(product, self._split, c.units[0], copies, axes, rest, x, w)
        return None

    def _way_around(
        self, scope: Scope, equation: Any, fused: int, axes: tuple[str, ...]
    ) -> dict[int, tuple[str, ...]]:
        """The first dim of a result besides the fused one that tensor axes can split meanwhile."""
        value = scope.values[equation.outvars[0]]
        for dim, (size, atoms) in enumerate(zip(value.shape, value.dims, strict=True)):
            around = (*self._batch_axes(atoms), *axes)
            if dim != fused and size % self.plan.mesh.ways(around) == 0:
                return {dim: around}
        return {}

    def _split(self, x: Any, dims: Mapping[int, tuple[str, ...]]) -> Any:
        """`x` with some dims sharded over tensor axes or replicated, the others as XLA likes."""
        entries = [dims[d] or None if d in dims else FREE for d in range(x.ndim)]
        return self.constrain(x, entries, even_whole=() in dims.values())

    def _meet(self, scope: Scope, equation: Any, operands: Sequence[Any], meeting: Meeting) -> Any:
        """A product of tokens with tokens: one side gathered, the result sharded as the other."""

        def gather(x: Any, value: Value, dim: int, widens: bool) -> Any:
            split = self.held(value, dim)
            whole = [None if d == dim else entry for d, entry in enumerate(split)]
            shard = functools.partial(self.constrain, entries=split)
            replicate = functools.partial(self.constrain, entries=whole, even_whole=True)
            if not widens:
                return gather_tokens(shard, replicate, x)
            with jax.named_scope(GATHERED):
                return replicate(shard(x))

        entries = self.held(scope.values[equation.outvars[0]], meeting.result)
        place = functools.partial(self.constrain, entries=entries)
        product = self._sequences.product(equation, operands, meeting, gather, place)
        axes = [axis for entry in entries if isinstance(entry, tuple) for axis in entry]
        scored = scope if meeting.is_scores else None
        return self._sequences.result(product, scored, self.plan.mesh.ways(axes))

    def has_tokens(self, value: Value) -> bool:
        """Whether devices along cp share a value's tokens."""
        return any(map(self._sequences.axes_of, value.dims))

    def held(self, value: Value, tokens: int | None = None) -> list[Entry]:
        """Sharded along the batch, the tokens and region dims; the rest as XLA likes.

        Args:
            value: What is constrained.
            tokens: The dim of tokens that is sharded, if there are several; by default the first.
        """
        entries: list[Entry] = []
        used = set[str]()
        for number, (dim, c) in enumerate(zip(value.dims, self.dims(value), strict=True)):
            shared = self._sequences.axes_of(dim)
            axes = self.axes(c) or self._batch_axes(dim)
            if shared:
                axes = shared if tokens in (None, number) else ()
            known = () if used & set(axes) else axes
            used.update(known)
            entries.append(known or (None if shared else FREE))
        return entries

    def _place(self, scope: Scope, equation: Any, value: Value, result: Any) -> Any:
        """An equation's result, constrained if it is one of the values that matter."""
        if value.kind is not Kind.ACTIVATION or not value.shape or isinstance(result, Pieces):
            return result
        if self._sequences.meeting(scope, equation) is not None:
            return result  # placed by `_meet`
        if value.skip is not None:
            return self.constrain(result, self.stream(value))
        if equation.primitive.name in PRODUCTS:
            classes = self.dims(value)
            is_region = any(self.axes(c) for c in classes) and not self._by_whole(scope, equation)
            leaves_region = value.product is not None and self._sums_region(value)
            if is_region:
                return self.constrain(result, self._region(value))
            if leaves_region:
                return self.constrain(result, self.stream(value))
        is_row = equation.primitive.name in ("gather", *PRODUCTS)
        if is_row and self.has_tokens(value):
            return self.constrain(result, self.held(value))
        return result

    def _by_whole(self, scope: Scope, equation: Any) -> bool:
        """Whether a product's weight is replicated, as a router's is: then the result is, too."""
        values = [scope.values.get(v) for v in equation.invars if not isinstance(v, Literal)]
        weights = [v.path for v in values if v and v.kind is Kind.PARAMETER and v.path]
        tensor = self.plan.mesh.tp
        return any(self.plan[path].dim_on(tensor) is None for path in weights)

    def _gather(
        self, scope: Scope, equation: Any, operands: list[Any], gathered: dict[Any, Any]
    ) -> list[Any]:
        """Operands of a product that enters a region, gathered along the sequence.

        Constrained twice: first split, as the norm that made it leaves it, so that XLA gathers its
        final type and not what the norm computed in float32.
        """
        result = scope.values.get(equation.outvars[0])
        if result is None or result.product is None or not self.enters_region(result):
            return operands
        replaced: list[Any] = []
        for var, operand in zip(equation.invars, operands, strict=True):
            value = None if isinstance(var, Literal) else scope.values.get(var)
            if value is not None and value.kind is Kind.ACTIVATION and self.on_stream(value):
                if var not in gathered:
                    split = self.constrain(operand, self.stream(value))
                    gathered[var] = self.constrain(split, self._region(value))
                operand = gathered[var]
            replaced.append(operand)
        return replaced

    def dims(self, value: Value) -> tuple[DimClass, ...]:
        """What each dim of a value is."""
        if value not in self._classes:
            self._classes[value] = self.analysis.dim_classes(value)
        return self._classes[value]

    def enters_region(self, value: Value) -> bool:
        """Whether a product's result lies in a region that the plan shards, all of it or some."""
        return any(self.axes(c) or (c.pieces and c.group in self._leads) for c in self.dims(value))

    def on_stream(self, value: Value) -> bool:
        """Whether a value has the features of the residual stream."""
        return any(c.kind == "feature" for c in self.dims(value))

    def _sums_region(self, value: Value) -> bool:
        """Whether the product behind a value sums over a dim that the plan splits."""
        assert value.product is not None
        return any(self.axes(self.analysis.dim_class(dim)) for dim in value.product.summed)

    def axes(self, dim: DimClass) -> tuple[str, ...]:
        """Tensor axes that split a dim, as the plan splits the parameters of its group."""
        lead = self._leads.get(dim.group)
        if lead is None or dim.pieces or dim.classes[:1] != lead:
            return ()
        return self.plan.axes_for(dim.units)

    def _region(self, value: Value) -> list[Entry]:
        """Sharded along the batch and along region dims, replicated along the sequence."""
        entries: list[Entry] = []
        used = False
        tokens = self._sequences.axes
        for dim, c in zip(value.dims, self.dims(value), strict=True):
            axes = () if used else self.axes(c)
            used = used or bool(axes)
            shared = () if axes else self._sequences.axes_of(dim) and tokens
            tokens = () if shared else tokens
            known = axes or shared or self._batch_axes(dim)
            entries.append(known or (None if c.kind in ("position", "feature") else FREE))
        return entries

    def stream(self, value: Value) -> list[Entry]:
        """Split along the batch, and under sequence parallelism along the sequence."""
        entries: list[Entry] = []
        free = (*self._sequences.axes, *(self.plan.mesh.tp if self.plan.sequence_parallel else ()))
        positions = [
            dim
            for dim, c in zip(value.dims, self.dims(value), strict=True)
            if c.kind == "position" and dim
        ]
        # Where no axis shards the batch either, the sequence is what is no row of it; an array of
        # one position dim, such as (tokens, features), has no other.
        sequences = [dim for dim in positions if not self.analysis.is_batch(dim)]
        if not sequences and not self._shares_batch and not self._sequences.axes:
            sequences = positions
        for dim in value.dims:
            is_sequence = any(dim is s for s in sequences)
            entries.append(self._batch_axes(dim) or (free if is_sequence and free else None))
            free = () if is_sequence else free
        return entries

    def _batch_axes(self, dim: Any) -> tuple[str, ...]:
        return self.plan.mesh.batch if self._shares_batch and self.analysis.is_batch(dim) else ()

    def constrain(self, x: Any, entries: Sequence[Entry], *, even_whole: bool = False) -> Any:
        """`x` with a constraint if it splits; a dim that does not divide is left to XLA."""
        fitted = [
            FREE if isinstance(e, tuple) and size % self.plan.mesh.ways(e) else e
            for e, size in zip(entries, x.shape, strict=True)
        ]
        splits = any(isinstance(e, tuple) and self.plan.mesh.ways(e) > 1 for e in fitted)
        if not splits and not even_whole:
            return x
        mesh = self.mesh
        here = jax.sharding.get_abstract_mesh()
        if here.manual_axes:
            # Inside a `shard_map`: arrays are already local along the axes that it is manual over.
            mesh, taken = here, set(here.manual_axes)
            fitted = [
                tuple(a for a in e if a not in taken) or FREE if isinstance(e, tuple) else e
                for e in fitted
            ]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*fitted)))
