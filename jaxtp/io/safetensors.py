"""safetensors files: headers checked to the last byte, boxes of tensors read, files written.

The format is an 8-byte length, that much JSON, and the tensors' bytes without gaps
(https://github.com/huggingface/safetensors). Its own package reads whole tensors or slices through
a memory map: the bytes that reach the process are not countable, a file truncated meanwhile ends it
with SIGBUS, and NumPy has no bfloat16 there. Reads here are `preadv` straight into the destination.
"""

import dataclasses
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtp.errors import BadWeights, join
from jaxtp.io.json_text import open_regular, parse_object

LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the reference implementation."""

MOST_DIMS = 64
"""Of one tensor; NumPy's limit (NPY_MAXDIMS)."""

DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Type in a header -> NumPy name; files keep their tensors in the reverse of this order."""

# Bits of the exponent. All of them set means infinite or not a number.
EXPONENT = {
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
}

Box = tuple[tuple[int, int], ...]
"""(start, stop) in elements of each dim."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        name: Its name in the file.
        dtype: NumPy name of its type.
        shape: In elements.
        file: The file that holds it.
        start: First byte in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int

    @functools.cached_property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * _itemsize(self.dtype)

    def bad(self, what: str, fix: str = "download the file again") -> BadWeights:
        """An error about this tensor."""
        return BadWeights(f"tensor {self.name!r} {what}", where=str(self.file), fix=fix)


@functools.cache
def _itemsize(dtype: str) -> int:
    return jnp.dtype(dtype).itemsize


def read_header(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a file by name; the header is proven to describe exactly this file.

    Raises:
        BadWeights: TP095, if the file is shorter or longer than its header says, the header is no
            JSON of the right form, or tensors overlap or leave gaps.
    """
    header, start, size = _header_json(file)
    header.pop("__metadata__", None)
    tensors = [_tensor(file, name, entry, start, size) for name, entry in header.items()]
    end = start
    for tensor in sorted(tensors, key=lambda t: (t.start, t.num_bytes)):
        if tensor.start != end:
            raise tensor.bad(f"begins at byte {tensor.start}, the one before it ends at {end}")
        end += tensor.num_bytes
    if end != size:
        raise BadWeights(
            f"the tensors end at byte {end} of {size}",
            where=str(file),
            fix="download the file again",
        )
    return {tensor.name: tensor for tensor in tensors}


def _header_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header, the byte that follows it, and the size of the file."""

    def fail(what: str) -> BadWeights:
        return BadWeights(what, where=str(file), fix="download the file again")

    with os.fdopen(open_regular(file), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        # Checked before it is read: a hostile length must not become an allocation.
        if not 2 <= length <= min(LONGEST_HEADER, size - 8):
            raise fail(
                f"a header of {length} bytes in a file of {size}: truncated, or no safetensors"
            )
        text = stream.read(length)
    try:
        return parse_object(text), 8 + length, size
    except ValueError as err:
        raise fail(f"the header {err}") from None


def _tensor(file: Path, name: str, entry: Any, start: int, size: int) -> StoredTensor:
    """One entry of a header, checked alone; `start` is where the file's tensors begin."""
    fields = entry if isinstance(entry, dict) else {}
    code, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    blank = functools.partial(StoredTensor, name, "uint8", (), file, start)
    if not (isinstance(code, str) and _are_counts(shape) and _are_counts(span) and len(span) == 2):
        raise blank().bad("has no dtype, shape and data_offsets of the right form")
    if code not in DTYPES:
        raise blank().bad(f"is of type {code!r}", fix=f"known types: {join(DTYPES, limit=20)}")
    first, last = span
    tensor = StoredTensor(name, DTYPES[code], tuple(shape), file, start + first)
    if not first <= last <= size - start:
        raise tensor.bad(f"lies at bytes {first} to {last} of {size - start}: truncated?")
    if last - first != tensor.num_bytes:
        raise tensor.bad(f"has {last - first} bytes, {code}{list(shape)} takes {tensor.num_bytes}")
    return tensor


def _are_counts(numbers: Any) -> TypeGuard[list[int]]:
    # A JSON true is a Python int too. Products of more and larger ones than these take minutes.
    # No generator: a header has some 100,000 of these lists.
    return (
        isinstance(numbers, list)
        and len(numbers) <= MOST_DIMS
        and {*map(type, numbers)} <= {int}
        and 0 <= min(numbers, default=0) <= max(numbers, default=0) < 2**63
    )


def read_box(tensor: StoredTensor, shape: tuple[int, ...], box: Box, out: NDArray[Any]) -> None:
    """Reads a box of a tensor into `out`, with exactly the bytes that it has.

    Args:
        tensor: The tensor.
        shape: Its shape, or the same elements with some dims split further.
        box: One (start, stop) per dim of `shape`.
        out: Where to put it: contiguous, of the box's shape and the tensor's type.

    Raises:
        BadWeights: TP095, if the file ends early, or an element is infinite or not a number.
    """
    assert out.flags.c_contiguous
    assert out.dtype == tensor.dtype
    assert math.prod(shape) == math.prod(tensor.shape)
    bytes_out = out.reshape(-1).view(np.uint8).data
    position = 0
    file = os.open(tensor.file, os.O_RDONLY)
    try:
        for start, length in _runs(shape, box, out.itemsize):
            _read_run(tensor, file, tensor.start + start, bytes_out[position : position + length])
            position += length
    finally:
        os.close(file)
    if not is_finite(out):
        raise tensor.bad(
            "holds infinities or NaN", fix="download it again, or use the checkpoint before it"
        )


def _runs(shape: tuple[int, ...], box: Box, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first byte, number of bytes) of every contiguous piece of a box, in order."""
    whole = len(shape)  # dims from here on are read whole
    while whole and box[whole - 1] == (0, shape[whole - 1]):
        whole -= 1
    inner = math.prod(shape[whole:]) * itemsize
    if whole == 0:
        yield 0, inner
        return
    # The last dim that is cut is still contiguous within one index of the dims before it.
    first, last = box[whole - 1]
    starts = np.zeros(1, np.int64)
    for d, (low, high) in enumerate(box[: whole - 1]):
        stride = math.prod(shape[d + 1 :]) * itemsize
        starts = (starts[:, None] + np.arange(low, high) * stride).reshape(-1)
    for start in starts.tolist():
        yield start + first * inner, (last - first) * inner


def _read_run(tensor: StoredTensor, file: int, start: int, into: memoryview) -> None:
    while into:
        count = os.preadv(file, [into], start)
        if count == 0:
            raise tensor.bad(f"ends before byte {start}: the file became shorter while it was read")
        start, into = start + count, into[count:]


def is_finite(array: NDArray[Any]) -> bool:
    """Whether no element is infinite or NaN; true for integers.

    Looks at exponent bits in pieces that stay in cache: several GB/s for bfloat16 too, for which
    `np.isfinite` takes a slow path through fp32.
    """
    if str(array.dtype) not in EXPONENT:
        return True
    unsigned, exponent = EXPONENT[str(array.dtype)]
    bits, piece = array.reshape(-1).view(unsigned), 1 << 16
    return not any(
        ((bits[i : i + piece] & exponent) == exponent).any() for i in range(0, len(bits), piece)
    )


def write_file(
    file: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    arrays: Iterable[NDArray[Any]],
) -> None:
    """Writes a file tensor by tensor, byte for byte as the reference implementation would.

    Args:
        file: The file to make.
        tensors: Name -> (NumPy name of the type, shape in elements).
        arrays: The tensors themselves in `write_order`; one at a time is held.
    """
    order = write_order(tensors)
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # `transformers` refuses files that do not say which framework they are for.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        dtype, shape = tensors[name]
        start, end = end, end + math.prod(shape) * jnp.dtype(dtype).itemsize
        header[name] = {"dtype": codes[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name, array in zip(order, arrays, strict=True):
            assert (str(array.dtype), array.shape) == tensors[name]
            stream.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def write_order(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[str]:
    """Names in the order of a file: wide types first, which aligns every tensor, then by name."""
    rank = {dtype: i for i, dtype in enumerate(DTYPES.values())}
    return sorted(tensors, key=lambda name: (-rank[tensors[name][0]], name))
