"""Arrays that are stored in another form than the model has: pieces of a dim, zeros between them.

One rule serves all of it. A dim is a row of pieces, each lies at the start of a block, all blocks
are equally long, and zeros fill the rest. A padded vocabulary is one piece. Layers assigned to
pipeline stages are one piece a chunk, so that sharding the stored dim gives each stage its
own.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Generator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtp.errors import BadTree, SizeMismatch
from jaxtp.errors.arguments import Kind, checked, whole

ArrayType = TypeVar("ArrayType", jax.Array, NDArray[Any])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """How one dim is stored.

    Attributes:
        dim: Which one.
        pieces: `(first, count)` of each block's piece, in elements of the logical dim; together
            they are all of the dim, in any order.
        block: Elements of every stored block.
    """

    dim: int
    pieces: tuple[tuple[int, int], ...]
    block: int

    @property
    def logical(self) -> int:
        """Elements of the dim as the model has it."""
        return sum(count for _, count in self.pieces)

    @property
    def stored(self) -> int:
        """Elements of the dim as it is stored."""
        return len(self.pieces) * self.block

    @property
    def rows(self) -> NDArray[np.int64]:
        """The logical element that each stored one is; `logical`, which is none, for zeros."""
        found = np.full((len(self.pieces), self.block), self.logical)
        for row, (first, count) in zip(found, self.pieces, strict=True):
            row[:count] = np.arange(first, first + count)
        return found.reshape(-1)

    @property
    def places(self) -> NDArray[np.int64]:
        """Where each logical element is stored."""
        # Stable, so that zeros, which have the largest number, come last.
        return np.argsort(self.rows, kind="stable")[: self.logical]

    @property
    def is_plain(self) -> bool:
        """Whether both forms are the same."""
        return bool(np.array_equal(self.rows, np.arange(self.logical)))


Padding = tuple[Blocks, ...]
"""The dims of one array that are stored in blocks; `()` if its two forms are the same."""


def stored_shape(shape: tuple[int, ...], padding: Padding) -> tuple[int, ...]:
    """Shape (elements) of the stored form of an array of `shape`."""
    changed = {blocks.dim: blocks.stored for blocks in padding}
    return tuple(changed.get(dim, size) for dim, size in enumerate(shape))


def pad(x: jax.Array, padding: Padding) -> jax.Array:
    """The stored form of an array in logical form; works inside `jit`, on arrays placed anyhow.

    `pad(unpad(x, a), b)` brings an array from one plan's stored form to another's.

    Args:
        x: The array. A dim that is as long as stored, and not as long as logical, stays as it is;
            where both are equally long, which is true of even rounds, it is taken to be logical.
        padding: The plan's, from `ParamDecision.padding`, or `placement.train_state.slots` for
            the leaves of any train state.
    """
    for blocks in padding:
        if x.shape[blocks.dim] == blocks.logical:
            x = jnp.take(x, blocks.rows, blocks.dim, mode="fill", fill_value=0)
    return x


def unpad(x: ArrayType, padding: Padding) -> ArrayType:
    """The logical form of an array in stored form, the inverse of `pad`.

    Args:
        x: The array, on devices or the host. A dim that is not as long as stored stays as it is.
        padding: As in `pad`.
    """
    for blocks in padding:
        if x.shape[blocks.dim] == blocks.stored:
            x = x.take(blocks.places, blocks.dim, mode="clip")
    return x


def read(host: NDArray[Any], padding: Padding, index: tuple[slice, ...]) -> NDArray[Any]:
    """A copy of `pad(host, padding)[index]` that reads no more of `host` than it needs."""
    todo = [blocks for blocks in padding if host.shape[blocks.dim] == blocks.logical]
    wanted = {blocks.dim: blocks.rows[index[blocks.dim]] for blocks in todo}
    part = host[tuple(slice(None) if d in wanted else cut for d, cut in enumerate(index))]
    for dim, rows in wanted.items():
        is_zero = rows == host.shape[dim]
        part = part.take(np.where(is_zero, 0, rows), dim)
        part[(slice(None),) * dim + (is_zero,)] = 0
    return np.array(part)


_watching: contextvars.ContextVar[tuple[set[int], ...]] = contextvars.ContextVar(
    "jaxtp_masked", default=()
)


MASKED = "jaxtp_mask_padding"
"""The name of the call by which a watched program shows where it masks."""


def _shown(logits: jax.Array) -> jax.Array:
    return logits


_shown.__name__ = MASKED
_show = jax.jit(_shown)


@contextlib.contextmanager
def masks_seen() -> Generator[set[int]]:
    """The vocabulary sizes that `mask_padding` is called with inside the block."""
    seen: set[int] = set()
    token = _watching.set((*_watching.get(), seen))
    try:
        yield seen
    finally:
        _watching.reset(token)


@checked(
    logits=Kind(
        lambda value: (
            getattr(value, "ndim", 0) > 0
            and not isinstance(value, jax.ShapeDtypeStruct)
            and jnp.issubdtype(value.dtype, jnp.number)
        ),
        "the logits: mask_padding(logits, vocab_size)",
        BadTree,
    ),
    vocab_size=Kind(whole(1).accepts, "how many tokens there are, e.g. 50257", SizeMismatch),
)
def mask_padding(logits: jax.Array, vocab_size: int) -> jax.Array:
    """Logits whose padded entries can neither be sampled nor change a softmax.

    A loss that gives weight to the log-probability of every token, such as label smoothing, gives
    it to the padded ones too and becomes absurdly large: take `log_probs[..., :vocab_size]` there.

    Args:
        logits: `(..., stored vocab)`, of a float type.
        vocab_size: Entries that stand for a token; the ones behind them were added by a plan.

    Returns:
        `(..., stored vocab)`. Padded entries hold half of the type's lowest number, not -inf: the
        difference of two logits stays finite, so that no gradient becomes NaN. Their own gradient
        is zero.

    Raises:
        SizeMismatch: TP003, if there are fewer than `vocab_size` logits, or it is no count.
        BadTree: TP046, if the logits are no array.
    """
    for seen in _watching.get():
        seen.add(vocab_size)
    stored = logits.shape[-1]
    if stored < vocab_size:
        raise SizeMismatch(
            f"{stored} logits for a vocabulary of {vocab_size}",
            fix=f"vocab_size is at most {stored}",
        )
    if stored == vocab_size:
        return _show(logits) if _watching.get() else logits
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    lowest = jnp.asarray(jnp.finfo(logits.dtype).min / 2, logits.dtype)
    return jnp.where(ids < vocab_size, logits, lowest)
