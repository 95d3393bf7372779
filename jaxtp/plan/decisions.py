"""A plan: every decision about every parameter, as data.

No device is touched; a plan for 16,384 GPUs is as ordinary as one for a laptop.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from jaxtp.errors import PlanMismatch
from jaxtp.errors.arguments import TEXT, instance
from jaxtp.mesh.axes import MeshShape
from jaxtp.plan.inputs import STATE, InputDecision, input_decision
from jaxtp.plan.specs import Spec, partition_spec, spec_text
from jaxtp.plan.stages import Stages
from jaxtp.plan.stored_form import Blocks, Padding, stored_shape
from jaxtp.plan.table import Row, html_table, note_lines, text_table
from jaxtp.plan.trees import PyTree, map_with_path, stored_bytes

FORMAT = 1
"""Version of the JSON form; readers refuse newer ones."""

POLICIES: Mapping[str, bool] = {"factor": True, "replicate": False, "error": False}
"""Policy for units that are not divisible -> whether a group may take part of the tensor axis."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParamDecision:
    """What happens to one parameter, and why.

    Attributes:
        path: "/"-joined path from the root of the tree.
        shape: Global shape in elements, as the model has it; `len(shape) == len(spec)`.
        dtype: NumPy name of the dtype.
        spec: Mesh axes per dim, `()` meaning "not sharded".
        role: What the parameter does: column, row, vocab, expert, norm, ...
        reasons: Evidence, strongest last; the last one explains the final spec.
        units: Indivisible pieces of the dim on the tensor axis, major to minor, or `()`.
        group: Parameters with the same group were decided together; "" if alone.
        fallback: Why the split is narrower than the tensor axis, with its price; "" if it is not.
        padding: Dims that are stored in another form than the model has: a padded vocabulary,
            layers assigned to pipeline stages.
        state_spec: Mesh axes per dim of what the optimizer keeps of it, and from ZeRO stage 2 on of
            its gradient; `()` where these lie like the parameter.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec
    role: str
    reasons: tuple[str, ...]
    units: tuple[int, ...] = ()
    group: str = ""
    fallback: str = ""
    padding: Padding = ()
    state_spec: Spec = ()

    def revise(self, spec: Spec, reason: str, **changes: Any) -> "ParamDecision":
        """The same decision with another spec, and the reason for it."""
        return dataclasses.replace(self, spec=spec, reasons=(*self.reasons, reason), **changes)

    def explained(self, why: str, **changes: Any) -> "ParamDecision":
        """The same decision, changed, with `why` behind its last reason, which tables show."""
        *before, last = self.reasons
        return dataclasses.replace(self, reasons=(*before, f"{last}; {why}"), **changes)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, global, without padding."""
        return stored_bytes(math.prod(self.shape), self.dtype)

    @property
    def partition_spec(self) -> PartitionSpec:
        """The spec as JAX spells it."""
        return partition_spec(self.spec)

    def dim_on(self, axes: Sequence[str]) -> int | None:
        """The dim that any of `axes` shards, or None."""
        return next((d for d, used in enumerate(self.spec) if set(used) & set(axes)), None)

    @property
    def stored(self) -> tuple[int, ...]:
        """Global shape of the placed array in elements, padding included."""
        return stored_shape(self.shape, self.padding)

    def bytes_per_device(self, mesh: MeshShape) -> int:
        """Bytes that one device holds of this array, padding included."""
        stored = stored_bytes(math.prod(self.stored), self.dtype)
        return stored // mesh.pieces(self.spec)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """All decisions for one tree on one mesh shape. Frozen, comparable, JSON round-trip.

    Attributes:
        mesh: The plan's own mesh shape; its tensor axis may be factored (`tp_0`, `tp_1`).
        decisions: One per leaf, in the tree's order.
        policy: What happened to units that do not divide: "factor", "replicate" or "error".
        sequence_parallel: Whether the residual stream is sharded along the sequence.
        overlap: How hard to hide communication: "off", "auto", or "aggressive", which interleaves
            two halves of the batch (`jaxtp.layers.interleaving`) and wants the compile options of
            that name.
        zero: What fsdp, cp and ep shard (`MeshShape.zero`): 0 nothing, 1 optimizer state, 2 also
            gradients, 3 also parameters.
        stages: How stacked layers are assigned along the pp axis; None without one.
        notes: Sentences about the plan altogether.
        inputs: One per array that the traced function takes beside the parameters: a cache, tokens;
            none if no function was traced.
    """

    mesh: MeshShape
    decisions: tuple[ParamDecision, ...]
    policy: str = "factor"
    sequence_parallel: bool = False
    overlap: str = "auto"
    zero: int = 0
    stages: Stages | None = None
    notes: tuple[str, ...] = ()
    inputs: tuple[InputDecision, ...] = ()

    @functools.cached_property
    def params(self) -> Mapping[str, ParamDecision]:
        """Decisions by path."""
        return {d.path: d for d in self.decisions}

    def __getitem__(self, path: str) -> ParamDecision:
        """The decision for one path.

        Raises:
            PlanMismatch: TP045, if the plan has no such path.
        """
        if not TEXT.accepts(path) or path not in self.params:
            raise PlanMismatch(
                f"the plan has no parameter {path!r}",
                where=str(path),
                fix=f"paths look like {self.decisions[0].path!r}",
            )
        return self.params[path]

    def axes_for(self, units: Sequence[int]) -> tuple[str, ...]:
        """Tensor axes that an activation dim with these units is split over, as for parameters."""
        axes = self.mesh.fit(units)
        return axes if POLICIES[self.policy] or axes == self.mesh.tp else ()

    def specs(self) -> dict[str, PartitionSpec]:
        """PartitionSpec by path."""
        return {d.path: d.partition_spec for d in self.decisions}

    def partition_specs(self, tree: PyTree) -> PyTree:
        """A tree of PartitionSpecs with the structure of `tree`.

        Raises:
            PlanMismatch: TP045, if `tree` has a path that the plan does not have.
        """
        return map_with_path(lambda path, _: self[path].partition_spec, tree)

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, global."""
        return sum(d.num_bytes for d in self.decisions)

    @property
    def bytes_per_device(self) -> int:
        """Bytes of parameters that each device holds."""
        return sum(d.bytes_per_device(self.mesh) for d in self.decisions)

    @property
    def fallbacks(self) -> tuple[ParamDecision, ...]:
        """Decisions that are narrower than the tensor axis."""
        return tuple(d for d in self.decisions if d.fallback)

    def explain(self, path: str) -> str:
        """All that is known about one parameter, or one input, over several lines.

        Raises:
            PlanMismatch: TP045, if the plan has no such path.
        """
        for known in self.inputs:
            if TEXT.accepts(path) and known.path == path and path not in self.params:
                return known.explain(self.mesh)
        d = self[path]
        lines = [
            f"{d.path}  {d.dtype}{list(d.shape)}",
            f"  spec     {spec_text(d.spec)} on {self.mesh}",
            *([f"  state    {spec_text(d.state_spec)}"] if d.state_spec else []),
            *([f"  stored   {list(d.stored)}, zeros between"] if d.stored != d.shape else []),
            f"  role     {d.role}" + (f", decided with group {d.group!r}" if d.group else ""),
            f"  bytes    {d.num_bytes:,} in all, {d.bytes_per_device(self.mesh):,} per device",
            *(f"  because  {reason}" for reason in d.reasons),
        ]
        if d.fallback:
            lines.append(f"  fallback {d.fallback}")
        return "\n".join(lines)

    def diff(self, other: "Plan") -> str:
        """Lines on what `other` does differently, "" when the specs are equal."""
        check_plan(other)
        lines = [] if self.mesh == other.mesh else [f"mesh: {self.mesh} -> {other.mesh}"]
        for path in dict.fromkeys((*self.params, *other.params)):
            a, b = self.params.get(path), other.params.get(path)
            before = "absent" if a is None else spec_text(a.spec)
            after = "absent" if b is None else spec_text(b.spec)
            if before != after:
                why = "" if b is None else f"  ({b.reasons[-1]})"
                lines.append(f"{path}: {before} -> {after}{why}")
        places = [{i.path: spec_text(i.spec) for i in plan.inputs} for plan in (self, other)]
        for path in dict.fromkeys(itertools.chain(*places)) if all(places) else ():
            before, after = (place.get(path, "absent") for place in places)
            if before != after:
                lines.append(f"{path}: {before} -> {after}")
        return "\n".join(lines)

    def moved_bytes(self, other: "Plan") -> int:
        """Bytes that each device must receive for this plan's arrays to lie as in `other`.

        0 where both agree: `jaxtp.shard(params, mesh, plan=other)` then copies nothing. Of an array
        that lies elsewhere a device has the part that its old and its new shard share; shards
        along independent axes share their product.

        Args:
            other: A plan of the same parameters on the same devices.

        Raises:
            PlanMismatch: TP045, if `other` lacks a parameter, or has another number of devices.
        """
        check_plan(other)
        if other.mesh.num_devices != self.mesh.num_devices:
            raise PlanMismatch(
                f"{self.mesh} and {other.mesh} have not the same number of devices",
                where="other",
                fix="plans on one mesh; between others everything moves",
            )
        total = 0.0
        for old in self.decisions:
            new = other[old.path]
            before, after = _shards(old, self.mesh), _shards(new, other.mesh)
            if before == after and old.stored == new.stored:
                continue
            # Prefixes of the tensor axis nest in one dim; other axes do as sets.
            shared = 1
            for (axes, ways), (new_axes, new_ways) in zip(before, after, strict=True):
                shared *= self.mesh.ways({*axes, *new_axes}) * max(ways, new_ways)
            stored = stored_bytes(math.prod(new.stored), new.dtype)
            total += new.bytes_per_device(other.mesh) - stored / shared
        return round(total)

    def rows(self) -> Iterator[tuple[str, int, ParamDecision]]:
        """`(path with repeated layers folded, how many, one of them)`, in the tree's order."""
        folded: dict[tuple[object, ...], list[ParamDecision]] = {}
        for d in self.decisions:
            specs = (d.spec, d.state_spec)
            key = (re.sub(r"\d+", "*", d.path), d.shape, d.dtype, specs, d.role, d.fallback)
            folded.setdefault(key, []).append(d)
        for members in folded.values():
            yield _folded_path([d.path for d in members]), len(members), members[0]

    @property
    def summary(self) -> str:
        """The mesh, parameters and bytes in one line."""
        total = (
            f"{self.bytes_per_device / 1e6:,.1f} MB per device of {self.num_bytes / 1e6:,.1f} MB"
        )
        return f"plan for {self.mesh}: {len(self.decisions)} parameters, {total}"

    def __repr__(self) -> str:
        """The summary; `print(plan)` shows the table."""
        return f"<{self.summary}>"

    def _cells(self) -> list[Row]:
        """One tuple of texts for each row; of the inputs those that a function keeps."""
        rows = [
            (
                path if count == 1 else f"{path} (x{count})",
                "x".join(map(str, d.shape)) or "scalar",
                spec_text(d.spec),
                d.role,
                f"{d.bytes_per_device(self.mesh) * count / 1e6:,.3f}",
                d.fallback or d.reasons[-1],
            )
            for path, count, d in self.rows()
        ]
        folded: dict[Row, list[InputDecision]] = {}
        for i in self.inputs:
            if i.role == STATE:
                key = (re.sub(r"\d+", "*", i.path), str(i.shape), i.dtype, spec_text(i.spec))
                folded.setdefault(key, []).append(i)
        for members in folded.values():
            first, count = members[0], len(members)
            path = _folded_path([i.path for i in members])
            rows.append(
                (
                    path if count == 1 else f"{path} (x{count})",
                    "x".join(map(str, first.shape)) or "scalar",
                    spec_text(first.spec),
                    first.role,
                    f"{first.bytes_per_device(self.mesh) * count / 1e6:,.3f}",
                    first.reasons[0],
                )
            )
        return rows

    def __str__(self) -> str:
        """One line per parameter (repeated layers folded): spec, role, bytes per device, reason.

        Lines have at most 100 columns; `explain` gives a reason in full.
        """
        stages = [f"stages: {self.stages}"] if self.stages else []
        notes = [line for note in self.notes for line in note_lines(note)]
        return "\n".join((self.summary, *stages, *notes, *text_table(self._cells())))

    def _repr_html_(self) -> str:
        """The same for a notebook, reasons in full."""
        stages = [f"stages: {self.stages}"] if self.stages else []
        return html_table(self.summary, [*stages, *self.notes], self._cells())

    def to_json(self) -> str:
        """All of the plan as JSON text, stable between runs."""
        data = dataclasses.asdict(self) | {"mesh": self.mesh.to_data()}
        if not self.inputs:
            data.pop("inputs")  # readers of an earlier jaxtp do not know them
        return json.dumps({"format": FORMAT, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """The plan that `to_json` wrote.

        Raises:
            PlanMismatch: TP045, if the text is not a plan or comes from a newer jaxtp.
        """
        try:
            data = json.loads(text)
            if data.pop("format") > FORMAT:
                raise PlanMismatch(
                    "the plan was written by a newer jaxtp",
                    fix="upgrade jaxtp, or make the plan again",
                )
            mesh = MeshShape.from_data(data.pop("mesh"))
            decisions = tuple(_decision(d) for d in data.pop("decisions"))
            twice = [path for path, n in Counter(d.path for d in decisions).items() if n > 1]
            if twice:
                raise ValueError(f"{twice[0]} is decided twice")
            if any(type(n) is not int or n < 0 for d in decisions for n in d.shape):
                raise ValueError("a shape holds no size")
            inputs = tuple(map(input_decision, data.pop("inputs", ())))
            stages = data.pop("stages", None)
            return cls(
                mesh=mesh,
                decisions=decisions,
                inputs=inputs,
                stages=stages and _stages(**stages),
                notes=tuple(data.pop("notes")),
                **data,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as err:
            if isinstance(err, PlanMismatch):
                raise
            raise PlanMismatch(
                f"not the JSON of a plan: {err!r}", fix="read a file written by plan.to_json()"
            ) from None


def _folded_path(paths: Sequence[str]) -> str:
    """Paths that differ in numbers as one, a star for each number that they do not share.

    >>> _folded_path(["layers/0/fc1/bias", "layers/1/fc1/bias"])
    'layers/*/fc1/bias'
    """
    split = zip(*(re.split(r"(\d+)", path) for path in paths), strict=True)
    return "".join(parts[0] if len(set(parts)) == 1 else "*" for parts in split)


def _shards(d: ParamDecision, mesh: MeshShape) -> list[tuple[tuple[str, ...], int]]:
    """Per dim: the axes besides the tensor axis, and shards along that one, factored or not."""
    return [
        (tuple(a for a in axes if a not in mesh.tp), mesh.ways(a for a in axes if a in mesh.tp))
        for axes in d.spec
    ]


def _stages(layers: list[list[int]], micro_batches: int) -> Stages:
    return Stages(layers=tuple(map(tuple, layers)), micro_batches=micro_batches)


def _decision(data: dict[str, Any]) -> ParamDecision:
    specs = {k: tuple(map(tuple, data.pop(k, ()))) for k in ("spec", "state_spec")}
    tuples = {k: tuple(data.pop(k)) for k in ("shape", "reasons", "units")}
    padding = tuple(_blocks(**blocks) for blocks in data.pop("padding"))
    return ParamDecision(**specs, **tuples, padding=padding, **data)


def _blocks(dim: int, pieces: list[tuple[int, int]], block: int) -> Blocks:
    return Blocks(dim=dim, pieces=tuple((first, count) for first, count in pieces), block=block)


def check_plan(plan: Any) -> None:
    """Refuses what is no plan.

    Raises:
        PlanMismatch: TP045, for anything but a `Plan`.
    """
    A_PLAN.check("plan", plan)


A_PLAN = instance(
    Plan, takes="a plan from jaxtp.make_plan, or Plan.from_json(text)", error=PlanMismatch
)
"""What functions take as their plan."""
