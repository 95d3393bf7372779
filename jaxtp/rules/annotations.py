"""Evidence that somebody wrote down: overrides, and annotations already on the tree."""

import dataclasses
import difflib
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

from jaxtp.errors import (
    BadConfig,
    BadSpec,
    ConflictingDecisions,
    Problems,
    UnusedOverride,
    join,
    warn,
)
from jaxtp.mesh.axes import Axis, MeshShape
from jaxtp.plan.specs import Spec, canonical, spec_text
from jaxtp.plan.trees import Param
from jaxtp.rules.roles import Placement, Role, Source, Vote

# Logical axis names of t5x, MaxText and the Flax guides -> role of the dim that carries them. A
# name that is not here says nothing about the tensor axis ("embed", "kv" = head_dim, "layers").
LOGICAL: dict[str, Role] = {
    "mlp": Role.COLUMN,
    "hidden": Role.COLUMN,
    "heads": Role.COLUMN,
    "q_heads": Role.COLUMN,
    "kv_heads": Role.COLUMN,
    "vocab": Role.VOCAB,
    "expert": Role.EXPERT,
    "experts": Role.EXPERT,
    "exp": Role.EXPERT,
}
STREAM = frozenset({"embed", "embed_no_exp", "embedding", "model", "d_model", "activation_embed"})
"""Logical names of the residual stream."""

UNSHARDED = STREAM - {"model"} | {
    "kv", "head_dim", "kv_head_dim", "layers", "layer", "norm", "length", "batch", "stack",
    "relpos_buckets", "abspos_buckets", "unmodeled", "conv", "conv_in", "conv_out",
}  # fmt: skip
"""Logical names of dims that tensor parallelism leaves alone."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What somebody wrote down about the parameters of a tree.

    Attributes:
        votes: What is known by it, overrides last.
        notes: Sentences on what says nothing here.
    """

    votes: tuple[Vote, ...]
    notes: tuple[str, ...]


def read(params: Mapping[str, Param], mesh: MeshShape, overrides: Mapping[str, Any]) -> Written:
    """Annotations of a tree and overrides of it.

    Args:
        params: The tree.
        mesh: The user's mesh, whose axes a spec may use.
        overrides: As in `override_votes`.

    Raises:
        UnusedOverride, ConflictingDecisions, BadSpec: as in `override_votes`.
    """
    notes = tuple(unknown_names(params, mesh))
    votes = (*annotation_votes(params, mesh), *override_votes(params, mesh, overrides))
    return Written(votes, notes)


def override_votes(
    params: Mapping[str, Param], mesh: MeshShape, overrides: Mapping[str, Any]
) -> list[Vote]:
    """One vote per parameter that an override matches.

    Args:
        params: The tree.
        mesh: For the axes that a spec may use; the tensor axis' own name means all its factors.
        overrides: Regular expression searched in the path -> PartitionSpec; `P()` replicates it.

    Raises:
        UnusedOverride: TP040, if a pattern matches nothing.
        ConflictingDecisions: TP001, if two patterns give one parameter different specs.
        BadSpec: TP044, if a pattern is no regular expression or a spec does not suit the array.
    """
    if not isinstance(overrides, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BadConfig(
            f"is a {type(overrides).__name__}",
            where="overrides",
            fix='a mapping: {"lm_head/kernel": PartitionSpec(None, "tp")}',
        )
    problems = Problems()
    chosen: dict[str, tuple[str, Spec]] = {}
    for pattern, spec in overrides.items():
        try:
            matched = [p for p in params if re.search(pattern, p)]
        except (re.error, TypeError) as err:
            problems.add(BadSpec(f"{pattern!r}: {err}", fix="patterns are regular expressions"))
            continue
        if not matched:
            near = difflib.get_close_matches(pattern, params, n=3, cutoff=0.3) or list(params)[:3]
            problems.add(
                UnusedOverride(
                    f"override {pattern!r} matches none of {len(params)} parameters",
                    fix=f"close paths: {join(near)}",
                )
            )
        for path in matched:
            try:
                wanted = _checked(spec, params[path], mesh)
            except BadSpec as err:
                problems.add(err)
                continue
            before = chosen.setdefault(path, (pattern, wanted))
            if before[1] != wanted:
                problems.add(
                    ConflictingDecisions(
                        f"override {before[0]!r} says {spec_text(before[1])}, "
                        f"override {pattern!r} says {spec_text(wanted)}",
                        where=path,
                        fix="make the patterns exclude each other, or drop one",
                    )
                )
    problems.raise_any()
    return [
        Vote(path, Source.OVERRIDE, Role.GIVEN, f"override {pattern!r}", spec=spec)
        for path, (pattern, spec) in chosen.items()
    ]


def _checked(spec: Any, param: Param, mesh: MeshShape) -> Spec:
    dims = canonical(spec, len(param.shape), param.path)
    used = {axis for axes in dims for axis in axes}
    if unknown := sorted(used - set(mesh.names) - {mesh.tp_name}):
        raise BadSpec(
            f"the spec uses {join(unknown)}, which this mesh does not have",
            where=param.path,
            fix=f"axes of the mesh: {join(mesh.names)}",
        )
    return dims


def annotation_votes(params: Mapping[str, Param], mesh: MeshShape) -> Iterator[Vote]:
    """Votes from names that the model's author put on dims.

    Names of mesh axes are taken as they are. Logical names say what the dim is, and jaxtp places
    it. Names that are neither say nothing, see `unknown_names`.
    """
    axes = {*mesh.names, mesh.tp_name}
    for param in params.values():
        if param.annotation is None:
            continue
        named = _named(param)
        physical = tuple(tuple(n for n in names if n in axes) for names in named)
        text = f"annotated {param.annotation}"
        if any(physical):
            yield _physical_vote(param, physical, text, mesh)
            continue
        logical = [(d, LOGICAL[n]) for d, names in enumerate(named) for n in names if n in LOGICAL]
        if logical:
            # One dim per array goes on the tensor axis: experts before the width inside an expert.
            dim, role = max(logical, key=lambda item: item[1] is Role.EXPERT)
            role = _input_or_output(role, named, dim)
            units = (param.shape[dim],)
            yield Vote(param.path, Source.ANNOTATION, role, text, (Placement(dim, units),))


def unknown_names(params: Mapping[str, Param], mesh: MeshShape) -> list[str]:
    """A sentence on annotations that have no effect, because their names mean nothing here.

    Warns once, unless the name is that of an axis which this mesh could have: a model that is
    annotated for fsdp runs on a mesh without it as it should.
    """
    axes = {*mesh.names, mesh.tp_name, *LOGICAL, *UNSHARDED}
    found: dict[str, list[str]] = {}
    for param in params.values():
        for name in itertools.chain.from_iterable(_named(param) if param.annotation else ()):
            if name not in axes:
                found.setdefault(name, []).append(param.path)
    notes = [
        f"{len(paths)} annotations name {name!r}, which is no axis of the mesh {mesh} and no known "
        f"logical name, so it has no effect; the first is at {paths[0]}. If it stands for an axis "
        f'of the mesh: axis_names={{"{Axis.TP}": "{name}"}} with a mesh that has it'
        for name, paths in found.items()
    ]
    if strange := [note for name, note in zip(found, notes, strict=True) if name not in set(Axis)]:
        more = f" (and {len(strange) - 1} more in plan.notes)" if len(strange) > 1 else ""
        warn(f"{strange[0]}{more}")
    return notes


def _named(param: Param) -> list[tuple[str, ...]]:
    """The names on every dim of an annotated parameter.

    Raises:
        BadSpec: TP044, for what names no axis.
    """
    for name in param.annotation or ():
        if not isinstance(cast("object", name), str | tuple | None):
            raise BadSpec(
                f"the annotation {param.annotation} has the entry {name!r}",
                where=param.path,
                fix="an entry is the name of an axis, a tuple of names, or None",
            )
    if len(param.annotation or ()) > len(param.shape):
        raise BadSpec(
            f"the annotation {param.annotation} names {len(param.annotation or ())} dims of "
            f"{len(param.shape)}",
            where=param.path,
            fix="one entry for each dim; what adds a dim (nn.vmap, nn.scan) takes metadata_params",
        )
    named = [(n,) if isinstance(n, str) else tuple(n or ()) for n in param.annotation or ()]
    return named + [()] * (len(param.shape) - len(named))


def _input_or_output(role: Role, named: list[tuple[str, ...]], dim: int) -> Role:
    """A matrix with a dim of the residual stream behind the sharded one has it as its output."""
    behind = {name for names in named[dim + 1 :] for name in names}
    return Role.ROW if role is Role.COLUMN and behind & STREAM else role


def _physical_vote(param: Param, spec: Spec, text: str, mesh: MeshShape) -> Vote:
    on_tensor = [d for d, axes in enumerate(spec) if mesh.tp_name in axes]
    if len(on_tensor) == 1 and sum(map(len, spec)) == 1:
        # Only the tensor axis: what does not divide on this mesh may still be fitted.
        (dim,) = on_tensor
        placement = Placement(dim, (param.shape[dim],))
        return Vote(param.path, Source.ANNOTATION, Role.GIVEN, text, (placement,))
    return Vote(param.path, Source.ANNOTATION, Role.GIVEN, text, spec=_checked(spec, param, mesh))
