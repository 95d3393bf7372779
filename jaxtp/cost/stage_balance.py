"""Layers for stages of different GPUs: how many each one runs, and what a step then takes."""

import dataclasses
from collections.abc import Sequence

from jaxtp.cost.floor import stream_bytes
from jaxtp.cost.flops import is_tied, layer_params, matmul_params, model_flops
from jaxtp.cost.recomputation import recomputed_flops
from jaxtp.hardware.clusters import Cluster
from jaxtp.hardware.gpus import DeviceKind
from jaxtp.plan.decisions import Plan
from jaxtp.plan.stages import Stages
from jaxtp.rules.model_dims import ModelDims

STRATEGIES = ("even", "compute_first", "memory_first")
"""How layers are assigned to stages: alike, by FLOP/s of matrix products, by memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """What the layers of a model cost on one device.

    Attributes:
        layer_flops: FLOPs of one layer on one micro-batch, forward and backward, recomputation
            included.
        end_flops: FLOPs of the head on the whole batch, forward and backward.
        layer_bytes: Memory that one layer's parameters and optimizer state take.
        permute_seconds: Time in which a micro-batch reaches the next stage, over the slowest link.
    """

    layer_flops: float
    end_flops: float
    layer_bytes: int
    permute_seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """One strategy and what it comes to.

    Attributes:
        strategy: One of `STRATEGIES`.
        stages: Layers of each stage.
        step_seconds: Modelled, by `step_seconds`.
        held_bytes: Parameters and optimizer state of the layers that one device holds: one program
            runs on all stages, so each stores as many layers as the longest.
    """

    strategy: str
    stages: Stages
    step_seconds: float
    held_bytes: int


def deal(
    strategy: str,
    num_layers: int,
    kinds: Sequence[DeviceKind],
    *,
    micro_batches: int,
    num_rounds: int = 1,
) -> Stages:
    """Layers assigned to stages by one of `STRATEGIES`.

    Args:
        strategy: Which one.
        num_layers: Layers of the model.
        kinds: The kind of GPU of each stage.
        micro_batches: Pieces of the batch.
        num_rounds: Chunks of each stage.

    Raises:
        BadStages: TP074, whatever `Stages.shared` raises.
    """
    shares = {
        "even": [1.0 for _ in kinds],
        "compute_first": [kind.matmul_flops for kind in kinds],
        "memory_first": [float(kind.memory_bytes) for kind in kinds],
    }[strategy]
    return Stages.shared(num_layers, shares, micro_batches=micro_batches, num_rounds=num_rounds)


def layer_work(
    plan: Plan,
    dims: ModelDims,
    cluster: Cluster,
    *,
    tokens: int,
    seq: int,
    remat: str,
    dtype: str,
    stacked_bytes: int,
) -> LayerWork:
    """What the layers of a plan with stages cost on one device of a stage.

    Args:
        plan: The plan, with stages.
        dims: Sizes of its model.
        cluster: The machines; stages are equal runs of its devices.
        tokens: Tokens of the global batch.
        seq: Tokens of one sequence.
        remat: Key of `jaxtp.layers.recomputation.REMAT`.
        dtype: Type of activations.
        stacked_bytes: Parameters and optimizer state of the layers that one device stores.
    """
    assert plan.stages is not None
    stages, num_stages = plan.stages, plan.stages.num_stages
    per_stage = cluster.num_devices // num_stages
    whole = model_flops(plan, dims, tokens=tokens, seq=seq)
    ends = 6 * tokens * (matmul_params(plan, tied=is_tied(plan)) - layer_params(plan, dims).total)
    layers = whole.full - ends + recomputed_flops(remat, plan, dims, tokens=tokens, seq=seq)
    row = tokens // stages.micro_batches // plan.mesh.ways(plan.mesh.data)
    num_bytes = stream_bytes(row, dims.hidden_size, dtype)
    if plan.sequence_parallel:
        num_bytes //= plan.mesh.tp_size
    first = [stage * per_stage for stage in range(num_stages)]
    ring = zip(first, [*first[1:], 0], strict=True)
    return LayerWork(
        layer_flops=layers / dims.layers / stages.micro_batches / per_stage,
        end_flops=ends / cluster.num_devices,
        layer_bytes=stacked_bytes // (stages.num_rounds * stages.block),
        permute_seconds=max(cluster.permute_seconds(num_bytes, *pair) for pair in ring),
    )


def step_seconds(stages: Stages, kinds: Sequence[DeviceKind], work: LayerWork) -> float:
    """Modelled seconds of one step: ticks x (slowest chunk + permutes) + the head.

    The number of ticks is that of Narayanan et al. 2021, section 2.2. All stages wait for each
    other at the end of a tick, so it takes as long as the slowest chunk on its own kind of GPU, and
    the micro-batch is sent on once in the forward and once in the backward pass. All stages share
    the head behind the last tick, at the pace of the slowest.

    Args:
        stages: Layers of each stage.
        kinds: The kind of GPU of each stage.
        work: What a layer costs.
    """
    chunk = max(
        count * work.layer_flops / kind.matmul_flops
        for around in stages.layers
        for count, kind in zip(around, kinds, strict=True)
    )
    head = work.end_flops / min(kind.matmul_flops for kind in kinds)
    return stages.num_ticks * (chunk + 2 * work.permute_seconds) + head


def compare(stages: Stages, kinds: Sequence[DeviceKind], work: LayerWork) -> tuple[Deal, ...]:
    """All strategies for as many layers, micro-batches and rounds as `stages` has."""
    deals: list[Deal] = []
    for strategy in STRATEGIES:
        dealt = deal(
            strategy,
            stages.num_layers,
            kinds,
            micro_batches=stages.micro_batches,
            num_rounds=stages.num_rounds,
        )
        deals.append(
            Deal(
                strategy=strategy,
                stages=dealt,
                step_seconds=step_seconds(dealt, kinds, work),
                held_bytes=dealt.num_rounds * dealt.block * work.layer_bytes,
            )
        )
    return tuple(deals)


def table(deals: Sequence[Deal], kinds: Sequence[DeviceKind]) -> tuple[str, ...]:
    """A head, and one line a strategy: layers by stage, modelled seconds, against even."""
    names = " + ".join(kind.name for kind in kinds)
    lines = [f"stages on {names}; a step is ticks x (slowest chunk + 2 permutes) + head, modelled"]
    even = next(d.step_seconds for d in deals if d.strategy == "even")
    for d in deals:
        lines.append(
            f"{d.strategy}: {d.step_seconds:,.3f} s a step, {even / d.step_seconds:.2f} x even; "
            f"{d.stages.layers_text}; {d.held_bytes / 1e9:,.1f} GB of layers on each GPU"
        )
    return tuple(lines)
