"""Anybody's model on two halves of the batch, as far as rows of the batch are treated alone."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Literal

from jaxtp.activations.interleaved import Turns, half_of, whole_of
from jaxtp.activations.left_alone import PRODUCTS, matters
from jaxtp.activations.placer import FREE, Placer
from jaxtp.activations.sums_apart import Product
from jaxtp.errors import JaxtpWarning, NotInterleaved, join
from jaxtp.mesh.axes import Axis
from jaxtp.rules.jaxpr import analyse_jaxpr
from jaxtp.rules.jaxpr.halves import Halves, Lies, MixesBatch, compare
from jaxtp.rules.jaxpr.walk import Kind, Scope


class HalfPlacer(Placer):
    """A placer that can take the sums of row products apart."""

    def apart(self, scope: Scope, equation: Any) -> Product | None:
        """The product of an equation, if it enters or leaves a region by one evenly split dim."""
        value = scope.values.get(equation.outvars[0])
        if equation.primitive.name != "dot_general" or value is None or value.product is None:
            return None
        params, tensor = equation.params, self.plan.mesh.tp
        ways = self.plan.mesh.ways(tensor)
        sides = [None if isinstance(v, Literal) else scope.values.get(v) for v in equation.invars]
        weights = [n for n, v in enumerate(sides) if v and v.kind is Kind.PARAMETER and v.path]
        if len(weights) != 1 or any(params["dimension_numbers"][1]) or params.get("out_sharding"):
            return None
        (weight,) = weights
        w, x = sides[weight], sides[1 - weight]
        if w is None or x is None or self.plan[w.path].dim_on(tensor) is None:
            return None
        classes = self.dims(w)
        split = [d for d, c in enumerate(classes) if self.axes(c)]
        if len(split) != 1 or self.plan.mesh.ways(self.axes(classes[split[0]])) != ways:
            return None
        if w.shape[split[0]] % ways or self.analysis.findings[w.path].pieces:
            return None
        product = Product(params, weight, split[0], ways)
        x_split = [d for d, c in enumerate(self.dims(x)) if self.axes(c)]
        fits = bool(x_split) if product.is_row else self.on_stream(x) and not x_split
        return product if fits else None

    def enters(self, scope: Scope, equation: Any) -> bool:
        """Whether an equation is a product that enters a region, in one piece or several."""
        value = scope.values.get(equation.outvars[0])
        if equation.primitive.name not in PRODUCTS or value is None or value.product is None:
            return False
        return self.enters_region(value)

    def place_parts(self, w: Any, dim: int) -> Any:
        """An array whose dim is the devices."""
        entries = [self.plan.mesh.tp if d == dim else FREE for d in range(w.ndim)]
        return self.constrain(w, entries)

    def copies(self, scope: Scope, var: Any, x: Any) -> Any:
        """An entry of an activation for each device, (W, ...); nothing moves."""
        tensor = self.plan.mesh.tp
        x_W = jax.numpy.broadcast_to(x[None], (self.plan.mesh.ways(tensor), *x.shape))
        return self.constrain(x_W, [tensor, *self.stream(scope.values[var])])

    def total(self, scope: Scope, equation: Any, parts: Any) -> Any:
        """The sum over the devices, in its own type: `jnp.sum` would add and send float32."""
        del scope, equation
        return jax.lax.reduce_sum(parts, (0,))


def on_halves(
    whole: Placer,
    fn: Callable[..., Any],
    closed: Any,
    paths: Sequence[str],
    args: tuple[Any, ...],
) -> list[Any] | None:
    """The results of a function whose halves of the batch take turns; None if they cannot.

    Args:
        whole: Runs the function on the whole batch.
        fn: `(params, *inputs)`.
        closed: Its jaxpr.
        paths: Of its parameters.
        args: Parameters and inputs.
    """
    if whole.plan.mesh.ways(whole.plan.mesh.tp) == 1:
        return None  # nothing to hide
    try:
        _refuse_shards(whole, paths)
        rows, lies = _batch(whole)
        half, halves = _halves(whole, fn, closed, args, rows, lies)
        _check(halves, whole.analysis.scope)
    except NotInterleaved as error:
        warnings.warn(str(error), JaxtpWarning, stacklevel=4)
        return None
    analysis = analyse_jaxpr(half, paths)
    placer = HalfPlacer(analysis, whole.plan, whole.mesh)
    flat = jax.tree.leaves(args)
    pairs = [
        tuple(_spread(whole, half_of(x, n), 0) for n in (0, 1)) if where else (x, x)
        for x, where in zip(flat, lies, strict=True)
    ]
    _, computed = Turns(placer).both(analysis.scope, halves, pairs)
    whole.left |= placer.left
    return _rest(whole, halves, flat, computed)


def _refuse_shards(whole: Placer, paths: Sequence[str]) -> None:
    """Each half would gather the weights that the batch axes shard, and the keys of cp."""
    mesh = whole.plan.mesh
    if mesh.size_of(Axis.CP) > 1:
        raise NotInterleaved(
            "devices along cp share every sequence",
            where=mesh.name_of(Axis.CP),
            fix='overlap="auto"',
        )
    batch = {axis for axis in mesh.batch if mesh.ways((axis,)) > 1}
    for path in paths:
        if found := batch & {axis for axes in whole.plan[path].spec for axis in axes}:
            raise NotInterleaved(
                f"weights are sharded over {join(sorted(found))}, and each half would gather them",
                where=path,
                fix="dp in the place of fsdp, or a model of jaxtp",
            )


def _batch(whole: Placer) -> tuple[int, list[Lies | None]]:
    """Rows of the batch, and where it lies in parameters and inputs."""
    plan, analysis = whole.plan, whole.analysis
    if plan.sequence_parallel:
        raise NotInterleaved(
            "sequence parallelism shards the residual stream", fix="one of the two, not both"
        )
    inputs = [(v.shape, [analysis.is_batch(dim) for dim in v.dims]) for v in analysis.inputs]
    rows = next((shape[0] for shape, found in inputs if found[:1] == [True]), 0)
    replicas = plan.mesh.ways(plan.mesh.batch)
    if not rows or rows % (2 * replicas):
        raise NotInterleaved(
            f"{rows} sequences on {replicas} replicas do not make two equal halves",
            fix=f"a batch that is a multiple of {2 * replicas}",
        )
    if any(any(found[1:]) or (found[:1] == [True] and shape[0] != rows) for shape, found in inputs):
        raise NotInterleaved("the batch does not lead in every input", fix="inputs (batch, ...)")
    held = [Lies(0) if found[:1] == [True] else None for _, found in inputs]
    return rows, [None] * analysis.num_params + held


def _halves(
    whole: Placer,
    fn: Callable[..., Any],
    closed: Any,
    args: tuple[Any, ...],
    rows: int,
    lies: Sequence[Lies | None],
) -> tuple[Any, Halves]:
    """The jaxpr on half of the batch, and what of it can run there."""
    flat, tree = jax.tree.flatten(args)
    smaller = [
        jax.ShapeDtypeStruct((rows // 2, *x.shape[1:]), x.dtype) if where else x
        for x, where in zip(flat, lies, strict=True)
    ]
    try:
        half = jax.make_jaxpr(fn)(*jax.tree.unflatten(tree, smaller))
        return half, compare(half, closed, lies, rows)
    except (TypeError, ValueError, MixesBatch) as error:
        raise NotInterleaved(
            f"the function is not the same on half of the batch: {str(error).splitlines()[0]}",
            fix="sizes that follow from the arguments",
        ) from error


def _check(halves: Halves, scope: Scope) -> None:
    """Says which products stay behind; refuses where no product is left.

    Raises:
        NotInterleaved: TP073, if no product with the model's weights runs on halves.
    """
    behind = {n for n in range(len(scope.jaxpr.eqns)) if _multiplies(scope, n)}
    if not behind & set(halves.mixing):
        return
    reasons = list(dict.fromkeys(filter(None, halves.mixing.values())))
    error = NotInterleaved(
        f"rows of the batch meet in {join(reasons, 3)}",
        fix="what follows runs on all of the batch",
    )
    if behind <= set(halves.mixing):
        raise error
    warnings.warn(str(error), JaxtpWarning, stacklevel=5)


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
        known[var] = whole_of(pair, halves.where(half), functools.partial(_spread, whole))

    gathered: dict[Any, Any] = {}
    for position in sorted(halves.mixing):
        for var in scope.jaxpr.eqns[position].invars:
            learn(var)
        whole.step(scope, position, known, gathered)
    for var in scope.jaxpr.outvars:
        learn(var)
    return [v.val if isinstance(v, Literal) else known[v] for v in scope.jaxpr.outvars]


def _spread(whole: Placer, x: Any, dim: int) -> Any:
    """An array whose dim is sharded along the batch axes, as its halves are."""
    entries = [whole.plan.mesh.batch if d == dim else FREE for d in range(x.ndim)]
    return whole.constrain(x, entries)
