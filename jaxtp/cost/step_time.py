"""Seconds of a step from sizes alone: nothing is compiled."""

from jaxtp.cost.floor import layer_reductions, stream_bytes
from jaxtp.cost.flops import model_flops
from jaxtp.cost.recomputation import recomputed_flops
from jaxtp.hardware.gpus import Target
from jaxtp.plan.decisions import Plan
from jaxtp.rules.model_dims import ModelDims


def modelled_seconds(
    plan: Plan,
    dims: ModelDims,
    target: Target,
    *,
    tokens: int,
    seq: int,
    num_micro: int,
    remat: str,
    dtype: str,
) -> float:
    """Seconds of a step on `target` from sizes alone: nothing is compiled, nothing overlaps.

    (products + tensor parallelism's all-reduces) / (1 - bubble): products at the rate that large
    ones sustain, recomputation included. What data parallelism moves is left out. `jaxtp
    preflight` compiles, and knows better.

    Args:
        plan: The plan.
        dims: Sizes of the model.
        target: The machine.
        tokens: Tokens of the global batch.
        seq: Tokens of one sequence.
        num_micro: Micro-batches, of accumulation or of a pipeline.
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        dtype: Type of activations.
    """
    flops = model_flops(plan, dims, tokens=tokens, seq=seq).full
    flops += recomputed_flops(remat, plan, dims, tokens=tokens, seq=seq)
    products = flops / plan.mesh.num_devices / target.device.matmul_flops
    message = stream_bytes(
        tokens // plan.mesh.ways(plan.mesh.data) // num_micro, dims.hidden_size, dtype
    )
    reductions = reduction_seconds(
        plan, dims, target, message_bytes=message, num_micro=num_micro, remat=remat
    )
    bubble = plan.stages.bubble if plan.stages else 0
    return (products + reductions) / (1 - bubble)


def reduction_seconds(
    plan: Plan,
    dims: ModelDims,
    target: Target,
    *,
    message_bytes: int,
    num_micro: int,
    remat: str,
    size: int = 0,
) -> float:
    """Seconds of one device's all-reduces over the tensor axis in a step, one after the other.

    Args:
        plan: The plan.
        dims: Sizes of the model.
        target: The machine.
        message_bytes: The residual stream of one micro-batch on one data shard, replicated.
        num_micro: Micro-batches.
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        size: Devices along the tensor axis, instead of the plan's.
    """
    size = size or plan.mesh.tp_size
    if size == 1:
        return 0.0
    num_stages = plan.stages.num_stages if plan.stages else 1
    count = layer_reductions(remat, plan) * dims.layers * num_micro / num_stages
    return count * target.collective_seconds("all-reduce", message_bytes, [range(size)])
