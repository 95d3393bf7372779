"""What a strategy has to move in a step, whatever the schedule, and how long each link takes.

Beside the matrix products this is the bound of a step: no schedule of the same strategy is faster.
Tensor parallelism moves its lower bound (`cost/floor`). ZeRO 3 gathers the weights of a layer twice
a step, forward and backward, and a table once, in the type of products, and reduces each gradient
once. Along cp keys and values go around: docs/long-sequences.md. Tokens travel to experts along ep
and back, in each pass.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np

from jaxtp.cost.floor import REDUCTIONS_PER_PASS, stream_bytes
from jaxtp.hardware.gpus import LINKS, Target
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import ParamDecision, Plan
from jaxtp.rules.model_dims import ModelDims
from jaxtp.rules.roles import Role


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Equal collectives that a strategy needs in a step.

    Attributes:
        kind: As in `jaxtp.hardware.links.wire_bytes`.
        axes: Mesh axes that they run along.
        num_bytes: Full buffer of one in bytes, as in `wire_bytes`.
        count: How many a device takes part in.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    count: float


def seconds_of(needs: Iterable[Need], mesh: Mapping[str, int], target: Target) -> dict[str, float]:
    """Seconds per step that needs keep each link busy, by `LINKS`.

    Args:
        needs: From `needed`.
        mesh: Axis name -> size, devices numbered with the last axis fastest.
        target: Whose links.
    """
    total: dict[str, float] = dict.fromkeys(LINKS, 0.0)
    for need in needs:
        groups = _groups(need, mesh)
        for link, seconds in target.link_seconds(need.kind, need.num_bytes, groups).items():
            total[link] += seconds * need.count
    return total


def _groups(need: Need, mesh: Mapping[str, int]) -> list[tuple[int, ...]]:
    """Device ids of each group along the need's axes; of a permute its pairs."""
    names = list(mesh)
    ids = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    along = [names.index(axis) for axis in need.axes]
    moved = np.moveaxis(ids, along, range(-len(along), 0))
    groups = moved.reshape(-1, math.prod(mesh[axis] for axis in need.axes)).tolist()
    if need.kind != "collective-permute":
        return [tuple(group) for group in groups]
    return [pair for g in groups for pair in zip(g, [*g[1:], g[0]], strict=True)]


def needed(
    plan: Plan,
    dims: ModelDims,
    *,
    tokens: int,
    num_micro: int,
    compute: str,
    sums: str,
    trains: Callable[[str], bool] | None = None,
) -> tuple[Need, ...]:
    """What the plan of a stacked decoder has to move in a step.

    Args:
        plan: The plan.
        dims: Sizes of its model.
        tokens: Tokens of the global batch.
        num_micro: Micro-batches of accumulation; those of stages are in the plan.
        compute: Type of activations and products.
        sums: Type in which gradients are reduced.
        trains: Whether a path is trained; by default all are.
    """
    micro = plan.stages.micro_batches if plan.stages else num_micro
    shard = tokens // plan.mesh.ways(plan.mesh.data) // micro
    stream = stream_bytes(shard, dims.hidden_size, compute)
    trained = [d for d in plan.decisions if trains is None or trains(d.path)]
    found = (
        *_tensor(plan, dims, stream, micro),
        *_experts(plan, dims, stream, micro),
        *_stages(plan, stream, micro),
        *_around(plan, dims, shard, compute, micro),
        *_gathers(plan, dims, compute),
        *(need for d in trained for need in _gradient(plan, d, sums)),
    )
    sizes = dict(plan.mesh.sizes)
    return tuple(n for n in found if n.count and math.prod(sizes[a] for a in n.axes) > 1)


def held_in_stages(plan: Plan, compute: str) -> tuple[float, float]:
    """Bytes per device of what stages hold that gather weights once a step.

    Args:
        plan: A plan with stages and sharded parameters.
        compute: Type of products.

    Returns:
        The weights of a stage, and the sums of their gradients, in the types of the parameters.
    """
    pp = plan.mesh.name_of(Axis.PP)
    stacked = [d for d in plan.decisions if d.spec and pp in d.spec[0]]
    weights = sum(_elements(plan, d) for d in stacked) * jnp.dtype(compute).itemsize
    return weights, sum(_elements(plan, d) * jnp.dtype(d.dtype).itemsize for d in stacked)


def _tensor(plan: Plan, dims: ModelDims, stream: float, micro: int) -> Iterator[Need]:
    """Reductions of the residual stream, as `floor_bytes` counts them."""
    num_stages = plan.stages.num_stages if plan.stages else 1
    per_pass = REDUCTIONS_PER_PASS * micro * dims.layers / num_stages
    axes = plan.mesh.tp
    if plan.sequence_parallel:
        yield Need(kind="all-gather", axes=axes, num_bytes=stream, count=3 * per_pass)
        yield Need(kind="reduce-scatter", axes=axes, num_bytes=stream, count=2 * per_pass)
    else:
        yield Need(kind="all-reduce", axes=axes, num_bytes=stream, count=2 * per_pass)
    if any(d.role is Role.VOCAB and d.dim_on(axes) is not None for d in plan.decisions):
        count = 2 * micro / num_stages  # stages share the ends of the model
        yield Need(kind="all-reduce", axes=axes, num_bytes=stream, count=count)


def _experts(plan: Plan, dims: ModelDims, stream: float, micro: int) -> Iterator[Need]:
    """Tokens on their way to experts on axes that shard the batch, and back; each pass does both.

    A device along a tensor axis of experts sends what its own ones need. Room that capacity leaves
    empty is no need, and layers in front that have one MLP have none.
    """
    shape, num_stages = plan.mesh, plan.stages.num_stages if plan.stages else 1
    experts = [d for d in plan.decisions if d.role is Role.EXPERT]
    axis = shape.name_of(Axis.EP)
    found = ((d.shape[:n], on) for d in experts for n, on in enumerate(d.spec) if axis in on)
    stack, on = next(found, ((), ()))
    if on:
        layers = math.prod(stack) if stack else dims.layers
        apart = shape.ways(name for name in on if name in shape.tp)
        size = stream * max(dims.chosen, 1) / apart
        count = 4 * micro * layers / num_stages
        yield Need(kind="all-to-all", axes=(axis,), num_bytes=size, count=count)


def _stages(plan: Plan, stream: float, micro: int) -> Iterator[Need]:
    """A micro-batch on its way to the next stage, once a round and pass."""
    if plan.stages is not None:
        count = 2 * plan.stages.num_rounds * micro
        axes = (plan.mesh.name_of(Axis.PP),)
        yield Need(kind="collective-permute", axes=axes, num_bytes=stream, count=count)


def _around(plan: Plan, dims: ModelDims, shard: int, compute: str, micro: int) -> Iterator[Need]:
    """Keys and values to every device along cp: forward, backward, and their gradients back."""
    axis, ways = plan.mesh.name_of(Axis.CP), plan.mesh.size_of(Axis.CP)
    # Where queries are split further than keys, a kv head lies on several devices.
    heads = max(dims.kv_heads / plan.mesh.tp_size, 1)
    size = shard * heads * dims.head_widths * jnp.dtype(compute).itemsize
    layers = dims.layers / (plan.stages.num_stages if plan.stages else 1)
    count = 3 * (ways - 1) * layers * micro
    if axis:
        yield Need(kind="collective-permute", axes=(axis,), num_bytes=size, count=count)


def _gathers(plan: Plan, dims: ModelDims, compute: str) -> Iterator[Need]:
    """ZeRO 3: the weights of each layer in one message, forward and backward; each table once."""
    num_stages = plan.stages.num_stages if plan.stages else 1
    layers = dims.layers / num_stages
    found: defaultdict[tuple[str, ...], list[ParamDecision]] = defaultdict(list)
    for d in plan.decisions:
        if (axes := _zero_axes(plan, d)) and d.dim_on(axes) is not None:
            found[axes].append(d)
    for axes, sharded in found.items():
        stacked = [d for d in sharded if d.shape[0] == dims.layers]
        size = sum(_elements(plan, d) for d in stacked) * jnp.dtype(compute).itemsize / layers
        yield Need(kind="all-gather", axes=axes, num_bytes=size, count=2 * layers if stacked else 0)
        for d in sharded:
            if d not in stacked:
                size = _elements(plan, d) * jnp.dtype(compute).itemsize
                yield Need(kind="all-gather", axes=axes, num_bytes=size, count=1)


def _gradient(plan: Plan, d: ParamDecision, sums: str) -> Iterator[Need]:
    """The reduction of one parameter's gradient; below ZeRO 3 the gather of what was updated."""
    shape, zero = plan.mesh, _zero_axes(plan, d)
    stacked = plan.stages is not None and shape.name_of(Axis.PP) in d.spec[0]
    # Outside of the layers pipeline stages share the batch.
    others = (shape.name_of(Axis.PP),) if plan.stages is not None and not stacked else ()
    size = _elements(plan, d) * jnp.dtype(sums).itemsize
    held = _held(d)
    if not zero:
        axes = _ordered(plan, (*(a for a in shape.data if a not in held), *others))
        yield Need(kind="all-reduce", axes=axes, num_bytes=size, count=1)
        return
    rest = _ordered(plan, (*(a for a in shape.data if a not in held), *others))
    yield Need(kind="reduce-scatter", axes=zero, num_bytes=size, count=1)
    yield Need(kind="all-reduce", axes=rest, num_bytes=size / shape.ways(zero), count=1)
    if d.state_spec:
        stored = _elements(plan, d) * jnp.dtype(d.dtype).itemsize
        yield Need(kind="all-gather", axes=zero, num_bytes=stored, count=1)


def _held(d: ParamDecision) -> set[str]:
    """Axes that shard a parameter or what the optimizer keeps of it."""
    return {axis for axes in (*d.spec, *d.state_spec) for axis in axes}


def _zero_axes(plan: Plan, d: ParamDecision) -> tuple[str, ...]:
    """Axes over which ZeRO shards a parameter: of all but experts ep is one too."""
    own = {plan.mesh.name_of(Axis.EP)} if d.role is Role.EXPERT else set[str]()
    return _ordered(plan, _held(d) & {*plan.mesh.zero} - own)


def _ordered(plan: Plan, axes: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in plan.mesh.names if name in set(axes))


def _elements(plan: Plan, d: ParamDecision) -> float:
    """Elements of an array on one device once ZeRO's axis is gathered."""
    zero = _zero_axes(plan, d)
    others = (axis for axes in d.spec for axis in axes if axis not in zero)
    return math.prod(d.stored) / plan.mesh.ways(others)
