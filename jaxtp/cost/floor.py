"""The least that tensor parallelism can move: the Megatron minimum."""

from jaxtp.hardware.links import wire_bytes


def floor_bytes(
    *,
    size: int,
    message_bytes: float,
    layers: int,
    ends: bool = True,
    sequence_parallel: bool = False,
    training: bool = True,
) -> float:
    """Wire bytes that one device must send per step along the tensor axis (DESIGN 2).

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
        ends: Whether embedding and head are split along the vocabulary.
        sequence_parallel: Whether the residual stream is split along the sequence.
        training: Whether there is a backward pass.

    >>> floor_bytes(size=8, message_bytes=1000, layers=2, ends=False)
    14000.0
    """
    one = wire_bytes("all-reduce", message_bytes, size)
    half = wire_bytes("all-gather", message_bytes, size)
    passes = 2 if training else 1
    per_layer = 2 * passes * one
    if sequence_parallel:
        per_layer += 2 * half * (passes - 1)
    return layers * per_layer + (passes * one if ends else 0.0)
