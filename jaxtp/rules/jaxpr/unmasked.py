"""Where a program reads all of a vocabulary's logits without `mask_padding` in between.

A padded vocabulary has more logits than tokens. Behind the mask they change nothing; what sums,
compares or multiplies them without it gives other numbers than the model that is not padded.
"""

from collections.abc import Collection
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
    reader.follow(analysis.scope, held)
    return list(dict.fromkeys(reader.found))


class _Reader:
    def __init__(self, analysis: Analysis, atoms: Collection[Atom]) -> None:
        self._analysis = analysis
        self._atoms = atoms
        self.found: list[str] = []

    def follow(self, scope: Scope, held: Collection[Any]) -> list[bool]:
        """Follows what holds unmasked logits; whether each result of the jaxpr holds them too."""
        holding = set(held)
        for position, equation in enumerate(scope.jaxpr.eqns):
            used = [not isinstance(v, Literal) and v in holding for v in equation.invars]
            if any(used) and equation.params.get("name") != MASKED:
                holding.update(self._results(scope, position, equation, used))
        return [not isinstance(v, Literal) and v in holding for v in scope.jaxpr.outvars]

    def _results(self, scope: Scope, position: int, equation: Any, used: list[bool]) -> list[Any]:
        """The outputs of an equation that hold unmasked logits."""
        inner = scope.calls.get(position, [])
        outputs = [v for v in equation.outvars if self._is_vocabulary(scope, v)]
        name = equation.primitive.name
        if not inner:
            if (not outputs or name.startswith(("cum", "sort"))) and name.startswith(_READS):
                self.found.append(f"{name} at {where(equation)}".removesuffix(" at "))
            return outputs
        results: dict[Any, None] = {}
        for call in inner:
            inputs = call.jaxpr.invars
            skipped = max(0, len(equation.invars) - len(inputs))  # the index of a cond
            flags = self.follow(
                call, [v for v, flag in zip(inputs, used[skipped:], strict=False) if flag]
            )
            results |= dict.fromkeys(
                v for v, flag in zip(equation.outvars, flags, strict=False) if flag
            )
        return list(results)

    def _is_vocabulary(self, scope: Scope, var: Any) -> bool:
        dims = self._analysis.value(scope, var).dims
        return any(atom in self._atoms for dim in dims for atom in resolve(dim))
