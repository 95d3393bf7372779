"""Regions and facts -> one finding per parameter, with its reasons.

Nothing is decided here.
"""

from collections.abc import Sequence
from typing import Any

from jaxtp.errors import join
from jaxtp.rules.jaxpr.classes import Atom, Dim, classes_in, dim_size, resolve
from jaxtp.rules.jaxpr.evidence import EXPERT, SMALL, VOCAB, Evidence
from jaxtp.rules.jaxpr.records import Contraction, Fact, Finding, Lookup, Offset, Option, Use
from jaxtp.rules.jaxpr.regions import Region, Regions
from jaxtp.rules.jaxpr.walk import where

_INDEX = {
    "tokens": "an integer input",
    "experts": "a router's choice",
    "computed": "a computed index",
}

_PICKS = {
    "group": "which a ragged product picks by group: XLA would gather all of them and compute all "
    "on every device",
    "index": "which an index picks: XLA would add up the matrices of every token over the devices",
}


class Reporter:
    """Writes findings; keeps source lines, which many parameters share."""

    def __init__(self, evidence: Evidence, regions: Regions, facts: Sequence[Fact]) -> None:
        self._evidence = evidence
        self._regions = regions
        self._offsets = {fact.path: fact for fact in facts if isinstance(fact, Offset)}
        self._lines: dict[int, str] = {}

    def finding(self, path: str) -> Finding:
        """What the dataflow says about one parameter that the call reaches."""
        region = self._regions.placed.get(path)
        if region is None:
            role, reason = self._whole_role(path)
            dims = enumerate(self._evidence.params[path])
            why = [f"dim {axis}: {self._why(dim)}" for axis, dim in dims if dim]
            reasons = tuple(filter(None, [reason, *why])) or ("a single number",)
            small = any(
                self._evidence.kind(atom) == SMALL
                for dim in self._evidence.params[path]
                for atom in resolve(dim)[:1]
            )
            return Finding(
                path=path,
                role=role,
                dim=None,
                small=small,
                stacked_dims=self._stacked_dims(path),
                reasons=reasons,
            )
        option = region.options[path]
        spare = self._regions.instead.get(path)
        return Finding(
            path=path,
            role=self._split_role(path, region, option),
            dim=option.dim,
            units=option.units,
            classes=option.classes,
            pieces=option.pieces,
            replicated=option.replicated,
            use=self._use(path, option) if option.pieces else None,
            group=region.name,
            alternatives=() if spare is None else (spare,),
            stacked_dims=self._stacked_dims(path),
            reasons=tuple(filter(None, self._split_reasons(path, region, option))),
        )

    def _stacked_dims(self, path: str) -> tuple[int, ...]:
        """Array dims along which a scan runs, also where a reshape made stages of layers first."""
        return tuple(
            axis
            for axis, dim in enumerate(self._evidence.params[path])
            if any(self._evidence.of(atom).layer for atom in resolve(dim))
        )

    def _split_role(self, path: str, region: Region, option: Option) -> str:
        if region.kind in (EXPERT, VOCAB):
            return region.kind
        if option.pieces:
            return "fused"
        classes = set(classes_in((self._evidence.params[path][option.dim],)))
        for use in self._contractions(path):
            if not classes.isdisjoint(classes_in(use.summed)):
                return "row"
            if not classes.isdisjoint(classes_in(use.free)):
                return "column"
        return "column_bias" if path in self._offsets else "follower"

    def _split_reasons(self, path: str, region: Region, option: Option) -> list[str]:
        dim = self._evidence.params[path][option.dim]
        said = [self._first_use(path), self._partners(region)]
        if option.pieces:
            cuts = join(f"{start}:{stop}" for start, stop in option.pieces)
            said.append(f"dim {option.dim} has the pieces {cuts}, each sharded by itself")
            if option.replicated:
                kept = join(f"{start}:{stop}" for start, stop in option.replicated)
                said.append(f"except {kept}, which every device needs all of")
        elif len(atoms := resolve(dim)) > 1:
            factors = " x ".join(str(atom.size) for atom in atoms)
            units = " x ".join(map(str, option.units))
            origin = next((atom.origin for atom in dim if atom.origin is not None), None)
            said.append(f"{dim_size(dim)} is seen as {factors}{self._at(origin)}; units {units}")
        experts = self._regions.picked.get(path)
        if experts not in (None, region):
            said.append(f"not along the {experts.classes[0].size} experts, {_PICKS[experts.picks]}")
        if path in self._regions.instead:
            said.append(f"dim {self._regions.instead[path].dim} can be sharded instead")
        return said

    def _first_use(self, path: str) -> str:
        """What the parameter does first in the program."""
        use = next(iter(self._evidence.uses[path]), None)
        if isinstance(use, Lookup):
            return f"rows picked by {_INDEX[use.kind]}{self._at(use.equation)}"
        if use is not None:
            summed = " x ".join(str(dim_size(dim)) for dim in use.summed)
            return f"a product sums over {summed or 'nothing'}{self._at(use.equation)}"
        if (offset := self._offsets.get(path)) is not None:
            return f"added to the output of {_quote([offset.product])}{self._at(offset.equation)}"
        return ""

    def _use(self, path: str, option: Option) -> Use | None:
        """What the products by a fused parameter move; None if they sum over the fused dim."""
        dims, products = self._evidence.params[path], self._contractions(path)
        fused = set(classes_in((dims[option.dim],)))
        if not products or any(not fused.isdisjoint(classes_in(p.summed)) for p in products):
            return None
        whole = len(products) == 1 and resolve(dims[option.dim]) in map(resolve, products[0].free)
        summed = [resolve(dim) for dim in products[0].summed]
        operand = products[0].equation.invars[0].aval
        result = products[0].equation.outvars[0].aval
        elements = sum(map(_weight_elements, products))
        return Use(
            inputs=tuple(axis for axis, dim in enumerate(dims) if dim and resolve(dim) in summed),
            rows=tuple(map(dim_size, products[0].rows)) if whole else (),
            weight_bytes=elements * operand.dtype.itemsize,
            result_bytes=result.size * result.dtype.itemsize,
        )

    def _partners(self, region: Region) -> str:
        """Who stands at the other end of a region."""
        lead = region.classes[0]
        known = self._evidence.of(lead)
        if region.kind == EXPERT:
            return f"one of {lead.size} experts is one entry of its dim"
        if region.kind == VOCAB:
            return f"a vocabulary of {lead.size}"
        contracted, produced = self._named(known.contracted), self._named(known.produced)
        return f"{lead.size} units, contracted with {contracted}, a free output of {produced}"

    def _named(self, facts: Sequence[Contraction]) -> str:
        """The parameters of some contractions, each once, with the line where it comes first."""
        first = {fact.path: fact.equation for fact in reversed(facts)}
        named = (_quote([fact]) + self._at(first[fact.path]) for fact in facts)
        return join(dict.fromkeys(named), 4)

    def _whole_role(self, path: str) -> tuple[str, str]:
        """Role of a replicated parameter, and the reason that the role is."""
        evidence, uses = self._evidence, self._evidence.uses[path]
        offset = self._offsets.get(path)
        if path in evidence.convolved:
            return "conv", "kernel of a convolution"
        if evidence.routes(path):
            return "router", "only tells experts apart"
        if offset and any(a in self._regions.split for a in classes_in(offset.product.summed)):
            return "row_bias", f"added once, after the sum over {_quote([offset.product])}"
        if uses and all(isinstance(use, Lookup) for use in uses):
            return "position", "a table, but no vocabulary"
        if any(self._is_low_rank(use) for use in self._contractions(path)):
            return "low_rank", "a narrow width that no kernel leads back to the residual stream"
        layers = [evidence.of(resolve(dim)[0]).layer for dim in evidence.params[path] if dim]
        if not (uses or offset) and layers.count(False) == 1:
            return "norm", "scales or shifts what is replicated"
        return "replicated", ""

    def _contractions(self, path: str) -> list[Contraction]:
        return [use for use in self._evidence.uses[path] if isinstance(use, Contraction)]

    def _is_low_rank(self, use: Contraction) -> bool:
        """Whether a kernel narrows, and what it makes is contracted, but never into the stream."""
        inner = [atom for atom in classes_in(use.free) if atom not in self._evidence.streams]
        known = [self._evidence.of(atom) for atom in inner]
        leads_nowhere = [k for k in known if k.contracted and not self._evidence.leads_back(k)]
        return bool(leads_nowhere) and dim_size(sum(use.free, ())) < dim_size(sum(use.summed, ()))

    def _why(self, dim: Dim) -> str:
        """Why a dim is not split: what is known about its leading class."""
        size, atom = dim_size(dim), resolve(dim)[0]
        if all(part.lead for part in self._regions.parts(dim)):
            return f"{size} could be sharded, but not together with what is"
        return f"{size} {self._verdict(atom)}"

    def _verdict(self, atom: Atom) -> str:
        known = self._evidence.of(atom)
        if atom in self._evidence.streams:
            return "is a dim of the residual stream"
        if forbidden := known.whole + known.inside + known.needed:
            return "cannot be sharded: " + forbidden[0]
        if known.lost and not known.contracted:
            return known.lost[0]
        if self._evidence.kind(atom) == SMALL:
            return f"is an output or table of {atom.size} entries, too few to be worth an exchange"
        if known.contracted:
            how = (
                "but not on the way back to the residual stream"
                if known.produced
                else "but never made"
            )
            return f"is contracted, {how}"
        return "has pieces that are not all sharded" if known.produced else "is only indexed"

    def _at(self, equation: Any) -> str:
        """The source line of an equation, or nothing."""
        if equation is None:
            return ""
        if id(equation) not in self._lines:
            self._lines[id(equation)] = where(equation)
        line = self._lines[id(equation)]
        return f" at {line}" if line else ""


def _quote(facts: Sequence[Contraction]) -> str:
    """The parameters of some contractions, each once."""
    paths = dict.fromkeys(fact.path for fact in facts)
    return join((f"`{path}`" if path else "a computed weight" for path in paths), 4)


def _weight_elements(product: Contraction) -> int:
    """Elements of the weight in a product, positions under a convolution's window included."""
    if product.equation.primitive.name == "conv_general_dilated":
        return product.equation.invars[1].aval.size
    return dim_size(sum(product.summed + product.free + product.batch, ()))
