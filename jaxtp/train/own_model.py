"""Anybody's model as training sees it: batches of any size, a loss to stand in, a traced step.

What a stranger trains a model for is not known. Where an integer input has the shape of the outputs
without their last dim, the loss is the cross-entropy of its ids, and else the mean square of what
comes out: both cost what most losses cost.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtp.cost.traced.price import StoredParams, TracedStep
from jaxtp.cost.traced.program import Block, Reader
from jaxtp.cost.traced.work import PRODUCTS, product_of, work_of
from jaxtp.errors import BadUsage, join
from jaxtp.io.model_functions import OwnModel
from jaxtp.mesh.axes import Axis
from jaxtp.models.decoder import token_nats
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import PyTree, as_pytree, leaves
from jaxtp.rules.dataflow import forward
from jaxtp.rules.jaxpr import Analysis, analyse, analyse_jaxpr, tracing
from jaxtp.rules.planner import make_plan

LEAST_BATCH = 2
"""Sequences that a model is traced on: a dim of one element links to nothing."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batched:
    """A model whose batch is known.

    Attributes:
        model: As it was given.
        call: `call(params, *inputs)`, where `params` is a plain tree.
        params: Structs, a plain tree.
        leaves: Its inputs, flattened: structs, or arrays where arrays were given.
        treedef: How they go together.
        batched: Which of them have the batch as their first dim.
        size: The batch that they have.
    """

    model: OwnModel
    call: Callable[..., Any]
    params: PyTree
    leaves: Sequence[Any]
    treedef: Any
    batched: tuple[int, ...]
    size: int

    @property
    def inputs(self) -> tuple[Any, ...]:
        """What the model is traced on."""
        return jax.tree.unflatten(self.treedef, self.leaves)

    @property
    def names(self) -> tuple[str, ...]:
        """What to call each of `leaves`: its position, and its path in there."""
        return _names(self.inputs)

    def batch(self, size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The inputs that have a batch, of another size."""
        return {str(i): _resized(self.leaves[i], size) for i in self.batched}

    def output(self, params: PyTree, batch: Mapping[str, Any], call: Any = None) -> Any:
        """What the model makes of a batch; inputs without one are as given, or zeros."""
        given = [
            batch[str(i)] if i in self.batched else _constant(leaf)
            for i, leaf in enumerate(self.leaves)
        ]
        return (call or self.call)(params, *jax.tree.unflatten(self.treedef, given))

    def loss(self, params: PyTree, batch: Mapping[str, Any], call: Any = None) -> jax.Array:
        """The loss that stands in, summed over the batch; a float32 scalar."""
        found = [x for x in jax.tree.leaves(self.output(params, batch, call)) if _is_float(x)]
        if not found:
            raise BadUsage(
                "it returns no floating-point array to train",
                where=self.model.name,
                fix="a function whose fn returns what a loss is made of",
            )
        if (ids := self._ids(found[0], batch)) is not None:
            return token_nats(found[0].astype(jnp.float32), ids).sum()
        return sum((jnp.square(x.astype(jnp.float32)).sum() for x in found), jnp.float32(0))

    def _ids(self, logits: Any, batch: Mapping[str, Any]) -> Any:
        for leaf in batch.values():
            is_integer = jnp.issubdtype(leaf.dtype, jnp.integer)
            if is_integer and logits.ndim > 1 and leaf.shape == logits.shape[:-1]:
                return leaf
        return None

    def trained(self) -> frozenset[str]:
        """Paths of what has a gradient: keys of random numbers and counters have none."""
        return frozenset(path for path, leaf in leaves(self.params) if _is_float(leaf))


def batched(model: OwnModel) -> Batched:
    """A model, and which of its inputs have a batch, by its dataflow.

    Raises:
        BadUsage: TP132, if no input has one, or if it does not lead in all that have it.
    """
    plain, rebuild = as_pytree(model.params)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain)
    whole = forward(model.fn, model.params)

    def call(params: PyTree, *inputs: Any) -> Any:
        return whole(rebuild(params), *inputs)

    flat, is_batch = _traceable(call, params, model.inputs)
    names = _names(model.inputs)
    found = [(i, d) for i, dims in enumerate(is_batch) for d, is_one in enumerate(dims) if is_one]
    if not found:
        raise BadUsage("no input has a batch", where=model.name, fix="inputs (batch, ...)")
    if any(dim for _, dim in found) or len({np.shape(flat[i])[0] for i, _ in found}) > 1:
        raise BadUsage(
            f"the batch is {join(f'dim {dim} of input {names[i]}' for i, dim in found)}",
            where=model.name,
            fix="inputs (batch, ...) alike, the first of them one that has the batch",
        )
    of_batch = tuple(i for i, _ in found)
    size = np.shape(flat[of_batch[0]])[0]
    return Batched(
        model=model,
        call=call,
        params=params,
        leaves=[_resized(leaf, size) if i in of_batch else leaf for i, leaf in enumerate(flat)],
        treedef=jax.tree.structure(tuple(model.inputs)),
        batched=of_batch,
        size=size,
    )


def _traceable(
    call: Callable[..., Any], params: PyTree, inputs: Sequence[Any]
) -> tuple[list[Any], list[list[bool]]]:
    """The inputs, flattened, to trace a model on, and which of their dims are the batch.

    Where inputs lead with one element, they are tried with a size that no other one leads with, so
    that only what belongs to them goes with it.
    """
    flat, treedef = jax.tree.flatten(tuple(inputs))

    def read(tried: Sequence[Any]) -> list[list[bool]]:
        analysis = analyse(call, params, *jax.tree.unflatten(treedef, tried))
        return [list(map(analysis.is_batch, value.dims)) for value in analysis.inputs]

    first = [next(iter(np.shape(leaf)), 0) for leaf in flat]
    if 1 in first:
        size = next(n for n in itertools.count(LEAST_BATCH) if n not in first)
        pairs = list(zip(flat, first, strict=True))
        wider = [_resized(leaf, size) if n == 1 else leaf for leaf, n in pairs]
        try:
            found = read(wider)
        except Exception:  # what a model of theirs raises, which takes these only as they are
            return flat, read(flat)
        both = zip(flat, wider, found, strict=True)
        return [new if any(dims) else old for old, new, dims in both], found
    return flat, read(flat)


def _names(inputs: Sequence[Any]) -> tuple[str, ...]:
    found = jax.tree_util.tree_flatten_with_path(tuple(inputs))[0]
    return tuple(jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in found)


def _resized(leaf: Any, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)


def _constant(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", jnp.int32), jnp.floating)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A step of somebody's model, traced once for all meshes.

    Attributes:
        model: What was traced.
        analysis: Of the forward pass, with the step read into it.
        scope: The step as it was read: loss and gradients.
        flops: FLOPs of forward and backward pass for one sequence, recomputation left out.
    """

    model: Batched
    analysis: Analysis
    scope: Any
    flops: float

    def step(self, plan: Plan) -> TracedStep:
        """The step along the tensor axis of a plan."""
        block = Reader(self.analysis, plan).block(self.scope)
        stored = _stored(self.analysis, plan, block, self.model.trained())
        return TracedStep(block=block, work=work_of(block), stored=stored, batch=self.model.size)


def traced(model: Batched) -> TracedModel:
    """Traces loss and gradients, and reads them by the classes of the forward pass."""
    paths = [path for path, _ in leaves(model.params)]
    trained, batch = model.trained(), model.batch(model.size)

    def loss(chosen: Mapping[str, Any], params: PyTree, inputs: Mapping[str, Any]) -> jax.Array:
        own = {path: chosen.get(path, leaf) for path, leaf in leaves(params)}
        whole = jax.tree.unflatten(jax.tree.structure(params), [own[path] for path in paths])
        return model.loss(whole, inputs)

    def step(params: PyTree, inputs: Mapping[str, Any]) -> Any:
        chosen = {path: leaf for path, leaf in leaves(params) if path in trained}
        return jax.value_and_grad(loss)(chosen, params, inputs)

    forward_pass = tracing.forward(model.loss, model.params, batch)
    analysis = analyse_jaxpr(forward_pass, paths)
    values = [analysis.value(analysis.scope, var) for var in analysis.scope.jaxpr.invars]
    scope, _ = analysis.read(tracing.forward(step, model.params, batch), values)
    nowhere = make_plan(model.params, {Axis.TP.value: 1})
    block = Reader(analysis, nowhere).block(analysis.scope)
    work = work_of(block)
    once = sum(
        2 * p.rows * p.columns * p.depth * p.count * (2 if p.attention else 1) * times
        for p, times in work.products.items()
    )
    return TracedModel(model=model, analysis=analysis, scope=scope, flops=3 * once / model.size)


def _stored(analysis: Analysis, plan: Plan, block: Block, trained: frozenset[str]) -> StoredParams:
    """Parameters on one device along the tensor axis, and how ZeRO 3 gathers them.

    One message a layer for what a loop runs along, and one for each other matrix; vectors travel
    with them. They are gathered and reduced in the type of the products, if that is narrower.
    """
    _, width = _largest_product(block)
    elements = num_bytes = trained_bytes = sums = 0.0
    by_loop: dict[int, float] = {}
    messages: list[float] = []
    for d in plan.decisions:
        count = math.prod(d.stored) / plan.mesh.pieces(d.spec)
        itemsize = d.num_bytes / max(math.prod(d.shape), 1)
        num_bytes += count * itemsize
        if d.path not in trained:
            continue
        moved = count * min(itemsize, width)
        elements, sums = elements + count, sums + moved
        trained_bytes += count * itemsize
        finding = analysis.findings.get(d.path)
        if finding is not None and finding.stacked_dims:
            turns = d.shape[finding.stacked_dims[0]]
            by_loop[turns] = by_loop.get(turns, 0.0) + moved / turns
        elif len(d.shape) > 1:
            messages.append(moved)
    layers = [size for turns, size in by_loop.items() for _ in range(turns)]
    return StoredParams(
        elements=elements,
        num_bytes=num_bytes,
        trained_bytes=trained_bytes,
        messages=(*layers, *messages),
        sums=sums,
    )


def _largest_product(block: Block) -> tuple[float, int]:
    """Multiplications of the program's largest product, and bytes of an element in it.

    Without a product those of float32; of several as large the first counts.
    """
    found = [(0.0, 4)]
    for operation in block.operations:
        found += map(_largest_product, operation.bodies)
        if operation.name in PRODUCTS and (one := product_of(operation)) is not None:
            size = one.rows * one.columns * one.depth * one.count
            found.append((size, operation.operands[1].itemsize))
    return max(found, key=lambda product: product[0])
