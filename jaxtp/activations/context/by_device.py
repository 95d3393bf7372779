"""Attention that each device computes for its own queries, with a derivative that is written here.

What is kept for the backward pass is the result and the `lse`, and no scores.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from jaxtp.activations.by_name import ActivePlan, in_force
from jaxtp.activations.context.blocks import AttentionPart, Scores, sinks_gradient, with_sinks

Gradients = tuple[jax.Array, jax.Array, jax.Array]


class DeviceWork(Protocol):
    """What a device does for its own queries, which it has with their keys, values and segments."""

    def forward(self, q: Any, k: Any, v: Any, ids: Any, window: Any) -> tuple[jax.Array, jax.Array]:
        """The result, like the queries, and the `lse`."""
        ...

    def backward(
        self, q: Any, k: Any, v: Any, ids: Any, window: Any, out: Any, lse: Any, d_out: Any
    ) -> Gradients:
        """The gradients of queries, keys and values, given result, `lse` and its gradient."""
        ...


How = tuple[Callable[[Scores, Any], DeviceWork], Scores, ActivePlan | None]
"""Makes the work of a device, its arguments, and the plan in force."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(how: How, q: Any, k: Any, v: Any, ids: Any, window: Any, sinks: Any) -> Any:
    """Attention of global arrays, like the queries; arguments as for `attention.attend_shared`."""
    return _forward(how, q, k, v, ids, window, sinks)[0]


def _forward(
    how: How, q: Any, k: Any, v: Any, ids: Any, window: Any, sinks: Any
) -> tuple[jax.Array, tuple[Any, ...]]:
    work_of, scores, active = how
    run: Any = work_of(scores, active).forward
    if active is not None:
        specs = Specs.of(active, q, k, ids)
        run = in_pieces(run, active, specs.inputs, (specs.heads, specs.lse))
    out, lse = run(q, k, v, ids, window)
    if sinks is not None:
        whole = with_sinks(AttentionPart(out, lse), sinks)
        out, lse = whole.out_BTNH.astype(q.dtype), whole.lse_BNT
    return out, (q, k, v, ids, window, out, lse, sinks)


def _backward(how: How, kept: tuple[Any, ...], d_out: jax.Array) -> Any:
    work_of, scores, active = how
    *operands, sinks = kept
    q, k, _, ids, _, out, lse = operands
    run: Any = work_of(scores, active).backward
    if active is None:
        dq, dk, dv = run(*operands, d_out)
    else:
        specs = Specs.of(active, q, k, ids)
        inputs = (*specs.inputs, specs.heads, specs.lse, specs.heads)
        with in_force(active):
            dq, dk, dv = in_pieces(run, active, inputs, (specs.heads,) * 3)(*operands, d_out)
    d_sinks = None if sinks is None else sinks_gradient(AttentionPart(out, lse), d_out, sinks)
    return dq, dk, dv, None, None, d_sinks


attend.defvjp(_forward, _backward)


@dataclasses.dataclass(frozen=True, slots=True)
class Specs:
    """Where arrays lie: (batch, tokens, heads, width), an `lse`, segments."""

    heads: PartitionSpec
    lse: PartitionSpec
    ids: PartitionSpec

    @classmethod
    def of(cls, active: ActivePlan, q: jax.Array, k: jax.Array, ids: Any) -> "Specs":
        """The specs of one call.

        Queries are sharded as far as keys are, so that each device has the keys of its queries.
        """
        shape, tokens = active.shape, active.tokens
        batch = shape.batch if q.shape[0] % shape.batch_ways == 0 else ()
        heads = shape.fit((k.shape[2],))
        rows = batch if ids is not None and ids.shape[0] > 1 else ()
        return cls(
            heads=PartitionSpec(batch, tokens, heads),
            lse=PartitionSpec(batch, heads, tokens),
            ids=PartitionSpec(rows, tokens),
        )

    @property
    def inputs(self) -> tuple[PartitionSpec, ...]:
        """Of queries, keys, values, segments and the window."""
        return (self.heads, self.heads, self.heads, self.ids, PartitionSpec())


def in_pieces(fn: Any, active: ActivePlan, in_specs: Any, out_specs: Any) -> Any:
    """`fn` on what each device has; the partitioner has no part in it.

    Not even along other axes: cuDNN's kernel cannot be partitioned where some are manual.
    """
    mesh = active.here
    return jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(mesh.axis_names) - set(getattr(mesh, "manual_axes", ())),
        check_vma=False,
    )
