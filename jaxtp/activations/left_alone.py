"""What `parallelize` leaves to XLA, and how it says so: once, with the model's own line."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from jaxtp.errors import join, warn
from jaxtp.plan.decisions import Plan
from jaxtp.rules.jaxpr import Analysis, DimClass
from jaxtp.rules.jaxpr.walk import UNKNOWN, Scope

PRODUCTS = frozenset(["dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"])
"""Primitives whose results are constrained."""


NOTICED_BYTES = 2**28
"""Scores of one attention on one device, in bytes, from which they are worth a warning."""


UNCHOSEN = "jaxtp_experts"
"""In the names of products in which every expert works on every token; experts and chosen ones
follow. A compiled program shows it, and a preflight what it costs."""


def named(share: tuple[int, int] | None) -> contextlib.AbstractContextManager[Any]:
    """Where such a product is run, with `Analysis.unchosen` of it; nothing for any other."""
    if share is None:
        return contextlib.nullcontext()
    return jax.named_scope(f"{UNCHOSEN}_{share[0]}_{share[1]}")


class Told:
    """Says what stayed as it was, once per function however often it is traced."""

    def __init__(self) -> None:
        self._done = False
        self._notes: set[str] = set()

    def tell(
        self, left: Iterable[str], scores: Mapping[str, int], notes: Sequence[str] = ()
    ) -> None:
        """Warns of what was left alone, if anything was and nothing has been said yet.

        Args:
            left: What, and where.
            scores: Where attention over shared sequences keeps its scores -> bytes per device.
            notes: Further texts, each of which is a warning of its own.
        """
        left = list(dict.fromkeys(left))
        large = {line: size for line, size in scores.items() if size >= NOTICED_BYTES}
        said: list[str] = []
        if left:
            said.append(f"parallelize leaves to XLA what happens inside {join(left, 8)}")
        if large:
            where = join(f"{size:,} bytes at {line}" for line, size in large.items())
            said.append(
                f"each device keeps scores of its own queries by all keys, {where}: "
                "`jax.nn.dot_product_attention` with cuDNN's implementation keeps none"
            )
        if said and not self._done:
            self._done = True
            warn("; ".join(said))
        for note in notes:
            if note not in self._notes:
                self._notes.add(note)
                warn(note)


def matters(scope: Scope) -> bool:
    """Whether a program, or one that it holds, has a value that may be constrained."""
    for position, equation in enumerate(scope.jaxpr.eqns):
        values = [scope.values.get(var) for var in equation.outvars]
        if equation.primitive.name in PRODUCTS and any(values):
            return True
        if any(value is not None and value.skip is not None for value in values):
            return True
        if any(map(matters, scope.calls.get(position, ()))):
            return True
    return False


def stays_manual(equation: Any, plan: Plan) -> str:
    """Why a `shard_map` is left alone; "" if constraints can be placed inside."""
    manual = equation.params.get("newly_manual_axes", equation.params.get("manual_axes", ()))
    if taken := [axis for axis in plan.mesh.tp if axis in manual]:
        return f"it is manual over {join(taken)}"
    missing = [axis for axis in plan.mesh.tp if axis not in equation.params["mesh"].axis_names]
    return f"its mesh has no axis {join(missing)}" if missing else ""


def lost(analysis: Analysis, axes: Callable[[DimClass], tuple[str, ...]]) -> dict[int, str]:
    """Primitives without a rule that split dims go into: XLA gathers what it cannot split."""
    return {
        id(fact): f"`{fact.primitive}` at {fact.where or UNKNOWN}: {fact.reason}"
        for fact in analysis.opaque
        if any(axes(analysis.dim_class(dim)) for dim in fact.dims)
    }
