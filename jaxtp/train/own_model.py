"""Anybody's model as training sees it: batches of any size, a loss to stand in, a traced step.

What a stranger trains a model for is not known. Where an integer input has the shape of the outputs
without their last dim, the loss is the cross-entropy of its ids, and else the mean square of what
comes out: both cost what most losses cost.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.cost.traced.price import Stored, TracedStep
from jaxtp.cost.traced.program import Block, Reader
from jaxtp.cost.traced.work import product_of, work_of
from jaxtp.errors import BadUsage
from jaxtp.io.model_functions import OwnModel
from jaxtp.mesh.axes import Axis
from jaxtp.models.decoder import token_nats
from jaxtp.plan.decisions import Plan
from jaxtp.plan.trees import PyTree, as_pytree, leaves
from jaxtp.rules.dataflow import forward
from jaxtp.rules.jaxpr import Analysis, analyse_jaxpr, tracing
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
    """A model, and which of its inputs have a batch.

    Raises:
        BadUsage: TP132, if no input has one.
    """
    flat, treedef = jax.tree.flatten(tuple(model.inputs))
    first = next((leaf.shape[0] for leaf in flat if getattr(leaf, "ndim", 0)), 0)
    if not first:
        raise BadUsage("no input has a batch", where=model.name, fix="inputs with a leading batch")
    size = max(first, LEAST_BATCH)
    of_batch = tuple(i for i, leaf in enumerate(flat) if leaf.ndim and leaf.shape[0] == first)
    flat = [_resized(leaf, size) if i in of_batch else leaf for i, leaf in enumerate(flat)]
    plain, rebuild = as_pytree(model.params)
    whole = forward(model.fn, model.params)
    return Batched(
        model=model,
        call=lambda params, *inputs: whole(rebuild(params), *inputs),
        params=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), plain),
        leaves=flat,
        treedef=treedef,
        batched=of_batch,
        size=size,
    )


def _resized(leaf: Any, size: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype)


def _constant(leaf: Any) -> Any:
    return jnp.zeros(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf


def _is_float(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", jnp.int32), jnp.floating)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
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


def traced(model: Batched) -> Traced:
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
    return Traced(model=model, analysis=analysis, scope=scope, flops=3 * once / model.size)


def _stored(analysis: Analysis, plan: Plan, block: Block, trained: frozenset[str]) -> Stored:
    """Parameters on one device along the tensor axis, and how ZeRO 3 gathers them.

    One message a layer for what a loop runs along, and one for each other matrix; vectors travel
    with them. They are gathered and reduced in the type of the products, if that is narrower.
    """
    width = _product_itemsize(block)
    elements = num_bytes = sums = 0.0
    by_loop: dict[int, float] = {}
    messages: list[float] = []
    for d in plan.decisions:
        count = math.prod(d.stored) / plan.mesh.ways(axis for axes in d.spec for axis in axes)
        itemsize = d.num_bytes / max(math.prod(d.shape), 1)
        num_bytes += count * itemsize
        if d.path not in trained:
            continue
        moved = count * min(itemsize, width)
        elements, sums = elements + count, sums + moved
        finding = analysis.findings.get(d.path)
        if finding is not None and finding.stacked_dims:
            turns = d.shape[finding.stacked_dims[0]]
            by_loop[turns] = by_loop.get(turns, 0.0) + moved / turns
        elif len(d.shape) > 1:
            messages.append(moved)
    layers = [size for turns, size in by_loop.items() for _ in range(turns)]
    return Stored(elements=elements, num_bytes=num_bytes, messages=(*layers, *messages), sums=sums)


def _product_itemsize(block: Block) -> float:
    """Bytes of an element in the program's largest product."""
    most, width = 0.0, 4.0
    for operation in block.operations:
        for body in operation.bodies:
            width = min(width, _product_itemsize(body))
        if operation.name == "dot_general" and (found := product_of(operation)) is not None:
            size = found.rows * found.columns * found.depth * found.count
            if size > most:
                most, width = size, min(width, operation.operands[1].itemsize)
    return width
