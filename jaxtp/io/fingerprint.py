"""One number per array, equal before and after a checkpoint wherever both lie.

File formats do not notice a flipped bit inside of an array. The fingerprint is the sum over all
elements, modulo 2^32, of their bits, scrambled. A sum of integers depends neither on its order, so
the mesh does not matter, nor on zeros, so padding does not matter either.
"""

from collections import defaultdict
from collections.abc import Mapping

import jax
import jax.numpy as jnp

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
"""Bytes of an element -> what its bits are read as; eight bytes are two words."""

TOGETHER = 64
"""Arrays in one program."""


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The fingerprint of each array by path; one pass over memory, on its own devices.

    Arrays of one shape and place go together, `TOGETHER` a program: a tree of 10,000 small ones
    would else wait 10,000 times for its devices.
    """
    alike: defaultdict[object, list[str]] = defaultdict(list)
    for path, x in arrays.items():
        alike[x.shape, x.dtype, x.sharding].append(path)
    found: dict[str, int] = {}
    # One after the other: simulated devices may stop when many programs with sums are under way.
    for same in alike.values():
        for start in range(0, len(same), TOGETHER):
            paths = same[start : start + TOGETHER]
            marks = jax.device_get(_fingerprints(tuple(arrays[path] for path in paths)))
            found |= {path: int(mark) for path, mark in zip(paths, marks, strict=True)}
    return {path: found[path] for path in arrays}


@jax.jit
def _fingerprints(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(jnp.sum(_scramble(_bits(x)), dtype=jnp.uint32) for x in arrays)


def _bits(x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize <= 4):
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack((x.real, x.imag))
    return jax.lax.bitcast_convert_type(x, WORDS[x.dtype.itemsize]).astype(jnp.uint32)


def _scramble(bits: jax.Array) -> jax.Array:
    """MurmurHash3's finalizer: a bijection of 32-bit words that maps zero to zero."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(0xC2B2AE35)
    return bits ^ (bits >> 16)
