"""Wire bytes of one step of jaxtp along each mesh axis, from sizes alone.

Ring bytes that one device sends, as the compiled program's report counts them. Scalars per token
of the cross entropy and gradients of norms are left out (less than 0.1 %).
"""

from collections.abc import Mapping

import numpy as np

from jaxtp.cost.data_parallel import local_params, vocab_ways
from jaxtp.cost.habits import HABITS
from jaxtp.cost.strategy import ModelSizes, Recompute, Strategy, is_recompute, tokens_of
from jaxtp.hardware.links import wire_bytes
from jaxtp.mesh.axes import Axis


def axis_bytes(model: ModelSizes, s: Strategy) -> Mapping[str, float]:
    """Bytes that one device sends per step along each axis of more than one device.

    Args:
        model: Sizes.
        s: One strategy, its fields numbers; `cp` and `ep` of 1. Recomputing whole blocks under
            sequence parallelism, and accumulation under ZeRO 2, are not described.
    """
    axes = {Axis.TP: _tensor(model, s), Axis.PP: _stages(model, s)}
    axes |= {axis: _data(model, s, axis) for axis in (Axis.FSDP, Axis.DP)}
    return {axis.value: sent for axis, sent in axes.items() if getattr(s, axis.value) > 1}


def _ticks(s: Strategy) -> int:
    return int(s.rounds * s.micro_batches + s.pp - 1) if s.pp > 1 else int(s.micro_batches)


def _tensor(model: ModelSizes, s: Strategy) -> float:
    """Reductions of the residual stream: four a block, one more where blocks run again."""
    message = 2.0 * float(tokens_of(model, s)) * model.hidden
    one = wire_bytes("all-reduce", message, int(s.tp))
    half = wire_bytes("all-gather", message, int(s.tp))
    layers = model.layers / s.pp / s.rounds if s.pp > 1 else model.layers
    again = bool(is_recompute(s, Recompute.FULL))
    per_layer = (4 + again) * one + (2 * half if s.sequence_parallel else 0)
    split = int(vocab_ways(model, s, HABITS["jaxtp"])) > 1
    # Stages share the ends of the model: each has its part of all micro-batches.
    ends = 2 * one * s.micro_batches / s.pp if split else 0
    return float(_ticks(s) * layers * per_layer + ends)


def _stages(model: ModelSizes, s: Strategy) -> float:
    """Sends forward and backward, the stream's way into and out of the stages, table gradients."""
    message = 2.0 * float(tokens_of(model, s)) * model.hidden
    stream = wire_bytes("all-gather", message * s.micro_batches, int(s.pp))
    split = s.tp if s.sequence_parallel else 1
    table = 0.0
    if s.dp * s.fsdp == 1:
        rows = 4 * model.table_params / float(vocab_ways(model, s, HABITS["jaxtp"]))
        table = wire_bytes("all-reduce", rows, int(s.pp)) * (1 if model.tied else 2)
    return float((2 * _ticks(s) * message + 4 * stream) / split + table)


def _data(model: ModelSizes, s: Strategy, axis: Axis) -> float:
    """Gradients and, by ZeRO stage, parameters; bfloat16 inside the loop over blocks."""
    size = int(getattr(s, axis.value))
    zero = int(s.zero) if axis is Axis.FSDP else 0
    shards = int(s.fsdp) if axis is Axis.DP and s.zero >= 2 else 1
    layers = model.layers * model.layer_params / s.tp / s.pp / shards
    everything = float(np.asarray(local_params(model, s, HABITS["jaxtp"]))) / shards
    tables = everything - layers

    def ring(kind: str, elements: float, width: int) -> float:
        return wire_bytes(kind, width * elements, size)

    both = tables if not model.tied else 2 * tables
    if zero == 3:
        blocks = 2 * ring("all-gather", layers, 2) + ring("reduce-scatter", layers, 2)
        ends = ring("all-gather", both, 2) + ring("reduce-scatter", both, 2)
        return float(s.micro_batches * (blocks + ends))
    whole = ring("all-gather", everything, 4) if zero else 0.0
    if zero == 2:
        return whole + ring("reduce-scatter", layers + both, 2)
    if s.micro_batches > 1 and s.pp == 1:
        return whole + ring("all-reduce", everything, 4)
    return whole + ring("all-reduce", layers, 2) + ring("all-reduce", tables, 4)
