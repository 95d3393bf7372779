"""What products, convolutions and lookups do to dims: handlers that give evidence about weights."""

from collections.abc import Sequence
from typing import Any

from jaxtp.rules.jaxpr.classes import Dim, Dims
from jaxtp.rules.jaxpr.records import Contraction, Lookup, Mixing, Whole
from jaxtp.rules.jaxpr.shapes import needs_whole
from jaxtp.rules.jaxpr.walk import Kind, Result, Value, Walk, shape_of


def _pick(dims: Dims, axes: Sequence[int]) -> Dims:
    return tuple(dims[i] for i in axes)


def _rest(dims: Dims, *used: Sequence[int]) -> Dims:
    gone = {i for axes in used for i in axes}
    return tuple(dim for i, dim in enumerate(dims) if i not in gone)


def multiply(
    walk: Walk,
    equation: Any,
    sides: Sequence[Value],
    summed: Dims,
    free: tuple[Dims, Dims],
    batch: Dims,
    dims: Dims,
    *,
    ragged: bool = False,
) -> Value:
    """The result of a product that sums over dims, with the fact it stands for.

    Args:
        walk: The walker.
        equation: The equation.
        sides: The two operands.
        summed: The dims summed over.
        free: The free dims of each side.
        batch: The dims of the weight that pair off, or that are chosen by group.
        dims: The dims of the result.
        ragged: See `Contraction`.
    """
    aval = equation.outvars[0].aval
    kinds = [side.kind for side in sides]
    if _only_scales(sides, summed, free):
        return walk.derive(aval, dims, sides, elementwise=True, path="")
    if Kind.ACTIVATION not in kinds:
        # Learned queries meet their projection: either side may be the kernel, and both are told.
        pairs = zip(sides, free, reversed(sides), reversed(free), strict=True)
        for side, own, other, rows in pairs:
            if other.kind is Kind.PARAMETER:
                walk.facts.append(Contraction(side.path, summed, own, (), rows, equation))
        return walk.derive(aval, dims, sides, path="")
    weight = kinds.index(Kind.PARAMETER) if Kind.PARAMETER in kinds else None
    if weight is None or (batch and not sides[weight].path):
        scores = (sides[0].scores, sides[1].scores)
        fixed = (kinds[0] is Kind.CONSTANT, kinds[1] is Kind.CONSTANT)
        walk.facts.append(Mixing(summed, free, batch, scores, fixed, equation))
        again = any(scores) if any(fixed) else not any(scores)
        return walk.derive(aval, dims, sides, scores=again)
    path, value = sides[weight].path, sides[1 - weight]
    if value.one_hot:
        return _look_up(walk, equation, sides[weight], value, sum(summed, ()), free[weight], dims)
    source = _source(value)
    fact = Contraction(
        path,
        summed,
        free[weight],
        batch,
        free[1 - weight],
        equation,
        ragged=ragged,
        source=source.order,
        before=source.product,
    )
    walk.facts.append(fact)
    return walk.derive(aval, dims, sides, kernel=True, scores=False, product=fact)


def _source(value: Value) -> Value:
    """What a value is up to elementwise steps on it alone: casts, a scale, dropout."""
    while value.elementwise and value.product is None and len(set(value.parents)) == 1:
        value = value.parents[0]
    return value


def _only_scales(sides: Sequence[Value], summed: Dims, free: tuple[Dims, Dims]) -> bool:
    """Whether a product multiplies numbers and adds none: `einsum("bt,btf->btf", gate, x)`.

    Written as a multiplication it would be elementwise, and no evidence either. An outer product
    with a weight sums nothing too, but it produces the weight's width.
    """
    produces = any(
        side.kind is Kind.PARAMETER and any(own) for side, own in zip(sides, free, strict=True)
    )
    return not summed and not produces


def dot_general(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Batch and summed dims unify, free dims pass: batch, left free, right free."""
    (sum_l, sum_r), (batch_l, batch_r) = equation.params["dimension_numbers"]
    left, right = inputs
    for one, two in zip((*sum_l, *batch_l), (*sum_r, *batch_r), strict=True):
        walk.classes.unify(left.dims[one], right.dims[two])
    batch = _pick(left.dims, batch_l)
    free = _rest(left.dims, sum_l, batch_l), _rest(right.dims, sum_r, batch_r)
    summed = _pick(left.dims, sum_l)
    return [multiply(walk, equation, inputs, summed, free, batch, batch + free[0] + free[1])]


def ragged_dot_general(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """A product whose rows pick one of several stacked weights: the group dim is the expert dim."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (sum_l, sum_r), (batch_l, batch_r) = numbers.dot_dimension_numbers
    groups = numbers.rhs_group_dimensions
    left, right, sizes = inputs[:3]
    if not groups or set(numbers.lhs_ragged_dimensions) & set(sum_l):
        return [*walk.give_up(equation, inputs, "groups are summed over")]
    for one, two in zip((*sum_l, *batch_l), (*sum_r, *batch_r), strict=True):
        walk.classes.unify(left.dims[one], right.dims[two])
    walk.classes.unify(sizes.dims[-1], right.dims[groups[0]])
    batch = _pick(left.dims, batch_l)
    free = _rest(left.dims, sum_l, batch_l), _rest(right.dims, sum_r, batch_r, groups)
    stacked = batch + _pick(right.dims, groups)
    summed, dims = _pick(left.dims, sum_l), batch + free[0] + free[1]
    sides = (left, right)
    return [multiply(walk, equation, sides, summed, free, stacked, dims, ragged=True)]


def convolution(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """A product by channels: a kernel sums over its inputs and produces its outputs.

    What it sums over positions as well changes nothing for channels. Positions pass where the
    window is 1 and its stride is 1. A depthwise convolution is elementwise in its channels; one
    of wider groups needs the channels of a group in one place, and its groups may be split.
    """
    params, (image, kernel) = equation.params, inputs
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    if params["batch_group_count"] != 1:
        return [*walk.give_up(equation, inputs, "batches are grouped")]
    (batch, feature, *space), (out, inner, *window) = numbers.lhs_spec, numbers.rhs_spec
    align = walk.classes.align
    group_in, features = align((image.dims[feature],), (groups, image.shape[feature] // groups))
    group_out, result = align((kernel.dims[out],), (groups, kernel.shape[out] // groups))
    walk.classes.unify(group_in, group_out)
    walk.classes.unify(features, kernel.dims[inner])
    aval = equation.outvars[0].aval
    dims: list[Dim] = [()] * len(image.dims)
    plain = [
        kernel.shape[w] == step == 1
        for w, step in zip(window, params["window_strides"], strict=True)
    ]
    for source, target, same in zip(space, numbers.out_spec[2:], plain, strict=True):
        dims[target] = image.dims[source] if same else walk.classes.fresh(aval.shape[target])
    dims[numbers.out_spec[0]] = image.dims[batch]
    dims[numbers.out_spec[1]] = kernel.dims[out]
    if groups == 1 or all(plain):
        free = ((image.dims[batch], *_pick(image.dims, space)), (result,))
        return [multiply(walk, equation, inputs, (features,), free, (group_out,), tuple(dims))]
    walk.facts += [Whole(dim, "conv", equation, kernel.path) for dim in (features, result) if dim]
    return [walk.derive(aval, tuple(dims), inputs, kernel=True, scores=False)]


def gather(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """Rows picked by index: token tables, position tables, experts, entries of an activation."""
    (table, index), numbers = inputs, equation.params["dimension_numbers"]
    sizes, aval = equation.params["slice_sizes"], equation.outvars[0].aval
    picked, paired = numbers.collapsed_slice_dims, numbers.operand_batching_dims
    for one, two in zip(paired, numbers.start_indices_batching_dims, strict=True):
        walk.classes.unify(table.dims[one], index.dims[two])
    kept = [i for i in range(len(sizes)) if i not in picked and i not in paired]
    features = [
        table.dims[i] if sizes[i] == table.shape[i] else walk.classes.fresh(sizes[i]) for i in kept
    ]
    row, entries = iter(features), iter(index.dims[:-1])
    dims = tuple(
        next(row) if i in numbers.offset_dims else next(entries) for i in range(len(aval.shape))
    )
    if table.kind is not Kind.PARAMETER:
        needs_whole(
            walk, equation, table, [i for i in range(len(sizes)) if sizes[i] != table.shape[i]]
        )
        return [walk.derive(aval, dims, inputs)]
    rows = tuple(atom for i in picked for atom in table.dims[i])
    return [_look_up(walk, equation, table, index, rows, tuple(features), dims)]


def _look_up(
    walk: Walk, equation: Any, table: Value, index: Value, rows: Dim, features: Dims, dims: Dims
) -> Value:
    """Rows of a parameter picked by an index, or by a product with its one-hot form."""
    aval, kind = equation.outvars[0].aval, "computed"
    if index.index:
        walk.pick(index.index, rows)
        matrices = sum(1 for dim in features if dim) > 1 and any(index.dims)
        kind = "tokens" if index.index.tokens else "experts" if matrices else kind
    walk.facts.append(Lookup(table.path, rows, features, kind, equation))
    if kind == "experts":
        # One matrix per token: it is still a weight for the product that follows.
        return walk.new(aval, Kind.PARAMETER, dims, path=table.path)
    return walk.derive(aval, dims, (table, index))


def scatter(walk: Walk, equation: Any, inputs: Sequence[Value]) -> list[Result]:
    """The operand's dims; what is written lies on it where the sizes agree."""
    (target, index, update), numbers = inputs, equation.params["dimension_numbers"]
    hidden = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    windows = [i for i in range(len(target.dims)) if i not in hidden]
    for one, two in zip(windows, numbers.update_window_dims, strict=True):
        if target.shape[one] == update.shape[two]:
            walk.classes.unify(target.dims[one], update.dims[two])
    entries = [i for i in range(len(update.dims)) if i not in numbers.update_window_dims]
    for one, two in zip(entries, index.dims[:-1], strict=True):
        walk.classes.unify(update.dims[one], two)
    for one, two in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        walk.classes.unify(target.dims[one], index.dims[two])
    return [walk.derive(equation.outvars[0].aval, target.dims, inputs)]


def attention(
    walk: Walk, equation: Any, inputs: Sequence[Value], signature: str
) -> list[Result] | None:
    """A kernel call whose signature is declared; None if the operands do not fit it.

    The signature names the dims of query, key, value, further operands and result, e.g.
    "bthd,bskd,bskv,bhts->bthv". Equal letters are one dim; `k` (kv heads) divides `h` (query heads)
    and is its major factor. Further operands (a score bias) count if they fit up to sizes of 1.
    """
    terms, _, result = signature.partition("->")
    letters: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    names = terms.split(",")
    for place, (name, value) in enumerate(zip(names, inputs, strict=False)):
        known = [sizes.get(letter, size) for letter, size in zip(name, value.shape, strict=False)]
        fits = len(name) == len(value.shape) and all(
            size == own or (place > 2 and own == 1)
            for size, own in zip(known, value.shape, strict=True)
        )
        if not fits and place < 3:
            return None
        for letter, dim, size in zip(name, value.dims, known, strict=False) if fits else ():
            sizes[letter] = size
            letters[letter] = walk.classes.meet(letters.get(letter, ()), dim)
    shape = shape_of(equation.outvars[0].aval)
    if tuple(sizes[c] for c in result) != shape or sizes["h"] % sizes.get("k", 1):
        return None
    if "k" in sizes:
        groups = (sizes["k"], sizes["h"] // sizes["k"])
        walk.classes.unify(walk.classes.align((letters["h"],), groups)[0], letters["k"])
    query, key, value = names[:3]
    width = tuple(letters[c] for c in query if c in key and c not in result)
    positions = tuple(letters[c] for c in key if c in value and c not in query and c != "k")
    free = tuple(letters[c] for c in value if c not in key)
    heads = tuple(letters[c] for c in query if c in result and c not in key)
    plain = (False, False)
    walk.facts.append(Mixing(width, ((), ()), heads, plain, plain, equation))
    walk.facts.append(Mixing(positions, ((), free), heads, (True, False), plain, equation))
    others = [walk.classes.fresh_dims(shape_of(var.aval)) for var in equation.outvars[1:]]
    return [tuple(letters[c] for c in result), *others]
