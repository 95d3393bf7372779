"""The jitted train step: state in, state out, in the same places, in the same memory."""

import contextlib
import functools
import math
import operator
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxtp.activations.by_name import use_plan
from jaxtp.activations.grouped_kernels import sums_kernels, sums_over_rows
from jaxtp.compile.options import OPTIONS
from jaxtp.errors import (
    BadMesh,
    BadStages,
    BadStep,
    PlanMismatch,
    Problems,
    StateNotPlaced,
)
from jaxtp.errors.arguments import FLAG, FUNCTION, checked
from jaxtp.layers.stacked import runs_in_stages
from jaxtp.mesh.axes import Axis, MeshShape
from jaxtp.mesh.build import auto_context, auto_mesh, check_devices, plan_mesh
from jaxtp.placement.arrays import batch_slots, place, put
from jaxtp.placement.replicas import check_agreement
from jaxtp.placement.train_state import SMALL_BYTES
from jaxtp.plan.decisions import A_PLAN, Plan
from jaxtp.plan.trees import FlatTree, PyTree, itemsize, leaves, shape_dtype
from jaxtp.rules.jaxpr.walk import bare
from jaxtp.train import traced_step
from jaxtp.train.arguments import Form, Signature, Static, check_state, update_objects
from jaxtp.train.traced_step import Structure, put_together, take_apart

State = TypeVar("State")


@checked(
    step_fn=FUNCTION.raising(BadStep),
    plan=A_PLAN.or_none(),
    donate=FLAG,
    compiler_options=OPTIONS.or_none(),
)
def jit_step(
    step_fn: Callable[..., Any],
    state: State,
    mesh: Mesh,
    *,
    plan: Plan | None = None,
    axis_names: Mapping[str, str] | None = None,
    donate: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    compiler_options: Mapping[str, Any] | None = None,
) -> "Step[State]":
    """`step_fn` as one compiled function over the mesh.

    Every array of the new state lies where its predecessor lay, and takes over its memory; the
    batch is split over dp and fsdp only. It works under any ambient mesh, or none.

    Args:
        step_fn: `(state, batch) -> (state, metrics)`, or `-> state`; single-device code. It may
            take more: other batches, keys, `nnx.Rngs`, flags, schedules. With NNX the state holds
            the objects, e.g. `(model, optimizer)`: the function may change them in place, and
            returns them.
        state: The state to begin with, from `init_sharded` or `shard`, or structs with shardings.
            Its arrays say where everything lies. Only its shapes and places are used here.
        mesh: The mesh that the state was placed with.
        plan: Makes the plan's activation constraints hold inside the step (`use_plan`).
        axis_names: What jaxtp calls an axis -> what the mesh calls it, e.g. `{"dp": "data"}`; the
            plan knows them, if one is given.
        donate: Let the new state use the memory of the old one, which is gone after the call. NNX
            objects that were passed in are then empty; use those that come back.
        static_argnums: Positions of arguments that are part of the program, as in `jax.jit`; the
            state is 0. Flags, strings and functions are static by themselves, numbers are not.
        static_argnames: Names of such arguments.
        compiler_options: XLA options for this function, e.g. from `jaxtp.compile_options`.

    Raises:
        StateNotPlaced: TP070, if a large array of the state is not on the mesh.
        BadMesh: TP010, if the state lies on other devices than those of the mesh.
        NoTensorAxis: TP013, if the mesh has no tensor axis under its own or the given name.
        BadStep: TP133, if the step has no such static argument.
        PlanMismatch: TP045, if the state has no array of the shape of any of the plan's parameters.
        BadConfig: TP020, if `donate` is neither True nor False.
        BadOption: TP110, for compiler options that are no names and numbers or text.
    """
    check_devices(mesh)
    if plan is not None:
        _check_own(plan, state)
    shape = plan.mesh if plan is not None else MeshShape.of(mesh, axis_names)
    return Step(
        step_fn,
        state,
        mesh,
        shape=shape,
        plan=plan,
        donate=donate,
        signature=Signature(step_fn, static_argnums, static_argnames),
        compiler_options=compiler_options,
    )


class Step(Generic[State]):
    """A jitted train step; call it as the step function is written, e.g. `step(state, batch)`.

    Attributes:
        jitted: The function under it, of (structure, leaves of the state, batch, other arguments).
        mesh: The Auto mesh that the state lies on.
        shardings: Where each leaf of the state lies, in JAX's flattening order.
        state_paths: Its path, likewise; the compiled program calls the leaves `arrays[0]`, ...
        state_shapes: Path -> global shape in elements, likewise.
    """

    def __init__(
        self,
        step_fn: Callable[..., Any],
        state: State,
        mesh: Mesh,
        *,
        shape: MeshShape,
        plan: Plan | None,
        donate: bool,
        signature: Signature,
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self._shape, self._plan, self._donate = shape, plan, donate
        self._signature = signature
        self._user_mesh = mesh
        self._plan_mesh = None if plan is None else plan_mesh(mesh, plan.mesh)
        self.mesh, self.shardings = _places(state, mesh)
        self.state_shapes = {path: np.shape(leaf) for path, leaf in leaves(state)}
        self.state_paths = tuple(self.state_shapes)
        # What the last call returned needs no look in the next one.
        self._known: list[weakref.ref[jax.Array]] = []
        self._read: set[Static] = set()
        self._body = functools.partial(traced_step.run, step_fn)
        self._jit = functools.partial(
            jax.jit,
            static_argnums=0,
            in_shardings=(self.shardings, None, None),
            out_shardings=(self.shardings, None, None),
            donate_argnums=1 if donate else (),
            keep_unused=True,  # a dropped argument would not be donated
            compiler_options=dict(compiler_options) if compiler_options else None,
        )
        self.jitted = self._jit(self._body)

    def __call__(self, state: State, *args: Any, **named: Any) -> Any:
        """One step: what `step_fn` returns, with the state on the mesh.

        Args:
            state: As the one that the step was made for; what lies elsewhere is moved first.
            *args: The batch, a tree of arrays `(batch, ...)` on the host or placed, and whatever
                else `step_fn` takes; see `jaxtp.shard_batch` for what is not sharded. NNX objects,
                such as `nnx.Rngs`, are updated in place.
            **named: The same, by name.

        Raises:
            BadStep: TP133, if `step_fn` cannot be called like that, does not return the state as it
                was, or the state was donated to an earlier call.
            ProcessesDisagree: TP014, in the first call, if processes have other plans, other
                batches, or other copies of one array.
            PlanMismatch: TP045, if the state has another number of arrays.
            SizeMismatch: TP003, if the batch does not divide over the batch axes.
            BadStages: TP074, if the plan has stages and `step_fn` does not run in them.
        """
        with self._context():
            structure, arrays = take_apart(state)
            known = [ref() for ref in self._known]
            if not known or len(known) != len(arrays) or any(map(operator.is_not, known, arrays)):
                arrays = self._adopt(arrays)
            form, traced = self._signature.read(state, args, named)
            flat = FlatTree.of(traced)
            if not known:
                self._compare_processes(arrays, flat)
            arguments = self._arguments(structure, arrays, form, flat)
            self._read_program(arguments)
            new, rest, changed = self.jitted(*arguments)
            update_objects(dict(zip(form.names, (*args, *named.values()), strict=True)), changed)
        self._known = [weakref.ref(leaf) for leaf in new]
        return (put_together(structure, new), *rest) if rest else put_together(structure, new)

    def lower(self, state: State, *args: Any, **named: Any) -> jax.stages.Lowered:
        """The step lowered for arrays or structs; nothing runs and nothing is donated."""
        with self.as_jitted(state, *args, **named) as (jitted, arguments):
            return jitted.lower(*arguments)

    @contextlib.contextmanager
    def as_jitted(
        self, state: State, *args: Any, **named: Any
    ) -> Generator[tuple[Any, tuple[Any, ...]]]:
        """`jitted` and what it takes for these arrays or structs, while the plan is in force.

        For whoever traces or exports the step; nothing runs and nothing is donated.
        """
        with self._context():
            structure, arrays = take_apart(state)
            arrays = [_settle(x, s) for x, s in zip(arrays, self.shardings, strict=True)]
            form, traced = self._signature.read(state, args, named)
            arguments = self._arguments(structure, arrays, form, FlatTree.of(traced))
            self._read_program(arguments)
            yield self.jitted, arguments

    def _read_program(self, arguments: tuple[Any, ...]) -> None:
        """Refuses what would compute wrong numbers, or has it computed in another way.

        Layers stored for stages and run otherwise would be in the wrong order, with holes; for
        kernels of grouped convolutions see `jaxtp.activations.grouped_kernels`.
        """
        shape, plan = self._shape, self._plan
        stages = plan.stages if plan is not None else None
        shares_rows = 1 < shape.batch_ways < shape.num_devices
        if arguments[0] in self._read or (stages is None and not shares_rows):
            return
        traced = self.jitted.trace(*arguments).jaxpr
        if stages and not runs_in_stages(bare(traced), shape.name_of(Axis.PP)):
            raise BadStages(
                f"the plan assigns layers to {stages.num_stages} stages along "
                f"{shape.name_of(Axis.PP)}, and the step runs none of them there",
                fix="run stacked layers with jaxtp.scan_layers instead of a scan",
            )
        if shares_rows and sums_kernels(traced):
            self.jitted = self._jit(sums_over_rows(self._body, shape.batch, self.mesh))
        self._read.add(arguments[0])

    @contextlib.contextmanager
    def _context(self) -> Generator[None]:
        with auto_context(self._user_mesh), contextlib.ExitStack() as stack:
            if self._plan is not None and self._plan_mesh is not None:
                stack.enter_context(use_plan(self._plan, self._plan_mesh))
            yield

    def _arguments(
        self, structure: Structure, arrays: list[Any], form: Form, traced: FlatTree
    ) -> tuple[Any, ...]:
        """What the jitted function takes; the first argument is the batch."""
        placed = place(traced, batch_slots(traced.shapes(), self._shape), self.mesh)
        batch = placed.pop(form.names[0], None) if form.names else None
        return (Static((structure, form)), arrays, batch, placed)

    def _compare_processes(self, arrays: list[jax.Array], traced: FlatTree) -> None:
        """Refuses processes that would wait for each other for ever, or train apart in silence."""
        facts = {"plan": self._plan and self._plan.to_json(), "shardings": self.shardings}
        check_agreement({name: str(value) for name, value in facts.items()}, traced.values, arrays)

    def _adopt(self, arrays: list[Any]) -> list[jax.Array]:
        """A state that this step has not made: every array in its place and in its own memory.

        Donating one buffer twice is an error, and ends the process on jax 0.10. Optimizers start
        with copies of the parameters that are the parameters themselves.
        """
        check_state(arrays, self.state_shapes)
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
            raise BadStep(
                "the state was given to an earlier call of a step, which took over its memory",
                fix="go on with the state that the call returned: state, metrics = step(state, "
                "batch); or jit_step(..., donate=False)",
            )
        placed = [_settle(x, s) for x, s in zip(arrays, self.shardings, strict=True)]
        # Asking for the address of an array that is still being computed can hang JAX on CPU.
        jax.block_until_ready(placed)
        seen: set[int] = set()
        for i, leaf in enumerate(placed):
            address = _address(leaf)
            if self._donate and address in seen:
                placed[i] = jnp.copy(leaf)
            seen.add(address)
        return placed


def _settle(leaf: Any, sharding: NamedSharding) -> Any:
    """A leaf in its place, of a strong type.

    A Python number is weakly typed, and what a checkpoint gives back is not: without this the step
    would compile again, and promote differently, after a restart.
    """
    leaf = put(leaf, sharding)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.update(weak_type=False)
    return jax.lax.convert_element_type(leaf, leaf.dtype) if jax.typeof(leaf).weak_type else leaf


def _check_own(plan: Plan, state: PyTree) -> None:
    """Refuses a plan of which nothing is in the state.

    One shape in common is enough: adapters and a few norms may train, and all else stand elsewhere.
    """
    shapes = {np.shape(leaf) for _, leaf in leaves(state)}
    if not any({d.shape, d.stored} & shapes for d in plan.decisions):
        raise PlanMismatch(
            f"the state has no array of the shape of any of the plan's {len(plan.decisions)} "
            "parameters",
            where="plan",
            fix="give the plan that the state was placed by",
        )


def _places(state: PyTree, mesh: Mesh) -> tuple[Mesh, list[NamedSharding]]:
    """The mesh that a state lies on, and where each leaf lies; small strays become copies."""
    found: list[NamedSharding | None] = []
    problems = Problems()
    for path, leaf in leaves(state):
        shape, dtype = shape_dtype(leaf, path)
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            if list(sharding.mesh.devices.flat) != list(mesh.devices.flat):
                raise BadMesh(
                    f"the array lies on {sharding.mesh.devices.size} devices that are not, or not "
                    f"in the order of, the {mesh.devices.size} devices of the mesh",
                    where=path,
                    fix="give jit_step the mesh that the state was placed with",
                )
            # The memory too: an offloaded state goes back to the host.
            home, kind = auto_mesh(sharding.mesh), sharding.memory_kind
            found.append(NamedSharding(home, sharding.spec, memory_kind=kind))
        else:
            found.append(None)
            if itemsize(dtype) * math.prod(shape) > SMALL_BYTES:
                problems.add(_astray(path, f"lies on {sharding or 'the host'}"))
    homes = [sharding.mesh for sharding in found if sharding is not None]
    if not homes:
        problems.add(_astray("", "has no array on the mesh"))
    problems.raise_any()
    if not _refines(homes[0], mesh):
        raise BadMesh(
            f"the state lies on the mesh {dict(homes[0].shape)}, and the step is for "
            f"{dict(mesh.shape)}",
            fix="give jit_step the mesh that the state was placed with",
        )
    home = auto_mesh(homes[0])
    return home, [sharding or NamedSharding(home, PartitionSpec()) for sharding in found]


def _refines(placed: Mesh | AbstractMesh, mesh: Mesh) -> bool:
    """Whether axes of one mesh are those of another, each whole or as consecutive factors."""
    factors = [size for size in placed.shape.values() if size > 1]
    for size in (size for size in mesh.shape.values() if size > 1):
        while size > 1 and factors and size % factors[0] == 0:
            size //= factors.pop(0)
        if size > 1:
            return False
    return not factors


def _astray(path: str, where: str) -> StateNotPlaced:
    return StateNotPlaced(
        f"the state {where}",
        where=path,
        fix="make it with jaxtp.init_sharded, or move it with jaxtp.shard(state, mesh)",
    )


def _address(x: jax.Array) -> int:
    """Where the first local piece of an array lies in memory; its own number if it is empty."""
    if x.nbytes == 0 or jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return id(x)
    return x.addressable_shards[0].data.unsafe_buffer_pointer()
