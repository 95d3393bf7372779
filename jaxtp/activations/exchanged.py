"""Tokens on their way to experts on an axis that shards the batch as well, and back.

Left alone, XLA keeps the tokens where they are and gathers the experts. What enters the products of
experts is therefore placed twice, as it was made, by sequence, and then by expert: between the two
lies one all-to-all. What leaves them is placed the other way round.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jaxtp.activations.left_alone import PRODUCTS
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.rules.jaxpr import Analysis, DimClass
from jaxtp.rules.jaxpr.walk import Kind, Scope, Value

FREE = PartitionSpec.UNCONSTRAINED
Constrain = Callable[[Any, Sequence[Any]], Any]


class Exchange:
    """Which values lie by expert, and what is placed on the way."""

    def __init__(
        self,
        analysis: Analysis,
        plan: Plan,
        tensor_axes: Callable[[DimClass], tuple[str, ...]],
        constrain: Constrain,
    ) -> None:
        """For one traced function.

        Args:
            analysis: Of the function.
            plan: Of its parameters.
            tensor_axes: The tensor axes that split a dim.
            constrain: Places an array by an entry for each dim.
        """
        self._analysis, self._plan = analysis, plan
        self._tensor_axes, self._constrain = tensor_axes, constrain
        self._name = plan.mesh.name_of(Axis.EP)
        on_axis = [
            finding
            for path, finding in analysis.findings.items()
            if self._name
            and finding.role == "expert"
            and plan[path].dim_on([self._name]) is not None
        ]
        self._experts = {finding.classes[0] for finding in on_axis if finding.classes}
        self._paths = {finding.path for finding in on_axis}
        self._by_expert: set[Any] = set()
        self._moved: dict[Any, Any] = {}

    def operands(self, scope: Scope, equation: Any, operands: list[Any]) -> list[Any]:
        """What an equation takes, by expert where it multiplies by experts, else by sequence."""
        if not self._experts or equation.primitive.name not in (*PRODUCTS, "gather"):
            return operands
        enters = self.multiplies_experts(scope, equation)
        found: list[Any] = []
        for var, x in zip(equation.invars, operands, strict=True):
            value = None if isinstance(var, Literal) else scope.values.get(var)
            if value is not None and self._expert_dim(value) is not None:
                lies_by_expert = var in self._by_expert
                if enters != lies_by_expert:
                    key = (var, enters)
                    if key not in self._moved:
                        first = self._constrain(x, self._entries(value, by_expert=lies_by_expert))
                        entries = self._entries(value, by_expert=enters)
                        self._moved[key] = self._constrain(first, entries)
                    x = self._moved[key]
            found.append(x)
        return found

    def result(self, scope: Scope, equation: Any, var: Any, x: Any) -> Any:
        """An equation's result, by expert if it is of experts; None if this has no say."""
        value = scope.values.get(var)
        if not self._experts or value is None or self._expert_dim(value) is None:
            return None
        if self.multiplies_experts(scope, equation):
            self._by_expert.add(var)
            return self._constrain(x, self._entries(value, by_expert=True))
        is_moved = equation.primitive.name in (*PRODUCTS, "gather")
        sources = {v for v in equation.invars if not isinstance(v, Literal)}
        if not is_moved and sources & self._by_expert:
            self._by_expert.add(var)
        return None

    def multiplies_experts(self, scope: Scope, equation: Any) -> bool:
        """Whether an equation is a product by experts that lie on the axis."""
        if equation.primitive.name not in PRODUCTS:
            return False
        values = [scope.values.get(v) for v in equation.invars if not isinstance(v, Literal)]
        return any(v.kind is Kind.PARAMETER and v.path in self._paths for v in values if v)

    def _expert_dim(self, value: Value) -> int | None:
        """The dim of experts of an activation that has sequences too."""
        if value.kind is not Kind.ACTIVATION:
            return None
        classes = self._analysis.dim_classes(value)
        found = [
            d for d, c in enumerate(classes) if c.classes[:1] and c.classes[0] in self._experts
        ]
        has_batch = any(self._analysis.is_batch(dim) for dim in value.dims)
        return found[0] if found and has_batch else None

    def _entries(self, value: Value, *, by_expert: bool) -> list[Any]:
        expert_dim, batch = self._expert_dim(value), self._plan.mesh.batch
        if by_expert:
            batch = tuple(name for name in batch if name != self._name)
        entries: list[Any] = []
        for number, (dim, c) in enumerate(
            zip(value.dims, self._analysis.dim_classes(value), strict=True)
        ):
            axes = self._tensor_axes(c)
            if number == expert_dim and by_expert:
                axes = (*axes, self._name)
            entries.append(axes or (batch if self._analysis.is_batch(dim) else FREE))
        return entries
