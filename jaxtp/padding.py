"""Arrays with a padded dim: zeros at its end, and logits that ignore them.

Stage in: arrays of the model's shape. Stage out: arrays of the stored shape, and back.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtp.errors import SizeMismatch


def pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """`x` with zeros at the end of each dim up to `shape` (elements); `x` itself if it is there."""
    if np.shape(x) == shape:  # a number has the shape ()
        return x
    return jnp.pad(x, [(0, want - have) for have, want in zip(x.shape, shape, strict=True)])


def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits whose padded entries can neither be sampled nor change a softmax.

    Args:
        logits: `(..., stored vocab)`, of a float type.
        vocab_size: Entries that stand for a token; the ones behind them were added by a plan.

    Returns:
        `(..., stored vocab)`. Padded entries hold half of the type's lowest number, not -inf: the
        difference of two logits stays finite, so that no gradient becomes NaN. Their own gradient
        is zero.

    Raises:
        SizeMismatch: TP003, if there are fewer than `vocab_size` logits.
    """
    stored = logits.shape[-1]
    if stored < vocab_size:
        raise SizeMismatch(
            f"{stored} logits for a vocabulary of {vocab_size}",
            fix=f"vocab_size is at most {stored}",
        )
    if stored == vocab_size:
        return logits
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min / 2, logits.dtype)
    return jnp.where(ids < vocab_size, logits, lowest)
