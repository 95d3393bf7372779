"""Which products of shared tokens belong to one attention, while a model is run.

Scores are followed from the product that makes them to the one with the values, across calls that
run in place. There the attention is computed in chunks of queries (`row_chunks`), if its scores are
large and nothing else needs them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from jaxtp.activations.by_chunk import Chunks
from jaxtp.activations.row_chunks import (
    AttentionWeights,
    Facts,
    Level,
    Make,
    NotByRows,
    TokenProduct,
    Wiring,
    rows_of_chunk,
)
from jaxtp.rules.jaxpr.primitives import PRIMITIVES
from jaxtp.rules.jaxpr.reentry import inline
from jaxtp.rules.jaxpr.walk import UNKNOWN, Scope, where


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """An equation that is being run, or holds one that is.

    Attributes:
        scope: The jaxpr that it is in.
        position: Its place there.
        known: What the variables of that jaxpr hold so far.
    """

    scope: Scope
    position: int
    known: Mapping[Any, Any]

    @property
    def equation(self) -> Any:
        """The equation."""
        return self.scope.jaxpr.eqns[self.position]

    @property
    def is_inline(self) -> bool:
        """Whether what it holds runs in its place, so that values pass in and out."""
        row = PRIMITIVES.get(self.equation.primitive.name)
        return row is not None and row.again is inline

    @property
    def inside(self) -> Scope | None:
        """What runs in its place."""
        calls = self.scope.calls.get(self.position)
        return calls[0] if calls and self.is_inline else None


class Attentions:
    """What comes from scores, and how many of them are held at a time.

    Args:
        mesh: The mesh.
        axis: The axis of it that shards tokens; "" if none does.
    """

    def __init__(self, mesh: Mesh | AbstractMesh, axis: str) -> None:
        self._mesh, self._axis = mesh, axis
        self._products: dict[tuple[Scope, int], TokenProduct] = {}
        self._scored: set[tuple[Scope, Any]] = set()
        self._wirings: dict[Scope, Wiring] = {}
        self._held: dict[tuple[Scope, int], int] = {}
        self._whys: dict[tuple[Scope, int], str] = {}

    def scores(self) -> dict[str, int]:
        """Where scores are made, and why all at once -> bytes of them that a device holds."""
        found: dict[str, int] = {}
        for key, product in self._products.items():
            why = self._whys.get(key)
            line = where(product.equation) or UNKNOWN
            found[f"{line} ({why})" if why else line] = self._held[key]
        return found

    def enter(self, frame: Frame) -> None:
        """Before an equation is run."""
        if inside := frame.inside:
            self._pass(frame.scope, frame.equation.invars, inside, inside.jaxpr.invars)

    def leave(self, frame: Frame, *, ends: bool) -> None:
        """After an equation was run; `ends` if it is a product of tokens with tokens."""
        scope, equation = frame.scope, frame.equation
        if inside := frame.inside:
            self._pass(inside, inside.jaxpr.outvars, scope, equation.outvars)
        elif not ends and any(self.is_scored(scope, var) for var in equation.invars):
            self._scored.update((scope, var) for var in equation.outvars)

    def is_scored(self, scope: Scope, var: Any) -> bool:
        """Whether a variable comes from scores whose values have not been multiplied."""
        return not isinstance(var, Literal) and (scope, var) in self._scored

    def _pass(
        self, scope: Scope, names: Sequence[Any], other: Scope, others: Sequence[Any]
    ) -> None:
        for before, after in zip(names, others, strict=True):
            if self.is_scored(scope, before):
                self._scored.add((other, after))

    def made(self, scope: Scope, product: TokenProduct, num_bytes: int) -> None:
        """Scores were made, which would be so many bytes on a device."""
        key = scope, id(product.equation)
        self._products[key], self._held[key] = product, num_bytes
        self._scored.update((scope, var) for var in product.equation.outvars)

    def in_chunks(self, frames: Sequence[Frame], product: TokenProduct) -> Make | None:
        """How a product with values is computed for some queries at a time.

        Args:
            frames: What is being run, the outermost first.
            product: The product; its rows are the weights.

        Returns:
            Gives the result; None where there is one chunk, or something needs all scores.
        """
        scope, equation = frames[-1].scope, product.equation
        if not self.is_scored(scope, equation.invars[product.side]):
            return None
        queries = product.rows.shape[product.row_dim]
        own = queries // self._mesh.shape[self._axis]
        chunk = rows_of_chunk(own, product.num_summed)
        if chunk == own:
            return None
        found = set[tuple[Scope, int]]()
        facts = Facts(self._wirings, self._products, self._scored, found)
        try:
            weights = AttentionWeights(facts, _innermost(frames), product, queries)
        except NotByRows as reason:
            self._whys.update((key, str(reason)) for key in found)
            return None
        self._held.update((key, self._held[key] * chunk // own) for key in found)
        return functools.partial(weights.times_values, Chunks(self._mesh, self._axis, chunk))


def _innermost(frames: Sequence[Frame]) -> Level:
    """The level of the last frame, with those around it that it runs in place of."""
    level: Level | None = None
    caller: Frame | None = None
    for frame in frames:
        outer = level if caller is not None and caller.is_inline else None
        level = Level(frame.scope, frame.known, outer, caller and caller.equation)
        if outer is not None and caller is not None:
            outer.inside[caller.position] = level
        caller = frame
    assert level is not None
    return level
