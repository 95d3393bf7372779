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

Attend = Callable[..., jax.Array]
"""`(queries, keys, values, mask=None) -> result`: (batch, tokens, heads, width), and a mask
(batch or 1, 1, tokens, tokens)."""


def on_each_device(attend: Attend, mask: jax.Array | None) -> Attend:
    """`attend` with a mask, in a `shard_map` of its own inside of one over some of the axes.

    Queries are sharded as far as keys are, so that each device has the keys of its queries.
    """
    active = active_plan()
    manual = set(getattr(active.here, "manual_axes", ())) if active is not None else set[str]()

    def local(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, **options: Any) -> jax.Array:
        if active is None or not manual:
            return attend(q_BTNH, k_BTKH, v_BTKH, mask=mask, **options)
        mesh, shape = active.here, active.shape
        batch = shape.batch if q_BTNH.shape[0] % shape.ways(shape.batch) == 0 else ()
        heads = PartitionSpec(batch, None, shape.fit((k_BTKH.shape[2],)))
        rows = PartitionSpec(batch if mask is not None and mask.shape[0] > 1 else ())
        return jax.shard_map(
            lambda q, k, v, mask: attend(q, k, v, mask=mask, **options),
            mesh=mesh,
            in_specs=(heads, heads, heads, rows),
            out_specs=heads,
            axis_names=set(mesh.axis_names) - manual,
            check_vma=False,
        )(q_BTNH, k_BTKH, v_BTKH, mask)

    return local
