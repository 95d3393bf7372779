"""Where activations lie on the mesh: models name a value, the active plan says which axes shard it.

Without an active plan nothing happens, so one model file serves one device and ten thousand.
"""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.errors import BadStages, BadTree, PlanMismatch, SizeMismatch, UnknownActivation, join
from jaxtp.errors.arguments import checked, several, whole
from jaxtp.mesh.axes import Axis, MeshShape, Shards
from jaxtp.mesh.build import check_devices, refuse_explicit_context
from jaxtp.plan.decisions import ParamDecision
from jaxtp.plan.specs import Spec
from jaxtp.plan.stages import Stages

REPLICATED, BATCH, TOKENS, SEQUENCE, UNITS = "replicated", "batch", "tokens", "sequence", "units"
"""What a dim of an activation is: replicated; sharded over the batch axes; tokens, sharded over cp;
sharded over cp and, in the regions that sequence parallelism covers, the tensor axes; sharded over
the tensor axes, unit by unit."""

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "tokens": (BATCH, TOKENS),
    # Token ids of a batch, as they come and as targets.
    "rows": (BATCH, REPLICATED),
    # Between blocks every tensor-parallel device holds the same residual stream; sequence
    # parallelism shards it.
    "residual": (BATCH, SEQUENCE, REPLICATED),
    # The normed input of a column product is gathered again. Left to propagation, sequence
    # parallelism gains four all-gathers and five all-to-alls a layer in the backward pass of the
    # compiled GPU program.
    "block_input": (BATCH, TOKENS, REPLICATED),
    "heads": (BATCH, TOKENS, UNITS, REPLICATED),
    "kv_heads": (BATCH, TOKENS, UNITS, REPLICATED),
    "mlp": (BATCH, TOKENS, UNITS),
    # Keys or values of one layer, and of all layers, while generating.
    "cache": (BATCH, UNITS, REPLICATED, REPLICATED),
    # The likeliest tokens of all parts of the vocabulary.
    "candidates": (BATCH, REPLICATED),
    "caches": (REPLICATED, BATCH, UNITS, REPLICATED, REPLICATED),
    "logits": (BATCH, TOKENS, UNITS),
    # Two weights. The token table as the lookup reads it: where ZeRO shards it too, pipeline stages
    # would else send each other parts of it first. And (embed, kv heads, head_dim), see `spread`.
    "token_table": (UNITS, REPLICATED),
    "kv_kernel": (REPLICATED, UNITS, REPLICATED),
}
"""Activation name -> what each of its dims is."""


class ActivationPlan(Protocol):
    """The part of a `jaxtp.Plan` that activations need."""

    @property
    def mesh(self) -> MeshShape:
        """Axis sizes, with the tensor axis factored as the parameters need it."""
        ...

    @property
    def sequence_parallel(self) -> bool:
        """Whether the residual stream is sharded along the sequence over the tensor axes."""
        ...

    @property
    def overlap(self) -> str:
        """Whether layers may be interleaved to hide communication: "off", "auto", "aggressive"."""
        ...

    @property
    def decisions(self) -> tuple[ParamDecision, ...]:
        """Where every parameter lies."""
        ...

    @property
    def stages(self) -> Stages | None:
        """How stacked layers are assigned along the pp axis; None without one."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class ActivePlan:
    """What is in force; hashable, for it joins the key of every jit cache.

    Attributes:
        shape: Axis sizes; the tensor axes are those that activations may be sharded over.
        sequence_parallel: Whether the residual stream is sharded along the sequence.
        mesh: The devices.
        interleave: Whether layers that can be are interleaved (`jaxtp.layers.interleaving`).
        decisions: Where parameters lie, if layers are interleaved or run in stages; () otherwise.
        stages: How stacked layers are assigned along the pp axis; None without one, and inside a
            stage.
        params_sharded: Whether the batch axes shard parameters too.
        experts: Shape and spec of the weights of stacked experts.
        is_mapped: Whether what runs is one device's part, see `mapped`.
    """

    shape: MeshShape
    sequence_parallel: bool
    mesh: Mesh | jax.sharding.AbstractMesh
    interleave: bool = False
    # A model without stacked layers has hundreds; equality settles what the hash leaves open.
    decisions: tuple[ParamDecision, ...] = dataclasses.field(default=(), hash=False)
    stages: Stages | None = None
    params_sharded: bool = False
    experts: frozenset[tuple[tuple[int, ...], Spec]] = frozenset()
    is_mapped: bool = False

    @property
    def batch(self) -> tuple[str, ...]:
        """Axes that split the batch, major to minor.

        Outside of the layers pipeline stages share it: otherwise all of them would compute the same
        loss, and hold its logits.
        """
        return (
            self.shape.batch
            if self.stages is None
            else (*self.shape.batch, self.shape.name_of(Axis.PP))
        )

    @property
    def sequence(self) -> tuple[str, ...]:
        """Axes that split the residual stream along the sequence, major to minor."""
        return (*self.tokens, *(self.shape.tp if self.sequence_parallel else ()))

    @property
    def tokens(self) -> tuple[str, ...]:
        """Axes that split every sequence all the way through: cp, or none."""
        return tuple(filter(None, [self.shape.name_of(Axis.CP)]))

    @property
    def here(self) -> Mesh | jax.sharding.AbstractMesh:
        """The mesh to name in a sharding: inside a `shard_map` the one that it leaves."""
        here = jax.sharding.get_abstract_mesh()
        return here if here.manual_axes else self.mesh

    def place(self, x: jax.Array, *entries: object) -> jax.Array:
        """`x` with one PartitionSpec entry per dim, also inside a `shard_map` over other axes."""
        sharding = NamedSharding(self.here, PartitionSpec(*(entry or None for entry in entries)))
        return jax.lax.with_sharding_constraint(x, sharding)

    def mapped(self) -> "ActivePlan":
        """What counts inside a `jax.vmap` over the batch and tensor axes: the other axes only."""
        mapped = [Axis.TP, *Axis.that_shard(Shards.BATCH)]
        return ActivePlan(self.shape.without(mapped), False, self.mesh, is_mapped=True)


# The one ambient value of jaxtp. A ContextVar would be invisible to jit: a function traced outside
# of a plan would run without its constraints inside, from the cache, and the other way round.
_active = jax.make_user_context(None)


@contextlib.contextmanager
def use_plan(plan: ActivationPlan, mesh: Mesh) -> Generator[None]:
    """Makes `constrain` effective inside the block; blocks nest, the innermost counts.

    Functions jitted by the caller are traced again when the plan in force changes, and found in
    jit's cache when an equal one is in force again.

    Args:
        plan: The plan whose mesh shape (tensor axis factored), sequence parallelism and overlap
            apply.
        mesh: A jax Mesh with Auto axes of exactly the names and sizes of `plan.mesh`.

    Raises:
        SizeMismatch: TP003, if the two meshes differ.
        PlanMismatch: TP045, for what is no plan.
        BadMesh: TP010, for what is no mesh of devices, and under `jax.set_mesh` of a mesh with
            Explicit axes.
        BadStages: TP074, if the plan has stages that its mesh or its parameters do not have.
    """
    refuse_explicit_context()
    if not isinstance(getattr(plan, "mesh", None), MeshShape):
        raise PlanMismatch(
            f"plan is a {type(plan).__name__}", where="plan", fix="a plan from jaxtp.make_plan"
        )
    check_devices(mesh)
    if tuple(mesh.shape.items()) != plan.mesh.sizes:
        raise SizeMismatch(
            f"the plan is for the mesh {plan.mesh}, the devices form {MeshShape.of(mesh)}",
            fix="apply the plan on its own mesh, or make the plan for this one",
        )
    _check_stages(plan)
    interleave = plan.overlap == "aggressive"
    active = ActivePlan(
        shape=plan.mesh,
        sequence_parallel=plan.sequence_parallel,
        mesh=mesh,
        interleave=interleave,
        decisions=plan.decisions if interleave or plan.stages else (),
        stages=plan.stages,
        params_sharded=any(d.dim_on(plan.mesh.batch) is not None for d in plan.decisions),
        experts=frozenset((d.shape, d.spec) for d in plan.decisions if d.role == "expert"),
    )
    with _active(active):
        yield


def _check_stages(plan: ActivationPlan) -> None:
    stages, shape = plan.stages, plan.mesh
    if stages is None:
        return
    axis = shape.name_of(Axis.PP)
    if not axis or shape[axis] != stages.num_stages:
        raise BadStages(
            f"{stages.num_stages} stages on the mesh {shape}",
            where="pp",
            fix=f"make the plan on a mesh with pp={stages.num_stages}",
        )
    if all(axis not in d.spec[0] for d in plan.decisions if d.spec):
        raise BadStages(
            f"{stages.num_stages} stages, and no parameter has its layers sharded over {axis}",
            fix="stack the layers and run them with jaxtp.scan_layers; or a mesh without pp",
        )


def active_plan() -> ActivePlan | None:
    """The plan in force, or None."""
    return _active.value


@contextlib.contextmanager
def in_force(active: ActivePlan) -> Generator[None]:
    """Makes a plan count that was in force elsewhere: a backward rule may be traced later."""
    with _active(active):
        yield


@checked(
    units=several(whole(1), "a tuple of counts, such as (8, 4)").raising(SizeMismatch).or_none()
)
def constrain(x: jax.Array, name: str, units: Sequence[int] | None = None) -> jax.Array:
    """Returns `x` placed as the active plan wants this activation; `x` itself without a plan.

    Args:
        x: An array with one dim per entry of `ACTIVATIONS[name]`.
        name: A key of `ACTIVATIONS`.
        units: Indivisible pieces of the dim that the tensor axes shard, major to minor, e.g. (kv
            heads, query heads per kv head) for "heads"; default: every element of the dim is one.

    Raises:
        UnknownActivation: TP072, if the table has no such name; also when no plan is active, so
            that a misspelt name fails on one device.
        SizeMismatch: TP003, if `x` has another number of dims.
        BadTree: TP046, if it is no array.
    """
    dims = None if name.__hash__ is None else ACTIVATIONS.get(name)
    if dims is None:
        raise UnknownActivation(
            f"no activation is called {name!r}", fix=f"known names: {join(ACTIVATIONS, limit=20)}"
        )
    if not hasattr(x, "ndim"):
        raise BadTree(f"a {type(x).__name__} is no array", where=name, fix="constrain(x, name)")
    if len(dims) != x.ndim:
        raise SizeMismatch(
            f"{x.ndim} dims {x.shape} where the activation has {len(dims)}: {join(dims)}",
            where=name,
            fix="pass the value with its batch dim; leave dims that vmap adds to vmap",
        )
    active = active_plan()
    if active is None or not set(active.here.axis_names) - set(active.here.manual_axes):
        return x
    entries = (_entry(active, dim, size, units) for dim, size in zip(dims, x.shape, strict=True))
    return active.place(x, *entries)


def spread(w: jax.Array, name: str, units: Sequence[int]) -> jax.Array:
    """Returns a weight with one copy of a shared unit per device; `w` itself without a plan.

    With 16 query heads and 4 kv heads on 8 devices two devices need each kv head. Repeating the
    weight makes the copies ordinary heads: what flows back from them joins the all-reduce of the
    query heads, and only the weight's gradient is summed within the pair. If the pair shares the
    head's activations instead, the residual stream is all-reduced a third time in every layer's
    backward pass (5 all-reduces a layer instead of 4 in the program compiled for 8 H100).

    Args:
        w: The weight, in the type that its gradient shall be reduced in.
        name: A key of `ACTIVATIONS`; its UNITS dim is the one to repeat.
        units: (units of `w`, parts that each is shared by), e.g. (kv heads, query heads per kv
            head); the plan splits their product.

    Returns:
        `w` with each unit repeated in place; nothing is repeated where no unit is shared.
    """
    active = active_plan()
    if active is None:
        return w
    ways = active.shape.ways(active.shape.fit(units))
    copies = ways // math.gcd(ways, units[0])
    if copies == 1:
        return w
    return constrain(jnp.repeat(w, copies, axis=ACTIVATIONS[name].index(UNITS)), name)


def _entry(active: ActivePlan, dim: str, size: int, units: Sequence[int] | None) -> object:
    """The PartitionSpec entry of one dim of `size` elements.

    Inside a `shard_map` these are of a device's own part along the axes that it is manual over,
    which say no more about it.
    """
    axes = {
        REPLICATED: (),
        BATCH: active.batch,
        TOKENS: active.tokens,
        SEQUENCE: active.sequence,
        UNITS: active.shape.fit(units or (size,)),
    }[dim]
    if dim == BATCH and size % active.shape.ways(axes):
        axes = active.shape.batch
    axes = tuple(axis for axis in axes if axis not in active.here.manual_axes)
    if not axes:
        return None
    # Inside jit an uneven constraint does not raise: XLA replicates the array, quietly. No
    # constraint on that dim is better; a batch of one prompt on two data-parallel devices is the
    # everyday case.
    return PartitionSpec.UNCONSTRAINED if size % active.shape.ways(axes) else axes
