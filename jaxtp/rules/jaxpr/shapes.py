"""What shape operations do to dims: handlers that move, drop, repeat or reduce elements."""

from collections.abc import Sequence
from typing import Any

from jaxtp.rules.jaxpr.classes import Dim, Dims
from jaxtp.rules.jaxpr.records import Reduction, Whole
from jaxtp.rules.jaxpr.walk import Index, Result, Value, Walk, shape_of


def needs_whole(walk: Walk, equation: Any, value: Value, axes: Sequence[int]) -> None:
    """Records that an equation needs all of some dims of `value` in one place."""
    for axis in axes:
        if value.dims[axis]:
            walk.facts.append(Whole(value.dims[axis], equation.primitive.name, equation))


def keep_where_equal(walk: Walk, equation: Any, value: Value, result: int = 0) -> Dims:
    """The operand's dims where the result has the same size, fresh ones elsewhere."""
    shape = shape_of(equation.outvars[result].aval)
    return tuple(
        dim if size == new else walk.classes.fresh(new)
        for dim, size, new in zip(value.dims, value.shape, shape, strict=True)
    )


def identity(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Each result has the dims of the operand in its place."""
    return [
        walk.derive(var.aval, value.dims, [value], view=True, elementwise=True)
        for var, value in zip(equation.outvars, inputs, strict=True)
    ]


def reshape(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Regroups factors; splitting a dim refines its atoms wherever they occur."""
    order = equation.params.get("dimensions") or range(len(inputs[0].dims))
    dims = tuple(inputs[0].dims[i] for i in order)
    return [walk.classes.align(dims, equation.params["new_sizes"])]


def transpose(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Permutes dims."""
    return [tuple(inputs[0].dims[i] for i in equation.params["permutation"])]


def broadcast_in_dim(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Dims that are new, or grow from size 1, are fresh."""
    shape = equation.params["shape"]
    dims = list(walk.classes.fresh_dims(shape))
    for source, target in enumerate(equation.params["broadcast_dimensions"]):
        if inputs[0].shape[source] == shape[target]:
            dims[target] = inputs[0].dims[source]
    return [tuple(dims)]


def squeeze(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Drops dims of size 1."""
    gone = equation.params["dimensions"]
    return [tuple(dim for i, dim in enumerate(inputs[0].dims) if i not in gone)]


def tile(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """The repeats are the major factor of each dim."""
    reps = equation.params["reps"]
    return [tuple(walk.classes.fresh(n) + dim for n, dim in zip(reps, inputs[0].dims, strict=True))]


def slice_(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Contiguous slices are cuts; one of every k elements is the major factor of n x k."""
    params, value = equation.params, inputs[0]
    strides = params["strides"] or (1,) * len(value.dims)
    shape = shape_of(equation.outvars[0].aval)
    dims: list[Dim] = []
    for axis, (dim, step, new) in enumerate(zip(value.dims, strides, shape, strict=True)):
        start, stop = params["start_indices"][axis], params["limit_indices"][axis]
        if step == 1:
            dims.append(walk.classes.cut(dim, start, stop))
        elif new * step == value.shape[axis]:  # interleaved pieces, such as gate and up
            taken, skipped = walk.classes.align((dim,), (new, step))
            walk.facts.append(Whole(skipped, equation.primitive.name, equation))
            dims.append(taken)
        else:
            needs_whole(walk, equation, value, [axis])
            dims.append(walk.classes.fresh(new))
    return [tuple(dims)]


def _cuts(walk: Walk, value: Value, axis: int, sizes: Sequence[int]) -> list[Dims]:
    """The dims of consecutive slices along one axis."""
    pieces: list[Dims] = []
    start = 0
    for size in sizes:
        cut = walk.classes.cut(value.dims[axis], start, start + int(size))
        pieces.append(value.dims[:axis] + (cut,) + value.dims[axis + 1 :])
        start += int(size)
    return pieces


def split(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Consecutive slices along one axis."""
    return [*_cuts(walk, inputs[0], equation.params["axis"], equation.params["sizes"])]


def unstack(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """One slice of width 1 per index, without the axis."""
    axis = equation.params["axis"]
    pieces = _cuts(walk, inputs[0], axis, (1,) * inputs[0].shape[axis])
    return [dims[:axis] + dims[axis + 1 :] for dims in pieces]


def _merge(walk: Walk, inputs: Sequence[Value], skip: int | None) -> list[Any]:
    """The dims that several operands share, except along `skip`."""
    dims = list(inputs[0].dims)
    for value in inputs[1:]:
        for i, dim in enumerate(value.dims):
            if i != skip:
                dims[i] = walk.classes.meet(dims[i], dim)
    return dims


def concatenate(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """The joined dim is a new one, cut into the operands' dims."""
    axis = equation.params["dimension"]
    dims = _merge(walk, inputs, axis)
    dims[axis] = walk.classes.join([v.dims[axis] for v in inputs], [v.shape[axis] for v in inputs])
    return [tuple(dims)]


def stack(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """A new dim whose elements are the operands."""
    axis = equation.params["axis"]
    dims = _merge(walk, inputs, None)
    return [(*dims[:axis], walk.classes.join([()] * len(inputs), [1] * len(inputs)), *dims[axis:])]


def pad(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """A padded dim holds the old one as a piece; a cropped one is a piece of the old one."""
    value, dims = inputs[0], list[Any]()
    config = equation.params["padding_config"]
    needs_whole(walk, equation, value, [i for i, edges in enumerate(config) if any(edges)])
    for dim, size, (low, high, inner) in zip(value.dims, value.shape, config, strict=True):
        if inner or not size:
            dims.append(walk.classes.fresh(shape_of(equation.outvars[0].aval)[len(dims)]))
            continue
        kept = walk.classes.cut(dim, max(-low, 0), size + min(high, 0))
        edges = (max(low, 0), size + min(low, 0) + min(high, 0), max(high, 0))
        ends = walk.classes.fresh(edges[0]), walk.classes.fresh(edges[2])
        grows = edges[0] or edges[2]
        dims.append(walk.classes.join((ends[0], kept, ends[1]), edges) if grows else kept)
    return [tuple(dims)]


def reverse(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Same dims; all of the reversed ones is needed."""
    needs_whole(walk, equation, inputs[0], equation.params["dimensions"])
    return [inputs[0].dims]


def dynamic_slice(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Full dims pass; partial ones are needed entirely, and fresh. A slice of a weight is one."""
    value, sizes = inputs[0], equation.params["slice_sizes"]
    partial = [i for i, (a, b) in enumerate(zip(value.shape, sizes, strict=True)) if a != b]
    needs_whole(walk, equation, value, partial)
    dims = keep_where_equal(walk, equation, value)
    return [walk.derive(equation.outvars[0].aval, dims, [value], view=True)]


def dynamic_update_slice(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """The operand's dims; an update as wide as the operand lies exactly on it."""
    value, update = inputs[:2]
    for i, (size, new) in enumerate(zip(value.shape, update.shape, strict=True)):
        if size == new:
            walk.classes.unify(value.dims[i], update.dims[i])
    return [value.dims]


def reduce(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Dims]:
    """Drops the reduced dims; operands of one reduction share theirs."""
    params = equation.params
    axes = params["axes"] if "axes" in params else params["dimensions"]
    arrays = inputs[: len(equation.outvars)]
    dims = _merge(walk, arrays, None)
    kept = tuple(dim for i, dim in enumerate(dims) if i not in axes)
    gone = tuple(dim for i, dim in enumerate(dims) if i in axes)
    if any(gone) and any(kept):
        walk.facts.append(Reduction(gone, kept, equation))
    return [kept for _ in equation.outvars]


def argument(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """The position of an extreme: an index into the reduced dim."""
    (dims,) = reduce(walk, equation, inputs)
    rows = tuple(atom for axis in equation.params["axes"] for atom in inputs[0].dims[axis])
    return [walk.derive(equation.outvars[0].aval, dims, inputs, index=Index(rows))]


def cumulative(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Same dims; all of the scanned one is needed."""
    needs_whole(walk, equation, inputs[0], [equation.params["axis"]])
    return [inputs[0].dims]


def sort(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Operands are sorted together; all of the sorted dim is needed."""
    dims = tuple(_merge(walk, inputs, None))
    needs_whole(walk, equation, inputs[0], [equation.params["dimension"]])
    return [dims for _ in inputs]


def top_k(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Values and indices; the selected dim is fresh and all of its source is needed."""
    value, params = inputs[0], equation.params
    axis = params.get("reduction_dimension", params.get("axis", -1)) % len(value.dims)
    needs_whole(walk, equation, value, [axis])
    size = shape_of(equation.outvars[0].aval)[axis]
    dims = value.dims[:axis] + (walk.classes.fresh(size),) + value.dims[axis + 1 :]
    values, chosen = (var.aval for var in equation.outvars)
    index = walk.derive(chosen, dims, inputs, index=Index(value.dims[axis]))
    return [walk.derive(values, dims, inputs), index]


def window(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Pooling: dims with a window of 1 and no stride pass, others are fresh."""
    value, params = inputs[0], equation.params
    shape = shape_of(equation.outvars[0].aval)
    strides = params.get("window_strides", (1,) * len(shape))
    sizes = zip(params["window_dimensions"], strides, strict=True)
    return [
        tuple(
            value.dims[i] if size == step == 1 else walk.classes.fresh(shape[i])
            for i, (size, step) in enumerate(sizes)
        )
        for _ in equation.outvars
    ]


def fourier(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """All of the transformed dims is needed; a real transform changes the last one's size."""
    lengths = equation.params["fft_lengths"]
    rank = len(inputs[0].dims)
    needs_whole(walk, equation, inputs[0], range(rank - len(lengths), rank))
    return [keep_where_equal(walk, equation, inputs[0])]


def random(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Random numbers have nothing to do with the dims, or with the parameter, of their key."""
    return [
        walk.derive(var.aval, walk.classes.fresh_dims(shape_of(var.aval)), inputs, path="")
        for var in equation.outvars
    ]
