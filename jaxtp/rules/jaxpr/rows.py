"""Where the batch lies in the results of single equations that treat every row of it alone."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxtp.rules.jaxpr.primitives import ELEMENTWISE


@dataclasses.dataclass(frozen=True, slots=True)
class Lies:
    """Where the batch lies in an array: it leads in this dim.

    Attributes:
        dim: Which.
        inner: Elements of the dim for each row of the batch.
    """

    dim: int
    inner: int = 1


class MixesBatch(Exception):
    """An equation inside of a program mixes the batch; carries the reason."""


def lies_in_results(
    one: Any, two: Any, operands: list[Lies | None], dims: list[int | None], rows: int
) -> list[Lies | None]:
    """Where the batch lies in the results of an equation that holds no program.

    Args:
        one: The equation on half of the batch, or another part.
        two: The same on the whole.
        operands: Where it lies in the operands.
        dims: The dim of each result that depends on the size of the batch.
        rows: Of the whole batch.

    Raises:
        MixesBatch: If the equation is not known to treat every row alone.
    """
    name = one.primitive.name
    if name in ELEMENTWISE:
        return _alike(two, operands)
    if name in RULES:
        return [RULES[name](one, two, operands, dims[0], rows)] * len(one.outvars)
    if name.startswith("dot_product_attention"):
        if any(lies not in (None, Lies(0)) for lies in operands):
            raise MixesBatch("the batch does not lead")
        return [None if dim is None else Lies(0) for dim in dims]
    raise MixesBatch("not known to treat rows alone")


def _alike(whole: Any, operands: list[Lies | None]) -> list[Lies | None]:
    """Position by position; `optimization_barrier` has as many results as operands."""
    if whole.primitive.name == "optimization_barrier":
        return list(operands)
    (known,) = found if len(found := {lies for lies in operands if lies}) == 1 else (None,)
    if known is None:
        raise MixesBatch("rows of the batch meet others")
    for lies, var in zip(operands, whole.invars, strict=True):
        # What is one row, or none, is the same for all.
        if not lies and var.aval.ndim and var.aval.shape[known.dim] != 1:
            raise MixesBatch("rows of the batch meet others")
    return [known]


def _only(operands: list[Lies | None]) -> Lies | None:
    if any(operands[1:]):
        raise MixesBatch("positions that depend on the batch")
    return operands[0]


def _outside(key: str) -> Callable[..., Lies | None]:
    """The dim of the batch is not among those that an equation works along."""

    def rule(one: Any, _two: Any, operands: list[Lies | None], _d: Any, _rows: int) -> Any:
        axes = np.atleast_1d(one.params[key])
        known = {o for o, v in zip(operands, one.invars, strict=True) if o or v.aval.ndim}
        if len(known) != 1 or (lies := next(iter(known))) is None or lies.dim in axes:
            raise MixesBatch("rows of the batch meet")
        is_gone = one.primitive.name.startswith(("reduce", "arg", "squeeze"))
        lost = [axis for axis in axes if axis < lies.dim] if is_gone else []
        return Lies(lies.dim - len(lost), lies.inner)

    return rule


def _reshape(one: Any, two: Any, operands: list[Lies | None], dim: int | None, rows: int) -> Any:
    lies = operands[0]
    if lies is None or dim is None or one.params.get("dimensions") is not None:
        raise MixesBatch("rows of the batch meet")
    before, after = two.invars[0].aval.shape, two.outvars[0].aval.shape
    if not math.prod(after):
        raise MixesBatch("an array without elements")
    stride = lies.inner * math.prod(before[lies.dim + 1 :])
    inner, rest = divmod(stride, math.prod(after[dim + 1 :]))
    if rest or not inner or after[dim] != rows * inner:
        raise MixesBatch("the batch does not lead in its dim")
    return Lies(dim, inner)


def _broadcast(one: Any, two: Any, operands: list[Lies | None], dim: int | None, _rows: int) -> Any:
    lies = operands[0]
    if lies is None:
        along = one.params["broadcast_dimensions"]
        if dim in along and two.invars[0].aval.shape[along.index(dim)] != 1:
            raise MixesBatch("rows of the batch meet others")
        return None if dim is None else Lies(dim, two.outvars[0].aval.shape[dim] // _rows)
    return Lies(one.params["broadcast_dimensions"][lies.dim], lies.inner)


def _iota(one: Any, two: Any, _operands: Any, dim: int | None, rows: int) -> Any:
    if dim == one.params["dimension"] or dim is None:
        raise MixesBatch("rows are numbered")
    return Lies(dim, two.outvars[0].aval.shape[dim] // rows)


def _transpose(one: Any, _two: Any, operands: list[Lies | None], _dim: Any, _rows: int) -> Any:
    lies = operands[0]
    return lies and Lies(tuple(one.params["permutation"]).index(lies.dim), lies.inner)


def _dot(one: Any, _two: Any, operands: list[Lies | None], _dim: Any, _rows: int) -> Any:
    summed, batch = one.params["dimension_numbers"]
    found: list[Lies] = []
    frees = [
        [d for d in range(v.aval.ndim) if d not in summed[i] and d not in batch[i]]
        for i, v in enumerate(one.invars)
    ]
    for side, lies in enumerate(operands):
        if lies is None:
            continue
        if lies.dim in summed[side]:
            raise MixesBatch("a sum over the batch")
        if lies.dim in batch[side]:
            place = tuple(batch[side]).index(lies.dim)
            other = operands[1 - side]
            if other is None or other.inner != lies.inner or batch[1 - side][place] != other.dim:
                raise MixesBatch("rows of the batch meet others")
            found.append(Lies(place, lies.inner))
        else:
            place = len(batch[0]) + side * len(frees[0]) + frees[side].index(lies.dim)
            found.append(Lies(place, lies.inner))
    if len(set(found)) != 1:
        raise MixesBatch("rows of the batch meet")
    return found[0]


def _convolution(one: Any, _two: Any, operands: list[Lies | None], _dim: Any, _rows: int) -> Lies:
    lies, kernel = operands
    numbers = one.params["dimension_numbers"]
    if lies is None or kernel or one.params["batch_group_count"] != 1:
        raise MixesBatch("rows of the batch meet")
    if lies.dim != numbers.lhs_spec[0]:
        raise MixesBatch("rows of the batch meet")
    return Lies(numbers.out_spec[0], lies.inner)


def _window(one: Any, _two: Any, operands: list[Lies | None], _dim: Any, _rows: int) -> Lies:
    lies = _only(operands)
    if (
        lies is None
        or one.params["padding"][lies.dim] != (0, 0)
        or any(
            one.params[name][lies.dim] != 1
            for name in ("window_dimensions", "window_strides", "base_dilation")
        )
    ):
        raise MixesBatch("rows of the batch meet")
    return lies


def _gather(one: Any, two: Any, operands: list[Lies | None], dim: int | None, _rows: int) -> Any:
    numbers: jax.lax.GatherDimensionNumbers = one.params["dimension_numbers"]
    table, index = operands
    batching: tuple[int, ...] = tuple(numbers.operand_batching_dims)
    if index is None or dim is None or dim in numbers.offset_dims:
        raise MixesBatch("rows of the batch are picked")
    if one.params["slice_sizes"] != two.params["slice_sizes"]:
        raise MixesBatch("rows of the batch are picked")
    if table is not None:
        own = tuple(numbers.start_indices_batching_dims)
        if table.dim not in batching or own[batching.index(table.dim)] != index.dim:
            raise MixesBatch("rows of the batch are picked")
        if table.inner != index.inner:
            raise MixesBatch("rows of the batch are picked")
    rest = [d for d in range(one.outvars[0].aval.ndim) if d not in numbers.offset_dims]
    return Lies(rest[index.dim], index.inner)  # the index vector is the last dim


def _slice(one: Any, two: Any, operands: list[Lies | None], _dim: Any, _rows: int) -> Any:
    lies = _only(operands)
    if lies is None:
        raise MixesBatch("rows of the batch are picked")
    taken, steps = one.outvars[0].aval.shape[lies.dim], one.params.get("strides")
    if taken != one.invars[0].aval.shape[lies.dim] or (steps and steps[lies.dim] != 1):
        raise MixesBatch("rows of the batch are picked")
    starts = [list(eqn.params.get("start_indices", ())) for eqn in (one, two)]
    if any(a != b for a, b in zip(*starts, strict=True)):
        raise MixesBatch("a parameter that depends on the size of the batch")
    return lies


def _pad(one: Any, _two: Any, operands: list[Lies | None], _dim: Any, _rows: int) -> Any:
    lies = _only(operands)
    if lies is None or any(one.params["padding_config"][lies.dim]):
        raise MixesBatch("rows are added to the batch")
    return lies


_KEYS = {
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin": "axes",
    "cumsum cumprod cummax cummin cumlogsumexp split top_k": "axis",
    "squeeze rev": "dimensions",
    "concatenate sort": "dimension",
}

RULES: Mapping[str, Callable[..., Lies | None]] = {
    **{name: _outside(key) for names, key in _KEYS.items() for name in names.split()},
    "reshape": _reshape,
    "broadcast_in_dim": _broadcast,
    "iota": _iota,
    "transpose": _transpose,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    **{f"reduce_window_{name}": _window for name in ("max", "min", "sum")},
    "gather": _gather,
    "slice": _slice,
    "dynamic_slice": _slice,
    "pad": _pad,
}
"""Primitive -> where the batch lies in its results; raises `MixesBatch`."""
