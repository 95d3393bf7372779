"""The least that tensor parallelism can move: the Megatron minimum, in wire bytes per device."""

import jax.numpy as jnp

from jaxtp.cost.recomputation import reruns_of
from jaxtp.hardware.links import wire_bytes
from jaxtp.plan.decisions import Plan
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.roles import Role

REDUCTIONS_PER_PASS = 2
"""All-reduces of a dense block in each direction: one a column/row pair, attention's and the MLP's
(Shoeybi et al. 2019, section 3)."""


def stream_bytes(tokens: int, hidden_size: int, dtype: str) -> int:
    """Bytes of the replicated residual stream of so many tokens."""
    return tokens * hidden_size * jnp.dtype(dtype).itemsize


def layer_reductions(remat: str, plan: Plan) -> int:
    """All-reduces of one layer on one micro-batch, forward and backward, those run again included.

    Args:
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        plan: The plan.
    """
    again = reruns_of(remat, plan)
    return 2 * REDUCTIONS_PER_PASS + again.attention_out + again.mlp_out


def plan_floor_bytes(plan: Plan, dims: ModelDims, *, tokens: int, dtype: str) -> float | None:
    """Wire bytes that one device must send per step along a plan's tensor axis; see `floor_bytes`.

    None in pipeline stages: of their compiled program idle ticks count as work, so that a ratio to
    the lower bound would say nothing.

    Args:
        plan: The plan.
        dims: Sizes of its model.
        tokens: Tokens of the global batch.
        dtype: Type of activations.
    """
    if plan.stages is not None:
        return None
    has_vocab = any(
        d.role is Role.VOCAB and d.dim_on(plan.mesh.tp) is not None for d in plan.decisions
    )
    shard = tokens // plan.mesh.ways(plan.mesh.data)
    return floor_bytes(
        size=plan.mesh.tp_size,
        message_bytes=stream_bytes(shard, dims.hidden_size, dtype),
        layers=dims.layers,
        ends=has_vocab,
        sequence_parallel=plan.sequence_parallel,
    )


def floor_bytes(
    *,
    size: int,
    message_bytes: float,
    layers: int,
    ends: bool = True,
    sequence_parallel: bool = False,
    training: bool = True,
) -> float:
    """Wire bytes that one device must send per step along the tensor axis, at least.

    docs/design.md#the-lower-bound says where it comes from.

    A dense block has two column/row pairs, and each pair needs one all-reduce of the activation
    forward and one backward. With sequence parallelism each becomes an all-gather and a
    reduce-scatter of the same bytes, and backward gathers the two inputs again for the weight
    gradients. The ends of a model with a vocab-parallel embedding and head add one all-reduce
    forward and one backward; the few scalars per token of the cross entropy are not counted.

    Args:
        size: Devices along the tensor axis.
        message_bytes: The activation of one data shard in bytes: batch x sequence x width x
            bytes per element.
        layers: Dense blocks, each of attention and MLP.
        ends: Whether embedding and head are sharded along the vocabulary.
        sequence_parallel: Whether the residual stream is sharded along the sequence.
        training: Whether there is a backward pass.

    >>> floor_bytes(size=8, message_bytes=1000, layers=2, ends=False)
    14000.0
    """
    one = wire_bytes("all-reduce", message_bytes, size)
    half = wire_bytes("all-gather", message_bytes, size)
    passes = 2 if training else 1
    per_layer = REDUCTIONS_PER_PASS * passes * one
    if sequence_parallel:
        per_layer += REDUCTIONS_PER_PASS * half * (passes - 1)
    return layers * per_layer + (passes * one if ends else 0.0)
