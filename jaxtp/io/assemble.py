"""Sharded arrays put together from tensors in files, with a few tensors of host memory.

Each process reads the bytes that its own devices hold, once, and nothing else.

A parameter of stacked layers is many tensors, and larger than a host should hold. It is filled a
few layers at a time, on the devices: bytes travel as they are stored; transposing and casting is
done there.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from jaxtp.io.safetensors import Box, StoredTensor, read_box
from jaxtp.models.published import Storage
from jaxtp.placement.train_state import Slot
from jaxtp.plan.specs import Spec, partition_spec
from jaxtp.plan.stored_form import Padding

CHUNK_BYTES = 64 * 2**20
"""Layers are read together up to this many bytes of one process's share."""

PIECE_BYTES = 16 * 2**20
"""One read of a thread; several are in flight."""


class ParameterSource(NamedTuple):
    """What one parameter is made of.

    Attributes:
        tensors: The stored tensors, an object array of shape `storage.stack`.
        storage: How their dims map to the parameter's.
    """

    tensors: NDArray[Any]
    storage: Storage


class _Chunks(NamedTuple):
    """How a parameter is filled; layers are those of the leading stacked dim, one without.

    Attributes:
        stages: Parts that mesh axes shard the layers into; each is filled from its own first layer.
        layers: Layers of one stage.
        chunk: Layers of every stage that are read together; divides `layers`.
        shape: Of what is read together: (stages, chunk, further stack dims, stored dims), elements.
        spec: Where that lies.
    """

    stages: int
    layers: int
    chunk: int
    shape: tuple[int, ...]
    spec: Spec


def assemble(
    source: ParameterSource,
    slot: Slot,
    mesh: Mesh,
    dtype: str,
    pool: Executor,
    advance: Callable[[int], None],
) -> jax.Array:
    """The parameter in its slot of `mesh`, in `dtype`.

    Args:
        source: Its tensors; their shapes are known to fit.
        slot: Its shape, the form it is stored in, and its spec.
        mesh: The plan's mesh.
        dtype: NumPy name of the type it shall have.
        pool: Threads that read.
        advance: Told the bytes of every chunk, all processes' together.

    Raises:
        BadWeights: TP095, if a file ends early or holds infinities or NaN.
    """
    tensors = _as_stored(source, slot.padding)
    sharding = NamedSharding(mesh, partition_spec(slot.spec))
    chunks = _chunks(source, slot, mesh)
    fill = _filler(slot.stored, dtype, sharding, source.storage, chunks)
    array = None
    if chunks.chunk < chunks.layers:
        array = _zeros(slot.stored, dtype, sharding)()
    # layers[s, i]: layer i of stage s.
    layers = tensors.reshape(chunks.stages, chunks.layers, *tensors.shape[1:])
    place = NamedSharding(mesh, partition_spec(chunks.spec))
    for first in range(0, chunks.layers, chunks.chunk):
        part = layers[:, first : first + chunks.chunk]
        stored = _read_array(part, source, chunks.shape, place, pool)
        if array is not None:
            # Reading overlaps with the devices' work on the chunk before, and not on all before it:
            # that would fill host memory.
            array.block_until_ready()
        array = fill(array, stored, first)
        advance(sum(tensor.num_bytes for tensor in part.flat if tensor is not None))
    assert array is not None
    return array


def _as_stored(source: ParameterSource, padding: Padding) -> NDArray[Any]:
    """The tensors of stacked layers in the order in which layers are stored, None for zeros."""
    tensors = np.atleast_1d(source.tensors)
    for blocks in padding:
        if blocks.dim < source.tensors.ndim:  # the other dims are inside a tensor
            nothing = np.full_like(tensors.take([0], blocks.dim), None)
            tensors = np.concatenate([tensors, nothing], blocks.dim).take(blocks.rows, blocks.dim)
    return tensors


def _chunks(source: ParameterSource, slot: Slot, mesh: Mesh) -> _Chunks:
    num_stacked = len(source.storage.stack)
    # Stored dims are the parameter's in another order, padding included.
    order = [num_stacked + int(i) for i in np.argsort(source.storage.order)]
    layer_axes = slot.spec[0] if num_stacked else ()
    stages = math.prod(mesh.shape[axis] for axis in layer_axes)
    layers = (slot.stored[0] if num_stacked else 1) // stages
    rest = (*range(1, num_stacked), *order)
    spec = (layer_axes, (), *(slot.spec[d] for d in rest))

    def shape(chunk: int) -> tuple[int, ...]:
        return (stages, chunk, *(slot.stored[d] for d in rest))

    def fits(chunk: int) -> bool:
        blocks = local_boxes(NamedSharding(mesh, partition_spec(spec)), shape(chunk))
        itemsize = jnp.dtype(source.tensors.flat[0].dtype).itemsize
        return sum(map(_volume, blocks)) * itemsize <= CHUNK_BYTES

    divisors = [n for n in range(1, layers + 1) if layers % n == 0]
    chunk = max(filter(fits, divisors), default=1)
    return _Chunks(stages, layers, chunk, shape(chunk), spec)


@functools.cache
def _zeros(shape: tuple[int, ...], dtype: str, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


@functools.cache
def _filler(
    shape: tuple[int, ...],
    dtype: str,
    sharding: NamedSharding,
    storage: Storage,
    chunks: _Chunks,
) -> Callable[[jax.Array | None, jax.Array, int], jax.Array]:
    """A function that writes a chunk of layers into the array, in place."""
    num_front = max(len(storage.stack), 1) + 1  # stages, layers, further stack dims
    order = (*range(num_front), *(num_front + d for d in storage.order))
    spec = partition_spec(tuple(chunks.spec[d] for d in order))

    def turn(stored: jax.Array) -> jax.Array:
        return stored.transpose(order)

    def whole(_: None, stored: jax.Array, first: jax.Array) -> jax.Array:
        return turn(stored).astype(dtype).reshape(shape)

    def update(array: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
        # As integers: jax 0.10 converts a whole bfloat16 array to fp32 and back on CPUs.
        bits = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
        layers = jax.lax.bitcast_convert_type(array, bits)
        layers = layers.reshape(chunks.stages, chunks.layers, *shape[1:])
        part = jax.lax.bitcast_convert_type(part.astype(dtype), bits)
        layers = jax.lax.dynamic_update_slice_in_dim(layers, part, first, axis=1)
        return jax.lax.bitcast_convert_type(layers.reshape(shape), dtype)

    if chunks.chunk == chunks.layers:
        return jax.jit(whole, out_shardings=sharding)
    # Two programs: fused with the update, the transpose takes XLA five times as long on CPUs.
    turned = jax.jit(turn, out_shardings=NamedSharding(sharding.mesh, spec))
    updated = jax.jit(update, out_shardings=sharding, donate_argnums=0)
    return lambda array, stored, first: updated(array, turned(stored), first)


def _read_array(
    tensors: NDArray[Any],
    source: ParameterSource,
    shape: tuple[int, ...],
    sharding: NamedSharding,
    pool: Executor,
) -> jax.Array:
    """Stored tensors as one array of `shape`: stack dims, then stored dims, padded with zeros."""
    buffers = {}
    for block in local_boxes(sharding, shape):
        sizes = [stop - start for start, stop in block]
        buffers[block] = np.zeros(sizes, source.tensors.flat[0].dtype)
    reads = [
        pool.submit(_read, source.storage.turn, *read)
        for block, buffer in buffers.items()
        for read in _reads(tensors, source.storage.split, block, buffer)
    ]
    for read in reads:
        read.result()

    def part(index: tuple[slice, ...] | None) -> NDArray[Any]:
        box = _box(index or (), shape)
        block, buffer = next((b, a) for b, a in buffers.items() if _inside(box, b))
        return buffer[tuple(slice(i - o, j - o) for (i, j), (o, _) in zip(box, block, strict=True))]

    return jax.make_array_from_callback(shape, sharding, part)


def _read(
    turn: tuple[int, int], tensor: StoredTensor, split: tuple[int, ...], box: Box, out: NDArray[Any]
) -> None:
    """`read_box`, of a tensor along whose last dim several parameters take turns."""
    first, count = turn
    if count == 1:
        read_box(tensor, split, box, out)
        return
    # All of them: one long read is better than one for each element.
    both = np.empty((*out.shape, count), out.dtype)
    read_box(tensor, (*split, count), (*box, (0, count)), both)
    out[...] = both[..., first]


def _reads(
    tensors: NDArray[Any], split: tuple[int, ...], block: Box, buffer: NDArray[Any]
) -> Iterator[tuple[StoredTensor, tuple[int, ...], Box, NDArray[Any]]]:
    """Arguments of `_read`, all but the first: for the part of `buffer` that the files have."""
    stack, core = block[: tensors.ndim], block[tensors.ndim :]
    core = tuple((start, min(stop, size)) for (start, stop), size in zip(core, split, strict=True))
    lengths = [stop - start for start, stop in core]
    if min(lengths) < 1:
        return  # nothing but padding
    rows = max(1, PIECE_BYTES // (math.prod(lengths[1:]) * buffer.itemsize))
    for index in itertools.product(*(range(start, stop) for start, stop in stack)):
        if tensors[index] is None:
            continue
        into = buffer[tuple(i - start for i, (start, _) in zip(index, stack, strict=True))]
        into = into[tuple(slice(n) for n in lengths)]
        (first, last), rest = core[0], core[1:]
        for row in range(first, last, rows):
            end = min(row + rows, last)
            yield tensors[index], split, ((row, end), *rest), into[row - first : end - first]


def local_boxes(sharding: NamedSharding, shape: tuple[int, ...]) -> Sequence[Box]:
    """What this process's devices hold of an array: one box, or one per shard if there are gaps.

    Neighbours along the tensor axis together have all rows of a tensor whose columns are sharded,
    and one long read is better than one per row and device.
    """
    indices = sharding.addressable_devices_indices_map(shape).values()
    boxes = {_box(index or (), shape) for index in indices}
    hull = tuple(
        (min(start for start, _ in dim), max(stop for _, stop in dim))
        for dim in zip(*boxes, strict=True)
    )
    return [hull] if _volume(hull) == sum(map(_volume, boxes)) else sorted(boxes)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    return tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))


def _volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def _inside(inner: Box, outer: Box) -> bool:
    return all(a <= i and j <= b for (i, j), (a, b) in zip(inner, outer, strict=True))
