"""`shard` and `unshard`: trees onto a mesh and back.

Everything is checked before the first byte moves, and no array is ever put together on one device:
a device receives its own slice of a host array, and arrays that lie on the mesh already are
exchanged between devices by a compiled identity.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from numpy.typing import NDArray

from jaxtp.errors import (
    BadConfig,
    BadStep,
    BadTree,
    JaxtpError,
    NothingSharded,
    Problems,
    ReplicatedTooMuch,
    SizeMismatch,
    join,
    warn,
)
from jaxtp.errors.arguments import FLAG, checked
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import (
    abstract_mesh,
    auto_context,
    auto_mesh,
    check_devices,
    plan_mesh,
    warn_of_explicit_axes,
)
from jaxtp.placement.boxes import name_axes_of_mesh
from jaxtp.placement.replicas import check_agreement
from jaxtp.placement.train_state import Overrides, Slot, check, slots
from jaxtp.plan.decisions import Plan, check_plan
from jaxtp.plan.specs import partition_spec
from jaxtp.plan.stored_form import Padding, pad, read, unpad
from jaxtp.plan.trees import FlatTree, Param, PyTree, is_key_type, refuse_shapes
from jaxtp.rules.planner import check_options, make_plan
from jaxtp.rules.review import WHAT_TO_GIVE


def shard(
    tree: PyTree,
    mesh: Any,
    *,
    plan: Plan | None = None,
    state_overrides: Overrides | None = None,
    **options: Any,
) -> PyTree:
    """The same tree, with every array placed on the plan's own Auto mesh over the same devices.

    Parameters lie where the plan puts them, in the form that it stores
    (`jaxtp.plan.stored_form`); optimizer state follows them (`jaxtp.placement.train_state`);
    counters, keys and other small leaves are replicated on every device. Numbers become arrays, and
    Linen boxes that name no axis of the mesh those that the plan gives. An array that already lies
    right on the mesh is not copied: as with `jax.device_put`, both trees then share it, and
    donating one ends the other.

    Args:
        tree: A Linen dict (boxed or not), an `nnx.Module` or `nnx.State`, a `TrainState`, optax
            state (give the plan of its parameters), or any tree of arrays, numbers and
            `jax.ShapeDtypeStruct`. Structs come back as structs that carry shardings.
        mesh: A jax Mesh, with Auto or Explicit axes. For structs also a shape, as in `make_plan`.
        plan: Where parameters go; by default `make_plan(tree, mesh, **options)`.
        state_overrides: Specs for leaves that cannot follow a parameter, by regular expression.
        **options: Options of `make_plan`.

    Raises:
        BadConfig: TP020, if both `plan` and options for making one are given.
        BadMesh: TP010, if arrays are to be placed on a mesh without devices.
        BadStep: TP133, if an array was donated to a step.
        JaxtpError: whatever `make_plan` and `jaxtp.state_specs` raise.
    """
    used = plan_for(tree, mesh, plan, options)
    warn_of_explicit_axes(mesh)
    flat = FlatTree.of(tree)
    found = slots(flat.shapes(), used, state_overrides, complete=plan is not None)
    if isinstance(mesh, Mesh) and mesh.is_multi_process:
        check_agreement({"plan": used.to_json()}, flat.values)
    is_abstract = all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat.values.values())
    shapes_only = is_abstract and not isinstance(mesh, Mesh)
    target = abstract_mesh(used.mesh) if shapes_only else plan_mesh(mesh, used.mesh)
    named = name_axes_of_mesh(flat, found, used.mesh)
    return place(named, found, target)


def plan_for(tree: PyTree, mesh: Any, plan: Plan | None, options: Mapping[str, Any]) -> Plan:
    """The given plan, or one made with these options.

    A plan that nobody has seen warns, once, where devices would all do the same work.

    Raises:
        BadConfig: TP020, if there are both.
    """
    if plan is not None:
        check_plan(plan)
        if options:
            raise BadConfig(
                f"a plan is given, so {join(options)} would have no effect",
                fix="give these options to make_plan, or leave the plan out",
            )
        return plan
    check_options(options)
    made = make_plan(tree, mesh, **options)
    codes = (NothingSharded.code, ReplicatedTooMuch.code)
    if wasteful := [note for note in made.notes if note.startswith(codes)]:
        warn(f"{wasteful[0]}\n  fix: {WHAT_TO_GIVE}")
    return made


def place(flat: FlatTree, found: Mapping[str, Slot], mesh: Mesh | AbstractMesh) -> PyTree:
    """The tree with every leaf in its slot of `mesh`; the slots are known to be legal.

    Raises:
        BadStep: TP133, before anything moves, for an array that a step has taken over.
    """
    refuse_donated(flat.values)
    places = {path: NamedSharding(mesh, partition_spec(slot.spec)) for path, slot in found.items()}
    with auto_context():
        return flat.like(put(leaf, places[path], found[path]) for path, leaf in flat.values.items())


def put(leaf: Any, sharding: NamedSharding, slot: Slot | None = None) -> Any:
    """One leaf in its place and in its stored form, which is its own if no slot says otherwise.

    What lies in its place already has its stored form; see `pad` for the others.
    """
    stored, padding = (np.shape(leaf), ()) if slot is None else (slot.stored, slot.padding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(shape=stored, sharding=sharding)
    # What one process has alone, it takes its devices' slices of, as of a host array.
    same_reach = getattr(leaf, "is_fully_addressable", None) == sharding.is_fully_addressable
    if isinstance(leaf, jax.Array) and same_reach:
        return _move(leaf, sharding, stored, padding)
    host = np.asarray(leaf)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    # Always a copy: JAX on CPU may use the caller's memory as device memory.
    return jax.make_array_from_callback(
        stored, sharding, lambda index: read(host, padding, index or ())
    )


@checked(local=FLAG)
def shard_batch(
    batch: PyTree,
    mesh: Any,
    *,
    local: bool = False,
    axis_names: Mapping[str, str] | None = None,
) -> PyTree:
    """The batch with dim 0 of every array sharded over dp and fsdp, and never over tp.

    All devices of a tensor-parallel group work on the same tokens. Scalars, random keys, and arrays
    whose dim 0 does not divide beside others whose dim 0 does (positions `(1, seq)`, a mask
    `(seq, seq)`) are replicated.

    Args:
        batch: Any tree of arrays `(batch, ...)`, numbers or structs; the same global batch in every
            process, unless `local`. What is placed already stays as it is.
        local: Whether each process gives its own part of the global batch: the rows that its
            devices work on, in the order of the processes. Processes whose devices work on the same
            rows (of one tensor-parallel group) give the same ones.
        mesh: A jax Mesh; a shape will do for structs.
        axis_names: What jaxtp calls an axis -> what the mesh calls it, e.g. `{"dp": "data"}`.

    Raises:
        SizeMismatch: TP003, if a batch size does not divide over the batch axes.
        NoTensorAxis: TP013, if the mesh has no tensor axis under its own or the given name.
        BadTree: TP046, for a batch without arrays.
        BadConfig: TP020, if `local` is neither True nor False.
    """
    shape = MeshShape.of(mesh, axis_names)
    concrete = auto_mesh(mesh) if isinstance(mesh, Mesh) else abstract_mesh(shape)
    flat = FlatTree.of(batch)
    if not flat.values:
        raise BadTree(
            f"a {type(batch).__name__} without arrays", where="batch", fix="arrays (batch, ...)"
        )
    if not isinstance(mesh, Mesh) and not all(
        isinstance(leaf, jax.ShapeDtypeStruct) for leaf in flat.values.values()
    ):
        check_devices(mesh)
    if local:
        return _from_local(flat, auto_mesh(mesh), shape)
    return place(flat, batch_slots(flat.shapes(), shape), concrete)


def _from_local(batch: FlatTree, mesh: Mesh, shape: MeshShape) -> PyTree:
    """A global batch of which every process has the rows of its own devices.

    Of arrays beside others one row, as of positions, is the same in all processes, and replicated.
    """
    everywhere = NamedSharding(mesh, partition_spec(()))
    rows = NamedSharding(mesh, partition_spec((shape.batch,)))
    arrays = batch.shapes()
    longest = max((array.shape[0] for array in arrays.values() if array.shape), default=1)
    pieces = rows.addressable_devices_indices_map((shape.batch_ways,))
    mine = len({str(index) for index in pieces.values()})

    def placed(path: str, leaf: Any) -> Any:
        size = arrays[path].shape
        if not size or _is_key(arrays[path]) or (size[0] == 1 < longest):
            return put(leaf, everywhere)
        if size[0] % mine:
            raise SizeMismatch(
                f"this process has {size[0]} rows for {mine} pieces of the batch",
                where=path or "batch",
                fix=f"a multiple of {mine} rows in every process",
            )
        host = np.asarray(leaf)
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
        return jax.make_array_from_process_local_data(rows, host)

    with auto_context():
        return batch.like(placed(path, leaf) for path, leaf in batch.values.items())


def batch_slots(batch: Mapping[str, Param], shape: MeshShape) -> dict[str, Slot]:
    """The checked slot of every array of a batch, by path; see `shard_batch`."""
    found: dict[str, Slot] = {}
    odd: dict[str, list[JaxtpError]] = {}
    is_known = False
    for path, array in batch.items():
        dims = array.shape
        if not dims or _is_key(array):
            found[path] = Slot.replicated(dims)
            continue
        found[path] = Slot(dims, (shape.batch,) + ((),) * (len(dims) - 1))
        problems = list(check(path or "batch", found[path], shape))
        if problems:
            odd[path] = problems
        is_known = is_known or not problems
    if odd and not is_known:
        collected = Problems()
        for problem in itertools.chain.from_iterable(odd.values()):
            collected.add(problem)
        collected.raise_any()
    # Beside arrays whose dim 0 is the batch, positions (1, seq) or a mask (seq, seq) are no batch.
    return found | {path: Slot.replicated(found[path].shape) for path in odd}


def _is_key(array: Param) -> bool:
    """Whether an array is random keys: typed ones, or the two words of `jax.random.PRNGKey`."""
    return is_key_type(array.dtype) or (array.dtype == "uint32" and array.shape == (2,))


def unshard(tree: PyTree, plan: Plan | None = None) -> PyTree:
    """The same tree on the host: NumPy arrays of the model's own shapes, boxes and modules kept.

    Typed random keys stay JAX arrays. With several processes every process gets the whole tree; one
    array at a time is then replicated.

    Args:
        tree: Arrays placed by `shard`, or any arrays.
        plan: The plan they were placed by; needed where it stores anything in another form: a
            padded vocabulary, uneven pipeline stages, stages in several rounds.

    Raises:
        PlanMismatch: TP045, if `tree` and `plan` are about different parameters.
        BadTree: TP046, for leaves that are no arrays, or shapes alone.
        BadStep: TP133, if an array was donated to a step.
    """
    if plan is not None:
        check_plan(plan)
    flat = FlatTree.of(tree)
    refuse_donated(flat.values)
    shapes = flat.shapes()  # refuses what is no array
    for path, leaf in flat.values.items():
        refuse_shapes(leaf, path)
    found = {} if plan is None else slots(shapes, plan)

    def fetch(path: str, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = _fetch(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(jnp.asarray(data), impl=jax.random.key_impl(leaf))
        return unpad(_fetch(leaf), found[path].padding if found else ())

    with auto_context():
        return flat.like(fetch(path, leaf) for path, leaf in flat.values.items())


def refuse_donated(found: Mapping[str, Any]) -> None:
    """Refuses arrays that are gone.

    Args:
        found: Path -> leaf.

    Raises:
        BadStep: TP133, if an array was donated to a step.
    """
    for path, leaf in found.items():
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise BadStep(
                "the array was given to a step, which took over its memory",
                where=path,
                fix="go on with the state that the step returned, or jit_step(..., donate=False)",
            )


def _fetch(leaf: Any) -> NDArray[Any]:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
    # A copy: on CPU the array would be a view of device memory that the next step donates.
    return np.array(leaf)


def _move(
    x: jax.Array, sharding: NamedSharding, stored: tuple[int, ...], padding: Padding
) -> jax.Array:
    """An array that lies on devices, moved to others or sharded differently."""
    source = x.sharding
    if isinstance(source, NamedSharding) and _order(source.mesh) == _order(sharding.mesh):
        # No copy: only the axes' types change, which an Explicit mesh would carry into the jit.
        x = jax.device_put(x, NamedSharding(auto_mesh(source.mesh), source.spec))
        if x.shape == stored and x.sharding.is_equivalent_to(sharding, x.ndim):
            return jax.device_put(x, sharding)
        return _exchange(sharding, padding)(x)
    # Where source and target meet, device_put shares memory; a copy makes the result free to be
    # donated.
    padded = pad(x, padding)
    return jax.device_put(jnp.copy(x) if padded is x else padded, sharding)


@functools.cache
def _exchange(sharding: NamedSharding, padding: Padding) -> Callable[[jax.Array], jax.Array]:
    """A compiled identity: devices send each other the slices they lack.

    `jax.device_put` would put the array together in host memory wherever the slices differ.
    """
    return jax.jit(lambda x: pad(x, padding), out_shardings=sharding)


def _order(mesh: Mesh | AbstractMesh) -> list[int]:
    """Devices in the order in which the mesh counts them."""
    return [d.id for d in mesh.devices.flat] if isinstance(mesh, Mesh) else []
