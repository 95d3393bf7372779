"""Where every leaf of a train state goes: parameters by decision, the rest by following one.

No device is touched.

One rule serves them all. A leaf whose path ends in a parameter's path belongs to that parameter,
and its dims are looked for among the parameter's: a moment has all of them, a factored moment lacks
one, a history has one more in front. Each dim that it shares keeps the parameter's axes.
"""

import dataclasses
import difflib
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtp.errors import (
    BadMesh,
    BadSpec,
    ConflictingDecisions,
    JaxtpError,
    PlanMismatch,
    Problems,
    SizeMismatch,
    StateNotPlaced,
    UnusedOverride,
    join,
)
from jaxtp.mesh.axes import MeshShape, legal_ways
from jaxtp.plan.decisions import Plan, check_plan
from jaxtp.plan.specs import Spec, canonical, partition_spec, spec_text
from jaxtp.plan.stored_form import Padding, stored_shape
from jaxtp.plan.trees import FlatTree, Param, PyTree

SMALL_BYTES = 4 * 2**20
"""A leaf of at most this size that follows no parameter is replicated: counters, random
keys, batch statistics, one vector over a large vocabulary. 4 MiB are 0.005% of an 80 GB GPU."""

PARAMETER_ROOTS = ("", "params")
"""Where the parameters themselves lie: the tree itself, or the field of a `TrainState`."""

Overrides = Mapping[str, PartitionSpec]
"""Regular expression, searched in a leaf's path -> its spec; "tp" means all of the tensor axis."""


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Where one array goes.

    Attributes:
        shape: Global shape in elements, as the model has it.
        spec: Mesh axes per dim.
        padding: Dims that are stored in another form.
    """

    shape: tuple[int, ...]
    spec: Spec
    padding: Padding = ()

    @property
    def stored(self) -> tuple[int, ...]:
        """Global shape in elements, as placed."""
        return stored_shape(self.shape, self.padding)

    @classmethod
    def replicated(cls, shape: tuple[int, ...]) -> "Slot":
        """The slot of an array of which every device has a copy."""
        return cls(shape, ((),) * len(shape))

    def take(self, dims: Sequence[int | None], shape: tuple[int, ...]) -> "Slot":
        """The slot of an array of `shape` whose dim `i` is dim `dims[i]` of this one, or new."""
        pairs = list(zip(dims, shape, strict=True))
        return Slot(
            shape=tuple(n if d is None else self.shape[d] for d, n in pairs),
            spec=tuple(() if d is None else self.spec[d] for d, _ in pairs),
            padding=tuple(
                dataclasses.replace(blocks, dim=dims.index(blocks.dim))
                for blocks in self.padding
                if blocks.dim in dims
            ),
        )

    def as_stored(self) -> "Slot":
        """The slot of an array that has its stored form already."""
        return Slot(self.stored, self.spec)


def state_specs(state: PyTree, plan: Plan, *, state_overrides: Overrides | None = None) -> PyTree:
    """A tree of PartitionSpecs, on the plan's mesh, with the structure of `state`.

    Args:
        state: Optax state, a `TrainState`, parameters, or any tree of them; arrays or structs.
        plan: The plan of its parameters.
        state_overrides: Specs for leaves that cannot follow a parameter, by regular expression.

    Raises:
        StateNotPlaced: TP070, if a matrix-like leaf belongs to a parameter and shares no dim with
            it, or if a leaf of more than `SMALL_BYTES` belongs to none.
        PlanMismatch: TP045, if a leaf lies among parameters and the plan does not know it.
        UnusedOverride: TP040, if an override matches no leaf.
        ConflictingDecisions: TP001, if two overrides match one leaf and differ.
        SizeMismatch: TP003, if a dim does not divide over its axes.
        BadSpec: TP044, if a spec does not fit its array or the mesh.
    """
    check_plan(plan)
    flat = FlatTree.of(state)
    found = slots(flat.shapes(), plan, state_overrides)
    return flat.like(partition_spec(slot.spec) for slot in found.values())


def slots(
    leaves: Mapping[str, Param],
    plan: Plan,
    overrides: Overrides | None = None,
    *,
    complete: bool = False,
) -> dict[str, Slot]:
    """The checked slot of every leaf of a train state, by path; errors as in `state_specs`.

    Args:
        leaves: What there is in any train state, by path.
        plan: The plan of its parameters.
        overrides: As in `state_specs`.
        complete: Whether parameters that the plan has and the tree lacks, and a tree that has
            nothing of the plan, are refused too (TP045).
    """
    params, moments = plan_slots(plan), plan_slots(plan, state=True)
    if complete:
        _check_same_model(leaves, _without_root(params))
    return follow(leaves, params, plan.mesh, overrides, moments=moments)


def _check_same_model(leaves: Mapping[str, Param], known: Mapping[str, Slot]) -> None:
    """Refuses trees with a part of the plan's parameters, or with matrices and none of them."""
    held: dict[str, set[str]] = {}
    matrices: list[str] = []
    has_owner = False
    owners = {path: _owner(path, known) for path in leaves}
    top = _parameter_roots(owners.values())
    for path, leaf in leaves.items():
        owner, root = owners[path]
        has_owner = has_owner or owner is not None
        if owner is not None and root in top:
            held.setdefault(root, set()).add(owner)
        elif owner is None and len(leaf.shape) > 1:
            matrices.append(path)
    if matrices and not has_owner:
        raise PlanMismatch(
            f"none of the plan's {len(known)} parameters is in this tree, which has "
            f"{join(matrices, 4)}; the plan has {join(known, 4)}",
            where=matrices[0],
            fix="make the plan from this tree",
        )
    for root, found in held.items():
        if missing := [path for path in known if path not in found]:
            raise PlanMismatch(
                f"the tree has {len(found)} of the plan's {len(known)} parameters; missing: "
                f"{join(missing, 4)}",
                where=root or missing[0],
                fix="make the plan from this tree",
            )


def plan_slots(plan: Plan, *, state: bool = False) -> dict[str, Slot]:
    """The slot of every parameter, by path; or that of what the optimizer keeps of it."""
    return {
        d.path: Slot(d.shape, (state and d.state_spec) or d.spec, d.padding) for d in plan.decisions
    }


def array_slots(params: Mapping[str, Any]) -> tuple[dict[str, Slot], Mesh]:
    """The slots that placed parameters occupy, read from the arrays themselves, and their mesh.

    Args:
        params: Arrays by path.

    Raises:
        StateNotPlaced: TP070, if an array is not on a mesh.
        BadMesh: TP010, if they lie on several meshes.
    """
    found: dict[str, Slot] = {}
    meshes: dict[Mesh, str] = {}
    for path, leaf in params.items():
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            raise StateNotPlaced(
                f"the parameter lies on {sharding or 'no device'}, not on a mesh",
                where=path,
                fix="params = jaxtp.shard(params, mesh) first",
            )
        shape = tuple(leaf.shape)
        found[path] = Slot(shape, canonical(sharding.spec, len(shape), path))
        meshes.setdefault(sharding.mesh, path)
    if len(meshes) != 1:
        listed = join(f"{path} on {dict(mesh.shape)}" for mesh, path in meshes.items())
        raise BadMesh(
            f"the parameters lie on {len(meshes)} meshes: {listed}",
            fix="params = jaxtp.shard(params, mesh) puts all of them on one",
        )
    return found, next(iter(meshes))


def follow(
    leaves: Mapping[str, Param],
    params: Mapping[str, Slot],
    mesh: MeshShape,
    overrides: Overrides | None = None,
    *,
    moments: Mapping[str, Slot] | None = None,
) -> dict[str, Slot]:
    """The checked slot of every leaf of a train state, in its order; errors of `state_specs`.

    Args:
        leaves: What there is in any train state, by path.
        params: Slots of the parameters.
        mesh: The mesh shape that specs are about.
        overrides: As in `state_specs`.
        moments: Slots of what follows each parameter; by default those of the parameters.
    """
    params = _without_root(params)
    moments = params if moments is None else _without_root(moments)
    rules = _compiled({} if overrides is None else overrides)
    unused = set(rules)
    problems = Problems()
    found: dict[str, Slot] = {}
    strangers: dict[str, int] = {}
    roots: set[str] = set()
    owners = {path: _owner(path, params) for path in leaves}
    top = _parameter_roots(owners.values())
    for path, leaf in leaves.items():
        shape, num_bytes = leaf.shape, leaf.num_bytes
        owner, root = owners[path]
        matched = [rule for rule in rules if rule.search(path)]
        unused.difference_update(matched)
        slot = _given(path, shape, {r.pattern: rules[r] for r in matched}, mesh)
        if slot is None and owner is not None:
            source = params if root in top else moments
            slot = _derive(shape, source[owner])
            same = shape in (params[owner].shape, params[owner].stored)
            if shape and same and root is not None:
                roots.add(root)
            if not same and root in PARAMETER_ROOTS:
                problems.add(_other_shape(path, shape, params[owner]))
            elif slot is None and (len(shape) > 1 or num_bytes > SMALL_BYTES):
                problems.add(_not_derived(path, shape, owner, params[owner]))
        elif slot is None:
            strangers[path] = num_bytes
        found[path] = slot or Slot.replicated(shape)
    for path, num_bytes in strangers.items():
        # A scalar among parameters is a counter. An array there means the plan of another model.
        if found[path].shape and any(not r or path.startswith(f"{r}/") for r in roots):
            problems.add(_not_planned(path, found[path].shape, params))
        elif num_bytes > SMALL_BYTES:
            problems.add(_stranger(path, found[path].shape, num_bytes))
    for rule in unused:
        problems.add(_matches_nothing(rule.pattern, found))
    for path, slot in found.items():
        for problem in check(path, slot, mesh):
            problems.add(problem)
    problems.raise_any()
    return found


def _compiled(overrides: Overrides) -> dict[re.Pattern[str], PartitionSpec]:
    if not isinstance(overrides, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadSpec(
            f"a {type(overrides).__name__} is no mapping",
            where="state_overrides",
            fix='{"regular expression": PartitionSpec(...)}',
        )
    found: dict[re.Pattern[str], PartitionSpec] = {}
    for pattern, spec in overrides.items():
        try:
            found[re.compile(pattern)] = spec
        except (re.error, TypeError) as err:
            raise BadSpec(
                f"{pattern!r}: {err}", where="state_overrides", fix="a regular expression"
            ) from None
    return found


def check(path: str, slot: Slot, mesh: MeshShape) -> Iterator[JaxtpError]:
    """What is illegal about a slot: unknown axes (TP044), dims that do not divide (TP003)."""
    if unknown := sorted({axis for axes in slot.spec for axis in axes} - set(mesh.names)):
        yield BadSpec(
            f"the spec {spec_text(slot.spec)} uses {join(unknown)}",
            where=path,
            fix=f"the mesh has the axes {join(mesh.names)}",
        )
        return
    for dim, (size, axes) in enumerate(zip(slot.stored, slot.spec, strict=True)):
        ways = mesh.ways(axes)
        if size % ways:
            yield SizeMismatch(
                f"dim {dim} of shape {slot.stored} has size {size}, which does not divide "
                f"{ways} ways over {join(axes)}",
                where=path,
                fix=f"{size} divides {join(legal_ways((size,)))} ways; "
                f"or make the size {-(-size // ways) * ways}",
            )


def _parameter_roots(owners: Iterable[tuple[str | None, str | None]]) -> set[str]:
    """The roots right below which the parameters themselves lie, and not what follows them.

    They are a whole tree, a field of a `TrainState`, or the module in a tuple with its optimizer;
    where nothing lies there, any field of a state beside one in which they lie deeper.
    """
    roots = {root for _, root in owners if root is not None}
    fields = {root for root in roots if "/" not in root}
    usual = {root for root in fields if root in PARAMETER_ROOTS or root.isdigit()}
    return usual or (fields if fields < roots else set())


def _without_root(params: Mapping[str, Slot]) -> Mapping[str, Slot]:
    """Paths below the "params" that a `TrainState` or Linen's variables put above all of them.

    An optimizer is initialised with what lies below, so that is what the paths in its state end in.
    """
    if all(path.startswith("params/") for path in params):
        return {path.removeprefix("params/"): slot for path, slot in params.items()}
    return params


def _owner(path: str, params: Mapping[str, Slot]) -> tuple[str | None, str | None]:
    """The parameter that a leaf belongs to, and what stands above it.

    The longest parameter path that `path` ends in. If there is none, one that is followed by more
    keys, as in SM3's one accumulator per dim; then the second result is None.
    """
    keys = path.split("/")
    for end in range(len(keys), 0, -1):
        for start in range(end):
            name = "/".join(keys[start:end])
            if name in params:
                return name, "/".join(keys[:start]) if end == len(keys) else None
    # A parameter tree that is one bare array has the empty path.
    return ("", path) if "" in params else (None, None)


def _given(path: str, shape: tuple[int, ...], specs: Overrides, mesh: MeshShape) -> Slot | None:
    """The slot that the overrides matching `path` ask for, or None without one."""
    wanted = {
        tuple(mesh.expand(axes) for axes in canonical(spec, len(shape), path))
        for spec in specs.values()
    }
    if len(wanted) > 1:
        raise ConflictingDecisions(
            f"several overrides match and differ: {dict(specs)}",
            where=path,
            fix="make the patterns narrower, so that one matches",
        )
    return Slot(shape, wanted.pop()) if wanted else None


def _derive(shape: tuple[int, ...], param: Slot) -> Slot | None:
    """The slot of an array of `shape` that belongs to `param`; None if no dim tells."""
    if not any(param.spec):
        return Slot.replicated(shape)
    for base in (param.shape, param.stored):
        dims = _align(shape, base)
        if dims is not None:
            return param.take(dims, shape)
    return Slot.replicated(shape) if math.prod(shape) == 1 else None


def _align(shape: tuple[int, ...], base: tuple[int, ...]) -> tuple[int | None, ...] | None:
    """Which dim of `base` each dim of `shape` is, or None for one of its own.

    Where several readings fit, as for the factored moments of a square matrix, only what they agree
    on counts: the rest is replicated, which is right for every reading and costs one vector.

    Returns:
        One entry per dim of `shape`; None if the two shapes are not related.

    >>> _align((256,), (256, 512)), _align((10, 256, 512), (256, 512)), _align((9,), (9, 9))
    ((0,), (None, 0, 1), (None,))
    """
    extra = len(shape) - len(base)
    if extra >= 0 and shape[extra:] == base:
        return (None,) * extra + tuple(range(len(base)))
    if extra == 0 and all(n in (1, m) for n, m in zip(shape, base, strict=True)):
        return tuple(None if n == 1 else d for d, n in enumerate(shape))
    # There is no combination when the array has more dims than the parameter.
    readings = [
        dims
        for dims in itertools.combinations(range(len(base)), len(shape))
        if all(base[d] == n for d, n in zip(dims, shape, strict=True))
    ]
    if not readings:
        return None
    choices = [set(dim) for dim in zip(*readings, strict=True)]
    return tuple(dim.pop() if len(dim) == 1 else None for dim in choices)


def _not_derived(path: str, shape: tuple[int, ...], owner: str, param: Slot) -> StateNotPlaced:
    return StateNotPlaced(
        f"shape {shape} belongs to the parameter {owner!r} of shape {param.shape}, split as "
        f"{spec_text(param.spec)}, but its dims are not the parameter's",
        where=path,
        fix=f'state_overrides={{"{path}": PartitionSpec(...)}}',
    )


def _other_shape(path: str, shape: tuple[int, ...], param: Slot) -> PlanMismatch:
    return PlanMismatch(
        f"the array has shape {shape}, the plan was made for {param.shape}",
        where=path,
        fix="make the plan from this tree",
    )


def _not_planned(path: str, shape: tuple[int, ...], params: Iterable[str]) -> PlanMismatch:
    return PlanMismatch(
        f"an array of shape {shape} lies among the parameters, but the plan has no such path",
        where=path,
        fix=f"make the plan from this tree; this plan has {join(params, limit=4)}",
    )


def _stranger(path: str, shape: tuple[int, ...], num_bytes: int) -> StateNotPlaced:
    return StateNotPlaced(
        f"shape {shape} ({num_bytes / 1e6:,.1f} MB) belongs to no parameter, and is too large to "
        f"be replicated without being asked for",
        where=path,
        fix=f'state_overrides={{"{path}": PartitionSpec(...)}}',
    )


def _matches_nothing(pattern: str, paths: Iterable[str]) -> UnusedOverride:
    listed = list(paths)
    near = difflib.get_close_matches(pattern, listed, n=3, cutoff=0.3) or listed
    return UnusedOverride(
        f"the override {pattern!r} matches no leaf", fix=f"paths look like {join(near, limit=3)}"
    )
