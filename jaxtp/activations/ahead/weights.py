"""How one layer's weights come to the devices, and how their gradients leave them.

Gathers and reductions are operations of their own here, which the loops over layers put where there
is work to hide them. Weights are gathered in the type of products. Gradients are kept apart for
each replica, as leading dims that are sharded over the batch axes, until they are reduced: left
alone, XLA reduces them where the products stand that make them.

Shape suffixes as in `jaxtp.models.layers`, and R replicas: one dim for each batch axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxtp.activations.by_name import ActivePlan
from jaxtp.errors import NotInterleaved, join
from jaxtp.mesh.axes import Axis, MeshShape, Shards
from jaxtp.plan.decisions import ParamDecision
from jaxtp.plan.specs import Spec
from jaxtp.plan.trees import PyTree, itemsize, leaves, map_with_path

SMALL_BYTES = 2**20
"""Gradients of smaller arrays of a layer, such as norms, are reduced for all layers at once: each
would cost a message of its own that is all start-up."""


@dataclasses.dataclass(frozen=True, slots=True)
class StackedArray:
    """One stacked array.

    Attributes:
        spec: Mesh axes of each dim of one layer's array.
        dtype: The type that it is gathered in, and its gradient reduced in.
        reduces_late: Whether its gradient is reduced for all layers at once.
    """

    spec: Spec
    dtype: str
    reduces_late: bool


@dataclasses.dataclass(frozen=True)
class Replicas:
    """The batch axes of a plan as leading dims of arrays.

    Attributes:
        active: The plan in force.
    """

    active: ActivePlan

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """Batch axes of more than one device, major to minor."""
        shape = self.active.shape
        return tuple(axis for axis in shape.batch if shape[axis] > 1)

    @property
    def inner(self) -> ActivePlan:
        """What counts inside one replica: all but the batch axes."""
        shape = self.active.shape.without(Axis.that_shard(Shards.BATCH))
        return dataclasses.replace(self.active, shape=shape)

    def split(self, x: jax.Array) -> jax.Array:
        """(R, batch / R, ...) of `(batch, ...)`; one row for all stays as it is."""
        if x.shape[0] == 1:
            return x
        sizes = [self.active.shape[axis] for axis in self.axes]
        x = x.reshape(*sizes, -1, *x.shape[1:])
        return self.active.place(x, *self.axes, *[None] * (x.ndim - len(sizes)))

    def join(self, x: jax.Array) -> jax.Array:
        """Inverse of `split`."""
        return x.reshape(-1, *x.shape[len(self.axes) + 1 :])

    def mapped(
        self, function: Callable[..., Any], in_axes: Any, out_axes: Any = 0
    ) -> Callable[..., Any]:
        """`function` on each replica; axes as of `jax.vmap`, 0 or None."""
        for axis in reversed(self.axes):
            function = jax.vmap(function, in_axes, out_axes, spmd_axis_name=axis)
        return function


def other_axes(shape: MeshShape, *apart: str) -> str:
    """Axes along which layers exchange more than weights and the sums of tp; "" if none.

    Args:
        shape: Of the mesh.
        *apart: Axes that loops over layers have no part in.
    """
    known = {*shape.batch, *shape.tp, *apart}
    others = [axis for axis, size in shape.sizes if size > 1 and axis not in known]
    # Experts lie along ep, which shards the batch too.
    return join(others or [shape.name_of(Axis.EP)] * (shape.size_of(Axis.EP) > 1))


@dataclasses.dataclass(frozen=True)
class Weights:
    """The stacked parameters of layers.

    Attributes:
        replicas: Who has shards of them, and gradients.
        by_path: Of each array.
    """

    replicas: Replicas
    by_path: dict[str, StackedArray]

    @property
    def are_sharded(self) -> bool:
        """Whether replicas share them, so that there is something to gather."""
        batch = {*self.replicas.axes}
        return any(batch & {*entry} for one in self.by_path.values() for entry in one.spec)

    def shards(self, stacked: PyTree, index: jax.Array | int) -> PyTree:
        """One layer's weights as each device stores them, in the type of products."""

        def leaf(w: jax.Array) -> jax.Array:
            return lax.dynamic_index_in_dim(w, index, keepdims=False)

        return self.stored(jax.tree.map(leaf, stacked))

    def stored(self, layer: PyTree) -> PyTree:
        """The weights of one layer, which are no stack, as from `shards`."""
        active = self.replicas.active

        def leaf(path: str, w: jax.Array) -> jax.Array:
            here = self.by_path[path]
            w = active.place(w, *here.spec).astype(here.dtype)
            return active.place(w, *here.spec)

        return map_with_path(leaf, layer)

    def gather(self, shards: PyTree) -> PyTree:
        """The same on all replicas."""
        active = self.replicas.active

        def leaf(path: str, w: jax.Array) -> jax.Array:
            return active.place(w, *self.without_batch(self.by_path[path].spec))

        return map_with_path(leaf, shards)

    def zeros(self, stacked: PyTree) -> PyTree:
        """Where gradients of all layers are collected, like the parameters."""
        active, replicas = self.replicas.active, self.replicas

        def leaf(path: str, w: jax.Array) -> jax.Array:
            here = self.by_path[path]
            if not here.reduces_late:
                return active.place(jnp.zeros_like(w), None, *here.spec)
            sizes = [active.shape[axis] for axis in replicas.axes]
            zeros = jnp.zeros((*sizes, *w.shape), here.dtype)
            return active.place(zeros, *replicas.axes, None, *self.without_batch(here.spec))

        return map_with_path(leaf, stacked)

    def reduce(self, partial: PyTree) -> PyTree:
        """Gradients of one layer, (R, ...) to (...), placed as the parameters; late ones stay."""

        def leaf(path: str, g: jax.Array) -> jax.Array:
            here = self.by_path[path]
            return g if here.reduces_late else self._reduced(g, here.spec)

        return map_with_path(leaf, partial)

    def put(self, collected: PyTree, layer: PyTree, index: jax.Array | int) -> PyTree:
        """Gradients of all layers with those of one, which `reduce` made, in their place."""
        found = dict(leaves(layer))
        num = len(self.replicas.axes)

        def leaf(path: str, all_layers: jax.Array) -> jax.Array:
            g = found[path].astype(all_layers.dtype)
            dim = num if self.by_path[path].reduces_late else 0
            return lax.dynamic_update_index_in_dim(all_layers, g, index, dim)

        return map_with_path(leaf, collected)

    def finish(self, collected: PyTree, stacked: PyTree) -> PyTree:
        """Gradients of all layers, with those that were left reduced."""
        types = {path: w.dtype for path, w in leaves(stacked)}

        def leaf(path: str, g: jax.Array) -> jax.Array:
            here = self.by_path[path]
            if here.reduces_late:
                g = self._reduced(g, ((), *here.spec))
            return g.astype(types[path])

        return map_with_path(leaf, collected)

    def finished(self, reduced: PyTree, layer: PyTree) -> PyTree:
        """Gradients of one layer that is no stack, from `reduce`, as from `finish`."""
        types = {path: w.dtype for path, w in leaves(layer)}

        def leaf(path: str, g: jax.Array) -> jax.Array:
            here = self.by_path[path]
            return (self._reduced(g, here.spec) if here.reduces_late else g).astype(types[path])

        return map_with_path(leaf, reduced)

    def place_partial(self, partial: PyTree) -> PyTree:
        """Gradients of one layer, (R, ...), where the products leave them."""
        active, axes = self.replicas.active, self.replicas.axes

        def leaf(path: str, g: jax.Array) -> jax.Array:
            return active.place(g, *axes, *self.without_batch(self.by_path[path].spec))

        return map_with_path(leaf, partial)

    def _reduced(self, g: jax.Array, spec: Spec) -> jax.Array:
        """The sum over all replicas; over the axes that shard the parameter first."""
        active, axes = self.replicas.active, list(self.replicas.axes)
        while axes:
            sharding = [axis for axis in axes if any(axis in entry for entry in spec)]
            axis = (sharding or axes)[-1]
            # Not jnp.sum, which adds in float32 and would move twice the bytes.
            g = lax.reduce_sum(g, (axes.index(axis),))
            axes.remove(axis)
            # What is still to be summed shards no dim but its own.
            entries = [tuple(a for a in entry if a not in axes) for entry in spec]
            g = active.place(g, *axes, *entries)
        return g

    def without_batch(self, spec: Spec) -> Spec:
        """The spec of an array once it is gathered."""
        batch = self.replicas.active.shape.batch
        return tuple(tuple(a for a in entry if a not in batch) for entry in spec)


def weights_of(
    stacked: PyTree, types: Sequence[Any], active: ActivePlan, where: str = ""
) -> Weights:
    """How the plan in force shards stacked parameters.

    Args:
        stacked: Arrays `(layers, ...)`.
        types: The type that products take each of them in, in the order of the leaves.
        active: The plan in force.
        where: Path of the tree from the layer.

    Raises:
        NotInterleaved: TP073, if the plan does not know a parameter or shards its layers.
    """
    by_path: dict[str, StackedArray] = {}
    for (path, w), dtype in zip(leaves(stacked), types, strict=True):
        decision = decision_of(f"{where}/{path}".strip("/"), w.shape, active)
        if decision.spec and decision.spec[0]:
            raise NotInterleaved(
                f"layers are sharded over {'+'.join(decision.spec[0])}",
                where=decision.path,
                fix="layers on one stage",
            )
        spec = decision.spec[1:]
        size = w.size // max(w.shape[0], 1) * itemsize(str(dtype))
        by_path[path] = StackedArray(spec, str(dtype), size < SMALL_BYTES)
    return Weights(Replicas(active), by_path)


def decisions_of(path: str, shape: tuple[int, ...], active: ActivePlan) -> list[ParamDecision]:
    """The decisions that a parameter of a stack may be meant by, found by the end of its path."""
    return [
        decision
        for decision in active.decisions
        if f"/{decision.path}".endswith(f"/{path}") and decision.shape == shape
    ]


def decision_of(path: str, shape: tuple[int, ...], active: ActivePlan) -> ParamDecision:
    """The decision for a parameter of a stack, found by the end of its path.

    Raises:
        NotInterleaved: TP073, if the plan has none, or several that differ.
    """
    found = decisions_of(path, shape, active)
    if not found or any(d.spec != found[0].spec or d.role != found[0].role for d in found):
        raise NotInterleaved(
            f"{len(found)} parameters of the plan have this path and the shape {shape}",
            where=path,
            fix="make the plan from this model",
        )
    return found[0]
