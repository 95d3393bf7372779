"""Attention of each device's own heads, where JAX cannot partition cuDNN's call.

Inside a `shard_map` over some of the axes, such as a pipeline stage, the call's partitioning rule
is given shardings that it does not know. There the kernel runs inside a second `shard_map`, over
all other axes, in which nothing is left to partition.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxtp.activations.by_name import active_plan
from jaxtp.activations.context.by_device import Specs, in_pieces

Attend = Callable[..., jax.Array]
"""`(queries, keys, values, mask=None) -> result`: (batch, tokens, heads, width), and a mask
(batch or 1, 1, tokens, tokens)."""


def on_each_device(attend: Attend, mask: jax.Array | None) -> Attend:
    """`attend` with a mask, in a `shard_map` of its own inside of one over some of the axes."""
    active = active_plan()
    manual = getattr(active.here, "manual_axes", ()) if active is not None else ()

    def local(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **options: Any) -> jax.Array:
        if active is None or not manual:
            return attend(q_BTNH, k_BTKH, v_BTKH, mask=mask, **options)
        heads = Specs.of(active, q_BTNH, k_BTKH, None).heads
        rows = PartitionSpec(heads[0] if mask is not None and mask.shape[0] > 1 else ())
        run = in_pieces(
            lambda q, k, v, mask: attend(q, k, v, mask=mask, **options),
            active,
            (heads, heads, heads, rows),
            heads,
        )
        return run(q_BTNH, k_BTKH, v_BTKH, mask)

    return local
