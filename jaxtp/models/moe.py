"""Mixture of experts: a router that chooses a few of many MLPs for every token.

Shape suffixes as in `jaxtp.models.layers`, and E experts, C those chosen for a token, G groups.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.layers.experts import Capacity, ExpertWeights, Gate, by_device, run_experts
from jaxtp.models.layers import Sums, Tally, stack_layers
from jaxtp.models.projections import Linear, QuantizedKernel


class GatedMLP(nnx.Module):
    """What an expert has: down(gated(gate(h), up(h)))."""

    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear
    gated: Gate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How experts are chosen.

    Attributes:
        num_chosen: Experts for each token.
        scoring: What makes affinities of the router's scores, over all experts or for each alone.
        normalise: Whether the weights of a token sum to one, as in Mixtral.
        scale: What weights are multiplied by, as in DeepSeek-V3.
        num_groups: Groups of experts; a token chooses within the best `num_groups_chosen`.
        num_groups_chosen: See there.
        group_rank: How many of its best experts a group is judged by: 1 in DeepSeek-V2, 2 in V3.
    """

    num_chosen: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    num_groups_chosen: int = 1
    group_rank: int = 2


class MoE(nnx.Module):
    """Weighted sum of the MLPs that the router likes best for a token, and of shared ones.

    Each expert works on the tokens that chose it alone, see `jaxtp.layers.experts`.
    """

    def __init__(
        self,
        router: Linear,
        make_expert: Callable[[nnx.Rngs], GatedMLP],
        num_experts: int,
        routing: Routing,
        capacity: Capacity,
        rngs: nnx.Rngs,
        *,
        shared: nnx.Module | None = None,
        has_correction: bool = False,
    ) -> None:
        self.router = router
        self.experts = stack_layers(make_expert, num_experts, rngs)
        self.routing, self.capacity = routing, capacity
        if has_correction:
            self.e_score_correction_bias = nnx.Param(jnp.zeros(num_experts, jnp.float32))
        if shared is not None:
            self.shared_experts = shared

    def __call__(self, h_BTD: jax.Array, tally: Tally | None = None) -> jax.Array:
        """The experts' result, (batch, tokens, hidden size).

        Args:
            h_BTD: The normed residual stream.
            tally: Takes what is counted.
        """
        scores_BTE = self.router(h_BTD).astype(jnp.float32)
        correction = getattr(self, "e_score_correction_bias", None)
        weights_BTC, index_BTC = choose(
            scores_BTE, self.routing, None if correction is None else correction[...]
        )
        capacity = self.capacity
        if h_BTD.shape[1] == 1:
            capacity = capacity.of_step(len(h_BTD), index_BTC.shape[-1], scores_BTE.shape[-1])
        out_BTD, dropped_BT = run_experts(
            *(h_BTD, weights_BTC, index_BTC),
            self._weights(h_BTD.dtype),
            self.experts.gated,
            capacity,
        )
        if tally is not None:
            dropped_B = jnp.sum(dropped_BT, axis=1)
            assigned_B = jnp.full_like(dropped_B, math.prod(index_BTC.shape[1:]))
            sums = balance(scores_BTE, index_BTC, self.routing)
            tally.add({**sums, "dropped": dropped_B, "assigned": assigned_B})
        if (shared := getattr(self, "shared_experts", None)) is not None:
            out_BTD = out_BTD + shared(h_BTD)
        return out_BTD

    def _weights(self, dtype: jnp.dtype) -> ExpertWeights:
        experts = self.experts
        linears = (experts.gate_proj, experts.up_proj, experts.down_proj)
        biases = (None if x.bias is None else x.bias[...].astype(dtype) for x in linears)
        kernels = [x.kernel for x in linears]
        if any(isinstance(kernel, QuantizedKernel) for kernel in kernels):
            values = (kernel.qvalue[...] for kernel in kernels)
            scales = (jnp.squeeze(kernel.scale[...], 1) for kernel in kernels)
            return ExpertWeights(*values, *biases, *scales)
        return ExpertWeights(*(kernel[...].astype(dtype) for kernel in kernels), *biases)


def choose(
    scores_BTE: jax.Array, routing: Routing, correction_E: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Weights and experts of every token, float32 and int32 (batch, tokens, chosen).

    Softmax over the chosen scores as in section 2.1 of the Mixtral paper (Jiang et al. 2024), where
    weights are normalised; sigmoid, groups and correction as in section 2.1.2 of the DeepSeek-V3
    report (2024).

    Args:
        scores_BTE: The router's.
        routing: How to choose.
        correction_E: Added to affinities for the choice, not for the weights: what balances the
            load without a loss. It has no gradient.
    """
    affinity_BTE = affinities(scores_BTE.astype(jnp.float32), routing)
    wanted_BTE = affinity_BTE
    if correction_E is not None:
        wanted_BTE = wanted_BTE + correction_E.astype(jnp.float32)[None, None]
    index_BTC = by_device(functools.partial(_best, routing), wanted_BTE)
    # Not by index: compared and summed, it is elementwise and stays on the device.
    is_chosen_BTCE = jax.nn.one_hot(index_BTC, affinity_BTE.shape[-1])
    weights_BTC = jnp.sum(is_chosen_BTCE * affinity_BTE[..., None, :], axis=-1)
    if routing.normalise:
        weights_BTC = weights_BTC / (jnp.sum(weights_BTC, axis=-1, keepdims=True) + 1e-20)
    return weights_BTC * routing.scale, index_BTC


def affinities(scores_BTE: jax.Array, routing: Routing) -> jax.Array:
    """What weights are made of, positive, like `scores_BTE`."""
    if routing.scoring == "sigmoid":
        return jax.nn.sigmoid(scores_BTE)
    return jax.nn.softmax(scores_BTE, axis=-1)


def _best(routing: Routing, wanted_BTE: jax.Array) -> jax.Array:
    """The experts of every token, the most wanted first."""
    if routing.num_groups > 1:
        wanted_BTE = _within_groups(wanted_BTE, routing)
    return jax.lax.top_k(wanted_BTE, routing.num_chosen)[1]


def _within_groups(wanted_BTE: jax.Array, routing: Routing) -> jax.Array:
    """The same with nothing left of the groups that a token does not choose."""
    wanted_BTGE = wanted_BTE.reshape(*wanted_BTE.shape[:2], routing.num_groups, -1)
    best_BTG = jnp.sum(jax.lax.top_k(wanted_BTGE, routing.group_rank)[0], axis=-1)
    chosen_BTG = jax.lax.top_k(best_BTG, routing.num_groups_chosen)[1]
    is_chosen_BTG = jnp.any(jax.nn.one_hot(chosen_BTG, routing.num_groups, dtype=bool), axis=-2)
    kept_BTGE = jnp.where(is_chosen_BTG[..., None], wanted_BTGE, -jnp.inf)
    return kept_BTGE.reshape(wanted_BTE.shape)


def balance(scores_BTE: jax.Array, index_BTC: jax.Array, routing: Routing) -> Sums:
    """Two losses of each sequence, summed over its tokens, float32 (batch,).

    None depends on how a batch is split over devices or into micro-batches.

    `load_balance`: within each sequence, experts x the sum over experts of the share of choices
    that an expert has times its mean affinity; 1 a token when balanced. Equations 4 to 6 of the
    Switch Transformer paper (Fedus et al. 2022), taken sequence by sequence as in equations 17 to
    20 of the DeepSeek-V3 report. `router_z`: the square of the log of the sum of exponentials of
    a token's scores, equation 5 of ST-MoE (Zoph et al. 2022).

    Args:
        scores_BTE: The router's, float32.
        index_BTC: The chosen experts.
        routing: How they were chosen.
    """
    num_tokens, num_experts = scores_BTE.shape[1:]
    affinity_BTE = affinities(scores_BTE, routing)
    share_BTE = affinity_BTE / jnp.sum(affinity_BTE, axis=-1, keepdims=True)
    counts_BE = jnp.sum(jax.nn.one_hot(index_BTC, num_experts), axis=(1, 2))
    fraction_BE = counts_BE / (num_tokens * routing.num_chosen)
    both_B = jnp.sum(fraction_BE * jnp.sum(share_BTE, axis=1), axis=-1)
    return {
        "load_balance": num_experts * both_B,
        "router_z": jnp.sum(jax.nn.logsumexp(scores_BTE, axis=-1) ** 2, axis=-1),
    }
