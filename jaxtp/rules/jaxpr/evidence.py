"""Facts -> what is known about each class: who makes and contracts it, and what forbids sharding.

The idea: a class that kernels produce and other kernels contract, without being the residual
stream, is the inside of a column/row pair; sharding it costs one all-reduce at the contraction.
Heads, kv heads and the MLP width are of that kind. Experts are classes that weights are stacked
along; a vocabulary is what token ids index.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxtp.rules.jaxpr.classes import Atom, Dim, Dims, classes_in, dim_size, resolve
from jaxtp.rules.jaxpr.records import (
    Choice,
    Contraction,
    Fact,
    Lookup,
    Mixing,
    Opaque,
    Reduction,
    Residual,
    Whole,
)

INNER, EXPERT, VOCAB, SMALL = "inner", "expert", "vocab", "small"
"""Kinds of class: between column and row kernels; experts; a vocabulary; one too small to shard."""

# A token table with fewer than 1/8 of the rows of the largest one is not a second vocabulary but a
# table of positions or segments whose index the caller passes (a threshold found on published
# models).
MINOR_TABLE = 8


MIXED = "mixed over positions by a product of two activations"


@dataclasses.dataclass(slots=True, eq=False)
class Known:
    """What the facts say about one class.

    Attributes:
        produced: Contractions whose weight has it as a free dim.
        contracted: Contractions that sum over it.
        layer: Whether a scan runs along it.
        stacked: Whether weights are stacked along it.
        multiplied: Whether a product takes all of these at once.
        picks: What picks weights along it, if no product takes them all: "group", a ragged product;
            "index", a gather, which gives each token matrices of its own.
        chosen: Whether a computed index is compared with a range along it (one-hot dispatch).
        tables: Token tables whose rows it is.
        whole: Why it must not be sharded.
        needed: Operations that need all of it for each position: harmless for a vocabulary or
            experts, where they work on a few numbers per token.
        inside: Reductions over it that keep the factor it is the minor one of: a norm of each head.
        lost: Where it goes into a primitive that gives no information.
    """

    produced: list[Contraction] = dataclasses.field(default_factory=list[Contraction])
    contracted: list[Contraction] = dataclasses.field(default_factory=list[Contraction])
    layer: bool = False
    stacked: bool = False
    multiplied: bool = False
    picks: str = ""
    chosen: bool = False
    tables: list[Lookup] = dataclasses.field(default_factory=list[Lookup])
    whole: list[str] = dataclasses.field(default_factory=list[str])
    needed: list[str] = dataclasses.field(default_factory=list[str])
    inside: list[str] = dataclasses.field(default_factory=list[str])
    lost: list[str] = dataclasses.field(default_factory=list[str])


_NOTHING = Known()


class Evidence:
    """What is known about every class once all facts are in.

    Attributes:
        params: Dims of each parameter.
        uses: Contractions and lookups of each parameter, in program order.
        known: Class -> what is known, in order of first appearance (and so independent of parameter
            names).
        streams: The residual stream: the dims of residual sums, and the features of token tables.
        convolved: Parameters that a convolution uses.
    """

    def __init__(self, params: Mapping[str, Dims], facts: Sequence[Fact], min_vocab: int) -> None:
        self.params = params
        self.uses: dict[str, list[Contraction | Lookup]] = {path: [] for path in params}
        self.known: dict[Atom, Known] = {}
        self.streams: set[Atom] = set()
        self.convolved: set[str] = set()
        self._nested: set[Atom] = set()
        self._min_vocab = min_vocab
        self._largest_table = 0
        self._kinds: dict[Atom, str] = {}
        self._writes: dict[int, bool] = {}
        for fact in facts:
            self._learn(fact)
        self._forbid(fact for fact in facts if isinstance(fact, Mixing))
        self._keep_ranks([fact for fact in facts if isinstance(fact, Contraction)])
        while self._demote():
            pass

    def of(self, atom: Atom) -> Known:
        """What is known about a class; empty if nothing is."""
        return self.known.get(atom, _NOTHING)

    def kind(self, atom: Atom) -> str:
        """What a class may be split as: one of the four kinds, or "" if it is never split."""
        if atom not in self._kinds:
            self._kinds[atom] = "" if atom in self.streams else self._judge(atom, heads=True)
        return self._kinds[atom]

    def leads_back(self, known: Known) -> bool:
        """Whether a kernel that contracts it writes the stream; for low ranks none does."""
        return not self.streams or any(self.writes_stream(fact) for fact in known.contracted)

    def leads_out(self, known: Known) -> bool:
        """Whether it is the inner width of an MLP that ends in an output, as heads of models do.

        Or in what only kernels read, as what a diffusion model makes of the time does. It is wider
        than what goes in, so that there is work to split, and no narrower than what comes out, or
        to sum that over devices would send more than it saves.
        """
        wide = any(_elements(fact.free) > _elements(fact.summed) for fact in known.produced)
        return wide and any(
            _elements(fact.summed) >= _elements(fact.free)
            and all(self._read_by_kernels(free) for free in classes_in(fact.free))
            for fact in known.contracted
        )

    def _read_by_kernels(self, atom: Atom) -> bool:
        """Whether a class is an output, or nothing but kernels that choose nothing reads it.

        Kernels that lead back to the residual stream are the better half of a pair with what makes
        the class.
        """
        known = self.of(atom)
        if known.contracted and self.leads_back(known):
            return False
        after = classes_in(dim for fact in known.contracted for dim in fact.free)
        return not (
            atom in self.streams
            or (known.whole or known.needed or known.stacked or known.chosen or known.lost)
            or any(self.of(free).stacked or self.of(free).chosen for free in after)
        )

    def writes_stream(self, fact: Contraction) -> bool:
        """Whether a contraction's output features, or a piece of them, are the residual stream."""
        if id(fact) not in self._writes:
            self._writes[id(fact)] = not self.streams.isdisjoint(classes_in(fact.free))
        return self._writes[id(fact)]

    def puts_out(self, path: str, dim: Dim) -> bool:
        """Whether products by a parameter have its dim, or a piece of it, among their outputs."""
        classes = set(classes_in((dim,)))
        products = (use for use in self.uses[path] if isinstance(use, Contraction))
        return any(not classes.isdisjoint(classes_in(use.free)) for use in products)

    def routes(self, path: str) -> bool:
        """Whether a parameter is a router or its bias: it gives scores of experts, not work."""
        products = [use for use in self.uses[path] if isinstance(use, Contraction)]
        if products:
            outputs = [classes_in(use.free) for use in products]
            return any(out and all(self.kind(a) == EXPERT for a in out) for out in outputs)
        atoms = classes_in(self.params[path])
        return bool(atoms) and all(self.kind(atom) == EXPERT for atom in atoms)

    def _judge(self, atom: Atom, *, heads: bool = False) -> str:
        known = self.of(atom)
        if self._is_routed(known):
            return EXPERT
        if known.whole or known.inside:
            return ""
        if known.tables:
            rows = max(dim_size(table.rows) for table in known.tables)
            major = known.produced or rows * MINOR_TABLE >= self._largest_table
            return VOCAB if major and rows >= self._min_vocab else SMALL
        if known.produced and not known.contracted:
            pieces = [self.of(piece) for piece in classes_in([(atom,)])]
            if any(piece.contracted or piece.whole or piece.lost for piece in pieces):
                return ""  # no output: several projections in one, or used where nobody can see
            return VOCAB if atom.size >= self._min_vocab else SMALL
        if not known.produced or known.needed:
            return ""
        return INNER if self.leads_back(known) or (heads and self.leads_out(known)) else ""

    def _is_routed(self, known: Known) -> bool:
        """Whether a class is one of experts.

        Weights are stacked along it, and no kernel sums over it together with a width inside (that
        would be a projection from heads). Or kernels produce it with a width inside, and it is
        chosen from: by a one-hot comparison, or by sorting what a router produces with it alone.
        """
        if known.stacked:
            return all(self._all(fact.summed, "stacked") for fact in known.contracted)
        routers = sum(self._all(fact.free, "chosen", "needed") for fact in known.produced)
        picked = known.chosen or (known.needed and routers)
        return bool(picked) and routers < len(known.produced)

    def _all(self, dims: Dims, *traits: str) -> bool:
        """Whether all classes in some dims have one of the traits of `Known`."""
        known = [self.of(atom) for atom in classes_in(dims)]
        return all(any(getattr(one, trait) for trait in traits) for one in known)

    def _note(self, atom: Atom) -> Known:
        return self.known.setdefault(atom, Known())

    def _learn(self, fact: Fact) -> None:
        match fact:
            case Contraction():
                produced, contracted = classes_in(fact.free), classes_in(fact.summed)
                if fact.equation.primitive.name == "conv_general_dilated":
                    self.convolved.add(fact.path)
                for atom in contracted:
                    self._note(atom).contracted.append(fact)
                for atom in produced:
                    self._note(atom).produced.append(fact)
                    if atom in contracted:
                        self._note(atom).whole.append(
                            "recurrent: one kernel contracts and produces it"
                        )
                # Without a sum it is a scale of what it meets, and stacks no weights.
                for atom in classes_in(fact.batch) if fact.summed else ():
                    self._note(atom).stacked = True
                    if fact.ragged:
                        self._note(atom).picks = "group"
                    self._note(atom).multiplied |= not fact.ragged
                self.uses.get(fact.path, []).append(fact)
            case Lookup():
                for atom in classes_in((fact.rows,)):
                    self._note(atom).stacked |= fact.kind == "experts"
                    if fact.kind == "experts":
                        self._note(atom).picks = self._note(atom).picks or "index"
                    if fact.kind == "tokens":
                        self._note(atom).tables.append(fact)
                if fact.kind == "tokens":
                    self.streams.update(classes_in(fact.features))
                    self._largest_table = max(self._largest_table, dim_size(fact.rows))
                self.uses.get(fact.path, []).append(fact)
            case Reduction():
                kept = {atom for dim in fact.kept for atom in resolve(dim)}
                for atom in {atom for dim in fact.reduced for atom in resolve(dim)} - kept:
                    if atom.beside is not None and not kept.isdisjoint(resolve((atom.beside,))):
                        self._note(atom).inside.append("reduced within each head or group")
            case Choice():
                for atom in classes_in((fact.dim,)):
                    self._note(atom).chosen |= not fact.tokens
            case Opaque():
                for atom in classes_in(fact.dims):
                    self._note(atom).lost.append(f"goes into `{fact.primitive}`: {fact.reason}")
            case Residual():
                own = {atom for dim in fact.dims for atom in resolve(dim)}
                self.streams |= own
                inner = (atom for dims in fact.inside for dim in dims for atom in resolve(dim))
                self._nested.update(atom for atom in inner if atom not in own)
            case Whole():
                binding = fact.why in ("conv", "layer")
                for atom in classes_in((fact.dim,)):
                    known = self._note(atom)
                    known.layer |= fact.why == "layer"
                    (known.whole if binding else known.needed).append(f"{fact.why} needs all of it")
                if fact.path:
                    self.convolved.add(fact.path)
            case _:
                pass

    def _forbid(self, products: Iterable[Mixing]) -> None:
        """What attention sums over, and the width that it mixes, are never split.

        A sum over positions (the values of attention, linear attention's state) mixes the free dims
        of its operands. Where every head has scores of its own, such a dim is the width inside a
        head, which is never split. Where all share one matrix of scores (gated attention units, a
        single head) there is no such width: each of its entries could be a head. Nor is there in a
        state of linear attention that all share, whose other width is summed with the queries.

        Scores themselves are exempt: their free dims are positions and heads. So are sums with a
        constant, which treat every entry of the free dims alike.
        """
        widths = {atom for dims in self.params.values() for atom in classes_in(dims)}
        widths -= self.streams

        def is_width(dim: Dim) -> bool:
            """Whether kernels make a dim, or all pieces it was joined from (rotary halves)."""
            pieces = [[piece for piece in atom.cuts.values() if piece] for atom in resolve(dim)]
            joined = any(own and all(map(is_width, own)) for own in pieces)
            return joined or not widths.isdisjoint(resolve(dim))

        products = list(products)
        met = {atom for fact in products for atom in classes_in(fact.summed)}
        for fact in products:
            for atom in classes_in(fact.summed):
                self._note(atom).whole.append("summed in a product of two activations")
            sums_width = any(map(is_width, fact.summed))
            others = reversed(fact.free)
            sides = zip(fact.free, others, fact.scores, fact.fixed, strict=True)
            for free, other, scores, fixed in sides:
                if fixed and sums_width:  # a width turned by a constant matrix is a width
                    widths.update(classes_in(free))
                heads = fact.batch + tuple(dim for dim in other if not met.issuperset(resolve(dim)))
                per_head = any(map(is_width, heads))
                if per_head and not (sums_width or scores or any(fact.fixed)):
                    for atom in classes_in(free):
                        self._note(atom).whole.append(MIXED)

    def _keep_ranks(self, products: Sequence[Contraction]) -> None:
        """The rank of a low-rank adapter is never split.

        Two weights lead, one after the other, from where a single one leads to where it leads, and
        are narrower in between. To split that width would add an all-reduce beside one that the
        adapter can share.
        """
        direct: dict[tuple[int, frozenset[Atom], frozenset[Atom]], str] = {
            (fact.source, frozenset(classes_in(fact.summed)), frozenset(classes_in(fact.free))): (
                fact.path
            )
            for fact in products
        }
        for second in products:
            first = second.before
            if first is None or set(classes_in(first.free)) != set(classes_in(second.summed)):
                continue
            sides = frozenset(classes_in(first.summed)), frozenset(classes_in(second.free))
            weight = direct.get((first.source, *sides))
            rank, *widths = map(_elements, (first.free, first.summed, second.free))
            if weight is not None and rank < min(widths):
                for atom in classes_in(first.free):
                    self._note(atom).whole.append(f"the rank of an adapter of `{weight}`")

    def _demote(self) -> bool:
        """Takes one class off the stream if sharding it is worth more than replicating it.

        Needed for sums that look residual inside a region, as Mamba's D * x does. Such a sum lies
        in the branch of another stream, its class would be an inner one, and more than half of the
        parameter elements on it have no other dim to split.
        """
        worst: tuple[float, int] | None = None
        victim = None
        for atom in [a for a in self.known if a in self.streams and a in self._nested]:
            self.streams.discard(atom)
            self._kinds.clear()
            self._writes.clear()
            inner = self._judge(atom) == INNER
            self.streams.add(atom)
            if not inner:
                continue
            self._kinds.clear()
            self._writes.clear()
            lost, total = self._at_stake(atom)
            order = (lost / total, -total)
            if 2 * lost > total and (worst is None or order > worst):
                worst, victim = order, atom
        if victim is not None:
            self.streams.discard(victim)
        self._kinds.clear()
        self._writes.clear()
        return victim is not None

    def _at_stake(self, atom: Atom) -> tuple[int, int]:
        """Elements of the parameters on a class: those without another dim to split, and all."""
        lost = total = 0
        for dims in self.params.values():
            holding = [atom in classes_in((dim,)) for dim in dims]
            if not any(holding):
                continue
            size = _elements(dims)
            others = [dim for dim, holds in zip(dims, holding, strict=True) if not holds]
            total += size
            if not any(self.kind(other) for other in classes_in(others)):
                lost += size
        return lost, total


def _elements(dims: Dims) -> int:
    """Elements along several dims."""
    return dim_size(sum(dims, ()))
