"""Where a program reads all of a vocabulary's logits without `mask_padding` in between.

A padded vocabulary has more logits than tokens. Behind the mask they change nothing; what sums,
compares or multiplies them without it gives other numbers than the model that is not padded. A
product may sum a table's rows: those of the padding are zero, and one-hot tokens and masked
probabilities pick none of them.
"""

from collections.abc import Collection, Mapping
from typing import Any

from jax.extend.core import Literal

from jaxtp.plan.stored_form import MASKED
from jaxtp.rules.jaxpr.analysis import Analysis
from jaxtp.rules.jaxpr.classes import Atom, resolve
from jaxtp.rules.jaxpr.walk import Scope, where

_READS = ("reduce_", "arg", "dot_general", "cum", "sort", "top_k", "approx_top_k", "reduce")
"""How primitives begin that make one number of many, or compare them."""


def unmasked_reads(analysis: Analysis, size: int) -> list[str]:
    """What reads the logits of a vocabulary and not through the mask, each with its line.

    Args:
        analysis: A traced program, in which `mask_padding` was watched.
        size: Entries of the vocabulary.
    """
    tables = analysis.vocabulary(size)
    reader = _Reader(analysis, {atom for atoms in tables.values() for atom in atoms})
    params = analysis.scope.jaxpr.invars[: analysis.num_params]
    held = [var for var, path in zip(params, analysis.paths, strict=True) if path in tables]
    reader.follow(analysis.scope, dict.fromkeys(held, True))
    return list(dict.fromkeys(reader.found))


class _Reader:
    def __init__(self, analysis: Analysis, atoms: Collection[Atom]) -> None:
        self._analysis = analysis
        self._atoms = atoms
        self.found: list[str] = []

    def follow(self, scope: Scope, held: Mapping[Any, bool]) -> list[bool | None]:
        """Follows what holds unmasked logits (False) or a table that makes them (True).

        Args:
            scope: The jaxpr.
            held: Of its inputs.

        Returns:
            The same of each result, None for what holds neither.
        """
        holding = dict(held)
        for position, equation in enumerate(scope.jaxpr.eqns):
            used = [None if isinstance(v, Literal) else holding.get(v) for v in equation.invars]
            if any(u is not None for u in used) and equation.params.get("name") != MASKED:
                holding.update(self._results(scope, position, equation, used))
        outs = scope.jaxpr.outvars
        return [None if isinstance(v, Literal) else holding.get(v) for v in outs]

    def _results(
        self, scope: Scope, position: int, equation: Any, used: list[bool | None]
    ) -> dict[Any, bool]:
        """The outputs of an equation that hold unmasked logits or a table."""
        inner = scope.calls.get(position, [])
        outputs = [v for v in equation.outvars if self._is_vocabulary(scope, v)]
        name = equation.primitive.name
        if not inner:
            looks_up = name == "dot_general" and False not in used
            reads = not outputs or name.startswith(("cum", "sort"))
            if reads and name.startswith(_READS) and not looks_up:
                self.found.append(f"{name} at {where(equation)}".removesuffix(" at "))
            return dict.fromkeys(outputs, name != "dot_general" and False not in used)
        results: dict[Any, bool] = {}
        for call in inner:
            inputs = call.jaxpr.invars
            skipped = max(0, len(equation.invars) - len(inputs))  # the index of a cond
            given = zip(inputs, used[skipped:], strict=False)
            flags = self.follow(call, {v: flag for v, flag in given if flag is not None})
            for v, flag in zip(equation.outvars, flags, strict=False):
                if flag is not None:
                    results[v] = flag and results.get(v, True)
        return results

    def _is_vocabulary(self, scope: Scope, var: Any) -> bool:
        dims = self._analysis.value(scope, var).dims
        return any(atom in self._atoms for dim in dims for atom in resolve(dim))
