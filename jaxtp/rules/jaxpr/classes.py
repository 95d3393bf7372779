"""Dimension classes: which dims of which arrays are one and the same dimension of the model.

A dim is a tuple of atoms, major to minor; the product of their sizes is the dim's size. A dim of
size 0 or 1 has no atoms, so broadcasting never links anything. Atoms form a union-find whose nodes
can be *refined* after the fact: when (..., 4096) is reshaped to (32, 128) the atom 4096 gets the
parts 32 and 128 wherever it occurs, in the projection's kernel too. A *cut* names a contiguous
piece of an atom (a fused q|k|v) and equal cuts share a piece.
"""

import math
from collections.abc import Iterable, Sequence


class Atom:
    """One factor of a dim.

    Attributes:
        number: Creation order; the printed name, and the tie-break that makes results reproducible.
        size: Elements.
        parent: The atom this one was merged into, or None.
        parts: Major and minor factor once refined, or None.
        cuts: Named pieces, (start, stop) in elements of this atom -> dim of that size.
        beside: The major factor that it is the minor one of, in some dim; or None.
        origin: The equation that split it or split it off (what was in `Classes.origin` then).
    """

    __slots__ = ("beside", "cuts", "number", "origin", "parent", "parts", "size")

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.parent: Atom | None = None
        self.parts: tuple[Atom, Atom] | None = None
        self.cuts: dict[tuple[int, int], Dim] = {}
        self.beside: Atom | None = None
        self.origin: object = None

    def __repr__(self) -> str:
        return f"c{self.number}({self.size})"


Dim = tuple[Atom, ...]
Dims = tuple[Dim, ...]


def find(atom: Atom) -> Atom:
    """The representative of an atom's class; shortens the path on the way."""
    while atom.parent is not None:
        if atom.parent.parent is not None:
            atom.parent = atom.parent.parent
        atom = atom.parent
    return atom


def resolve(dim: Dim) -> Dim:
    """The dim in today's finest atoms, major to minor."""
    if all(atom.parent is None and atom.parts is None for atom in dim):
        return dim
    atoms: list[Atom] = []
    for atom in dim:
        root = find(atom)
        atoms.extend((root,) if root.parts is None else resolve(root.parts))
    return tuple(atoms)


def dim_size(dim: Dim) -> int:
    """Elements along a dim; 1 for a dim without atoms."""
    return math.prod(atom.size for atom in dim)


def classes_in(dims: Iterable[Dim]) -> list[Atom]:
    """The classes in some dims and, below each, in the pieces it is cut into; each once.

    What happens to a fused dim happens to its pieces: a kernel that produces q|k|v produces q, k
    and v.
    """
    found: dict[Atom, None] = {}
    for dim in dims:
        for atom in resolve(dim):
            if atom not in found:
                found[atom] = None
                _add_pieces(atom, found)
    return list(found)


def _add_pieces(atom: Atom, found: dict[Atom, None]) -> None:
    for piece in atom.cuts.values():
        for part in resolve(piece):
            if part not in found:
                found[part] = None
                _add_pieces(part, found)


class Classes:
    """Makes atoms and learns about them.

    The state lies in the atoms; this holds the counter and the origin of what is learnt now.
    """

    def __init__(self) -> None:
        self.count = 0
        self.origin: object = None

    def fresh(self, size: int) -> Dim:
        """A dim that is linked to nothing yet."""
        if size < 2:
            return ()
        self.count += 1
        return (Atom(self.count, size),)

    def fresh_dims(self, shape: Sequence[int]) -> Dims:
        """One fresh dim per entry of a shape."""
        return tuple(self.fresh(size) for size in shape)

    def unify(self, left: Dim, right: Dim) -> None:
        """Two dims of equal size are the same dimension.

        Aligns the two atom lists from the major end, refining where a size does not match by the
        common divisor. Coprime remainders (6 x 4 against 4 x 6) end it: nothing is known about
        them.
        """
        if left == right:
            return
        lefts, rights = list(reversed(left)), list(reversed(right))
        while lefts and rights:
            one, two = _pop(lefts), _pop(rights)
            common = math.gcd(one.size, two.size)
            if common == 1:
                return
            self._union(self._take(one, common, lefts), self._take(two, common, rights))

    def meet(self, left: Dim, right: Dim) -> Dim:
        """The dim of an elementwise result: either side may be broadcast from size 1."""
        if left and right:
            self.unify(left, right)
        return left or right

    def align(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """The dims of a reshape to `shape`, refining atoms where a dim is split.

        Where sizes do not nest (6 x 4 to 4 x 6) the affected target dims are fresh; alignment
        resumes at the next boundary that both shapes share.
        """
        if 0 in shape:
            return self.fresh_dims(shape)
        atoms = [atom for dim in reversed(dims) for atom in reversed(dim)]
        result: list[Dim] = []
        targets = list(reversed(shape))
        while targets:
            need, taken = targets.pop(), []
            while need > 1:
                atom = _pop(atoms)
                common = math.gcd(need, atom.size)
                if common == 1:
                    result.append(self.fresh(need * math.prod(a.size for a in taken)))
                    result.extend(self._skip(atoms, targets, atom.size, need))
                    break
                taken.append(self._take(atom, common, atoms))
                need //= common
            else:
                result.append(tuple(taken))
        return tuple(result)

    def cut(self, dim: Dim, start: int, stop: int) -> Dim:
        """The dim of the contiguous slice [start, stop) of a dim.

        Whole multiples of the minor atoms cut the major atom only, and a slice inside one step of
        the major atom cuts the minor ones. A slice across steps is linked to nothing.
        """
        if stop - start == dim_size(dim) or stop <= start:
            return dim if stop > start else ()
        lead, *rest = resolve(dim)
        minor = dim_size(tuple(rest))
        if start % minor == 0 and stop % minor == 0:
            return self._piece(lead, start // minor, stop // minor) + tuple(rest)
        step = start // minor
        if stop <= (step + 1) * minor:
            self._piece(lead, step, step + 1)
            return self.cut(tuple(rest), start - step * minor, stop - step * minor)
        return self.fresh(stop - start)

    def join(self, pieces: Sequence[Dim], sizes: Sequence[int]) -> Dim:
        """The dim of a concatenation: a new atom cut into the pieces, so that slicing undoes it."""
        joined = self.fresh(sum(sizes))
        start = 0
        for piece, size in zip(pieces, sizes, strict=True):
            if size and joined:
                joined[0].cuts[start, start + size] = piece
            start += size
        return joined

    def refine(self, atom: Atom, major: int) -> tuple[Atom, Atom]:
        """Splits an atom into (major, rest); cuts at whole steps move to the major part."""
        minor = atom.size // major
        parts = self.fresh(major) + self.fresh(minor)
        assert len(parts) == 2, "a part of size 1 is no refinement"
        atom.parts = parts
        parts[0].beside, parts[1].beside = atom.beside, parts[0]
        for touched in (atom, *parts):
            touched.origin = self.origin
        for (start, stop), piece in atom.cuts.items():
            if start % minor == 0 and stop % minor == 0:
                self.unify(self._piece(parts[0], start // minor, stop // minor) + parts[1:], piece)
        return parts

    def _piece(self, atom: Atom, start: int, stop: int) -> Dim:
        if stop - start == atom.size:
            return (atom,)
        if (start, stop) not in atom.cuts:
            atom.cuts[start, stop] = self.fresh(stop - start)
        return atom.cuts[start, stop]

    def _take(self, atom: Atom, size: int, rest: list[Atom]) -> Atom:
        """The leading `size` of an atom; what is left of it goes back on the stack."""
        if atom.size == size:
            return atom
        major, minor = self.refine(atom, size)
        rest.append(minor)
        return find(major)

    def _skip(self, atoms: list[Atom], targets: list[int], source: int, target: int) -> list[Dim]:
        """Fresh dims for the targets up to the next boundary that both sides of a reshape share."""
        lost: list[Dim] = []
        while source != target:
            if source < target:
                source *= _pop(atoms).size
            else:
                size = targets.pop()
                lost.append(self.fresh(size))
                target *= size
        return lost

    def _union(self, one: Atom, two: Atom) -> None:
        if one is two:
            return
        old, new = (one, two) if one.number < two.number else (two, one)
        new.parent = old
        old.beside = old.beside or new.beside
        for key, piece in new.cuts.items():
            if key in old.cuts:
                self.unify(old.cuts[key], piece)
            else:
                old.cuts[key] = piece


def _pop(stack: list[Atom]) -> Atom:
    """The next unrefined atom; aligning may have refined or merged what the stack still holds."""
    atom = find(stack.pop())
    while atom.parts is not None:
        stack.extend(reversed(atom.parts))
        atom = find(stack.pop())
    return atom
