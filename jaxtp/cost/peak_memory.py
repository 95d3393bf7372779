"""Bytes that one device holds at the peak of a step, part by part, from sizes alone."""

import dataclasses

import numpy as np

from jaxtp.cost.block import block_params, is_fused
from jaxtp.cost.data_parallel import layer_params_here, sharded_params, vocab_ways
from jaxtp.cost.habits import Habits
from jaxtp.cost.strategy import (
    ModelSizes,
    Number,
    Recompute,
    Strategy,
    is_recompute,
    tokens_of,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes on the fullest device.

    Attributes:
        state: Parameters, gradients, master copies and moments.
        activations: What the backward pass needs of all micro-batches in flight.
        logits: Of one micro-batch, with what the loss makes of them.
        working: Of the block that is being computed, gathered parameters, library buffers.
    """

    state: Number
    activations: Number
    logits: Number
    working: Number

    @property
    def total(self) -> Number:
        """Bytes in all."""
        return self.state + self.activations + self.logits + self.working


ZERO_3_TABLE = 0.34
"""Share of `Habits.table_bytes` under ZeRO 3, where the gradient is scattered. As compiled."""


def kept_bytes(model: ModelSizes, s: Strategy, habits: Habits) -> Number:
    """Bytes that one block keeps for its backward pass, per token of the micro-batch.

    Nothing recomputed, 16 bits each: inputs and results of two norms (4 hidden), q, k, v and the
    attention's result, the MLP's inner values (3 ffn with a gate, else 2), dropout's masks; where
    scores go through memory also 5 bytes a score (Korthikanti et al. 2022, section 4.1, whose
    34 + 5 a s / h this is). Compiled by XLA it is more, which is in the habits.
    """
    tp = np.asarray(s.tp)
    split = np.where(s.sequence_parallel, tp, 1)
    masks = 2 * model.hidden if model.dropout else 0
    stream = 2 * model.hidden / split
    latents = 2 * (model.query_latent + model.kv_latent)
    heads = 2 * (model.width + model.values + model.kv_width) / tp + latents
    mlp = 2 * (3 if model.gated else 2) * model.active_ffn / tp
    # What was sent to experts, and what they made of it.
    routed = 2 * stream * model.chosen * model.capacity * model.routed_layers / model.layers
    scores = habits.score_bytes * model.heads * model.seq / tp
    # Where a sequence is shared or long, attention that is not fused works in tiles.
    is_long = 0 < habits.tiles_from <= model.seq
    scores = np.where(is_fused(s, habits) | (np.asarray(s.cp) > 1) | is_long, 0.0, scores)
    inner = habits.kept_inner * (heads + mlp)
    everything = habits.kept_streams * stream + masks / split + inner + routed
    ups = (2 if model.gated else 1) * model.active_ffn
    products = 2 * (model.width + model.kv_width + ups) / tp + routed
    kept = np.where(is_recompute(s, Recompute.NONE), everything + scores, everything)
    kept = np.where(is_recompute(s, Recompute.DOTS), 2 * stream + products, kept)
    ops = 2 * stream + products / 2 + 2 * model.values / tp
    kept = np.where(is_recompute(s, Recompute.OPS), ops, kept)
    kept = np.where(is_recompute(s, Recompute.OUTPUTS), 2 * stream, kept)
    return np.where(is_recompute(s, Recompute.FULL, Recompute.STAGE), stream, kept)


def peak_memory(model: ModelSizes, s: Strategy, habits: Habits) -> PeakMemory:
    """The peak of one step: at the loss, or in the backward pass of the last block.

    1F1B holds as many micro-batches as there are stages on the first of them; interleaved, the
    chunks in between as well (Narayanan et al. 2021, section 2.2). On the last stage, logits stand
    beside one micro-batch: the fuller of the two stages counts.
    """
    pp, m = np.asarray(s.pp), np.asarray(s.micro_batches)
    tokens, layers = tokens_of(model, s), np.ceil(model.layers / pp)
    flight = _in_flight(s, habits)
    kept = kept_bytes(model, s, habits) * tokens * layers
    # In stages of one program the head works on its share of all micro-batches at once.
    rows = tokens * np.where(pp > 1, m / pp, 1) if habits.gpipe else tokens
    each = np.where(pp > 1, habits.staged_logit_bytes, habits.logit_bytes)
    columns = model.vocab / vocab_ways(model, s, habits)
    table = habits.table_bytes * model.hidden * columns
    table = table * np.where(np.asarray(s.zero) >= 3, ZERO_3_TABLE, 1.0)
    logits = each * rows * columns + table
    none = dataclasses.replace(s, recompute=np.asarray(int(Recompute.NONE)))
    within = dataclasses.replace(habits, kept_inner=1, score_bytes=habits.working_score_bytes)
    block = kept_bytes(model, none, within) * tokens
    recomputes = is_recompute(s, Recompute.FULL, Recompute.STAGE, Recompute.OUTPUTS, Recompute.DOTS)
    block = np.where(recomputes, 1.0, 0.5) * block
    at_loss = np.where(habits.gpipe, flight, 1) * kept + logits
    along_cp = np.asarray(s.cp) if habits.zero_along_cp >= 2 else 1
    shards = np.where(np.asarray(s.zero) >= 2, s.fsdp * along_cp, 1) * np.asarray(s.tp)
    stacked = habits.stacked_gradient_bytes * layer_params_here(model, s) / shards
    stacked = np.where((m > 1) & (pp == 1), 0.0, stacked)  # counted as held
    # The table's gradient is there from the loss on, where the framework keeps it so long.
    block = block + stacked + (table / 2 if habits.gpipe else 0)
    ways = np.asarray(s.fsdp) * along_cp
    summed = sharded_params(model, s, habits, ways * s.ep, ways)
    block = block + np.where(_sums_ahead(s), habits.ahead_gradient_bytes * summed, 0.0)
    backward = flight * kept + block
    # The block that is computed and one more, gathered; gathered ahead a third is on its way.
    gathered = (2 + np.asarray(s.interleaved)) * 2.0 * block_params(model, s)
    on_loss = at_loss >= backward
    return PeakMemory(
        state=state_bytes(model, s, habits),
        activations=np.where(on_loss & (not habits.gpipe), 1, flight) * kept,
        logits=np.where(on_loss, logits, 0.0),
        working=np.where(on_loss, 0.0, block)
        + np.where(np.asarray(s.zero) >= 3, gathered, 0.0)
        + habits.workspace_bytes,
    )


def _sums_ahead(s: Strategy) -> Number:
    """Whether gradients are summed over micro-batches of blocks that are gathered ahead."""
    zero, m = np.asarray(s.zero), np.asarray(s.micro_batches)
    return np.asarray(s.interleaved, bool) & (zero >= 3) & (m > 1)


def _in_flight(s: Strategy, habits: Habits) -> Number:
    """Micro-batches whose activations the fullest stage holds at once."""
    pp, m, v = np.asarray(s.pp), np.asarray(s.micro_batches), np.asarray(s.rounds)
    if habits.gpipe:
        # One program keeps what each tick leaves, idle ones too: chunks of layers / rounds.
        return np.where(pp > 1, m + (pp - 1) / v, 1)
    return np.where(pp > 1, np.minimum(m, pp + np.where(v > 1, (pp - 1) / v, 0)), 1)


def state_bytes(model: ModelSizes, s: Strategy, habits: Habits) -> Number:
    """Bytes of parameters, gradients, master copies and moments on the fullest device."""
    zero = np.asarray(s.zero)

    def size(stage: int) -> Number:
        """Elements of what is sharded from this ZeRO stage on."""
        cp = np.asarray(s.cp) if stage <= habits.zero_along_cp else 1
        plain, experts = np.asarray(s.fsdp) * s.ep * cp, np.asarray(s.fsdp) * cp
        ways = (np.where(zero >= stage, n, 1) for n in (plain, experts))
        return sharded_params(model, s, habits, *ways)

    gradients = np.where(
        np.asarray(s.micro_batches) * (np.asarray(s.pp) == 1) > 1,
        habits.held_gradient_bytes,
        habits.single_gradient_bytes,
    )
    # Summed over replicas it is held once more; gathered ahead it is held so in any case.
    twice = (zero >= 2) & (np.asarray(s.dp) > 1) & (np.asarray(s.micro_batches) > 1)
    twice = twice & (np.asarray(s.pp) == 1) & np.logical_not(_sums_ahead(s))
    gradients = gradients + np.where(twice, habits.replica_gradient_bytes, 0.0)
    return size(3) * habits.copy_bytes + size(2) * gradients + size(1) * habits.state_bytes
