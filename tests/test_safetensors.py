"""safetensors files: boxes read exactly, damaged and hostile files refused, non-finite found."""

import json
import math
import os

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtp.errors import BadWeights
from jaxtp.io.safetensors import EXPONENT, is_finite, read_box, read_header, write_file, write_order


def write(file, arrays):
    tensors = {name: (str(a.dtype), a.shape) for name, a in arrays.items()}
    write_file(file, tensors, (arrays[name] for name in write_order(tensors)))


def raw(file, header, body=b"", length=None):
    """A file with any header text and any bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = len(text) if length is None else length
    file.write_bytes(length.to_bytes(8, "little") + text + body)
    return file


def entry(dtype="F32", shape=(2,), span=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


def test_what_is_written_is_read(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.arange(4, dtype=np.int8),
        "scalar": np.float16(3),
        "empty": np.zeros((0, 5), np.float32),
        "c.10": np.asarray(jnp.arange(5, dtype=jnp.bfloat16)),
    }
    write(tmp_path / "x.safetensors", arrays)
    found = read_header(tmp_path / "x.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in found.items()} == {
        n: (str(a.dtype), a.shape) for n, a in arrays.items()
    }
    for name, tensor in found.items():
        out = np.empty(tensor.shape, tensor.dtype)
        read_box(tensor, tensor.shape, tuple((0, n) for n in tensor.shape), out)
        np.testing.assert_array_equal(out, arrays[name])


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    box = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        box.append((start, draw(st.integers(start + 1, size))))
    return shape, tuple(box)


@given(boxes(), st.sampled_from(["float32", "bfloat16", "int8"]))
def test_a_box_is_read_with_its_own_bytes_only(tmp_path_factory, shape_and_box, dtype):
    (shape, box), read = shape_and_box, []
    want = np.arange(math.prod(shape)).reshape(shape).astype(jnp.dtype(dtype))
    file = tmp_path_factory.mktemp("box") / "x.safetensors"
    # Stored flat: dims may be split further than the file knows.
    write(file, {"before": np.zeros(3, np.float32), "x": want.reshape(-1)})
    cut = tuple(slice(*dim) for dim in box)
    out = np.empty_like(want[cut])
    with pytest.MonkeyPatch.context() as patch:
        real = os.preadv
        patch.setattr(os, "preadv", lambda *a: read.append(real(*a)) or read[-1])
        read_box(read_header(file)["x"], shape, box, out)
    np.testing.assert_array_equal(out, want[cut])
    assert sum(read) == out.nbytes


HOSTILE = {
    "no file": (lambda f: f.with_name("missing"), "cannot be read: No such file"),
    "empty": (lambda f: f.write_bytes(b""), "a header of 0 bytes in a file of 0"),
    "shorter than a length": (lambda f: f.write_bytes(b"abc"), "in a file of 3"),
    "header longer than the file": (
        lambda f: raw(f, b"{}", length=10**6),
        "a header of 1000000 bytes in a file of 10: truncated",
    ),
    "header of 2^63 bytes": (
        lambda f: raw(f, b"{}", length=2**63),
        "a header of 9223372036854775808",
    ),
    "no JSON": (lambda f: raw(f, b"{not json}"), "the header is no JSON"),
    "no UTF-8": (lambda f: raw(f, b'{"\xff": 1}'), "the header is no JSON"),
    "nested a million times": (lambda f: raw(f, b"[" * 10**6), "the header is no JSON"),
    "a list": (lambda f: raw(f, b"[1]"), "the header is no JSON object"),
    "a name twice": (
        lambda f: raw(f, b'{"a": %b, "a": %b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
        "twice in one object: a",
    ),
    "an entry of another form": (lambda f: raw(f, {"a": 3}), "tensor 'a' has no dtype, shape and"),
    "no offsets": (lambda f: raw(f, {"a": {"dtype": "F32", "shape": [2]}}), "tensor 'a' has no"),
    "three offsets": (lambda f: raw(f, {"a": entry(span=(0, 8, 9))}), "tensor 'a' has no dtype"),
    "negative size": (lambda f: raw(f, {"a": entry(shape=(-2,))}, bytes(8)), "tensor 'a' has no"),
    "true as a size": (lambda f: raw(f, {"a": entry(shape=(True, 2))}, bytes(8)), "'a' has no"),
    "a float as a size": (lambda f: raw(f, {"a": entry(shape=(2.0,))}, bytes(8)), "'a' has no"),
    "unknown type": (lambda f: raw(f, {"a": entry(dtype="Q4")}, bytes(8)), "is of type 'Q4'"),
    "a type that is a list": (
        lambda f: raw(f, {"a": entry(dtype=["F32"])}, bytes(8)),
        "has no dtype",
    ),
    "huge size": (
        lambda f: raw(f, {"a": entry(shape=(2**62, 2**62))}, bytes(8)),
        "tensor 'a' has 8 bytes, F32.* takes 85070591730234615865843651857942052864",
    ),
    "a number of 5000 digits": (
        lambda f: raw(f, b'{"a": {"shape": [%b]}}' % (b"9" * 5000)),
        "the header is no JSON",
    ),
    "size of another type": (lambda f: raw(f, {"a": entry(dtype="F16")}, bytes(8)), "takes 4"),
    "outside of the file": (
        lambda f: raw(f, {"a": entry(span=(8, 16))}, bytes(8)),
        "tensor 'a' lies at bytes 8 to 16 of 8: truncated",
    ),
    "end before start": (lambda f: raw(f, {"a": entry(span=(8, 0))}, bytes(8)), "bytes 8 to 0"),
    "truncated": (lambda f: raw(f, {"a": entry()}, bytes(7)), "'a' lies at bytes 0 to 8 of 7"),
    "overlap": (
        lambda f: raw(f, {"a": entry(), "b": entry(span=(4, 12))}, bytes(12)),
        "tensor 'b' begins at byte .*, the one before it ends at",
    ),
    "gap": (
        lambda f: raw(f, {"a": entry(), "b": entry(span=(12, 20))}, bytes(20)),
        "tensor 'b' begins at byte .*, the one before it ends at",
    ),
    "bytes behind the last": (
        lambda f: raw(f, {"a": entry()}, bytes(9)),
        "the tensors end at byte",
    ),
}


@pytest.mark.parametrize(("make", "message"), HOSTILE.values(), ids=HOSTILE)
def test_damaged_and_hostile_files_are_refused(tmp_path, make, message):
    file = tmp_path / "model.safetensors"
    made = make(file)
    file = made if hasattr(made, "name") else file
    with pytest.raises(BadWeights, match=message) as error:
        read_header(file)
    assert error.value.code == "TP095"
    assert error.value.where == str(file)


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(tmp_path):
    file = tmp_path / "x.safetensors"
    write(file, {"x": np.ones(10_000, np.float32)})
    tensor = read_header(file)["x"]
    os.truncate(file, 20_000)
    with pytest.raises(BadWeights, match="tensor 'x' ends before byte 20000"):
        read_box(tensor, (10_000,), ((0, 10_000),), np.empty(10_000, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_element_that_is_no_number_is_found(tmp_path, dtype, bad):
    x = np.full((3, 50_000), jnp.finfo(dtype).max, jnp.dtype(dtype))
    x[2, 777] = bad
    write(tmp_path / "x.safetensors", {"x": x})
    tensor = read_header(tmp_path / "x.safetensors")["x"]
    read_box(tensor, x.shape, ((0, 2), (0, 50_000)), np.empty_like(x[:2]))
    with pytest.raises(BadWeights, match=r"tensor 'x' holds infinities or NaN") as error:
        read_box(tensor, x.shape, ((2, 3), (700, 800)), np.empty_like(x[2:, 700:800]))
    assert error.value.where == str(tmp_path / "x.safetensors")


@given(st.binary(min_size=8, max_size=64), st.sampled_from(sorted(EXPONENT)))
def test_is_finite_agrees_with_numpy(data, dtype):
    size = jnp.dtype(dtype).itemsize
    x = np.frombuffer(data[: len(data) // size * size], jnp.dtype(dtype))
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs of small types
        wanted = bool(np.isfinite(x).all())
    assert is_finite(x) == wanted
