"""A function of some rows at a time, on each device for its own, backward as well.

Nothing of a chunk is kept for the backward pass. What all chunks add to the gradients of arrays
that they share is added up in float32, and over the devices once: in a loop of XLA's own it would
be for each chunk.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """How rows are cut.

    Attributes:
        mesh: The mesh.
        axis: The axis of it that shards the rows.
        rows: Of a chunk on one device.
    """

    mesh: Mesh | AbstractMesh
    axis: str
    rows: int

    def by_device(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        """`fn` on what each device along the axis has."""
        here = jax.sharding.get_abstract_mesh()
        return jax.shard_map(
            fn,
            mesh=here if here.manual_axes else self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={self.axis},
            check_vma=False,
        )

    def cut(self, x: Any, dim: int) -> Any:
        """A device's rows by chunk, in a leading dim."""
        return jnp.moveaxis(x.reshape(*x.shape[:dim], -1, self.rows, *x.shape[dim + 1 :]), dim, 0)

    def join(self, x: Any, dim: int) -> Any:
        """`cut` undone."""
        x = jnp.moveaxis(x, 0, dim)
        return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])

    def spec(self, dim: int) -> PartitionSpec:
        """Of an array with rows along a dim."""
        return PartitionSpec(*[None] * dim, self.axis)


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function of some rows.

    Attributes:
        run: `(rows, shared)` -> rows of the result; holds no array itself.
        dims: The dim of the rows in each array that has some.
        result: The same in the result.
        chunks: How they are cut.
    """

    run: Callable[[list[Any], list[Any]], Any]
    dims: tuple[int, ...]
    result: int
    chunks: Chunks

    def cut(self, arrays: Sequence[Any]) -> list[Any]:
        """Arrays with rows, by chunk."""
        return [self.chunks.cut(x, dim) for x, dim in zip(arrays, self.dims, strict=True)]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_chunk(fn: Function, arrays: list[Any], shared: list[Any]) -> Any:
    """The function of all rows.

    Args:
        fn: The function.
        arrays: What has rows, global.
        shared: What every row needs, on all devices along the axis.
    """

    def own(arrays: list[Any], shared: list[Any]) -> Any:
        made = jax.lax.map(lambda rows: fn.run(rows, shared), fn.cut(arrays))
        return fn.chunks.join(made, fn.result)

    specs = [fn.chunks.spec(dim) for dim in fn.dims]
    run = fn.chunks.by_device(own, (specs, PartitionSpec()), fn.chunks.spec(fn.result))
    return run(arrays, shared)


def _backward(
    fn: Function, kept: tuple[list[Any], list[Any]], gradient: Any
) -> tuple[list[Any], list[Any]]:
    moving = [[n for n, x in enumerate(xs) if _is_float(x)] for xs in kept]

    def own(arrays: list[Any], shared: list[Any], gradient: Any) -> tuple[list[Any], list[Any]]:
        def add(sums: list[Any], chunk: tuple[list[Any], Any]) -> tuple[list[Any], list[Any]]:
            rows, gradient = chunk

            def run(*floats: Sequence[Any]) -> Any:
                return fn.run(*map(_with, (rows, shared), moving, floats))

            floats = (_of(rows, moving[0]), _of(shared, moving[1]))
            d_rows, d_shared = jax.vjp(run, *floats)[1](gradient)
            return [a + b.astype(a.dtype) for a, b in zip(sums, d_shared, strict=True)], d_rows

        zeros = [
            jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))
            for x in _of(shared, moving[1])
        ]
        chunks = fn.cut(arrays), fn.chunks.cut(gradient, fn.result)
        sums, d_rows = jax.lax.scan(add, zeros, chunks)
        dims = _of(fn.dims, moving[0])
        d_arrays = [fn.chunks.join(x, dim) for x, dim in zip(d_rows, dims, strict=True)]
        floats = _of(shared, moving[1])
        return d_arrays, [x.astype(y.dtype)[None] for x, y in zip(sums, floats, strict=True)]

    specs = [fn.chunks.spec(dim) for dim in fn.dims]
    inputs = specs, PartitionSpec(), fn.chunks.spec(fn.result)
    outputs = _of(specs, moving[0]), PartitionSpec(fn.chunks.axis)
    d_rows, parts = fn.chunks.by_device(own, inputs, outputs)(*kept, gradient)
    # Not jnp.sum, which adds in float32 and would move twice the bytes.
    sums = [jax.lax.reduce_sum(x, (0,)) for x in parts]
    nothing = ([None] * len(xs) for xs in kept)
    d_arrays, d_shared = map(_with, nothing, moving, (d_rows, sums))
    return d_arrays, d_shared


by_chunk.defvjp(
    lambda fn, arrays, shared: (by_chunk(fn, arrays, shared), (arrays, shared)), _backward
)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _of(items: Sequence[Any], places: Sequence[int]) -> list[Any]:
    return [items[place] for place in places]


def _with(items: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The items, others in some places."""
    given = dict(zip(places, others, strict=True))
    return [given.get(place, item) for place, item in enumerate(items)]
