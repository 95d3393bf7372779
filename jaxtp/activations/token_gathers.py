"""What needs all tokens of a sequence in one place, and so is gathered from devices along cp.

XLA keeps the numbers right and says nothing. Shifts, flips, paddings and slices are not here: XLA
exchanges their edges, or permutes. Nor are arrays no wider than token ids.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.extend.core import Literal

from jaxtp.activations.sequences import Sequences
from jaxtp.activations.windows import window_of
from jaxtp.rules.jaxpr import Analysis
from jaxtp.rules.jaxpr.control import MIXING
from jaxtp.rules.jaxpr.walk import UNKNOWN, Kind, Scope, Value, shape_of, where

Dims = Sequence[int]


def gathers_of_tokens(analysis: Analysis, sequences: Sequences) -> dict[int, str]:
    """Equation id -> what is gathered there, where, and how many bytes of one row it is."""
    if not sequences.axes:
        return {}
    found: dict[int, str] = {}
    for scope, equation, line in _equations(analysis.scope):
        name = equation.primitive.name
        dims_of = _WHOLE.get(name, _every_dim if name in MIXING else None)
        for number, var in enumerate(equation.invars):
            value = None if isinstance(var, Literal) else scope.values.get(var)
            if value is None or value.kind is not Kind.ACTIVATION or not _is_wide(value, sequences):
                continue
            dims = (
                dims_of(equation, number) if dims_of else _merged(scope, equation, value, sequences)
            )
            window = window_of(scope, equation, sequences)
            if window is not None and window.edges is None:
                dims = (window.source,) if number < window.operands else ()
            if any(sequences.axes_of(value.dims[dim]) for dim in dims):
                size = math.prod(value.shape) * value.aval.dtype.itemsize
                text = f"`{name}` at {line or UNKNOWN}"
                found[id(equation)] = f"{text}: it gathers {size:,} bytes of all tokens over cp"
                break
    return found


def _equations(scope: Scope, outer: str = "") -> Iterator[tuple[Scope, Any, str]]:
    """All equations, the scopes that they are in, and the user's lines."""
    for position, equation in enumerate(scope.jaxpr.eqns):
        line = where(equation) or outer
        yield scope, equation, line
        for inner in scope.calls.get(position, ()):
            yield from _equations(inner, line)


def _is_wide(value: Value, sequences: Sequences) -> bool:
    """Whether a value has more than one number for each token."""
    return any(dim and not sequences.is_position(dim) for dim in value.dims)


def _every_dim(equation: Any, number: int) -> Dims:
    return range(len(shape_of(equation.invars[number].aval)))


def _axis(equation: Any, number: int) -> Dims:
    params = equation.params
    rank = len(shape_of(equation.invars[number].aval))
    axis = params.get("axis", params.get("dimension", params.get("reduction_dimension", -1)))
    return (axis % rank,)


def _last_dims(equation: Any, number: int) -> Dims:
    rank = len(shape_of(equation.invars[number].aval))
    return range(rank - len(equation.params["fft_lengths"]), rank)


def _scanned(equation: Any, number: int) -> Dims:
    """A recurrence along the tokens: all devices run all of its steps."""
    body = equation.params["jaxpr"]
    inner = getattr(body, "jaxpr", body).invars[number].aval
    return (0,) if len(shape_of(inner)) < len(shape_of(equation.invars[number].aval)) else ()


def _partly(sizes: Dims, equation: Any, number: int) -> Dims:
    shape = shape_of(equation.invars[number].aval)
    whole = len(sizes) != len(shape) or number > 0
    return () if whole else [d for d, size in enumerate(sizes) if size != shape[d]]


def _sliced(equation: Any, number: int) -> Dims:
    return _partly(equation.params["slice_sizes"], equation, number)


def _written(equation: Any, number: int) -> Dims:
    return _partly(shape_of(equation.invars[1].aval), equation, number)


def _picked(equation: Any, number: int) -> Dims:
    gone = equation.params["dimension_numbers"].operand_batching_dims
    return [d for d in _sliced(equation, number) if d not in gone]


def _strided(equation: Any, number: int) -> Dims:
    return [d for d, step in enumerate(equation.params["strides"] or ()) if step != 1]


_BY_NAMES: Mapping[str, Callable[[Any, int], Dims]] = {
    "cumsum cumprod cummax cummin cumlogsumexp sort top_k approx_top_k": _axis,
    "fft": _last_dims,
    "scan": _scanned,
    "dynamic_slice": _sliced,
    "dynamic_update_slice": _written,
    "gather": _picked,
    "slice": _strided,
}
_WHOLE = {name: dims for names, dims in _BY_NAMES.items() for name in names.split()}


def _merged(scope: Scope, equation: Any, value: Value, sequences: Sequences) -> Dims:
    """Tokens that a reshape puts behind rows of a batch: shards of both are not contiguous."""
    result = scope.values.get(equation.outvars[0])
    if equation.primitive.name != "reshape" or result is None:
        return ()
    merges = any(map(sequences.is_behind_rows, result.dims))
    before = any(map(sequences.is_behind_rows, value.dims))
    return range(len(value.dims)) if merges and not before else ()
