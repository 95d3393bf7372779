"""MeshShape -> jax meshes. The one place that sets axis types."""

import contextlib
import math
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxtp.errors import BadMesh, IdleDevices, JaxtpError, join, warn
from jaxtp.errors.arguments import Kind, checked, instance, is_whole
from jaxtp.mesh.axes import Axis, MeshShape


@checked(
    devices=Kind(
        lambda value: (
            isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim == 1)
        ),
        "a list: devices=jax.devices()[:8]",
        BadMesh,
    ).or_none()
)
def make_mesh(*, tp: int, devices: Sequence[Any] | None = None, **others: int) -> Mesh:
    """A mesh over all devices, `tp` innermost so that it stays inside the NVLink domain.

    Axes of size 1 are left out, except `tp`. All axes are Auto: JAX 0.9 and later default to
    Explicit, on which an unmodified Flax module raises:
    docs/design.md#meshes-as-people-pass-them.

    Args:
        tp: Devices along the tensor axis; -1 for any one axis takes all devices that are left.
        devices: Devices to use; all of them by default.
        **others: Devices along the other axes of the table (`jaxtp.mesh.axes.Axis`), 1 by default:
            `dp` replicas, `fsdp` devices over which parameters and batch are sharded, `pp`
            pipeline stages, `cp` devices that share every sequence, `ep` devices over which
            experts and batch are sharded.

    Raises:
        BadMesh: TP010, if an axis is unknown, a size is illegal, or the sizes do not multiply to
            the device count.
        IdleDevices: TP011, if devices would be left over; pass `devices=` to mean it.
    """
    sizes = _asked({Axis.TP.value: tp, **others})
    strange = [d for d in (() if devices is None else devices) if not hasattr(d, "device_kind")]
    if strange:
        raise BadMesh(
            f"devices holds a {type(strange[0]).__name__}", fix="a list: devices=jax.devices()[:8]"
        )
    count = len(jax.devices() if devices is None else devices)
    open_axes = [a for a, n in sizes.items() if n == -1]
    if len(open_axes) > 1 or any(n < 1 and n != -1 for n in sizes.values()):
        raise BadMesh(
            f"sizes {sizes}", fix="sizes are 1 or more; at most one is -1 and takes what is left"
        )
    known = math.prod(n for n in sizes.values() if n != -1)
    if open_axes:
        if count % known:
            raise BadMesh(
                f"{count} devices do not divide by {known} ({sizes})",
                fix=f"make the product of the other sizes one of {_divisors(count)}",
            )
        sizes[open_axes[0]] = count // known
    total = math.prod(sizes.values())
    if total > count:
        raise BadMesh(
            f"sizes {sizes} need {total} devices, there are {count}",
            fix="lower a size, or simulate devices: jax.config.update('jax_num_cpu_devices', N)",
        )
    if total < count:
        raise IdleDevices(
            f"sizes {sizes} use {total} of {count} devices, {count - total} would idle",
            fix="dp=-1 takes the rest; devices=jax.devices()[:N] means it",
        )
    kept = {a: n for a, n in sizes.items() if n > 1 or Axis(a) is Axis.TP}
    return jax.make_mesh(
        tuple(kept.values()),
        tuple(kept),
        axis_types=(AxisType.Auto,) * len(kept),
        devices=devices,
    )


def _asked(given: Mapping[str, Any]) -> dict[str, int]:
    """The size of every axis of the table, in its order; axes that are not given are 1."""
    if unknown := sorted(set(given) - set(Axis)):
        raise BadMesh(
            f"no mesh axis is called {join(unknown)}",
            fix="the axes are " + join(f"{axis} ({axis.purpose})" for axis in Axis),
        )
    if bad := {name: size for name, size in given.items() if not is_whole(size)}:
        raise BadMesh(
            f"sizes {bad} are not integers",
            fix="devices along the axis, 1 or more; or -1 for what the other axes leave",
        )
    return {axis.value: int(given.get(axis.value, 1)) for axis in Axis}


@checked(shape=instance(MeshShape, takes="plan_mesh(mesh, plan.mesh)", error=BadMesh))
def plan_mesh(mesh: Any, shape: MeshShape) -> Mesh:
    """The concrete mesh of a plan: the user's devices and order, Auto axes, factored tensor axis.

    Args:
        mesh: A jax Mesh with as many devices as `shape`.
        shape: The plan's mesh shape; its axes refine those of `mesh`.

    Raises:
        BadMesh: TP010, if `mesh` has no devices, or other axes or sizes than the plan.
    """
    mesh = check_devices(mesh)
    if mesh.devices.size != shape.num_devices:
        raise BadMesh(
            f"the mesh has {mesh.devices.size} devices, the plan {shape.num_devices} ({shape})",
            fix="make the plan from this mesh",
        )
    wide = [{a: n for a, n in s.items() if n > 1} for s in map(dict, (shape.sizes, shape.whole))]
    mine = {str(a): n for a, n in mesh.shape.items() if n > 1}
    if all(list(mine.items()) != list(sizes.items()) for sizes in wide):
        raise BadMesh(
            f"the mesh is {dict(mesh.shape)}, the plan was made for {dict(shape.whole)}",
            fix="make the plan from this mesh, or pass the mesh that it was made from",
        )
    devices = mesh.devices.reshape(tuple(size for _, size in shape.sizes))
    return Mesh(devices, shape.names, axis_types=(AxisType.Auto,) * len(shape.sizes))


def own_mesh(mesh: Mesh | AbstractMesh | None, shape: MeshShape) -> Mesh | AbstractMesh:
    """The mesh of a plan over a user's devices; over all devices in order if there is no mesh.

    Args:
        mesh: A jax Mesh, an AbstractMesh to compile only, or None.
        shape: The plan's mesh shape.

    Raises:
        BadMesh: TP010, if there are more or fewer devices than the plan has.
    """
    if isinstance(mesh, AbstractMesh):
        return abstract_mesh(shape)
    if mesh is None:
        devices = jax.devices()
        if len(devices) != shape.num_devices:
            raise BadMesh(
                f"the plan is for {shape.num_devices} devices ({shape}), there are {len(devices)}",
                fix="pass the mesh that the parameters were placed with",
            )
        devices = np.array(devices).reshape([size for _, size in shape.whole])
        mesh = Mesh(devices, [name for name, _ in shape.whole])
    return plan_mesh(mesh, shape)


def check_devices(mesh: Any) -> Mesh:
    """The mesh, known to have devices.

    Raises:
        BadMesh: TP010, if it is something else.
    """
    if not isinstance(mesh, Mesh):
        raise BadMesh(
            f"a {type(mesh).__name__} has no devices to place arrays on",
            fix="pass a jax Mesh, e.g. from jaxtp.make_mesh; plans alone need only a shape",
        )
    return mesh


def warn_of_explicit_axes(mesh: Any) -> None:
    """Warns, once, that arrays placed on a mesh with Explicit axes lie on an Auto one.

    On Explicit axes, the default of `jax.make_mesh`, JAX asks the model itself to say how each
    product is sharded: docs/design.md#meshes-as-people-pass-them.
    """
    if _is_explicit(mesh):
        warn(
            "TP010: the mesh has Explicit axes, on which a model that does not say how its "
            "products are sharded cannot run, so these arrays lie on an Auto mesh over the same "
            "devices. jaxtp.shard_batch does the same; jaxtp.jit_step and jaxtp.parallelize take "
            "both; a jax.jit of your own raises under jax.set_mesh(mesh), and beside arrays that "
            f"you placed on this mesh\n  fix: {_auto_line(mesh)}"
        )


def refuse_explicit_context() -> None:
    """Refuses to compute on placed arrays under `jax.set_mesh` of a mesh with Explicit axes.

    Raises:
        BadMesh: TP010, with the line that makes the mesh an Auto one.
    """
    ambient = jax.sharding.get_abstract_mesh()
    if _is_explicit(ambient):
        raise BadMesh(
            f"the ambient mesh {dict(ambient.shape)} has Explicit axes, and placed parameters lie "
            "on Auto ones, which JAX does not compute with under it",
            where="jax.set_mesh",
            fix=_auto_line(ambient),
        )


def refuse_manual_context(shape: MeshShape) -> None:
    """Refuses to place arrays inside a `jax.shard_map` over axes of their mesh.

    Raises:
        BadMesh: TP010, with the axes.
    """
    ambient = jax.sharding.get_abstract_mesh()
    types = zip(ambient.axis_names, ambient.axis_types, strict=True)
    manual = {name for name, kind in types if kind is AxisType.Manual}
    if taken := [name for name, _ in shape.whole if name in manual]:
        raise BadMesh(
            f"inside a shard_map over {join(taken)} every device has its own shard already, which "
            "no plan can place",
            where="jax.shard_map",
            fix="call it outside of the shard_map, with global arrays",
        )


def without_explicit_axes(x: Any) -> Any:
    """A value on Auto axes, traced or not, wherever it lies; its data stays where it is."""
    if not isinstance(x, jax.Array) or not _is_explicit(mesh := jax.typeof(x).sharding.mesh):
        return x
    source = getattr(x, "sharding", None)  # a traced value has none
    if isinstance(source, NamedSharding):
        return jax.device_put(x, NamedSharding(auto_mesh(source.mesh), source.spec))
    with jax.sharding.use_abstract_mesh(abstract_mesh(MeshShape(tuple(mesh.shape.items())))):
        return jax.sharding.reshard(x, PartitionSpec())


def _is_explicit(mesh: Any) -> bool:
    return AxisType.Explicit in (getattr(mesh, "axis_types", None) or ())


def _auto_line(mesh: Mesh | AbstractMesh) -> str:
    """The line that makes this mesh with Auto axes."""
    sizes, names = tuple(mesh.shape.values()), tuple(map(str, mesh.axis_names))
    return (
        f"mesh = jax.make_mesh({sizes}, {names}, "
        f"axis_types=(jax.sharding.AxisType.Auto,) * {len(names)}), or "
        "jax.sharding.Mesh(mesh.devices, mesh.axis_names) of one that you were given"
    )


def abstract_mesh(shape: MeshShape) -> AbstractMesh:
    """The plan's mesh without devices, for shardings of `ShapeDtypeStruct`s."""
    return AbstractMesh(
        tuple(size for _, size in shape.sizes),
        shape.names,
        axis_types=(AxisType.Auto,) * len(shape.sizes),
    )


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh:
    """The same devices, names and sizes with Auto axes.

    Raises:
        BadMesh: TP010, if there are no devices.
    """
    mesh = check_devices(mesh)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


@contextlib.contextmanager
def auto_context(mesh: Mesh | AbstractMesh | None = None) -> Generator[None]:
    """Inside the block no Explicit mesh and no mesh of other devices is the ambient one.

    Under `jax.set_mesh` with Explicit axes JAX refuses every array that lies on an Auto mesh, and
    under a mesh of other devices every function that puts its results elsewhere. Where there is no
    ambient mesh, there is none inside either.

    Args:
        mesh: What takes the ambient mesh's place, with Auto axes; by default nothing does.
    """
    if jax.sharding.get_abstract_mesh().empty:
        yield
        return
    empty = Mesh(np.empty((), dtype=object), ())
    with jax.set_mesh(empty if mesh is None else auto_mesh(mesh)):
        yield


def faults_of(mesh: Any, shape: MeshShape) -> list[JaxtpError]:
    """What only the user's mesh can tell, and no shape: idle devices, a tensor axis across hosts.

    Args:
        mesh: As given to `make_plan`.
        shape: Its shape.
    """
    found: list[JaxtpError] = []
    if (idle := idle_devices(mesh)) > 0:
        found.append(
            IdleDevices(
                f"the mesh {shape} leaves {idle} of {idle + shape.num_devices} devices idle",
                fix="use all devices: jaxtp.make_mesh(tp=..., dp=-1)",
            )
        )
    if (hosts := hosts_along(mesh, shape)) > 1:
        found.append(
            BadMesh(
                f"one tensor-parallel group spans {hosts} hosts, outside the NVLink domain",
                fix="make tp the innermost axis and at most the GPUs of one host",
            )
        )
    return found


def idle_devices(mesh: Any) -> int:
    """Devices of the mesh's own backend that it leaves unused; 0 for shapes.

    A mesh for compilation only has devices of no backend that JAX knows, all of them on purpose.
    """
    if not isinstance(mesh, Mesh):
        return 0
    first = mesh.devices.flat[0]
    known = jax.devices(first.platform) if first in jax.devices() else mesh.devices.flat
    return len(known) - mesh.devices.size


def hosts_along(mesh: Any, shape: MeshShape) -> int:
    """Over how many processes with several devices one tensor-parallel group spreads; 1 for shapes.

    With one process per GPU the node of a device is not visible to JAX, so those count as one.
    """
    if not isinstance(mesh, Mesh):
        return 1
    if max(Counter(d.process_index for d in mesh.devices.flat).values()) == 1:
        return 1
    names = list(mesh.axis_names)
    order = [i for i, n in enumerate(names) if n != shape.tp_name] + [names.index(shape.tp_name)]
    first_group = mesh.devices.transpose(order).reshape(-1, shape.tp_size)[0]
    return len({d.process_index for d in first_group})


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]
