"""Train states that are born where they belong.

`jax.jit(tx.init)` alone puts Adam's moments on the first device: they are zeros, and depend on no
argument that could tell XLA where to put them. The compiled functions here say where.
"""

import contextlib
import inspect
import re
import sys
from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.errors import BadStep, BadTree
from jaxtp.errors.arguments import FUNCTION, Kind, checked
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import (
    auto_context,
    auto_mesh,
    check_devices,
    plan_mesh,
    warn_of_explicit_axes,
)
from jaxtp.placement.arrays import place, plan_for
from jaxtp.placement.boxes import refuse_names
from jaxtp.placement.replicas import check_agreement
from jaxtp.placement.train_state import Overrides, Slot, array_slots, follow, plan_slots, slots
from jaxtp.plan.decisions import A_PLAN, Plan
from jaxtp.plan.specs import partition_spec
from jaxtp.plan.stored_form import pad
from jaxtp.plan.trees import FlatTree, PyTree, as_pytree, leaves

if TYPE_CHECKING:
    from optax import GradientTransformation


OPTIMIZER = Kind(
    lambda value: hasattr(value, "init") and hasattr(value, "update"),
    "an optimizer, such as optax.adamw(1e-3)",
    BadTree,
)


@checked(apply_fn=FUNCTION.or_none())
def init_sharded(
    init_fn: Callable[[], PyTree],
    tx: "GradientTransformation | None",
    mesh: Mesh,
    *,
    plan: Plan | None = None,
    apply_fn: Callable[..., Any] | None = None,
    state_overrides: Overrides | None = None,
    **options: Any,
) -> PyTree:
    """The train state that `init_fn` and `tx` describe, computed in place.

    `init_fn` is traced for shapes, planned, and compiled with the plan's shardings as outputs. The
    numbers are those that it gives on one device.

    Args:
        init_fn: Makes the parameters; what it needs (model, key, example input) it closes over.
        tx: The optimizer; None if `init_fn` returns a whole train state.
        mesh: A jax Mesh.
        plan: Where parameters go; by default `make_plan(parameters, mesh, **options)`.
        apply_fn: The `apply_fn` of the `TrainState`, e.g. `model.apply`; by default that of the
            Linen module given as `fn=`.
        state_overrides: Specs for leaves that cannot follow a parameter, by regular expression.
        **options: Options of `make_plan`.

    Returns:
        `(module, nnx.Optimizer)` if `init_fn` returns an `nnx.Module`; a Flax `TrainState` if it
        returns another tree of parameters. Without `tx`, what `init_fn` returns,
        e.g. `TrainState.create(...)`.

    Raises:
        BadTree: TP046, if the optimizer or the function is something else.
        BadSpec: TP044, if the model is annotated with axes that the ambient mesh lacks.
        ProcessesDisagree: TP014, if processes would make other parameters, of another seed.
        JaxtpError: whatever `jaxtp.shard` raises.
        BadConfig: TP020, if `apply_fn` cannot be called.
    """
    _check_arguments(init_fn, tx, mesh)
    with auto_context(mesh), annotations_kept():
        shapes = _shapes(init_fn)
        given = plan is not None
        plan = plan_for(shapes, mesh, plan, options)
        target = plan_mesh(mesh, plan.mesh)
        overrides = None if tx is not None else state_overrides
        flat = FlatTree.of(shapes)
        found = slots(flat.shapes(), plan, overrides, complete=given)
        params = _compute(init_fn, flat, found, target)
        if tx is None:
            return params
        optimizer = init_optimizer(tx, params, plan=plan, state_overrides=state_overrides)
        if _is_module(params):
            return params, optimizer
        from flax.training.train_state import TrainState

        step = jax.device_put(np.int32(0), NamedSharding(target, PartitionSpec()))
        return TrainState(
            step=step,
            apply_fn=_apply_fn(apply_fn, options.get("fn")),
            params=params,
            tx=tx,
            opt_state=optimizer,
        )


def _check_arguments(init_fn: Any, tx: Any, mesh: Any) -> None:
    """Refuses arguments in another order, or of another kind, than `init_sharded` takes."""
    if not callable(init_fn):
        raise BadTree(
            f"init_fn is a {type(init_fn).__name__}, which cannot be called",
            fix="a function without arguments that makes the parameters: lambda: model.init(...)",
        )
    with contextlib.suppress(ValueError):  # some callables have no signature
        signature = inspect.signature(init_fn)
        try:
            signature.bind()
        except TypeError as err:
            raise BadTree(
                f"init_fn takes {signature}: {err}",
                fix="a function without arguments: lambda: model.init(key, x)",
            ) from None
    if tx is not None:
        OPTIMIZER.check("tx", tx)
    check_devices(mesh)
    warn_of_explicit_axes(mesh)


def _apply_fn(given: Callable[..., Any] | None, model: Any) -> Callable[..., Any]:
    """What a `TrainState` calls its model by."""
    return given or getattr(model, "apply", None) or model or _no_apply_fn


def _no_apply_fn(*_: Any, **__: Any) -> Any:
    raise BadStep(
        "state.apply_fn was called, and init_sharded was not told the model's function",
        where="apply_fn",
        fix="init_sharded(..., apply_fn=model.apply), or call model.apply itself",
    )


@contextlib.contextmanager
def annotations_kept() -> Generator[None]:
    """Inside the block names on NNX variables are kept as evidence, and not applied by Flax.

    Flax would ask for an ambient mesh that has all of these names.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        yield
        return
    with nnx.use_eager_sharding(False):
        yield


@checked(tx=OPTIMIZER, plan=A_PLAN.or_none())
def init_optimizer(
    tx: "GradientTransformation",
    params: PyTree,
    *,
    plan: Plan | None = None,
    state_overrides: Overrides | None = None,
) -> PyTree:
    """The optimizer's state for placed parameters, every moment where its parameter lies.

    Args:
        tx: The optimizer.
        params: Parameters from `jaxtp.shard` or `jaxtp.init_sharded`; their arrays say where.
        plan: Their plan, if ZeRO shards the optimizer's state further than the parameters.
        state_overrides: Specs for leaves that cannot follow a parameter, by regular expression.

    Returns:
        `nnx.Optimizer(params, tx, wrt=nnx.Param)` for an `nnx.Module`, else `tx.init(params)`.

    Raises:
        StateNotPlaced: TP070, if a parameter is not on a mesh, or as in `jaxtp.state_specs`.
        BadMesh: TP010, if the parameters lie on several meshes.
        BadTree: TP046, if `tx` is no optimizer.
        PlanMismatch: TP045, if `plan` is no plan.
    """
    given = FlatTree.of(params)
    found, mesh = array_slots(given.values)
    with auto_context(mesh), annotations_kept():
        plain, rebuild = as_pytree(place(given, found, auto_mesh(mesh)))

        def make(plain: PyTree) -> PyTree:
            return _optimizer(tx, rebuild(plain))

        flat = FlatTree.of(_shapes(make, plain))
        shape = MeshShape(tuple(mesh.shape.items()))
        moments = None
        if plan is not None:  # it follows parameters that are in their stored form already
            kept = plan_slots(plan, state=True)
            moments = {path: slot.as_stored() for path, slot in kept.items()}
        placed = follow(flat.shapes(), found, shape, state_overrides, moments=moments)
        return _compute(make, flat, placed, auto_mesh(mesh), plain)


def _optimizer(tx: "GradientTransformation", params: PyTree) -> PyTree:
    if _is_module(params):
        nnx = sys.modules["flax.nnx"]
        return nnx.Optimizer(params, tx, wrt=nnx.Param)
    return tx.init(params)


def _is_module(params: PyTree) -> bool:
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(params, nnx.Module)


def _shapes(make: Callable[..., PyTree], *args: PyTree) -> PyTree:
    """What `make(*args)` returns, with a struct for every array; nothing is computed."""
    rebuilds: list[Callable[[PyTree], PyTree]] = []

    def plain(*args: PyTree) -> PyTree:
        tree, rebuild = as_pytree(make(*args))
        rebuilds.append(rebuild)
        return tree

    try:
        shapes = jax.eval_shape(plain, *args)
    except ValueError as error:
        refuse_names(error)
        raise
    return rebuilds[-1](shapes)


def _compute(
    make: Callable[..., PyTree],
    result: FlatTree,
    found: Mapping[str, Slot],
    mesh: Mesh,
    *args: PyTree,
) -> PyTree:
    """`make(*args)` in stored form, by one compiled function that leaves every array in its slot.

    Only leaves leave the function: a `TrainState` carries its optimizer's functions in its
    structure, and those of a second trace are others than those of the first.
    """

    def flat(*args: PyTree) -> list[jax.Array]:
        return [pad(leaf, found[path].padding) for path, leaf in leaves(make(*args))]

    shardings = [NamedSharding(mesh, partition_spec(found[path].spec)) for path in result.values]
    if jax.process_count() > 1:
        # Each process computes its own shards, so that of another seed only a part would be there.
        closed = jax.make_jaxpr(flat)(*args)
        program = re.sub(r"0x[0-9a-f]+", "", str(closed))
        consts = {f"constant {n}": value for n, value in enumerate(closed.consts)}
        check_agreement({"program that makes the state": program}, consts)
    return result.like(jax.jit(flat, out_shardings=shardings)(*args))
