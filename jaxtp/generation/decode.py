"""Anybody's decode step as one compiled function, its cache in place and in the same memory."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxtp.activations.by_dataflow import parallelize
from jaxtp.compile.options import OPTIONS, probe
from jaxtp.errors import BadStep, PlanMismatch, join
from jaxtp.errors.arguments import FLAG, FUNCTION, checked
from jaxtp.generation.programs import READ_ONCE
from jaxtp.mesh.build import auto_context, plan_mesh
from jaxtp.placement.arrays import put
from jaxtp.placement.inputs import arguments, input_slots, is_placed
from jaxtp.plan.decisions import A_PLAN, Plan
from jaxtp.plan.inputs import STATE, InputDecision
from jaxtp.plan.specs import partition_spec
from jaxtp.plan.trees import FlatTree, PyTree, as_pytree, spell


@checked(
    decode=FUNCTION.raising(BadStep), plan=A_PLAN, donate=FLAG, compiler_options=OPTIONS.or_none()
)
def jit_decode(
    decode: Callable[..., Any],
    plan: Plan,
    mesh: Mesh,
    *,
    donate: bool = True,
    compiler_options: Mapping[str, Any] | None = None,
) -> "Decode":
    """`decode` as one compiled function whose cache stays where the plan puts it.

    What the plan calls a state (`plan.inputs`, role "state") is donated, and what comes back lies
    in its place and in its memory. Everything else that comes back lies as XLA likes: logits along
    the vocabulary, as their kernel does. Activation constraints are placed by the dataflow, as by
    `jaxtp.parallelize`. It works under any ambient mesh, or none.

    Args:
        decode: `decode(params, *inputs)`, the pure function that the plan was made from, or a
            prefill with the same arguments.
        plan: From `make_plan(params, mesh, fn=decode, inputs=...)`.
        mesh: The mesh that the parameters were placed with.
        donate: Let the new state use the memory of the old one, which is gone after the call.
        compiler_options: XLA options for this function; by default those with which products read
            their weights once and in place (`generation.programs.READ_ONCE`).

    Raises:
        PlanMismatch: TP045, if the plan has no inputs.
        BadMesh: TP010, if the mesh has another number of devices than the plan.
        BadStep: TP133, if `decode` cannot be called.
        BadConfig: TP020, if `donate` is neither True nor False.
        BadOption: TP110, for compiler options that are no names and numbers or text.
    """
    return Decode(decode, plan, mesh, donate=donate, compiler_options=compiler_options)


class Decode:
    """A jitted decode step; call it as the function is written: `step(params, cache, token)`.

    Attributes:
        jitted: The function under it, of (structure, parameters, states, other inputs).
        mesh: The plan's own Auto mesh.
    """

    def __init__(
        self,
        decode: Callable[..., Any],
        plan: Plan,
        mesh: Mesh,
        *,
        donate: bool,
        compiler_options: Mapping[str, Any] | None,
    ) -> None:
        self._arguments, self._plan = arguments(plan), plan
        self.mesh = plan_mesh(mesh, plan.mesh)
        kept = [decision for decision in plan.inputs if decision.role == STATE]
        options = probe(READ_ONCE).options if compiler_options is None else compiler_options
        self.jitted = jax.jit(
            functools.partial(_body, parallelize(decode, plan, mesh), [d.path for d in kept]),
            static_argnums=0,
            out_shardings=([self._sharding(d) for d in kept], None),
            donate_argnums=2 if donate else (),
            keep_unused=True,  # a dropped argument would not be donated
            compiler_options=dict(options) or None,
        )

    def __call__(self, params: PyTree, *inputs: PyTree) -> Any:
        """One step: what `decode` returns, its state on the mesh.

        Args:
            params: Placed by `jaxtp.shard` with the same plan.
            *inputs: As the plan was made for; what lies elsewhere, such as a new cache or token ids
                on the host, is moved first.

        Raises:
            PlanMismatch: TP045, if the inputs are not those of the plan.
            SizeMismatch: TP003, if a dim does not divide over its axes.
            BadStep: TP133, if a state does not come back, or was donated to an earlier call.
        """
        with auto_context():
            states, rest = self.jitted(*self._taken_apart(params, inputs))
            return jax.tree.map(
                lambda x: states[x.index] if _is_place(x) else x, rest, is_leaf=_is_place
            )

    def lower(self, params: PyTree, *inputs: PyTree) -> jax.stages.Lowered:
        """The step lowered for arrays or structs; nothing runs and nothing is donated."""
        with auto_context():
            return self.jitted.lower(*self._taken_apart(params, inputs))

    def _sharding(self, decision: InputDecision) -> NamedSharding:
        return NamedSharding(self.mesh, decision.partition_spec)

    def _taken_apart(
        self, params: PyTree, inputs: Sequence[PyTree]
    ) -> tuple["_Structure", PyTree, list[Any], list[Any]]:
        """What the jitted function takes; every array is in its place."""
        if len(inputs) != len(self._arguments):
            raise PlanMismatch(
                f"{len(inputs)} inputs, the plan was made for {len(self._arguments)}",
                where="inputs",
                fix=f"({join(self._arguments)})",
            )
        states: list[Any] = []
        others: list[Any] = []
        forms: list[tuple[Any, Callable[[PyTree], PyTree], bool]] = []
        for tree, decisions in zip(inputs, self._arguments.values(), strict=True):
            plain, rebuild = as_pytree(tree)
            flat, treedef = jax.tree.flatten(plain)
            is_kept = decisions[0].role == STATE
            forms.append((treedef, rebuild, is_kept))
            (states if is_kept else others).extend(self._placed(plain, flat, decisions))
        plain, rebuild = as_pytree(params)
        return _Structure(rebuild, tuple(forms)), plain, states, others

    def _placed(
        self, plain: PyTree, flat: list[Any], decisions: Sequence[InputDecision]
    ) -> list[Any]:
        """The arrays of one input, each in its place."""
        if any(isinstance(x, jax.Array) and x.is_deleted() for x in flat):
            raise BadStep(
                "it was given to an earlier call, which took over its memory",
                where=decisions[0].argument,
                fix="go on with what that call returned, or jit_decode(..., donate=False)",
            )
        places = [self._sharding(decision) for decision in decisions]
        if len(flat) == len(places) and all(map(is_placed, flat, places)):
            return flat
        given = FlatTree.of(plain)
        slots = input_slots(given.shapes(), decisions, self._plan)
        return [
            put(leaf, NamedSharding(self.mesh, partition_spec(slots[path].spec)))
            for path, leaf in given.values.items()
        ]


@dataclasses.dataclass(frozen=True)
class _Structure:
    """How to put the arguments together again; equal where they are built alike.

    Attributes:
        rebuild: From plain pytree to parameters.
        inputs: Of each input its treedef, the way back from there, whether it is a state.
    """

    rebuild: Callable[[PyTree], PyTree]
    inputs: tuple[tuple[Any, Callable[[PyTree], PyTree], bool], ...]

    def put_together(self, states: Sequence[Any], others: Sequence[Any]) -> list[PyTree]:
        """The inputs, from the arrays of all states and of all others."""
        rows = {True: iter(states), False: iter(others)}
        return [
            rebuild(jax.tree.unflatten(treedef, itertools.islice(rows[kept], treedef.num_leaves)))
            for treedef, rebuild, kept in self.inputs
        ]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Place:
    """Stands in a result for the state that belongs there."""

    index: int


def _is_place(node: object) -> bool:
    return isinstance(node, _Place)


def _body(
    decode: Callable[..., Any],
    names: Sequence[str],
    structure: _Structure,
    params: PyTree,
    states: list[jax.Array],
    others: list[jax.Array],
) -> tuple[list[Any], PyTree]:
    """What is traced: the new states in the order of the old, and the result without them."""
    inputs = structure.put_together(states, others)
    out = decode(structure.rebuild(params), *inputs)
    flat, treedef = jax.tree_util.tree_flatten_with_path(out)
    paths = [spell(path).split("/") for path, _ in flat]
    arrays: list[Any] = [leaf for _, leaf in flat]
    new: list[Any] = []
    for index, (name, old) in enumerate(zip(names, states, strict=True)):
        own = name.split("/")[1:]
        alike = [
            i
            for i, x in enumerate(arrays)
            if hasattr(x, "dtype") and (x.shape, x.dtype) == (old.shape, old.dtype)
        ]
        if not alike:
            raise BadStep(
                f"no result is {old.dtype}{list(old.shape)}, as the state that came in",
                where=name,
                fix="return the new state with the shapes and types of the old one",
            )
        # The one of its own name; where names say nothing the first.
        best = max(alike, key=lambda i: (_shared_end(paths[i], own), -i))
        new.append(arrays[best])
        arrays[best] = _Place(index)
    return new, jax.tree.unflatten(treedef, arrays)


def _shared_end(left: Sequence[str], right: Sequence[str]) -> int:
    """How many last parts two paths share."""
    pairs = zip(reversed(left), reversed(right), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
