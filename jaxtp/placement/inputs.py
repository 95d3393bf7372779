"""Inputs of a planned function onto the mesh: caches and states where the plan wants them."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxtp.errors import PlanMismatch, Problems, SizeMismatch, join
from jaxtp.mesh.build import own_mesh
from jaxtp.placement.arrays import place
from jaxtp.placement.train_state import Slot
from jaxtp.plan.decisions import Plan, check_plan
from jaxtp.plan.inputs import InputDecision
from jaxtp.plan.specs import spec_text
from jaxtp.plan.trees import FlatTree, Param, PyTree


def shard_inputs(inputs: PyTree, plan: Plan, mesh: Mesh | AbstractMesh | None = None) -> PyTree:
    """A cache, or another input, with every array where `plan.inputs` says.

    Args:
        inputs: One argument of the planned function, such as its cache, or a tuple of all of them:
            arrays, or structs, which come back as structs with shardings. Its batch and its lengths
            may differ from those the plan was made from.
        plan: From `make_plan(params, mesh, fn=fn, inputs=...)`.
        mesh: The mesh that the parameters were placed with; by default all devices in order. For
            structs an AbstractMesh will do.

    Raises:
        PlanMismatch: TP045, if the plan has no inputs, or none of its arguments looks like this.
        SizeMismatch: TP003, if a dim does not divide over the axes that shard it.
        BadMesh: TP010, if there are more or fewer devices than the plan has.
    """
    check_plan(plan)
    named, there = arguments(plan), own_mesh(mesh, plan.mesh)
    if isinstance(inputs, tuple) and len(inputs) == len(named):
        given: tuple[PyTree, ...] = inputs
        flats = [FlatTree.of(tree) for tree in given]
        pairs = list(zip(flats, named.values(), strict=True))
        if all(_fits(flat.shapes(), known) for flat, known in pairs):
            return tuple(
                place(flat, input_slots(flat.shapes(), known, plan), there) for flat, known in pairs
            )
    flat = FlatTree.of(inputs)
    shapes = flat.shapes()
    return place(flat, input_slots(shapes, _one_of(shapes, named), plan), there)


def arguments(plan: Plan) -> dict[str, list[InputDecision]]:
    """The decisions of each argument, by its name.

    Raises:
        PlanMismatch: TP045, if the plan has none.
    """
    named: dict[str, list[InputDecision]] = {}
    for decision in plan.inputs:
        named.setdefault(decision.argument, []).append(decision)
    if not named:
        raise PlanMismatch(
            "the plan was made without inputs",
            where="plan.inputs",
            fix="make_plan(params, mesh, fn=decode, inputs=(cache, token)); shapes are enough",
        )
    return named


def input_slots(
    arrays: Mapping[str, Param], decisions: Sequence[InputDecision], plan: Plan
) -> Mapping[str, Slot]:
    """The checked slot of every array of one argument, by its path inside the argument.

    Args:
        arrays: Those of the argument, likewise.
        decisions: The plan's, of the same argument.
        plan: The plan.

    Raises:
        PlanMismatch: TP045, if it has other arrays than the plan, or one of another rank.
        SizeMismatch: TP003, if a dim does not divide over its axes.
    """
    known = {decision.inner_path: decision for decision in decisions}
    argument = decisions[0].argument
    if arrays.keys() != known.keys():
        raise PlanMismatch(
            f"missing: {join(sorted(known.keys() - arrays.keys())) or 'nothing'}, "
            f"new: {join(sorted(arrays.keys() - known.keys())) or 'nothing'}",
            where=argument,
            fix="make the plan from these inputs",
        )
    problems = Problems()
    slots: dict[str, Slot] = {}
    for path, array in arrays.items():
        shape, decision = array.shape, known[path]
        if len(shape) != len(decision.shape):
            problems.add(
                PlanMismatch(
                    f"{len(shape)} dims {shape}, the plan was made for {decision.shape}",
                    where=decision.path,
                    fix="make the plan from these inputs",
                )
            )
            continue
        for dim, (size, axes) in enumerate(zip(shape, decision.spec, strict=True)):
            if size % plan.mesh.ways(axes):
                problems.add(
                    SizeMismatch(
                        f"dim {dim} of {shape} does not divide over {join(axes)}, "
                        f"{plan.mesh.ways(axes)} devices: {spec_text(decision.spec)}",
                        where=decision.path,
                        fix=f"a multiple of {plan.mesh.ways(axes)}, or a plan made from this shape",
                    )
                )
        slots[path] = Slot(shape, decision.spec)
    problems.raise_any()
    return slots


def _one_of(
    arrays: Mapping[str, Param], named: Mapping[str, Sequence[InputDecision]]
) -> list[InputDecision]:
    """The argument that a tree is: the one with its paths and ranks; sizes decide among several."""
    fitting = [list(known) for known in named.values() if _fits(arrays, known)]
    shapes = [array.shape for array in arrays.values()]
    equal = [known for known in fitting if [d.shape for d in known] == shapes]
    for some in (equal, fitting):
        if some and all([d.spec for d in known] == [d.spec for d in some[0]] for known in some):
            return some[0]
    looks = join(f"{path or 'one array'}{list(x.shape)}" for path, x in arrays.items())
    raise PlanMismatch(
        f"{'several arguments look' if fitting else 'no argument looks'} like this: {looks}",
        where="inputs",
        fix=f"a tuple of all arguments, ({join(named)}), as the plan was made from",
    )


def _fits(arrays: Mapping[str, Param], known: Sequence[InputDecision]) -> bool:
    """Whether a tree has the paths and ranks of an argument."""
    found = sorted((path, len(array.shape)) for path, array in arrays.items())
    return found == sorted((d.inner_path, len(d.shape)) for d in known)


def is_placed(leaf: Any, sharding: jax.sharding.NamedSharding) -> bool:
    """Whether an array lies in its place already."""
    if not isinstance(leaf, jax.Array):
        return False
    return leaf.sharding == sharding or (
        leaf.committed and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    )
