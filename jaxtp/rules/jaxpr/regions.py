"""Evidence -> which dim of which parameter is split, and what is decided together.

A region is a set of classes that occur together in some dim (kv heads and query groups; the pieces
of a fused projection), with all parameters that have an option on it. Two regions that want
different dims of one parameter exclude each other; the set that covers most parameter elements
wins. For transformers nothing is left to choose then, except experts against the width inside them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from jaxtp.rules.jaxpr.classes import Atom, Dim, dim_size, resolve
from jaxtp.rules.jaxpr.evidence import EXPERT, INNER, VOCAB, Evidence
from jaxtp.rules.jaxpr.records import Option

# Up to this many connected regions the best set is found exactly; above it the heaviest goes first.
EXACT = 24


@dataclasses.dataclass(slots=True, eq=False)
class Region:
    """Classes that are decided together, and the parameters they would split.

    Attributes:
        name: Kind and number, in program order.
        kind: "inner", "expert" or "vocab".
        classes: The classes, in program order.
        options: Path -> where the parameter would be split.
        weight: Elements of those parameters; twice as many for experts, which beat the width inside
            them at an equal price on the wire because each expert's products stay on one device.
        picks: What picks experts along it, "group" or "index" (`Known.picks`); "" for all others.
            XLA has no way to divide a ragged product by groups: every device would gather and
            compute all of them. Of experts that an index picks it adds up, over the devices, the
            matrices of every token.
    """

    name: str
    kind: str
    classes: list[Atom]
    options: dict[str, Option]
    weight: int
    picks: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A contiguous part of a dim, in elements, and its leading classes that may be split."""

    start: int
    stop: int
    lead: Dim


class Regions:
    """All regions of a model and the choice among them.

    Attributes:
        evidence: What they are built from.
        number: Class -> its number in program order; what `Option.classes` holds.
        chosen: The regions that are split, in program order.
        split: Class -> the chosen region it is in.
        placed: Path -> the chosen region that splits it.
        picked: Path -> the region of experts that are picked, by group or by index.
        instead: Path -> what to fall back on if that region cannot be split.
    """

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.number = {atom: n for n, atom in enumerate(evidence.known)}
        regions = self._build()
        rivals = _rivals(regions)
        self.chosen = best_regions(regions, rivals)
        self.split = {atom: region for region in self.chosen for atom in region.classes}
        self.placed = {path: region for region in self.chosen for path in region.options}
        self.picked = {path: r for r in regions if r.picks for path in r.options}
        self.instead: dict[str, Option] = {}
        for region in self.chosen:
            taken = [other for other in self.chosen if other is not region]
            free = [
                r
                for r in rivals[region]
                if not r.picks and not any(other in rivals[r] for other in taken)
            ]
            for other in best_regions(free, rivals):
                self.instead |= {p: o for p, o in other.options.items() if p in region.options}

    def parts(self, dim: Dim, start: int = 0) -> list[Part]:
        """The parts of a dim: one, or one per piece it is cut into if it is not split as it stands.

        A dim stored as (3, heads, width) and indexed along the 3 is cut like one of 3 x heads x
        width elements.
        """
        atoms = resolve(dim)
        lead = tuple(itertools.takewhile(self._splits, atoms))
        pieces = _tiling(atoms[0]) if atoms and not lead else []
        step = dim_size(atoms[1:])
        if not pieces:
            return [Part(start, start + dim_size(atoms), lead)]
        return [
            part
            for at, piece in pieces
            for part in self.parts((*piece, *atoms[1:]), start + at * step)
        ]

    def _splits(self, atom: Atom) -> bool:
        return self.evidence.kind(atom) in (INNER, EXPERT, VOCAB)

    def _build(self) -> list[Region]:
        """Groups the classes that share a dim, and lists the options on each group."""
        evidence, number = self.evidence, self.number
        found: list[tuple[str, Option, list[Atom]]] = []
        for path, dims in evidence.params.items():
            for axis, dim in enumerate(() if evidence.routes(path) else dims):
                parts = self.parts(dim)
                option = self.option(axis, parts)
                if option and (not option.replicated or evidence.puts_out(path, dim)):
                    found.append((path, option, [atom for part in parts for atom in part.lead]))
        leader = _leaders([classes for *_, classes in found], number)
        members: dict[Atom, list[Atom]] = {}
        for atom in sorted(leader, key=number.__getitem__):
            members.setdefault(leader[atom], []).append(atom)
        options: dict[Atom, dict[str, Option]] = {first: {} for first in members}
        for path, option, classes in found:
            # Of two dims of one parameter in one region the first is taken.
            options[leader[classes[0]]].setdefault(path, option)
        regions: list[Region] = []
        for first, classes in members.items():
            kinds = {evidence.kind(atom) for atom in classes}
            kind = next(k for k in (EXPERT, VOCAB, INNER) if k in kinds)
            own = options[first]
            if kind == INNER and not self._is_summed(classes, own):
                continue
            size = sum(dim_size(sum(evidence.params[path], ())) for path in own)
            known = [evidence.of(atom) for atom in classes]
            picks = next((k.picks for k in known if k.picks and not k.multiplied), "")
            # Any width inside is better; without one, an index at least stores them apart.
            least = {"group": 0, "index": 1}
            weight = least.get(picks, size * 2 if kind == EXPERT else size)
            name = f"{kind}{len(regions)}"
            regions.append(Region(name, kind, classes, own, weight, picks))
        return regions

    def _is_summed(self, classes: list[Atom], options: Mapping[str, Option]) -> bool:
        """Whether a parameter that would be split sums over the classes, or a computed weight does.

        Columns without a row split what is gathered at once: the upsampled half of a concatenation
        that one kernel takes whole.
        """
        facts = [fact for atom in classes for fact in self.evidence.of(atom).contracted]
        return any(not fact.path or fact.path in options for fact in facts)

    def option(self, axis: int, parts: list[Part]) -> Option | None:
        """How a dim of some parts is split; None if too few of its parts are, or not alike.

        Units are the leading classes that all split parts share, or else a common divisor. Parts
        that are not split stay on every device, if they are the smaller share: z | x | B C | dt
        with narrow B and C.

        Experts that are routed by group are still single experts: their factors are one unit.
        """
        whole = [part for part in parts if not part.lead]
        parts_split = [part for part in parts if part.lead]
        total, kept = (sum(p.stop - p.start for p in some) for some in (parts, whole))
        if 2 * kept >= total:
            return None
        leads = zip(*(part.lead for part in parts_split), strict=False)
        shared = [column[0] for column in itertools.takewhile(lambda c: len(set(c)) == 1, leads)]
        units: list[Dim] = []
        for atom in shared:
            if units and EXPERT == self.evidence.kind(atom) == self.evidence.kind(units[-1][0]):
                units[-1] += (atom,)
            else:
                units.append((atom,))
        divisor = math.gcd(*(part.lead[0].size for part in parts_split))
        if divisor == 1:
            return None
        return Option(
            dim=axis,
            units=tuple(map(dim_size, units)) or (divisor,),
            classes=tuple(self.number[unit[0]] for unit in units),
            pieces=tuple((part.start, part.stop) for part in parts) if len(parts) > 1 else (),
            replicated=tuple((part.start, part.stop) for part in whole),
        )


def _tiling(atom: Atom) -> list[tuple[int, Dim]]:
    """The cuts of an atom that cover it without a gap, widest first, or nothing: (start, piece)."""
    tiles: list[tuple[int, Dim]] = []
    position = 0
    while position < atom.size:
        stop = max((b for a, b in atom.cuts if a == position), default=None)
        if stop is None:
            return []
        tiles.append((position, atom.cuts[position, stop]))
        position = stop
    return tiles


def _leaders(groups: list[list[Atom]], number: Mapping[Atom, int]) -> dict[Atom, Atom]:
    """For each atom the first, in program order, of those it is connected with through groups."""
    above: dict[Atom, Atom] = {}

    def top(atom: Atom) -> Atom:
        while above.setdefault(atom, atom) is not atom:
            atom = above[atom]
        return atom

    for group in groups:
        first, *others = sorted(map(top, group), key=number.__getitem__)
        above.update(dict.fromkeys(others, first))
    return {atom: top(atom) for atom in above}


def _rivals(regions: list[Region]) -> dict[Region, list[Region]]:
    """For each region those that want another dim of one of its parameters."""
    on: dict[str, list[Region]] = {}
    for region in regions:
        for path in region.options:
            on.setdefault(path, []).append(region)
    rivals: dict[Region, dict[Region, None]] = {region: {} for region in regions}
    for sharing in on.values():
        for region in sharing:
            rivals[region].update(dict.fromkeys(other for other in sharing if other is not region))
    order = {region: n for n, region in enumerate(regions)}
    return {region: sorted(others, key=order.__getitem__) for region, others in rivals.items()}


def best_regions(regions: list[Region], rivals: Mapping[Region, list[Region]]) -> list[Region]:
    """The set of regions without rivals inside it that covers most elements; first come wins a tie.

    Coverage, not elements per wire byte: of a chain (768, 12288), (12288, 256), (256, 10) the
    second would split 256 because it is cheap.
    """
    order = {region: n for n, region in enumerate(regions)}

    @functools.cache
    def exact(left: frozenset[Region]) -> frozenset[Region]:
        degree = {r: sum(other in left for other in rivals[r]) for r in left}
        alone = frozenset(r for r, n in degree.items() if not n)
        left -= alone
        if not left:
            return alone
        pivot = max(left, key=lambda r: (degree[r], -order[r]))
        sets = exact(left - {pivot} - set(rivals[pivot])) | {pivot}, exact(left - {pivot})
        return alone | max(
            sets, key=lambda s: (sum(r.weight for r in s), -min(map(order.__getitem__, s)))
        )

    def greedy(left: frozenset[Region]) -> set[Region]:
        taken: set[Region] = set()
        for region in sorted(left, key=lambda r: (-r.weight, order[r])):
            if taken.isdisjoint(rivals[region]):
                taken.add(region)
        return taken

    best: list[Region] = []
    for group in _connected(regions, rivals):
        best += exact(group) if len(group) <= EXACT else greedy(group)
    return sorted(best, key=order.__getitem__)


def _connected(
    regions: list[Region], rivals: Mapping[Region, list[Region]]
) -> list[frozenset[Region]]:
    """Regions grouped so that rivals are in one group; the choice in each is independent."""
    left, groups = dict.fromkeys(regions), list[frozenset[Region]]()
    while left:
        pending, group = [next(iter(left))], set[Region]()
        while pending:
            region = pending.pop()
            if region in left:
                del left[region]
                group.add(region)
                pending.extend(rivals[region])
        groups.append(frozenset(group))
    return groups
