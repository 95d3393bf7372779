"""Regions and facts -> one finding per parameter, with its reasons.

Stage in: `Evidence` and `Regions`. Stage out: `Finding`s. Nothing is decided here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtp.errors import join
from jaxtp.rules.graph.classes import Atom, Dim, dim_size, resolve
from jaxtp.rules.graph.evidence import EXPERT, SMALL, VOCAB, Evidence, classes_in
from jaxtp.rules.graph.facts import Contraction, Fact, Finding, Lookup, Offset, Option
from jaxtp.rules.graph.regions import Region, Regions
from jaxtp.rules.graph.walk import where


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
            role, reasons = self._whole(path)
            return Finding(path=path, role=role, dim=None, reasons=reasons)
        option = region.options[path]
        spare = self._regions.instead.get(path)
        return Finding(
            path=path,
            role=self._role(path, region, option),
            dim=option.dim,
            units=option.units,
            classes=option.classes,
            pieces=option.pieces,
            group=region.name,
            alternatives=() if spare is None else (spare,),
            reasons=tuple(self._reasons(path, region, option)),
        )

    def _role(self, path: str, region: Region, option: Option) -> str:
        if region.kind == EXPERT or region.kind == VOCAB:
            return region.kind
        if option.pieces:
            return "fused"
        classes = set(classes_in((self._evidence.params[path][option.dim],)))
        for use in self._evidence.uses[path]:
            if isinstance(use, Contraction):
                if classes.intersection(classes_in(use.summed)):
                    return "row"
                if classes.intersection(classes_in(use.free)):
                    return "column"
        return "column_bias" if path in self._offsets else "follower"

    def _reasons(self, path: str, region: Region, option: Option) -> list[str]:
        """Sentences for a parameter that is split."""
        dim = self._evidence.params[path][option.dim]
        atoms = resolve(dim)
        said = [self._use(use) for use in self._evidence.uses[path][:1]]
        if path in self._offsets:
            offset = self._offsets[path]
            said.append(
                f"added to the output of `{offset.product.path}`{self._at(offset.equation)}"
            )
        said.append(self._partners(path, region))
        if option.pieces:
            cuts = join(f"{start}:{stop}" for start, stop in option.pieces)
            said.append(f"dim {option.dim} is cut into {cuts}, each split by itself")
        elif len(atoms) > 1:
            factors = " x ".join(str(atom.size) for atom in atoms)
            units = " x ".join(map(str, option.units))
            origin = next((a.origin for a in dim if a.origin is not None), None)
            said.append(f"{dim_size(dim)} is seen as {factors}{self._at(origin)}; units {units}")
        if path in self._regions.instead:
            said.append(f"dim {self._regions.instead[path].dim} can be split instead")
        return [sentence for sentence in said if sentence]

    def _partners(self, path: str, region: Region) -> str:
        """Who stands at the other end of the region."""
        known = self._evidence.of(region.classes[0])
        size = region.classes[0].size
        if region.kind == EXPERT:
            return f"{size} experts: its weights are stacked along them"
        if region.kind == VOCAB:
            return f"a vocabulary of {size}"
        sides: list[tuple[str, list[Contraction]]] = [
            ("contracted with", known.contracted),
            ("a free output of", known.produced),
        ]
        told: list[str] = []
        for verb, facts in sides:
            names = dict.fromkeys(f"`{fact.path}`" for fact in facts if fact.path)
            if names:
                told.append(f"{verb} {join(names, 4)}")
        return f"a class of {size} units is " + " and ".join(told)

    def _use(self, use: Contraction | Lookup) -> str:
        if isinstance(use, Lookup):
            how = {"tokens": "an integer input", "experts": "a router's choice"}
            index = how.get(use.kind, "a computed index")
            return f"rows picked by {index}{self._at(use.equation)}"
        summed = " x ".join(str(dim_size(dim)) for dim in use.summed)
        return f"a product sums over {summed or 'nothing'}{self._at(use.equation)}"

    def _whole(self, path: str) -> tuple[str, tuple[str, ...]]:
        """Role and reasons of a parameter that stays whole."""
        evidence, uses = self._evidence, self._evidence.uses[path]
        dims = [
            dim for dim in evidence.params[path] if dim and not evidence.of(resolve(dim)[0]).layer
        ]
        why = [f"dim {i}: {self._why(dim)}" for i, dim in enumerate(evidence.params[path]) if dim]
        offset = self._offsets.get(path)
        rules: list[tuple[str, Callable[[], Any], str]] = [
            ("conv", lambda: path in evidence.convolved, "kernel of a convolution"),
            ("router", lambda: evidence.routes(path), "only tells experts apart"),
            (
                "row_bias",
                lambda: offset and self._sums_region(offset.product),
                "added once, after the sum over `{}`",
            ),
            (
                "position",
                lambda: uses and all(isinstance(use, Lookup) for use in uses),
                "a table, but no vocabulary",
            ),
            (
                "low_rank",
                lambda: any(self._is_low_rank(use) for use in uses),
                "narrow: no kernel leads it back to the stream",
            ),
            (
                "norm",
                lambda: not uses and len(dims) < 2,
                "scales or shifts what lies on every device",
            ),
        ]
        for role, holds, reason in rules:
            if holds():
                return role, (reason.format(offset.product.path if offset else ""), *why)
        return "replicated", tuple(why) or ("a single number",)

    def _sums_region(self, product: Contraction) -> bool:
        split = {atom for region in self._regions.chosen for atom in region.classes}
        return not split.isdisjoint(classes_in(product.summed))

    def _is_low_rank(self, use: Contraction | Lookup) -> bool:
        """Whether a kernel's output is contracted again, but not on the way back to the stream."""
        if not isinstance(use, Contraction):
            return False
        known = [
            self._evidence.of(atom)
            for atom in classes_in(use.free)
            if atom not in self._evidence.streams
        ]
        return any(k.contracted and not self._evidence.leads_back(k) for k in known)

    def _why(self, dim: Dim) -> str:
        """Why a dim is not split: what is known about its leading class."""
        part = next((p for p in self._regions.parts(dim) if not p.lead), None)
        if part is None:
            return f"{dim_size(dim)} could be split, but another dim of its group is"
        atom = resolve(dim)[0]
        return f"{dim_size(dim)} {self._verdict(atom)}"

    def _verdict(self, atom: Atom) -> str:
        evidence = self._evidence
        known = evidence.of(atom)
        if atom in evidence.streams:
            return "lies on the residual stream"
        if known.whole or known.needed:
            return "cannot be split: " + (known.whole + known.needed)[0]
        if known.lost and not known.contracted:
            return known.lost[0]
        if evidence.kind(atom) == SMALL:
            return (
                f"is an output or a table of {atom.size} entries, too few to be worth an exchange"
            )
        if known.contracted:
            how = (
                "but not on the way back to the stream" if known.produced else "but never produced"
            )
            return f"is contracted, {how}"
        return "is cut into pieces that are not all split" if known.produced else "is only indexed"

    def _at(self, equation: Any) -> str:
        """The source line of an equation in brackets, or nothing."""
        if equation is None:
            return ""
        if id(equation) not in self._lines:
            self._lines[id(equation)] = where(equation)
        line = self._lines[id(equation)]
        return f" ({line})" if line else ""
