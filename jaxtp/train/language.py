"""The loss of a language model: nats per token of predicting each token from those before it."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.activations.by_name import constrain
from jaxtp.models import Decoder
from jaxtp.models.decoder import token_nats
from jaxtp.plan.trees import PyTree

Batch = Mapping[str, jax.Array]
"""`tokens`, `(batch, seq + 1)` ids; and, where sequences are packed, `segments` of the same shape:
the number of the document that a token belongs to, from 1, and 0 for padding."""


SHIFTED = (slice(None, -1), slice(1, None))
"""What a model reads of a row, and what it is to predict."""


@dataclasses.dataclass(frozen=True, slots=True)
class NextToken:
    """Cross-entropy of the next token; across the border of two documents nothing is predicted.

    Attributes:
        graph: `nnx.split(model)[0]`.
    """

    graph: nnx.GraphDef[Decoder]

    def total(self, params: PyTree, batch: Batch) -> jax.Array:
        """Nats of all predictions that count, a float32 scalar."""
        return self.objective(params, batch)[1]["nats"]

    def objective(self, params: PyTree, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The same with the losses of experts; and `nats`, `tokens` and what experts count."""
        model = nnx.merge(self.graph, params)
        # Where devices share sequences, shifting what is sharded along them would take permutes.
        tokens, targets = (constrain(batch["tokens"][:, cut], "rows") for cut in SHIFTED)
        if "segments" in batch:
            segments = batch["segments"][:, :-1]
            h_BTD, sums = model.hidden_and_sums(tokens, positions(segments), segments)
            counts = predicted(batch["segments"])
        else:
            (h_BTD, sums), counts = model.hidden_and_sums(tokens), None
        nats = token_nats(model.logits(h_BTD), targets).sum(where=counts)
        if sums is None:
            return nats, {"nats": nats}
        config = model.config
        extra = config.router_aux_loss_coef * sums["load_balance"]
        extra += config.router_z_loss_coef * sums["router_z"]
        return nats + extra, {"nats": nats, "tokens": jnp.float32(targets.size), **sums}

    def metrics(self, sums: Mapping[str, jax.Array], count: jax.Array) -> dict[str, jax.Array]:
        """What tables show of experts; nothing without any.

        `nats` are those of a prediction, where the loss has those of experts added to it;
        `load_balance` and `router_z` are means over tokens, summed over layers; `dropped` counts
        tokens, once for every expert that had no room for them, over all layers and devices.
        """
        if "dropped" not in sums:
            return {}
        return {
            "nats": sums["nats"] / count,
            "load_balance": sums["load_balance"] / sums["tokens"],
            "router_z": sums["router_z"] / sums["tokens"],
            "dropped": sums["dropped"],
            "dropped_share": sums["dropped"] / sums["assigned"],
        }

    def count(self, batch: Batch) -> jax.Array:
        """Predictions that count, a float32 scalar."""
        if "segments" not in batch:
            return jnp.float32(batch["tokens"][:, 1:].size)
        return jnp.maximum(predicted(batch["segments"]).sum(), 1).astype(jnp.float32)


def predicted(segments: jax.Array) -> jax.Array:
    """Which of `(batch, seq)` predictions count, from `(batch, seq + 1)` document numbers."""
    return (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)


def positions(segments: jax.Array) -> jax.Array:
    """Position of each token in its own document, `(batch, seq)`."""
    steps = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return steps - jax.lax.cummax(jnp.where(begins, steps, 0), axis=1)
