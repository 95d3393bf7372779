"""The linear maps and norms that every module of the Llama family is made of."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.models.layers import residual_init
from jaxtp.models.llama.config import LlamaConfig
from jaxtp.models.projections import Linear


class OffsetRMSNorm(nnx.RMSNorm):
    """RMSNorm that multiplies by one plus its scale, in fp32."""

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """The normed array, like `x`."""
        shifted = jax.tree.map(lambda scale: 1 + scale.astype(jnp.float32), self)
        return nnx.RMSNorm.__call__(shifted, x, mask=mask)


Linears = Callable[..., Linear]
Norms = Callable[..., nnx.RMSNorm]


def parts_of(config: LlamaConfig, rngs: nnx.Rngs) -> tuple[Linears, Linears, Norms]:
    """Constructors of linear maps, of those back to the residual stream, and of norms.

    The config's types are filled in.
    """
    types = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.param_dtype)}
    linear = functools.partial(Linear, use_bias=False, rngs=rngs, **types)
    row = functools.partial(linear, kernel_init=residual_init(config.num_hidden_layers))
    kind, scale_init = nnx.RMSNorm, jax.nn.initializers.ones
    if config.norm_offset:
        kind, scale_init = OffsetRMSNorm, jax.nn.initializers.zeros
    norm = functools.partial(
        kind, epsilon=config.rms_norm_eps, scale_init=scale_init, rngs=rngs, **types
    )
    return linear, row, norm
