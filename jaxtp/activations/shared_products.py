"""Products by a weight with copies on several devices, computed so that XLA moves the least."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.plan.decisions import Plan
from jaxtp.rules.jaxpr import Analysis

Place = Callable[[Any, dict[int, tuple[str, ...]]], Any]
"""`(x, {dim: axes})` -> `x` with these dims sharded over these axes and all others as XLA likes."""


@dataclasses.dataclass(frozen=True, slots=True)
class WeightProduct:
    """Which operand of a product is the weight, and where one of its free dims comes out.

    Attributes:
        params: Of the equation, `dimension_numbers` among them.
        weight: 0 or 1.
        dim: The weight's dim in question.
        out: The same dim in the result.
        groups: Group sizes, for a ragged product (stacked weights, chosen by row).
        convolves: Whether it is a convolution; its weight is always operand 1.
    """

    params: dict[str, Any]
    weight: int
    dim: int
    out: int
    groups: Any = None
    convolves: bool = False

    def __call__(self, x: Any, w: Any) -> Any:
        """The product; `x` is the activation, wherever it stands in the equation."""
        if self.convolves:
            return jax.lax.conv_general_dilated_p.bind(x, w, **self.params)
        if self.groups is not None:
            return jax.lax.ragged_dot_general(x, w, self.groups, **self.params)
        return jax.lax.dot_general(*((w, x) if self.weight == 0 else (x, w)), **self.params)

    def wider(self) -> "WeightProduct":
        """The same product by a weight whose dim became three: (units, copies, rest)."""
        summed, batch = self.params["dimension_numbers"]
        moved = (
            tuple(
                tuple(d + 2 * (d > self.dim) if side == self.weight else d for d in dims)
                for side, dims in enumerate(summed)
            ),
            tuple(
                tuple(d + 2 * (d > self.dim) if side == self.weight else d for d in dims)
                for side, dims in enumerate(batch)
            ),
        )
        return dataclasses.replace(self, params={**self.params, "dimension_numbers": moved})


def product_at(
    params: dict[str, Any], ranks: Sequence[int], weight: int, dim: int, groups: Any = None
) -> WeightProduct | None:
    """The product seen from a free dim of its weight; None if that dim is summed or paired off.

    Args:
        params: Of a `dot_general` or a `ragged_dot_general`.
        ranks: Number of dims of both operands.
        weight: Which operand is the weight.
        dim: Its dim.
        groups: As in `WeightProduct`.
    """
    stacked: Sequence[int] = ()
    if groups is None:
        summed, batch = params["dimension_numbers"]
    else:
        numbers = params["ragged_dot_dimension_numbers"]
        summed, batch = numbers.dot_dimension_numbers
        stacked = numbers.rhs_group_dimensions
    free = [
        [
            d
            for d in range(rank)
            if d not in summed[side] and d not in batch[side] and not (side and d in stacked)
        ]
        for side, rank in enumerate(ranks)
    ]
    if dim not in free[weight]:
        return None
    before = len(batch[0]) + (len(free[0]) if weight == 1 else 0)
    return WeightProduct(params, weight, dim, before + free[weight].index(dim), groups)


def convolution_at(params: dict[str, Any], weight: int, dim: int) -> WeightProduct | None:
    """The product of a convolution seen from its kernel's output channels; None from elsewhere.

    Args:
        params: Of a `conv_general_dilated`.
        weight: Which operand is the kernel.
        dim: The kernel's dim.
    """
    numbers = params["dimension_numbers"]
    grouped = params["feature_group_count"] > 1 or params["batch_group_count"] > 1
    if weight != 1 or grouped or dim != numbers.rhs_spec[0]:
        return None
    return WeightProduct(params, weight, dim, numbers.out_spec[1], convolves=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3, 4, 5))
def shared(
    product: WeightProduct,
    place: Place,
    units: int,
    copies: int,
    axes: tuple[str, ...],
    copy_axes: tuple[str, ...],
    x: Any,
    w: Any,
) -> Any:
    """A product by a weight of which several devices hold a copy: fewer key heads than devices.

    Forward it is the plain product. Backward, the copies' cotangents of `x` are taken apart, one
    part of each copy, so that they are partial sums over all of the tensor axis like the query's:
    XLA then adds them before one all-reduce. Left alone it runs a further all-reduce of the entire
    residual stream (5 a layer instead of 4 on 8 H100 with 4 kv heads), and what is left here are
    two reductions of the small key and value cotangents.

    Args:
        product: The product.
        place: Puts constraints.
        units: Units of the weight's dim, one or more per device of `axes`.
        copies: Devices that hold the same units.
        axes: Tensor axes that split the units.
        copy_axes: Tensor axes along which they are copied.
        x: The activation.
        w: The weight.
    """
    del place, units, copies, axes, copy_axes
    return product(x, w)


def _shared_forward(
    product: WeightProduct,
    place: Place,
    units: int,
    copies: int,
    axes: tuple[str, ...],
    copy_axes: tuple[str, ...],
    x: Any,
    w: Any,
) -> tuple[Any, tuple[Any, Any]]:
    del place, units, copies, axes, copy_axes
    return product(x, w), (x, w)


def _shared_backward(
    product: WeightProduct,
    place: Place,
    units: int,
    copies: int,
    axes: tuple[str, ...],
    copy_axes: tuple[str, ...],
    kept: tuple[Any, Any],
    cotangent: Any,
) -> tuple[Any, Any]:
    x, w = kept
    (d_w,) = jax.vjp(lambda w: product(x, w), w)[1](cotangent)

    def apart(array: Any, dim: int) -> Any:
        shape = array.shape
        wide = (*shape[:dim], units, 1, shape[dim] // units, *shape[dim + 1 :])
        many = (*shape[:dim], units, copies, shape[dim] // units, *shape[dim + 1 :])
        array = jnp.broadcast_to(array.reshape(wide), many)
        return place(array, {dim: axes, dim + 1: copy_axes})

    # Copies are powers of primes of the axis; for the usual powers of two the division is exact.
    parts = apart(cotangent / copies, product.out).astype(cotangent.dtype)
    wide_w = apart(w, product.dim)
    (d_x,) = jax.vjp(lambda x: product.wider()(x, wide_w), x)[1](parts)
    return d_x, d_w


shared.defvjp(_shared_forward, _shared_backward)


def widest(
    analysis: Analysis, plan: Plan, leads: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, ...]]:
    """Group -> the tensor axes that its widest member is split over."""
    found: dict[str, tuple[str, ...]] = {}
    for finding in analysis.findings.values():
        if finding.group in leads and finding.dim is not None and not finding.pieces:
            axes = plan.axes_for(finding.units)
            found[finding.group] = max(found.get(finding.group, ()), axes, key=len)
    return found
