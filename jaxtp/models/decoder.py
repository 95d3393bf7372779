"""What every model is: tokens to hidden states to scores, with and without a cache; its loss."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from numpy.typing import NDArray

from jaxtp.activations.context.dealing import deal, undo
from jaxtp.errors import SizeMismatch
from jaxtp.models.cache import Cache, cache_shape, scan_cached
from jaxtp.models.layers import Layer, Sums, normed, run_alone, scan_layers


def default_positions(tokens_BT: jax.Array) -> jax.Array:
    """Positions 0, 1, ... of one row, (1, tokens)."""
    return jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None, :]


class Decoder(nnx.Module):
    """What every model of this package is: hidden states, then scores over the vocabulary.

    Parameters are in `config.param_dtype`, activations and logits in `config.dtype`; take losses
    with `cross_entropy`, which sums in fp32.

    Attributes:
        config: Its sizes and options, a `DecoderConfig`.
    """

    config: Any

    def __call__(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Scores of the next token at every position, (batch, tokens, vocab).

        Args:
            tokens_BT: Token ids.
            positions_BT: Position of each token, (batch or 1, tokens); default: 0, 1, ...
            segment_ids_BT: Which document each token belongs to; attention stays inside one.
                Default: one document.
        """
        return self.logits(self.hidden(tokens_BT, positions_BT, segment_ids_BT))

    def hidden(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> jax.Array:
        """Final normed hidden states, (batch, tokens, hidden size); arguments as for a call."""
        return self.hidden_and_sums(tokens_BT, positions_BT, segment_ids_BT)[0]

    def hidden_and_sums(
        self,
        tokens_BT: jax.Array,
        positions_BT: jax.Array | None = None,
        segment_ids_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Sums | None]:
        """The same, and what experts count on the way; None for a model without experts."""
        if positions_BT is None:
            self.check_length(tokens_BT.shape[1])
            positions_BT = default_positions(tokens_BT)
        tokens_BT, positions_BT = deal(tokens_BT), deal(positions_BT)
        if segment_ids_BT is not None:
            segment_ids_BT = deal(segment_ids_BT)
        x_BTD = self.embed(tokens_BT, positions_BT)
        context, rows = self.context(positions_BT, segment_ids_BT)
        sums: Sums | None = None
        for layers, (start, stop) in zip(self.stacks, self.spans, strict=True):
            own = {name: row[start:stop] for name, row in rows.items()}
            if isinstance(layers, nnx.List):
                x_BTD = run_alone(layers, x_BTD, context, own)
                continue
            in_stages = stop == self.config.num_hidden_layers
            x_BTD, sums = scan_layers(
                layers, x_BTD, context, self.config.remat, own, in_stages=in_stages
            )
        return undo(normed(self.last_norm, x_BTD)), sums

    def extend(
        self, tokens_BT: jax.Array, cache: Cache, slot: jax.Array, first_B: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Hidden states of tokens that follow those in a cache, and the cache with them in it.

        Args:
            tokens_BT: One token a row; or several in slots from 0 on, prompts that end together.
                With one token a row the batch may be a multiple of the cache's: then it is so many
                copies of each row, one after the other, of which the cache keeps one.
            cache: From `init_cache`, or from here.
            slot: Where the first of the tokens goes.
            first_B: The slot of each row's first token; what lies before it is padding.
        """
        slots_T = slot + jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)
        behind_BT = slots_T[None, :] - first_B[:, None]
        positions_BT = jnp.maximum(behind_BT, 0)
        x_BTD = self.embed(tokens_BT, positions_BT)
        context, rows = self.context(positions_BT, (behind_BT >= 0).astype(jnp.int32))
        for layers, span in zip(self.stacks, self.spans, strict=True):
            own = {name: row[slice(*span)] for name, row in rows.items()}
            x_BTD, cache = scan_cached(layers, x_BTD, context, own, cache, slot, first_B, span)
        return normed(self.last_norm, x_BTD), cache

    def init_cache(self, batch: int, num_slots: int) -> Cache:
        """An empty cache for so many rows and tokens."""
        shape = cache_shape(self.config, batch, num_slots)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)

    def check_length(self, num_tokens: int) -> None:
        """Whether positions up to this many exist; every family but GPT-2 has all.

        Raises:
            SizeMismatch: TP003, if they do not.
        """

    @property
    def stacks(self) -> tuple[Layer, ...]:
        """All layers, those that are alike as one module; pipeline stages share the last ones.

        Only the last ones may have experts.
        """
        raise NotImplementedError

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Of each of `stacks` the first layer, and the one behind the last."""
        first = self.config.num_hidden_layers - self.config.num_staged_layers
        last = (first, self.config.num_hidden_layers)
        return ((0, first), last) if first else (last,)

    @property
    def last_norm(self) -> Callable[[jax.Array], jax.Array]:
        """The norm behind the last layer."""
        raise NotImplementedError

    def embed(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """The residual stream in front of the first layer, (batch, tokens, hidden size)."""
        raise NotImplementedError

    def context(
        self, positions_BT: jax.Array, segment_ids_BT: jax.Array | None
    ) -> tuple[dict[str, jax.Array | None], dict[str, NDArray[Any]]]:
        """What all layers take, and what each of them takes where they differ, by name."""
        raise NotImplementedError

    def logits(self, h_BTD: jax.Array) -> jax.Array:
        """Scores over the vocab from final hidden states, (batch, tokens, vocab)."""
        raise NotImplementedError


def token_nats(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Negative log-likelihood in nats of each token, float32 (batch, tokens).

    The target's logit is found by comparing and summing, not by indexing: with the vocab on the
    tensor axis each device adds up its own part and per-token scalars cross the wire (one max, two
    sums), while a gather along the vocab would bring all logits to every device. XLA fuses the
    comparison into the sum; no one-hot array exists.

    Args:
        logits_BTV: Scores, of any float type; sums are taken in fp32.
        targets_BT: Token ids.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    is_target_BTV = targets_BT[:, :, None] == jnp.arange(logits_BTV.shape[-1])[None, None, :]
    target_BT = jnp.sum(logits_BTV, axis=-1, where=is_target_BTV)
    return jax.nn.logsumexp(logits_BTV, axis=-1) - target_BT


def cross_entropy(
    logits_BTV: jax.Array, targets_BT: jax.Array, where_BT: jax.Array | None = None
) -> jax.Array:
    """Mean of `token_nats` over the tokens that count, a float32 scalar.

    Args:
        logits_BTV: Scores, of any float type.
        targets_BT: Token ids.
        where_BT: True for tokens that count; default: all.
    """
    return jnp.mean(token_nats(logits_BTV, targets_BT), where=where_BT)


def generate(
    model: Decoder,
    prompt_BT: jax.Array,
    num_tokens: int,
    *,
    temperature: float = 0.0,
    key: jax.Array | None = None,
) -> jax.Array:
    """The prompt followed by `num_tokens` tokens of the model, (batch, prompt + num_tokens).

    One program per total length: each step runs the model on the whole buffer, where causality
    keeps what is not written yet from mattering. There is no key/value cache; this is for looking
    at samples.

    Args:
        model: A model of this package.
        prompt_BT: Token ids, at least one per row, all rows of one length.
        num_tokens: Tokens to add.
        temperature: 0 takes the likeliest token; otherwise logits are divided by it and a token is
            drawn.
        key: PRNG key for drawing; default: `jax.random.key(0)`.

    Raises:
        SizeMismatch: TP003, if the prompt is empty.
    """
    num_given = prompt_BT.shape[1]
    if num_given == 0:
        raise SizeMismatch("the prompt has no tokens", fix="start from at least one token per row")
    tokens_BT = jnp.pad(prompt_BT, ((0, 0), (0, num_tokens)))
    key = jax.random.key(0) if key is None else key
    graph, params = nnx.split(model)
    return _fill(graph, params, tokens_BT, num_given, temperature, key)


@functools.partial(jax.jit, static_argnums=0)
def _fill(
    graph: nnx.GraphDef,
    params: nnx.State,
    tokens_BT: jax.Array,
    num_given: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
) -> jax.Array:
    model: Decoder = nnx.merge(graph, params)

    def write(t: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        h_BTD = model.hidden(tokens_BT)
        # Only the last known token meets the head: with a large vocab the head is most of a step.
        h_B1D = jax.lax.dynamic_slice_in_dim(h_BTD, t - 1, 1, axis=1)
        logits_BV = model.logits(h_B1D)[:, 0].astype(jnp.float32)
        drawn_B = jax.random.categorical(
            jax.random.fold_in(key, t), logits_BV / jnp.maximum(temperature, 1e-6)
        )
        token_B = jnp.where(temperature > 0, drawn_B, jnp.argmax(logits_BV, axis=-1))
        return jax.lax.dynamic_update_index_in_dim(
            tokens_BT, token_B.astype(tokens_BT.dtype), t, axis=1
        )

    return jax.lax.fori_loop(num_given, tokens_BT.shape[1], write, tokens_BT)
