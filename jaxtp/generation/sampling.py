"""How the next token is chosen, without bringing the logits of a row to one device.

Every way of choosing is the same two steps: a threshold below which no token counts, and the
largest of logit / temperature + Gumbel noise above it (Gumbel 1954; with no noise, greedy). For the
largest each shard gives four numbers a row, in one all-gather; thresholds come from the largest
candidates of each shard. Shape suffixes: B batch, V vocab, C candidates, S shards, F numbers found.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtp.activations.by_name import active_plan, constrain
from jaxtp.errors.arguments import number, whole

NUM_CANDIDATES = 128
"""Likeliest tokens that a nucleus is looked for in; where they do not hold it, all tokens are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn, in this order: temperature, top_k, top_p, min_p.

    Raises:
        BadConfig: TP020, if a number is out of its bounds.
    """

    temperature: float = 0.0
    """0 takes the likeliest token; otherwise logits are divided by it and a token is drawn."""

    top_k: int = 0
    """Draw from so many likeliest tokens, and those equal to the last of them; 0: from all."""

    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together."""

    min_p: float = 0.0
    """Draw from tokens at least this likely, as a share of the likeliest one's probability."""

    def __post_init__(self) -> None:
        kinds = {
            "temperature": number(0),
            "top_k": whole(0),
            "top_p": number(above=0, most=1),
            "min_p": number(0, 1),
        }
        for name, kind in kinds.items():
            kind.check(name, getattr(self, name))

    @property
    def kind(self) -> "Sampling":
        """The same for all that one compiled program serves: which steps there are, and top_k."""
        return Sampling(
            temperature=float(self.temperature > 0),
            top_k=self.top_k if self.temperature > 0 else 0,
            top_p=0.5 if self.top_p < 1 and self.temperature > 0 else 1.0,
            min_p=0.5 if self.min_p > 0 and self.temperature > 0 else 0.0,
        )

    @property
    def numbers(self) -> "Numbers":
        """What may differ between two runs of one program."""
        return Numbers(*map(np.float32, (self.temperature, self.top_p, self.min_p)))


class Numbers(NamedTuple):
    """Run-time values of a program's sampling, float32 scalars; see `Sampling`."""

    temperature: Any
    top_p: Any
    min_p: Any


def choose(
    logits_BV: jax.Array, sampling: Sampling, keys_B: jax.Array, numbers: Numbers | None = None
) -> tuple[jax.Array, jax.Array]:
    """The next token of every row and its log-probability, int32 and float32 (batch,).

    Args:
        logits_BV: Scores.
        sampling: How to draw. The probability that is reported is the model's own: of all tokens,
            at temperature 1.
        keys_B: A random key for each row; unused if the temperature is 0.
        numbers: What counts instead of the numbers of `sampling`, which then says the kind alone.
    """
    numbers = sampling.numbers if numbers is None else numbers
    logits_BV = logits_BV.astype(jnp.float32)
    wanted_BV = logits_BV
    if sampling.temperature > 0:
        scaled_BV = logits_BV / numbers.temperature
        noise_BV = jax.vmap(lambda key: jax.random.gumbel(key, scaled_BV.shape[1:]))(keys_B)
        least_B = threshold(scaled_BV, sampling, numbers)
        wanted_BV = jnp.where(scaled_BV >= least_B[:, None], scaled_BV + noise_BV, -jnp.inf)
    axes, spec = _vocab_axes(logits_BV.shape)
    plan = active_plan()
    if plan is None or not axes:
        parts_BF = _found(wanted_BV, logits_BV)
    else:
        mapped = jax.shard_map(_found, mesh=plan.mesh, in_specs=(spec, spec), out_specs=spec)
        parts_BF = constrain(mapped(wanted_BV, logits_BV), "candidates")
    # One message for all of it: on a few bytes a message is nothing but its latency.
    parts_BSF = parts_BF.reshape(logits_BV.shape[0], -1, NUM_FOUND)
    most_BS, index_BS, logit_BS, total_BS = jnp.moveaxis(parts_BSF, -1, 0)
    shard_B1 = jnp.argmax(most_BS, axis=-1, keepdims=True)
    index_B1, logit_B1 = (jnp.take_along_axis(x, shard_B1, -1) for x in (index_BS, logit_BS))
    width = logits_BV.shape[1] // parts_BSF.shape[1]
    token_B = index_B1[:, 0].astype(jnp.int32) + width * shard_B1[:, 0].astype(jnp.int32)
    return token_B, logit_B1[:, 0] - jax.nn.logsumexp(total_BS, axis=-1)


NUM_FOUND = 4
"""Numbers of a row that each part of the vocabulary gives, see `_found`."""


def _found(wanted_BV: jax.Array, logits_BV: jax.Array) -> jax.Array:
    """Of one part of the vocabulary: the most wanted token, float32 (batch, `NUM_FOUND`).

    How much it is wanted; its index in the part, exact in float32 up to 16 million; its logit; and
    the logarithm of the sum of all exponentials.
    """
    index_B = jnp.argmax(wanted_BV, axis=-1)
    is_it_BV = jnp.arange(wanted_BV.shape[1])[None] == index_B[:, None]
    logit_B = jnp.sum(logits_BV, axis=-1, where=is_it_BV)
    most_B, total_B = jnp.max(wanted_BV, axis=-1), jax.nn.logsumexp(logits_BV, axis=-1)
    return jnp.stack([most_B, index_B.astype(jnp.float32), logit_B, total_B], axis=-1)


def _vocab_axes(shape: tuple[int, ...]) -> tuple[tuple[str, ...], PartitionSpec]:
    """The axes that shard the vocabulary of logits of this shape, and where the logits lie."""
    plan, (batch, vocab) = active_plan(), shape
    if plan is None:
        return (), PartitionSpec()
    axes = plan.shape.fit((vocab,))
    rows = plan.batch if batch % plan.shape.ways(plan.batch) == 0 else ()
    return axes, PartitionSpec(rows or None, axes)


def threshold(x_BV: jax.Array, sampling: Sampling, numbers: Numbers | None = None) -> jax.Array:
    """The least logit that may be drawn, float32 (batch,); -inf if all may.

    Args:
        x_BV: Logits over the temperature.
        sampling: See `choose`.
        numbers: See `choose`.
    """
    numbers = sampling.numbers if numbers is None else numbers
    least_B = jnp.full(x_BV.shape[0], -jnp.inf)
    vocab = x_BV.shape[1]
    if 0 < sampling.top_k < vocab or sampling.top_p < 1:
        wanted = sampling.top_k or vocab
        few = min(vocab, max(NUM_CANDIDATES, sampling.top_k) if sampling.top_p < 1 else wanted)
        least_B, is_exact_B = _nucleus(x_BV, candidates(x_BV, few), sampling, numbers.top_p)
        if few < vocab and sampling.top_p < 1:
            # Flat distributions only: all tokens are sorted where one row needs it.
            least_B = jax.lax.cond(
                jnp.all(is_exact_B),
                lambda: least_B,
                lambda: _nucleus(x_BV, candidates(x_BV, vocab), sampling, numbers.top_p)[0],
            )
    if sampling.min_p > 0:
        least_B = jnp.maximum(least_B, jnp.max(x_BV, axis=-1) + jnp.log(numbers.min_p))
    return least_B


def candidates(x_BV: jax.Array, count: int) -> jax.Array:
    """The `count` largest entries of each row, descending, (batch, count).

    Each shard of the vocabulary gives its own largest, and the largest of these are the answer.
    """
    plan, (axes, spec) = active_plan(), _vocab_axes(x_BV.shape)
    if plan is None or not axes or count * plan.shape.ways(axes) >= x_BV.shape[1]:
        return jax.lax.top_k(x_BV, count)[0]
    # Mapped by hand: XLA sorts a batch of parts as one array, for which it gathers all of them.
    largest = functools.partial(_largest, count=count)
    parts_BC = jax.shard_map(largest, mesh=plan.mesh, in_specs=spec, out_specs=spec)(x_BV)
    return jax.lax.top_k(constrain(parts_BC, "candidates"), count)[0]


def _largest(x_BV: jax.Array, count: int) -> jax.Array:
    return jax.lax.top_k(x_BV, count)[0]


def _nucleus(
    x_BV: jax.Array, largest_BC: jax.Array, sampling: Sampling, top_p: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The threshold of top_k and top_p, and whether the candidates were enough to know it."""
    count, vocab = largest_BC.shape[1], x_BV.shape[1]
    kept = min(sampling.top_k or vocab, vocab)
    if kept <= count:
        least_B, largest_BC = largest_BC[:, kept - 1], largest_BC[:, :kept]
        total_B = jax.nn.logsumexp(largest_BC, axis=-1)
    else:
        least_B, total_B = jnp.full(x_BV.shape[0], -jnp.inf), jax.nn.logsumexp(x_BV, axis=-1)
    if sampling.top_p == 1:
        return least_B, jnp.full(x_BV.shape[0], True)
    mass_BC = jnp.cumsum(jnp.exp(largest_BC - total_B[:, None]), axis=-1)
    before_BC = jnp.pad(mass_BC[:, :-1], ((0, 0), (1, 0)))
    least_B = jnp.min(jnp.where(before_BC < top_p, largest_BC, jnp.inf), axis=-1)
    is_exact_B = (mass_BC[:, -1] >= top_p) | (largest_BC.shape[1] == min(kept, vocab))
    return least_B, is_exact_B
