"""A traced function -> what its dataflow says about its parameters and activations.

No parameter name is read: paths are carried along to label the findings.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage] (0.12: Jaxpr)

from jaxtp.plan import trees
from jaxtp.rules.jaxpr import control, tracing
from jaxtp.rules.jaxpr.classes import Atom, Dim, classes_in, dim_size, resolve
from jaxtp.rules.jaxpr.evidence import SMALL, VOCAB, Evidence
from jaxtp.rules.jaxpr.primitives import PRIMITIVES, SIGNATURES
from jaxtp.rules.jaxpr.records import Contraction, Fact, Finding, Opaque, Residual
from jaxtp.rules.jaxpr.regions import Regions
from jaxtp.rules.jaxpr.report import Reporter
from jaxtp.rules.jaxpr.unchosen import Share, unchosen_work
from jaxtp.rules.jaxpr.walk import Index, Kind, Scope, Value, Walk, is_integer, where

MIN_VOCAB = 1024
"""Rows below which a vocabulary is not worth an all-reduce: a price, not a fact."""


@dataclasses.dataclass(frozen=True, slots=True)
class DimClass:
    """What one dim of an activation is.

    Attributes:
        kind: "feature" of the residual stream, "position" on it (batch and sequence), "region"
            (split like the parameters of `group`), or "" for anything else.
        group: The group's id for a region.
        units: As in `Option`: what may be separated, major to minor.
        classes: As in `Option`.
        pieces: As in `Option`.
        replicated: As in `Option`.
    """

    kind: str
    group: str = ""
    units: tuple[int, ...] = ()
    classes: tuple[int, ...] = ()
    pieces: tuple[tuple[int, int], ...] = ()
    replicated: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ClassInfo:
    """One dimension class, for people and tests.

    Attributes:
        number: As in `Option.classes`.
        size: Elements.
        kind: "inner", "expert", "vocab", "small" (a vocabulary too small to split), "stream", or
            "".
        members: "path[dim]" of every parameter dim that it is a factor of.
        produced: Parameters whose products have it as a free output.
        contracted: Parameters whose products sum over it.
        cuts: (start, stop) pieces seen, in elements.
        origin: The line that split it off a larger dim, "" if none did.
        reasons: Why it cannot be split.
    """

    number: int
    size: int
    kind: str
    members: tuple[str, ...]
    produced: tuple[str, ...]
    contracted: tuple[str, ...]
    cuts: tuple[tuple[int, int], ...]
    origin: str
    reasons: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """What the dataflow of one call says.

    Attributes:
        findings: Parameter path -> finding, for the parameters that the call reaches.
        unreached: Parameters that no equation consumes: nothing can be said about them.
        opaque: Primitives that gave no information, in program order.
        groups: Group id -> paths that are decided together.
        scope: The jaxpr as it was read, with the value of every variable; see `dim_classes`.
        num_params: How many of the jaxpr's inputs are parameters; they come first.
        paths: Labels of those.
        batch: The class of the batch dim, or None.
    """

    findings: dict[str, Finding]
    unreached: tuple[str, ...]
    opaque: tuple[Opaque, ...]
    groups: dict[str, tuple[str, ...]]
    scope: Scope = dataclasses.field(repr=False)
    num_params: int
    paths: tuple[str, ...]
    batch: Atom | None
    _regions: Regions = dataclasses.field(repr=False)
    _walk: Walk = dataclasses.field(repr=False)

    def value(self, scope: Scope, var: Any) -> Value:
        """What a variable or a literal in a scope is."""
        return self._walk.value(var, scope.values)

    def read(self, closed: ClosedJaxpr, values: Sequence[Value]) -> tuple[Scope, list[Value]]:
        """A jaxpr met later, as a derivative rule is: its scope, and what its outputs are.

        Its dims join the classes that are there. It is no evidence: in a backward pass every class
        is both produced and contracted.

        Args:
            closed: The jaxpr.
            values: What its inputs are.
        """
        facts = len(self._walk.facts)
        self._walk.entered = []
        results = self._walk.run(closed, values)
        del self._walk.facts[facts:]
        return self._walk.entered[0], results

    def dim_classes(self, value: Value) -> tuple[DimClass, ...]:
        """What each dim of a value in `scope` is."""
        return tuple(map(self.dim_class, value.dims))

    @property
    def inputs(self) -> list[Value]:
        """What the function takes beside the parameters, in JAX's flattening order."""
        scope = self.scope
        return [self.value(scope, var) for var in scope.jaxpr.invars[self.num_params :]]

    @property
    def outputs(self) -> list[Value]:
        """What it returns."""
        return [self.value(self.scope, var) for var in self.scope.jaxpr.outvars]

    def is_batch(self, dim: Dim) -> bool:
        """Whether a dim is the batch, or leads with it."""
        atoms = resolve(dim)
        return bool(atoms) and self.batch is not None and atoms[0] is resolve((self.batch,))[0]

    def is_sequence(self, dim: Dim) -> bool:
        """Whether a dim is the tokens of the residual stream, or leads with them.

        Of a residual sum it is the first dim that is neither the batch nor the features: of an
        image the rows.
        """
        atoms = resolve(dim)
        return bool(atoms) and any(atoms[0] in resolve(own)[:1] for own in self.tokens)

    @functools.cached_property
    def tokens(self) -> tuple[Dim, ...]:
        """The dims of tokens, one of each class."""
        found: dict[Atom, Dim] = {}
        for fact in self._walk.facts:
            dims = fact.dims if isinstance(fact, Residual) else ()
            rows = (d for d in dims if d and not self.is_batch(d))
            first = next((d for d in rows if self.dim_class(d).kind == "position"), None)
            if first is not None:
                found.setdefault(resolve(first)[0], first)
        return tuple(found.values())

    @functools.cached_property
    def unchosen(self) -> dict[int, Share]:
        """Products in which every expert works on every token; see `unchosen_work`."""
        return unchosen_work(self._walk.facts, self._regions.evidence)

    def vocabulary(self, size: int) -> dict[str, tuple[Atom, ...]]:
        """Parameters with a dim that is a vocabulary of so many entries, and that dim's classes."""
        evidence = self._regions.evidence
        return {
            path: resolve(dim)
            for path, dims in evidence.params.items()
            for dim in dims
            if dim_size(dim) == size and evidence.kind(resolve(dim)[0]) in (VOCAB, SMALL)
        }

    def of_one_row(self) -> "Analysis":
        """The same, where the first input is one sequence: what leads its products is no batch."""
        first = next((value.shape for value in self.inputs), ())
        return dataclasses.replace(self, batch=None) if first[:1] == (1,) and first[1:] else self

    def why_not(self, dim: Dim) -> str:
        """Why a dim is never split, "" if nothing forbids it."""
        for atom in resolve(dim)[:1]:
            if atom in self._regions.evidence.streams:
                return "a dim of the residual stream"
            known = self._regions.evidence.of(atom)
            return next(iter(known.whole + known.inside + known.needed), "")
        return ""

    def dim_class(self, dim: Dim) -> DimClass:
        """What one dim is; facts such as `Value.product` hold dims too."""
        regions, evidence = self._regions, self._regions.evidence
        parts = regions.parts(dim)
        option = regions.option(0, parts)
        leads = [part.lead[0] for part in parts if part.lead]
        if option and all(lead in regions.split for lead in leads):
            group = regions.split[leads[0]].name
            return DimClass(
                "region", group, option.units, option.classes, option.pieces, option.replicated
            )
        atoms = resolve(dim)
        if atoms and atoms[0] in evidence.streams:
            known = evidence.known.get(atoms[0])
            is_feature = known is not None and bool(known.produced or known.contracted)
            return DimClass("feature" if is_feature else "position")
        return DimClass("")

    def classes(self) -> tuple[ClassInfo, ...]:
        """Every class that a fact speaks about, in program order."""
        evidence = self._regions.evidence
        members: dict[Atom, list[str]] = {}
        for path, dims in evidence.params.items():
            for axis, dim in enumerate(dims):
                for atom in classes_in((dim,)):
                    members.setdefault(atom, []).append(f"{path}[{axis}]")
        return tuple(
            ClassInfo(
                number=self._regions.number[atom],
                size=atom.size,
                kind="stream" if atom in evidence.streams else evidence.kind(atom),
                members=tuple(members.get(atom, ())),
                produced=tuple(dict.fromkeys(fact.path for fact in known.produced)),
                contracted=tuple(dict.fromkeys(fact.path for fact in known.contracted)),
                cuts=tuple(sorted(atom.cuts)),
                origin="" if atom.origin is None else where(atom.origin),
                reasons=tuple(dict.fromkeys(known.whole + known.inside + known.needed)),
            )
            for atom, known in evidence.known.items()
        )

    def __str__(self) -> str:
        """One line per parameter, then what could not be read."""
        lines = [_line(finding) for finding in self.findings.values()]
        lines += [f"{path}: not reached by the traced call" for path in self.unreached]
        lines += [f"{o.primitive}: {o.reason} {o.where}".rstrip() for o in self.opaque]
        return "\n".join(lines)


def _line(finding: Finding) -> str:
    place = (
        "replicated"
        if finding.dim is None
        else f"dim {finding.dim} in {finding.units} {finding.group}"
    )
    return f"{finding.path}: {finding.role}, {place}: " + "; ".join(finding.reasons)


def analyse(
    fn: Callable[..., Any],
    params: Any,
    *inputs: Any,
    min_vocab: int = MIN_VOCAB,
    signatures: Mapping[str, str] | None = None,
) -> Analysis:
    """Reads a model's dimensions from the program that `fn(params, *inputs)` is.

    Traces abstractly, so arrays and `jax.ShapeDtypeStruct` do equally. Trace the forward function:
    in a gradient every class is both produced and contracted.

    Args:
        fn: A pure function of the parameters and the inputs.
        params: The parameters: any tree that `jaxtp.plan.trees` reads, an `nnx.Module` included.
        inputs: Trees of arrays or structs. Integer arrays that index a table make it a token table.
        min_vocab: Rows from which a vocabulary is split.
        signatures: More attention kernels for `primitives.SIGNATURES`, by primitive or kernel name.

    Raises:
        BadTree: TP046, if `params` is no tree of arrays.
    """
    plain, rebuild = trees.as_pytree(params)

    def arrays(tree: Any, *args: Any) -> list[Any]:
        return [x for x in jax.tree.leaves(fn(rebuild(tree), *args)) if hasattr(x, "dtype")]

    closed = tracing.forward(arrays, plain, *inputs)
    paths = [path for path, _ in trees.leaves(plain)]
    return analyse_jaxpr(closed, paths, min_vocab=min_vocab, signatures=signatures)


def analyse_jaxpr(
    closed: ClosedJaxpr,
    paths: Sequence[str],
    *,
    min_vocab: int = MIN_VOCAB,
    signatures: Mapping[str, str] | None = None,
) -> Analysis:
    """The same for a function that is already traced.

    Args:
        closed: The jaxpr; its first inputs are the parameters, in the order of `paths`.
        paths: Labels of the parameters.
        min_vocab: See `analyse`.
        signatures: See `analyse`.
    """
    walk = Walk(
        {name: row.dims for name, row in PRIMITIVES.items()},
        control.default,
        frozenset(name for name, row in PRIMITIVES.items() if row.view),
        {**SIGNATURES, **(signatures or {})},
    )
    values: list[Value] = []
    for path, var in itertools.zip_longest(paths, closed.jaxpr.invars):
        is_index = path is None and is_integer(var.aval)
        values.append(
            walk.new(
                var.aval,
                Kind.ACTIVATION if path is None else Kind.PARAMETER,
                path=path or "",
                index=Index(tokens=True) if is_index else None,
            )
        )
    walk.run(closed, values)
    held = {path: value.dims for path, value in zip(paths, values, strict=False)}
    reached = {path: dims for path, dims in held.items() if path in walk.used}
    evidence = Evidence(reached, walk.facts, min_vocab)
    regions = Regions(evidence)
    reporter = Reporter(evidence, regions, walk.facts)
    return Analysis(
        findings={path: reporter.finding(path) for path in reached},
        unreached=tuple(path for path in held if path not in reached),
        opaque=tuple(fact for fact in walk.facts if isinstance(fact, Opaque)),
        groups={region.name: tuple(region.options) for region in regions.chosen},
        scope=walk.entered[0],
        num_params=len(paths),
        paths=tuple(paths),
        batch=_batch(values[len(paths) :], walk.facts),
        _regions=regions,
        _walk=walk,
    )


def _batch(inputs: Sequence[Value], facts: Sequence[Fact]) -> Atom | None:
    """The class of the batch: the leading dim of an input that rows of products lead with.

    A cache of all layers leads with the layer, which no product has among its rows; the first of
    several that products lead with wins, and without products the first leading dim there is.
    """
    leads = [resolve(value.dims[0])[0] for value in inputs if value.dims and value.dims[0]]
    rows = Counter(
        resolve(dim)[0]
        for fact in facts
        if isinstance(fact, Contraction)
        for dim in [d for d in fact.rows if d][:1]
    )
    if found := [atom for atom in leads[:1] if atom in rows or not rows]:
        return found[0]
    held = {atom for value in inputs for dim in value.dims for atom in resolve(dim)}
    return next((atom for atom, _ in rows.most_common() if atom in held), next(iter(leads), None))
