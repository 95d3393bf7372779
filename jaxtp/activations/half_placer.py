"""Runs single equations of the halves, whose sums over tensor-parallel devices are taken apart."""

from typing import Any

import jax
from jax.extend.core import Literal

from jaxtp.activations.left_alone import PRODUCTS
from jaxtp.activations.placer import FREE, Placer
from jaxtp.activations.sums_apart import SplitProduct
from jaxtp.rules.jaxpr.walk import Kind, Scope, Value


class HalfPlacer(Placer):
    """A placer that can take the sums of row products apart."""

    def apart(self, scope: Scope, equation: Any) -> SplitProduct | None:
        """The product of an equation, if it enters or leaves a region by one evenly split dim."""
        if equation.primitive.name != "dot_general" or _product_value(scope, equation) is None:
            return None
        params, tensor = equation.params, self.plan.mesh.tp
        ways = self.plan.mesh.ways(tensor)
        sides = [None if isinstance(v, Literal) else scope.values.get(v) for v in equation.invars]
        weights = [n for n, v in enumerate(sides) if v and v.kind is Kind.PARAMETER and v.path]
        if len(weights) != 1 or any(params["dimension_numbers"][1]) or params.get("out_sharding"):
            return None
        (weight,) = weights
        w, x = sides[weight], sides[1 - weight]
        if w is None or x is None or self.plan[w.path].dim_on(tensor) is None:
            return None
        classes = self.dims(w)
        split = [d for d, c in enumerate(classes) if self.axes(c)]
        if len(split) != 1 or self.plan.mesh.ways(self.axes(classes[split[0]])) != ways:
            return None
        if w.shape[split[0]] % ways or self.analysis.findings[w.path].pieces:
            return None
        product = SplitProduct(params, weight, split[0], ways)
        x_split = [d for d, c in enumerate(self.dims(x)) if self.axes(c)]
        fits = bool(x_split) if product.is_row else self.on_stream(x) and not x_split
        return product if fits else None

    def enters(self, scope: Scope, equation: Any) -> bool:
        """Whether an equation is a product that enters a region, in one piece or several."""
        value = _product_value(scope, equation)
        return value is not None and self.enters_region(value)

    def sums(self, scope: Scope, equation: Any) -> bool:
        """Whether an equation is a product that leaves a region, with a sum over devices."""
        value = _product_value(scope, equation)
        return value is not None and self._sums_region(value)

    def place_parts(self, w: Any, dim: int) -> Any:
        """An array whose dim is the devices."""
        entries = [self.plan.mesh.tp if d == dim else FREE for d in range(w.ndim)]
        return self.constrain(w, entries)

    def copies(self, scope: Scope, var: Any, x: Any) -> Any:
        """An entry of an activation for each device, (W, ...); nothing moves."""
        tensor = self.plan.mesh.tp
        x_W = jax.numpy.broadcast_to(x[None], (self.plan.mesh.ways(tensor), *x.shape))
        return self.constrain(x_W, [tensor, *self.stream(scope.values[var])])


def _product_value(scope: Scope, equation: Any) -> Value | None:
    """The result of an equation that is a product; None for any other."""
    value = scope.values.get(equation.outvars[0])
    if equation.primitive.name not in PRODUCTS or value is None or value.product is None:
        return None
    return value
