"""The arrays of one checkpoint, brought into the places and the form of a target.

A plan may store an array in another form than the model has (`jaxtp.plan.stored_form`), and a
checkpoint holds what was stored. It is read in that form, each device its own slice, and then
converted array by array: out of the form of the one plan, into that of the other.
"""

import contextlib
import dataclasses
import functools
import gc
import hashlib
import json
import logging
import math
import re
import sys
import textwrap
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding

from jaxtp.errors import BadCheckpoint, CheckpointMismatch, join
from jaxtp.io import stores
from jaxtp.io.stores import Folder
from jaxtp.placement.train_state import Overrides, slots
from jaxtp.plan.decisions import Plan
from jaxtp.plan.specs import canonical, partition_spec
from jaxtp.plan.stored_form import Padding, pad, unpad
from jaxtp.plan.trees import FlatTree, PyTree, shape_dtype
from jaxtp.processes.lost_peer import sign_of_lost_peer

ITEM = "state"
"""What Orbax calls the arrays, and their folder."""


CHUNK_BYTES = 64 * 2**20
"""Largest piece of an array that a file is read by. Without a limit a piece is what one device
had, and each of 8 devices would read all of what was saved by one."""

IN_FLIGHT_GB = 2
"""What a process reads at a time, or two of its largest slices: enough requests to keep disks and
networks busy, and host memory for few arrays instead of the model."""

SIZES = "sizes.json"
"""A file beside the arrays: every other file there -> its bytes."""

DIGESTS = "digests.json"
"""A file beside the arrays: those that describe them -> SHA-256. The arrays' own bytes, in folders
`DATA`, are too many for that; what they say has a fingerprint."""

DATA = "d"


class Handler(ocp.StandardCheckpointHandler):
    """Orbax's handler, which also writes down how large the files are, and what small ones hold.

    Orbax notices a file that was cut off when it reads it, which may be hours into loading, and
    leaves the errors of all other reads behind for the log.
    """

    def finalize(self, directory: Any) -> None:
        """Called by Orbax in one process, when all have written and before the folder is renamed.

        Args:
            directory: The arrays' folder.
        """
        super().finalize(directory)
        folder = stores.as_place(directory)
        sizes = stores.sizes(folder)
        digests = {
            name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
            for name in sizes
            if DATA not in name.split("/")
        }
        (folder / SIZES).write_text(json.dumps(sizes, indent=1))
        (folder / DIGESTS).write_text(json.dumps(digests, indent=1))


@dataclasses.dataclass(frozen=True, slots=True)
class StoredArray:
    """An array in the form that some plan stores.

    Attributes:
        value: An array, a struct, or a number.
        padding: The plan's.
    """

    value: Any
    padding: Padding


def stored(tree: PyTree, plan: Plan | None, overrides: Overrides | None) -> dict[str, StoredArray]:
    """Every leaf of a placed tree by path, with the form that its plan stores it in."""
    flat = FlatTree.of(tree)
    found = slots(flat.shapes(), plan, overrides) if plan is not None else {}
    return {
        path: StoredArray(leaf, found[path].padding if path in found else ())
        for path, leaf in flat.values.items()
    }


def save_args(arrays: Mapping[str, Any]) -> ocp.args.StandardSave:
    """What Orbax needs to write arrays by path."""
    pieces = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
    return ocp.args.StandardSave(dict(arrays), save_args=dict.fromkeys(arrays, pieces))


def read(
    folder: Folder,
    plan: Plan | None,
    wanted: Mapping[str, StoredArray],
    overrides: Overrides | None,
) -> dict[str, StoredArray]:
    """The arrays in `folder`, as they were saved, each spread over the devices of its target.

    Raises:
        BadCheckpoint: TP090, if files are missing or damaged.
        CheckpointMismatch: TP091, if paths, shapes or dtypes are not the wanted ones.
    """
    handler: Any = Handler()
    with reading(folder):
        _check_files(folder)
        metadata = dict(handler.metadata(folder / ITEM))
        structs = {p: jax.ShapeDtypeStruct(m.shape, m.dtype) for p, m in metadata.items()}
        saved = stored(structs, plan, overrides)
    _compare(folder, saved, wanted)
    # A number stays one: a Flax TrainState counts its steps in one until the first.
    request = {
        path: _request(saved[path].value.shape, target.value)
        if hasattr(target.value, "sharding")
        else target.value
        for path, target in wanted.items()
    }
    largest = max((_bytes_touched(request[path], metadata[path]) for path in request), default=0)
    handler = Handler(restore_concurrent_gb=max(IN_FLIGHT_GB, 1 + 2 * largest // 10**9))
    with reading(folder):
        arrays = handler.restore(folder / ITEM, args=ocp.args.StandardRestore(request))
    return {path: StoredArray(arrays[path], saved[path].padding) for path in wanted}


def settle(found: dict[str, StoredArray], wanted: Mapping[str, StoredArray]) -> dict[str, Any]:
    """The arrays in the form and the places of `wanted`, in memory that they own.

    `found` is emptied on the way: never are more than one array there in both forms.
    """
    done: dict[str, Any] = {}
    for path, target in wanted.items():
        source, padding = found[path].value, found.pop(path).padding
        if not isinstance(source, jax.Array):
            done[path] = source
        elif not getattr(target.value, "committed", True):
            done[path] = _uncommitted(source)
        else:
            convert = _converter(padding, target.padding, target.value.sharding)
            done[path] = jax.block_until_ready(convert(source))
    return done


def _uncommitted(x: jax.Array) -> jax.Array:
    """The same numbers bound to no device, like a key or a counter that a user has just made.

    Bound to one, they could not meet arrays on a mesh in one compiled function.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        numbers = _uncommitted(jax.random.key_data(x))
        return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
    return jnp.asarray(np.array(x))


@functools.cache
def _converter(
    source: Padding, target: Padding, sharding: NamedSharding
) -> Callable[[jax.Array], jax.Array]:
    """A compiled function from one stored form to another.

    The copy is for arrays that need no conversion: what Orbax gives back may lie in memory that the
    next step cannot take over.
    """

    def convert(x: jax.Array) -> jax.Array:
        return jnp.copy(x if source == target else pad(unpad(x, source), target))

    return jax.jit(convert, out_shardings=sharding)


def _request(shape: tuple[int, ...], target: Any) -> jax.ShapeDtypeStruct:
    """What Orbax is asked for: the saved shape, split as the target's, as far as it divides.

    A mesh axis that the saved shape does not divide over moves to a dim that does, so that no
    device gets more than its share.
    """
    sharding = target.sharding
    if shape == target.shape or not isinstance(getattr(sharding, "mesh", None), Mesh):
        return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)
    sizes: Mapping[str, int] = sharding.mesh.shape
    ways = [1] * len(shape)
    spec: list[tuple[str, ...]] = [()] * len(shape)
    for home, axes in enumerate(canonical(sharding.spec, len(shape))):
        for axis in axes:
            dims = (home, *range(len(shape)))
            fits = [d for d in dims if shape[d] % (ways[d] * sizes[axis]) == 0]
            for dim in fits[:1]:
                ways[dim] *= sizes[axis]
                spec[dim] += (axis,)
    spread = NamedSharding(sharding.mesh, partition_spec(tuple(spec)))
    return jax.ShapeDtypeStruct(shape, target.dtype, sharding=spread)


def _check_files(folder: Folder) -> None:
    found = stores.sizes(folder / ITEM)
    for name, size in json.loads((folder / ITEM / SIZES).read_text()).items():
        there = found.get(name, 0)
        if there != size:
            raise damaged(folder, f"{ITEM}/{name} has {there:,} of {size:,} bytes")
    # Checkpoints of format 1 have none.
    digests = folder / ITEM / DIGESTS
    for name, digest in json.loads(digests.read_text()).items() if digests.exists() else ():
        if hashlib.sha256((folder / ITEM / name).read_bytes()).hexdigest() != digest:
            raise damaged(folder, f"{ITEM}/{name} is not what was written")


def _bytes_touched(wanted: Any, metadata: Any) -> int:
    """Most bytes of the pieces that one device's slice of an array lies in; 0 for numbers."""
    sharding, storage = getattr(wanted, "sharding", None), metadata.storage
    if sharding is None or storage is None or len(wanted.shape) != len(storage.chunk_shape):
        return 0
    dims = zip(sharding.shard_shape(wanted.shape), storage.chunk_shape, metadata.shape, strict=True)
    pieces = [(min(-(-cut // piece) + 1, -(-size // piece)) * piece) for cut, piece, size in dims]
    return math.prod(pieces) * metadata.dtype.itemsize


def _compare(
    folder: Folder, saved: Mapping[str, StoredArray], wanted: Mapping[str, StoredArray]
) -> None:
    paths = sorted({*saved, *wanted})
    found = {path: (_text(saved.get(path)), _text(wanted.get(path))) for path in paths}
    differences = [
        f"{path}: {before} saved, {after} wanted"
        for path, (before, after) in found.items()
        if before != after
    ]
    if differences:
        raise CheckpointMismatch(
            f"{len(differences)} of {len(paths)} arrays differ: {join(differences)}",
            where=str(folder),
            fix="restore with the model and the optimizer that were saved",
        )


def _text(array: StoredArray | None) -> str:
    """Dtype and shape as the model has them; of a random key, those of its numbers."""
    if array is None:
        return "nothing"
    value = array.value
    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.eval_shape(jax.random.key_data, value)
    shape, dtype = shape_dtype(value)
    sizes = {blocks.dim: blocks.logical for blocks in array.padding}
    # Orbax keeps Python's numbers in 64 bits, whatever JAX makes of them.
    name = dtype if shape else dtype.rstrip("0123456789")
    return f"{name}{[sizes.get(dim, size) for dim, size in enumerate(shape)]}"


@contextlib.contextmanager
def reading(folder: Folder) -> Generator[None]:
    """Inside the block, what goes wrong is the checkpoint's fault, and says so.

    Raises:
        BadCheckpoint: TP090, for any error but those of devices, memory and other processes.
        BadRunFolder: TP093, if a store does not answer: what is in it may be good.
    """
    hush_abandoned()
    try:
        with stores.answering(folder):
            yield
        return
    except (BadCheckpoint, jax.errors.JaxRuntimeError, MemoryError):
        raise
    except Exception as err:  # Orbax, TensorStore and JSON have nothing narrower in common
        if sign_of_lost_peer(err):
            raise  # the checkpoint is good; it is a process that is not there to read it
        stores.refuse_silence(folder, err)
        problem = damaged(folder, shorten(err.__cause__ or err))
    gc.collect()
    raise problem


@functools.cache
def hush_abandoned() -> None:
    """From here on, the reads and writes that Orbax leaves behind when one fails end in silence.

    It closes its event loop under them. Each one that ends later, perhaps minutes later, would
    print a traceback of its own: through `sys.unraisablehook` if TensorStore finds the loop closed,
    through asyncio's log if its task is freed. Nothing else is hushed.
    """
    hook = sys.unraisablehook

    def report(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            hook(unraisable)

    def is_news(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return not (
            text.startswith(("Task ", "Future ")) and re.search("orbax|tensorstore", text, re.I)
        )

    sys.unraisablehook = report
    logging.getLogger("asyncio").addFilter(is_news)


def shorten(error: BaseException) -> str:
    """The start of a text that may go on for pages."""
    return f"{type(error).__name__}: {textwrap.shorten(str(error), 200)}"


def damaged(folder: Folder, what: str) -> BadCheckpoint:
    """The error for a checkpoint that cannot be read."""
    return BadCheckpoint(what, where=str(folder), fix="restore an older one")
