"""Products by a weight that holds several projections, one after another: one product a piece.

Which constraints do it follows from where `rules.fused` keeps the weight.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.activations.shared_products import Place, WeightProduct
from jaxtp.rules.jaxpr.reentry import read

Cuts = tuple[tuple[int, int], ...]
"""(start, stop) of each piece along a dim, in elements."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pieces:
    """A value whose pieces along one dim were computed apart; joined only if somebody asks.

    Attributes:
        parts: The pieces, in order.
        dim: The dim.
        cuts: Where they are along it.
    """

    parts: tuple[Any, ...]
    dim: int
    cuts: Cuts

    @property
    def size(self) -> int:
        """Elements along the dim."""
        return self.cuts[-1][1]

    def joined(self) -> Any:
        """The value itself."""
        return jnp.concatenate(self.parts, axis=self.dim)


def joined(x: Any) -> Any:
    """A value as one array, if it is in pieces."""
    return x.joined() if isinstance(x, Pieces) else x


def value_of(var: Any, known: Mapping[Any, Any]) -> Any:
    """What a variable or a literal of a jaxpr holds, pieces put together."""
    return joined(read(var, known))


def product_of_piece(
    product: WeightProduct, place: Place, axes: tuple[str, ...], x: Any, w: Any
) -> Any:
    """The product by one piece of a fused weight, sharded along its dim.

    The piece is taken from a weight that is not sharded along this dim. Where it is on every
    device nothing moves forward, and backward the gradients of the pieces are gathered. Where
    another dim is split, each device exchanges its rows of all columns for all rows of its columns
    (an all-to-all), and the gradients go back the same way. The piece is first said to be
    replicated along the dim: otherwise XLA splits the weight before it is sliced, and its gradient
    before it is put together, and permutes both (17 permutes in two layers of GPT-2).
    """
    w = place(place(w, {product.dim: ()}), {product.dim: axes})
    return place(product(x, w), {product.out: axes})


def by_weight(
    product: WeightProduct,
    place: Place,
    ways: Mapping[tuple[int, int], tuple[str, ...]],
    x: Any,
    w: Any,
) -> Pieces:
    """The product by a weight that is replicated, or split along another dim than the fused one.

    Args:
        product: The product; its `dim` holds the pieces.
        place: Puts constraints.
        ways: The pieces, (start, stop), and the tensor axes that each is split over; none for a
            piece that every device needs all of.
        x: The activation.
        w: The weight.
    """
    parts: list[Any] = []
    for cut, axes in ways.items():
        piece = jax.lax.slice_in_dim(w, *cut, axis=product.dim)
        if axes:
            parts.append(product_of_piece(product, place, axes, x, piece))
        else:
            # Of a weight that is split along another dim all of this piece is fetched: it is the
            # small one, and its product would else be a sum over devices.
            piece = place(piece, dict.fromkeys(range(piece.ndim), ()))
            parts.append(place(product(x, piece), {product.out: ()}))
    return Pieces(tuple(parts), product.out, tuple(ways))


def by_result(
    product: WeightProduct,
    place: Place,
    cuts: Cuts,
    axes: tuple[str, ...],
    around: Mapping[int, tuple[str, ...]],
    x: Any,
    w: Any,
) -> Pieces:
    """The product by a weight that is sharded along the fused dim as it lies: its result moves.

    Args:
        product: As in `by_weight`.
        place: As in `by_weight`.
        cuts: As in `by_weight`.
        axes: Tensor axes that the weight, the result and then each piece are split over.
        around: {another dim of the result: axes that split it in between}, which makes both moves
            all-to-alls; without one the result is gathered.
        x: The activation.
        w: The weight.
    """
    dim = product.out
    between = {dim: (), **around}
    result = place(place(product(x, w), {dim: axes}), between)
    pieces = [jax.lax.slice_in_dim(result, *cut, axis=dim) for cut in cuts]
    return Pieces(tuple(place(place(p, between), {dim: axes}) for p in pieces), dim, cuts)


def over_pieces(
    equation: Any, operands: Sequence[Any], place: Place, *, elementwise: bool
) -> list[Any] | None:
    """The results of an equation on fused operands without putting them together, or None.

    What takes the dim apart at the cuts picks pieces; what works on each element, or leaves the
    pieces one after another along one dim, works on each piece.
    """
    name, params = equation.primitive.name, equation.params
    value = next(operand for operand in operands if isinstance(operand, Pieces))
    if name in TAKE_APART:
        return TAKE_APART[name](value, params)
    if name == "pad" and not any(params["padding_config"][value.dim]):
        return [_each(value, lambda part, *_: jax.lax.pad(part, operands[1], **params))]
    # Along another dim these leave the pieces where they are, too.
    along = {"concatenate": "dimension", "cumsum": "axis", "rev": "dimensions"}.get(name)
    beside = along is not None and value.dim not in jax.tree.leaves(params[along])
    if elementwise or beside or name == "convert_element_type":
        return _elementwise(value, equation, operands, place)
    return None


def _each(value: Pieces, fn: Callable[[Any, int, int], Any]) -> Pieces:
    """What a function of a piece and its place makes of each."""
    parts = [fn(part, *cut) for part, cut in zip(value.parts, value.cuts, strict=True)]
    return Pieces(tuple(parts), value.dim, value.cuts)


def depthwise(
    equation: Any, operands: Sequence[Any], run: Callable[[Any, Sequence[Any]], list[Any]]
) -> Pieces | None:
    """A convolution that treats every channel by itself, as the one before a state space does.

    Args:
        equation: The convolution.
        operands: Its operands, of which some are pieces.
        run: `(equation, operands)` -> the results, as `bind` gives them; for each piece.

    Returns:
        Its pieces, or None if it mixes channels.
    """
    params, (value, kernel) = equation.params, operands
    numbers = params["dimension_numbers"]
    if isinstance(kernel, Pieces) or value.dim != numbers.lhs_spec[1]:
        return None
    if not params["feature_group_count"] == value.size == kernel.shape[numbers.rhs_spec[0]]:
        return None

    def convolve(part: Any, start: int, stop: int) -> Any:
        own = jax.lax.slice_in_dim(kernel, start, stop, axis=numbers.rhs_spec[0])
        narrow = equation.replace(params={**params, "feature_group_count": stop - start})
        return run(narrow, (part, own))[0]

    return _each(value, convolve)


def _elementwise(
    value: Pieces, equation: Any, operands: Sequence[Any], place: Place
) -> list[Any] | None:
    params = equation.primitive.get_bind_params(equation.params)
    parts: list[Any] = []
    for index, (start, stop) in enumerate(value.cuts):
        pieces: list[Any] = []
        for operand in operands:
            if isinstance(operand, Pieces):
                if operand.cuts != value.cuts or operand.dim != value.dim:
                    return None
                operand = operand.parts[index]
            elif jnp.ndim(operand) > value.dim and operand.shape[value.dim] == value.size:
                vector = jnp.size(operand) == value.size
                operand = jax.lax.slice_in_dim(operand, start, stop, axis=value.dim)
                # As in `product_of_piece`.
                operand = place(operand, {value.dim: ()}) if vector else operand
            pieces.append(operand)
        parts.append(equation.primitive.bind(*pieces, **params))
    return [Pieces(tuple(parts), value.dim, value.cuts)]


def _between(value: Pieces, start: int, stop: int) -> Any:
    """The pieces from `start` to `stop`: one, several, or None if these are no cuts."""
    inside = [n for n, (a, b) in enumerate(value.cuts) if start <= a and b <= stop]
    if sum(value.cuts[n][1] - value.cuts[n][0] for n in inside) != stop - start:
        return None
    if len(inside) == 1:
        return value.parts[inside[0]]
    cuts = tuple((value.cuts[n][0] - start, value.cuts[n][1] - start) for n in inside)
    return Pieces(tuple(value.parts[n] for n in inside), value.dim, cuts)


def _split(value: Pieces, params: Mapping[str, Any]) -> list[Any] | None:
    if params["axis"] != value.dim:
        return None
    stops = list(itertools.accumulate(map(int, params["sizes"])))
    taken = [_between(value, a, b) for a, b in itertools.pairwise([0, *stops])]
    return None if any(part is None for part in taken) else taken


def _unstack(value: Pieces, params: Mapping[str, Any]) -> list[Any] | None:
    if params["axis"] != value.dim or len(value.cuts) != value.size:
        return None
    return [jax.lax.squeeze(part, (value.dim,)) for part in value.parts]


def _slice(value: Pieces, params: Mapping[str, Any]) -> list[Any] | None:
    starts, stops = list(params["start_indices"]), list(params["limit_indices"])
    steps = list(params["strides"] or (1,) * len(starts))
    if steps[value.dim] != 1:
        return None
    found = _between(value, starts[value.dim], stops[value.dim])
    if found is None:
        return None
    parts: list[Any] = []
    for part in found.parts if isinstance(found, Pieces) else [found]:
        starts[value.dim], stops[value.dim] = 0, part.shape[value.dim]
        parts.append(jax.lax.slice(part, starts, stops, steps))
    if isinstance(found, Pieces):
        return [dataclasses.replace(found, parts=tuple(parts))]
    return parts


def _reshape(value: Pieces, params: Mapping[str, Any]) -> list[Any] | None:
    """The fused dim becomes several, of which the first holds the pieces: (3 x 64) -> (3, 64)."""
    shape, dim = params["new_sizes"], value.dim
    before = value.parts[0].shape[:dim]
    if shape[:dim] != before or len(shape) <= dim or value.size % shape[dim]:
        return None
    step = value.size // shape[dim]
    if any(start % step or stop % step for start, stop in value.cuts):
        return None
    cuts = tuple((start // step, stop // step) for start, stop in value.cuts)
    shapes = [(*before, stop - start, *shape[dim + 1 :]) for start, stop in cuts]
    parts = tuple(p.reshape(own) for p, own in zip(value.parts, shapes, strict=True))
    return [Pieces(parts, dim, cuts)]


def _transpose(value: Pieces, params: Mapping[str, Any]) -> list[Any]:
    order = params["permutation"]
    parts = tuple(jax.lax.transpose(part, order) for part in value.parts)
    return [Pieces(parts, order.index(value.dim), value.cuts)]


TAKE_APART: Mapping[str, Callable[[Pieces, Mapping[str, Any]], list[Any] | None]] = {
    "split": _split,
    "unstack": _unstack,
    "slice": _slice,
    "reshape": _reshape,
    "transpose": _transpose,
}
