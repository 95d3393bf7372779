"""The linear map and the token table of every family.

What a compiled program says of them names the line that calls them, see `jaxtp.compile.hlo`.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxtp.activations.by_name import active_plan, constrain


class QuantizedKernel(nnx.Module):
    """A kernel as integers; see `jaxtp.models.quantized`.

    Attributes:
        qvalue: int8 or int4, of the kernel's shape.
        scale: What they are multiplied by, float32, 1 in place of each dim that is summed over.
    """

    def __init__(self, qvalue: jax.Array, scale: jax.Array) -> None:
        self.qvalue, self.scale = nnx.Param(qvalue), nnx.Param(scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """The kernel's."""
        return self.qvalue.shape

    def product(self, inputs: jax.Array, num_in: int) -> jax.Array:
        """`inputs` times the kernel, in their type, over its first `num_in` dims."""
        out = jnp.tensordot(inputs, self.qvalue[...].astype(inputs.dtype), axes=num_in)
        scale = jnp.squeeze(self.scale[...], tuple(range(num_in)))
        scale = jnp.expand_dims(scale, range(out.ndim - scale.ndim))
        # Behind the product: scaled in front of it, the kernel would be written in 16 bits first.
        return (out.astype(jnp.float32) * scale).astype(out.dtype)


class Linear(nnx.LinearGeneral):
    """A linear map of the last dims whose sizes are those of its kernel.

    So that it also runs on a part of its kernel and bias, where Flax's shapes the bias by what the
    module was made with. `jaxtp.models.lora` may give it an adapter, and `jaxtp.models.quantized`
    a `QuantizedKernel`.
    """

    lora_a: nnx.LoRAParam[jax.Array] | None = None
    lora_b: nnx.LoRAParam[jax.Array] | None = None
    lora_scale: float = 1.0

    def __call__(
        self,
        inputs: jax.Array,
        out_sharding: Any = None,
        *,
        adapter_inputs: jax.Array | None = None,
        product: jax.Array | None = None,
    ) -> jax.Array:
        """The product over the dims of `in_features`, in `dtype`, plus the bias.

        Args:
            inputs: What the kernel multiplies.
            out_sharding: As in Flax; not used.
            adapter_inputs: The same for the adapter, see `products`.
            product: What the kernel makes of them, where that is known.
        """
        num_in, kernel = len(self.in_features), self.kernel
        inputs = inputs.astype(self.dtype)
        if product is not None:
            out = product
        elif isinstance(kernel, QuantizedKernel):
            out = kernel.product(inputs, num_in)
        else:
            out = jnp.tensordot(inputs, kernel[...].astype(self.dtype), axes=num_in)
        if self.lora_a is not None and self.lora_b is not None:
            a, b = (factor[...].astype(self.dtype) for factor in (self.lora_a, self.lora_b))
            # Scaled between the products, where it is narrow.
            own = inputs if adapter_inputs is None else adapter_inputs.astype(self.dtype)
            narrow = jnp.tensordot(own, a, axes=num_in) * self.lora_scale
            out = out + jnp.tensordot(narrow.astype(self.dtype), b, axes=1)
        if self.bias is None:
            return out
        bias = self.bias[...].astype(self.dtype)
        return out + jnp.expand_dims(bias, range(out.ndim - bias.ndim))


def kernels_of(linear: Linear) -> list[tuple[jax.Array, jax.Array | None]]:
    """What a map multiplies by, as a sum: kernels, and the scales of their outputs or None.

    An adapter is added to a kernel of floats, and stands beside one of integers.
    """
    kernel = linear.kernel
    is_integer = isinstance(kernel, QuantizedKernel)
    adapter = None
    if linear.lora_a is not None and linear.lora_b is not None:
        adapter = jnp.tensordot(linear.lora_a[...], linear.lora_b[...], axes=1) * linear.lora_scale
    if is_integer:
        own = (kernel.qvalue[...], jnp.squeeze(kernel.scale[...], range(len(linear.in_features))))
        return [own] if adapter is None else [own, (adapter, None)]
    own = kernel[...]
    return [(own if adapter is None else own + adapter.astype(own.dtype), None)]


def products(inputs: jax.Array, *maps: Linear) -> tuple[jax.Array, ...]:
    """What each of several maps makes of the same inputs.

    Backward their kernels' parts of the inputs' gradient are partial sums on each device, which one
    all-reduce can add; an adapter's part is complete, its narrow product being summed before. Added
    in turns, each kernel's part needs an all-reduce of its own, so adapters get a copy of the
    inputs, whose gradient comes after the kernels'. XLA leaves no copy in the program.
    """
    has_adapters = any(one.lora_a is not None for one in maps)
    copied = jnp.copy(inputs) if has_adapters else None
    active, own = active_plan(), [None] * len(maps)
    if active is not None and active.is_mapped:
        own = _in_one(inputs, maps)
    pairs = zip(maps, own, strict=True)
    return tuple(one(inputs, adapter_inputs=copied, product=product) for one, product in pairs)


def _in_one(inputs: jax.Array, maps: Sequence[Linear]) -> list[jax.Array]:
    """What each map's kernel makes of the inputs, by one product with all of them side by side.

    Its derivative is one product too, where those of several leave parts of the inputs' gradient to
    be added in memory. For kernels of one device: side by side, shards would change places.
    """
    num_in = len(maps[0].in_features)
    kernels = [one.kernel[...].astype(one.dtype) for one in maps]
    outer = [kernel.shape[num_in:] for kernel in kernels]
    widths = [math.prod(shape) for shape in outer]
    flat = [kernel.reshape(*kernel.shape[:num_in], -1) for kernel in kernels]
    out = jnp.tensordot(inputs.astype(maps[0].dtype), jnp.concatenate(flat, axis=-1), axes=num_in)
    parts = jax.lax.split(out, widths, axis=out.ndim - 1)
    pairs = zip(parts, outer, strict=True)
    return [part.reshape(*part.shape[:-1], *shape) for part, shape in pairs]


class TokenTable(nnx.Embed):
    """The embedding of token ids; NaN for an id that no token has."""

    def __call__(self, tokens_BT: jax.Array, out_sharding: Any = None) -> jax.Array:
        """The residual stream in front of the first layer, (batch, tokens, hidden size)."""
        table_VD = constrain(self.embedding[...].astype(self.dtype), "token_table")
        x_BTD = jnp.take(table_VD, constrain(tokens_BT, "tokens"), axis=0, mode="clip")
        # Replicated before it is sharded along the sequence: at once, the lookup is split over
        # replicas and tokens together, and undoing that takes permutes. NaN comes after that:
        # between the sum over devices and the sharding it would keep them from becoming one
        # reduce-scatter.
        x_BTD = constrain(constrain(x_BTD, "block_input"), "residual")
        is_known_BT = (tokens_BT >= 0) & (tokens_BT < self.num_embeddings)
        return jnp.where(is_known_BT[:, :, None], x_BTD, jnp.nan)
