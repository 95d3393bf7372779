"""Mixture of experts: a router that chooses a few of many MLPs for every token.

Shape suffixes as in `jaxtp.models.layers`, and E experts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.models.layers import stack_layers


class GatedMLP(nnx.Module):
    """What an expert has: down(act(gate(h)) * up(h)), without biases."""

    gate_proj: nnx.LinearGeneral
    up_proj: nnx.LinearGeneral
    down_proj: nnx.LinearGeneral
    act: Callable[[jax.Array], jax.Array]


class MoE(nnx.Module):
    """Weighted sum of the MLPs that the router likes best for a token.

    Every expert sees every token, and those that were not chosen are multiplied by zero: exact for
    any routing, no token is dropped, and experts cost one all-reduce like a dense MLP, whether a
    plan puts whole experts or slices of all of them on a device. The price is arithmetic: experts /
    chosen times what sparse dispatch needs, 4 for Mixtral's 2 of 8.
    """

    def __init__(
        self,
        router: nnx.LinearGeneral,
        make_expert: Callable[[nnx.Rngs], GatedMLP],
        num_experts: int,
        num_chosen: int,
        rngs: nnx.Rngs,
    ) -> None:
        self.router = router
        self.experts = stack_layers(make_expert, num_experts, rngs)
        self.num_chosen = num_chosen

    def __call__(self, h_BTD: jax.Array) -> jax.Array:
        """The experts' result, (batch, tokens, hidden size)."""
        weights_BTE = route(self.router(h_BTD), self.num_chosen)
        experts, dtype = self.experts, h_BTD.dtype
        gate_EDF, up_EDF, down_EFD = (
            linear.kernel[...].astype(dtype)
            for linear in (experts.gate_proj, experts.up_proj, experts.down_proj)
        )
        gate_EBTF = jnp.einsum("btd,edf->ebtf", h_BTD, gate_EDF)
        inner_EBTF = experts.act(gate_EBTF) * jnp.einsum("btd,edf->ebtf", h_BTD, up_EDF)
        # Weighted before the last product, which then sums over experts too: no (experts, batch,
        # tokens, hidden size) array, and one all-reduce.
        weighted_EBTF = inner_EBTF * weights_BTE.astype(dtype).transpose(2, 0, 1)[..., None]
        return jnp.einsum("ebtf,efd->btd", weighted_EBTF, down_EFD)


def route(scores_BTE: jax.Array, num_chosen: int) -> jax.Array:
    """Weight of every expert for every token, (batch, tokens, experts), in fp32; rows sum to one.

    Softmax over the largest `num_chosen` scores, zero elsewhere: section 2.1 of the Mixtral paper
    (Jiang et al. 2024).
    """
    top_BTC, index_BTC = jax.lax.top_k(scores_BTE.astype(jnp.float32), num_chosen)
    chosen_BTCE = jax.nn.one_hot(index_BTC, scores_BTE.shape[-1])
    return jnp.sum(chosen_BTCE * jax.nn.softmax(top_BTC, axis=-1)[..., None], axis=-2)
