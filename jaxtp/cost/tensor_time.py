"""Seconds of tensor parallelism's all-reduces in a step, one after the other, from sizes alone."""

from jaxtp.cost.floor import layer_reductions
from jaxtp.hardware.gpus import Target
from jaxtp.plan.decisions import Plan
from jaxtp.rules.model_dims import ModelDims


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
