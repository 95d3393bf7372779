"""One number per array, equal before and after a checkpoint wherever both lie.

File formats do not notice a flipped bit inside of an array. The fingerprint is the sum over all
elements, modulo 2^32, of their bits, scrambled. A sum of integers depends neither on its order, so
the mesh does not matter, nor on zeros, so padding does not matter either.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
"""Bytes of an element -> what its bits are read as; eight bytes are two words."""


def fingerprints(arrays: Mapping[str, jax.Array]) -> dict[str, int]:
    """The fingerprint of each array by path; one pass over memory, on its own devices."""
    # One after the other: simulated devices may stop when many programs with sums are under way.
    return {path: int(_fingerprint(x)) for path, x in arrays.items()}


@jax.jit
def _fingerprint(x: jax.Array) -> jax.Array:
    return jnp.sum(_scramble(_bits(x)), dtype=jnp.uint32)


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
