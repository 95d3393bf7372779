"""Causal attention of long sequences that no axis shares, without an array of tokens x tokens.

XLA's own attention keeps scores of all pairs of tokens, several times: DeepSeek-V3's 128 heads have
24 GiB of them at 4,096 tokens. Tiles of `blocks` have those of 1,024 x 1,024 at a time, skip what
no query sees, and are computed again in the backward pass.
"""

import dataclasses
from typing import Any

import jax

from jaxtp.activations.by_name import ActivePlan, active_plan
from jaxtp.activations.context.blocks import (
    LARGEST,
    AttentionPart,
    Scores,
    TokenSpan,
    View,
    gradients_of,
    part_of,
)
from jaxtp.activations.context.by_device import Gradients, attend

LEAST_TOKENS = 2 * LARGEST
"""From here on there is a tile that is skipped."""


def attend_in_tiles(
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    segment_ids_BT: jax.Array | None,
    window: jax.Array | None,
    sinks_N: jax.Array | None,
    scores: Scores,
) -> jax.Array:
    """Attention like the queries; arguments as for `attention.attend_shared`, without its plan."""
    how = (_alone, scores, active_plan())
    return attend(how, q_BTNH, k_BTKH, v_BTKH, segment_ids_BT, window, sinks_N)


@dataclasses.dataclass(frozen=True, slots=True)
class _Alone:
    """The work of a device that has all tokens of its queries' sequences."""

    scores: Scores

    def forward(self, q: Any, k: Any, v: Any, ids: Any, window: Any) -> tuple[jax.Array, jax.Array]:
        part = part_of(q, k, v, _view(ids, window), self.scores)
        return part.out_BTNH.astype(q.dtype), part.lse_BNT

    def backward(
        self, q: Any, k: Any, v: Any, ids: Any, window: Any, out: Any, lse: Any, d_out: Any
    ) -> Gradients:
        view = _view(ids, window)
        dq, dk, dv = gradients_of(q, k, v, AttentionPart(out, lse), d_out, view, self.scores)
        return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


def _alone(scores: Scores, _: ActivePlan | None) -> _Alone:
    return _Alone(scores)


def _view(ids: Any, window: Any) -> View:
    side = TokenSpan(jax.numpy.int32(0), ids)
    return View(side, side, window, diagonal=True)
