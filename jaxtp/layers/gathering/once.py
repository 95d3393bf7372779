"""Weights of a pipeline stage, gathered once a step, and their gradients, reduced once.

In stages every tick runs one chunk of layers on one micro-batch. Gathered where they are used, the
weights of a stage cross the network once a micro-batch and pass; and no tick is long enough to hide
them. Here they are gathered in front of the first tick, in the type of products, and each replica
sums its gradients over all ticks, in the type of the parameters, which are reduced behind the last
one. That is the traffic of a step without micro-batches, for the memory of a stage's weights and
gradients that ZeRO 3 would have sharded further.

How: a layer takes the gathered weights, which have no gradient, and beside each an array of zeros
like the parameter, which no forward pass reads. Its cotangent is the gradient, which is added where
it belongs in what the scan over ticks carries.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxtp.activations.ahead.weights import (
    Replicas,
    StackedArray,
    Weights,
    decision_of,
    other_axes,
)
from jaxtp.activations.by_name import ActivePlan
from jaxtp.errors import NotInterleaved
from jaxtp.mesh.axes import Axis
from jaxtp.plan.trees import PyTree, leaves, map_with_path


@dataclasses.dataclass(frozen=True)
class Once:
    """How the stacked parameters of all stages come to the replicas.

    Attributes:
        weights: Of whole stacks, `(stored layers, ...)`.
        pp: The axis of stages.
    """

    weights: Weights
    pp: str

    @property
    def active(self) -> ActivePlan:
        """The plan in force."""
        return self.weights.replicas.active

    @property
    def specs(self) -> tuple[PartitionSpec, PartitionSpec]:
        """Of gathered weights and of gradients, by dim 0: stages; replicas and stages."""
        return PartitionSpec(self.pp), PartitionSpec((*self.active.shape.batch, self.pp))

    def __call__(self, stacked: PyTree) -> tuple[PyTree, PyTree]:
        """The weights on all replicas, and zeros to take their gradients.

        Args:
            stacked: Parameters, `(stored layers, ...)`.

        Returns:
            `(stored layers, ...)` in the type of products; `(replicas x stored layers, ...)` in the
            type of the parameters. Each tick finds `room_in` the second, and a layer takes both
            by `with_gradients`.
        """
        gathered, sums = _enter(self, stacked)
        return jax.tree.map(lax.stop_gradient, gathered), sums

    def gather(self, stacked: PyTree) -> PyTree:
        """Cast where they are stored, so that only that type moves."""
        place = self.active.place

        def cast(path: str, w: jax.Array) -> jax.Array:
            here = self.weights.by_path[path]
            return place(place(w, *here.spec).astype(here.dtype), *here.spec)

        return self.weights.gather(map_with_path(cast, stacked))

    def zeros(self, stacked: PyTree) -> PyTree:
        """Zeros like the parameters, for each replica."""
        num = self.active.shape.batch_ways

        def leaf(path: str, w: jax.Array) -> jax.Array:
            inner = self.weights.without_batch(self.weights.by_path[path].spec)[1:]
            zeros = jnp.zeros((num * w.shape[0], *w.shape[1:]), w.dtype)
            return self.active.place(zeros, (*self.active.shape.batch, self.pp), *inner)

        return map_with_path(leaf, stacked)

    def reduce(self, sums: PyTree) -> PyTree:
        """Gradients of all replicas, in the type of products, placed as the parameters."""
        replicas = self.weights.replicas
        sizes = [self.active.shape[axis] for axis in replicas.axes]

        def leaf(path: str, g: jax.Array) -> jax.Array:
            here = self.weights.by_path[path]
            g = g.astype(here.dtype).reshape(*sizes, -1, *g.shape[1:])
            return self.active.place(g, *replicas.axes, *self.weights.without_batch(here.spec))

        reduced = self.weights.reduce(map_with_path(leaf, sums))
        return jax.tree.map(lambda g, like: g.astype(like.dtype), reduced, sums)


def once_of(types: Callable[[], Sequence[Any]], stacked: PyTree, active: ActivePlan) -> Once | None:
    """How the plan in force has stacked parameters gathered once a step; None if it shards none.

    Args:
        types: The type that products take each parameter in, in the order of the leaves.
        stacked: Parameters, `(stored layers, ...)`.
        active: The plan in force, with stages.

    Raises:
        NotInterleaved: TP073, if layers communicate along other axes, or the plan does not know a
            parameter.
    """
    shape = active.shape
    if not active.params_sharded or shape.batch_ways == 1:
        return None
    if others := other_axes(shape, shape.name_of(Axis.PP)):
        raise NotInterleaved(
            f"layers communicate along {others}; stages gather weights once a micro-batch",
            where="layers",
            fix='overlap="auto"',
        )
    assert active.stages is not None
    found: dict[str, StackedArray] = {}
    for (path, w), dtype in zip(leaves(stacked), types(), strict=True):
        decision = decision_of(path, (active.stages.num_layers, *w.shape[1:]), active)
        found[path] = StackedArray(decision.spec, str(dtype), reduces_late=False)
    return Once(Weights(Replicas(active), found), shape.name_of(Axis.PP))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _enter(once: Once, stacked: PyTree) -> tuple[PyTree, PyTree]:
    return once.gather(stacked), once.zeros(stacked)


def _enter_forward(once: Once, stacked: PyTree) -> tuple[tuple[PyTree, PyTree], None]:
    return _enter(once, stacked), None


def _enter_backward(once: Once, _: None, cotangents: tuple[PyTree, PyTree]) -> tuple[PyTree]:
    return (once.reduce(cotangents[1]),)


_enter.defvjp(_enter_forward, _enter_backward)


def with_gradients(weights: PyTree, sums: PyTree) -> PyTree:
    """Weights of a layer whose gradients go to `sums`, in the types of those; () for their own."""
    if not jax.tree.leaves(sums):
        return weights
    return jax.tree.map(lambda w, g: _with_gradient(str(g.dtype), w, g), weights, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_gradient(dtype: str, w: jax.Array, sums: jax.Array) -> jax.Array:
    del dtype, sums
    return w


def _with_gradient_forward(dtype: str, w: jax.Array, sums: jax.Array) -> tuple[jax.Array, None]:
    return _with_gradient(dtype, w, sums), None


def _with_gradient_backward(dtype: str, _: None, g: jax.Array) -> tuple[None, jax.Array]:
    return None, g.astype(dtype)


_with_gradient.defvjp(_with_gradient_forward, _with_gradient_backward)


def room_in(sums: PyTree, turn: jax.Array, first: int, end: int) -> tuple[PyTree, PyTree]:
    """Zeros for the gradients of some layers of one chunk, and `sums` as they are.

    What comes back for the zeros is added to what comes back for `sums` in its place. Cut out of
    `sums` it would be added to all of them, in every tick.

    Args:
        sums: Zeros, `(rounds, layers, ...)`.
        turn: Which round.
        first: Which layers.
        end: The one behind the last.
    """
    leaves_, tree = jax.tree.flatten(sums)
    pairs = [_room(first, end, one, turn) for one in leaves_]
    zeros, same = (jax.tree.unflatten(tree, [pair[i] for pair in pairs]) for i in (0, 1))
    return zeros, same


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _room(first: int, end: int, sums: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.zeros((end - first, *sums.shape[2:]), sums.dtype), sums


def _room_forward(
    first: int, end: int, sums: jax.Array, turn: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    return _room(first, end, sums, turn), turn


def _room_backward(
    first: int, _: int, turn: jax.Array, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, None]:
    g, sums = cotangents
    start = (turn, first, *[0] * (g.ndim - 1))
    found = lax.dynamic_slice(sums, start, (1, *g.shape))
    return lax.dynamic_update_slice(sums, found + g[None], start), None


_room.defvjp(_room_forward, _room_backward)
