"""Grouped convolutions on a batch that devices share, as in Mamba, ConvNeXt and MobileNet.

XLA's partitioner sums the gradient of such a kernel over the whole mesh, also along axes on which
all devices have the same of it: on dp=2 x tp=4 it comes out four times too large. So a device
convolves its own rows in a `shard_map` along the batch axes, and gradients are summed along these.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jax.extend.source_info_util import current_name_stack, user_context
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxtp.rules.jaxpr.reentry import bind, read
from jaxtp.rules.jaxpr.walk import bare

CONVOLUTION = "conv_general_dilated"

Shared = tuple[Sequence[str], int, int]
"""Mesh axes that share a dim, this dim of an operand, and the same dim of the result."""


def convolve(
    equation: Any, operands: Sequence[Any], axes: Sequence[str], mesh: Mesh | AbstractMesh
) -> list[Any]:
    """The results of a grouped convolution, or of the gradient of its kernel, which has one each.

    Args:
        equation: The `conv_general_dilated`. With groups of the batch it is the gradient of a
            kernel: the batch is what both operands are summed over.
        operands: Its operands, global.
        axes: The mesh axes that share the batch; where it does not divide over them, they do not.
        mesh: The mesh.
    """
    numbers = equation.params["dimension_numbers"]
    is_gradient = _is_sum(equation)
    rows = numbers.lhs_spec[1 if is_gradient else 0]
    own = partial(equation.primitive.bind, **equation.params)
    mesh, axes, ways = free_axes(axes, mesh)
    if ways == 1 or operands[0].shape[rows] % ways:
        return [own(*operands)]
    if not is_gradient:
        return [on_own_part(own, operands, [(axes, rows, numbers.out_spec[0])], mesh)]
    parts = jax.shard_map(
        lambda x, y: own(x, y)[None],
        mesh=mesh,
        in_specs=(_spec({rows: axes}), _spec({numbers.rhs_spec[1]: axes})),
        out_specs=_spec({0: axes}),
        axis_names={*axes},
        check_vma=False,
    )
    return [parts(*operands).sum(0)]


def on_own_part(
    own: Callable[..., Any],
    operands: Sequence[Any],
    shared: Sequence[Shared],
    mesh: Mesh | AbstractMesh,
) -> Any:
    """A function of what devices share and of kernels that all have, with right gradients.

    Each device gets a copy of a kernel, so that the sum of their gradients stays outside: XLA's CPU
    compiler ends the process on a sum of bfloat16 inside.

    Args:
        own: `(part of x, *kernels)` -> the same part of the result.
        operands: Global: x and the kernels.
        shared: Which dims of x and of the result.
        mesh: The mesh.
    """
    x, *kernels = operands
    axes = tuple(axis for names, _, _ in shared for axis in names)
    ways = math.prod(mesh.shape[axis] for axis in axes)
    apart = jax.shard_map(
        lambda x, *copies: own(x, *(copy[0] for copy in copies)),
        mesh=mesh,
        in_specs=(
            _spec({dim: names for names, dim, _ in shared}),
            *[_spec({0: axes})] * len(kernels),
        ),
        out_specs=_spec({dim: names for names, _, dim in shared}),
        axis_names={*axes},
        check_vma=False,
    )
    return apart(x, *(jax.numpy.broadcast_to(k[None], (ways, *k.shape)) for k in kernels))


def free_axes(
    axes: Sequence[str], mesh: Mesh | AbstractMesh
) -> tuple[Mesh | AbstractMesh, tuple[str, ...], int]:
    """The mesh here, which of `axes` no `shard_map` around has taken, and their devices."""
    here = jax.sharding.get_abstract_mesh()
    mesh = here if here.manual_axes else mesh
    free = tuple(axis for axis in axes if axis not in here.manual_axes)
    return mesh, free, math.prod(mesh.shape[axis] for axis in free)


def _spec(dims: Mapping[int, Sequence[str]]) -> PartitionSpec:
    return PartitionSpec(*(tuple(dims.get(dim, ())) or None for dim in range(max(dims) + 1)))


def sums_kernels(program: Any) -> bool:
    """Whether a program has the gradient of the kernel of a grouped convolution."""
    return any(
        _is_sum(equation) or any(map(sums_kernels, _programs(equation)))
        for equation in bare(program).eqns
    )


def sums_over_rows(
    fn: Callable[..., Any], axes: Sequence[str], mesh: Mesh | AbstractMesh
) -> Callable[..., Any]:
    """`fn` with the gradients of all kernels of grouped convolutions summed over `axes` alone.

    Args:
        fn: `(static, *arrays)` -> a tree of arrays. It differentiates inside, as a train step does:
            no derivative rule is kept. It is traced once more each time that it is traced.
        axes: The mesh axes that share the batch.
        mesh: The mesh.
    """

    def again(static: Any, *args: Any) -> Any:
        program, shapes = jax.make_jaxpr(partial(fn, static), return_shape=True)(*args)
        results = _run(program, axes, mesh, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return again


def _run(
    program: Any, axes: Sequence[str], mesh: Mesh | AbstractMesh, *args: Any
) -> list[jax.Array]:
    jaxpr = bare(program)
    known = dict(zip(jaxpr.constvars, getattr(program, "consts", ()), strict=True))
    known |= dict(zip(jaxpr.invars, args, strict=True))
    for equation in jaxpr.eqns:
        operands = [read(var, known) for var in equation.invars]
        source = equation.source_info  # reports name the user's line and pass, not ours
        stack = current_name_stack() + source.name_stack
        with user_context(source.traceback, name_stack=stack), equation.ctx.manager:
            if _is_sum(equation):
                results = convolve(equation, operands, axes, mesh)
            else:
                results = bind(_rewritten(equation, axes, mesh), operands)
        known |= dict(zip(equation.outvars, results, strict=True))
    return [read(var, known) for var in jaxpr.outvars]


def _rewritten(equation: Any, axes: Sequence[str], mesh: Mesh | AbstractMesh) -> Any:
    """An equation, with such gradients in its programs, too, summed over `axes` alone."""
    summing = [program for program in _programs(equation) if sums_kernels(program)]

    def again(program: Any) -> Any:
        if not any(program is one for one in summing):
            return program
        shapes = [var.aval for var in bare(program).invars]
        new = jax.make_jaxpr(partial(_run, program, axes, mesh))(*shapes)
        return new if hasattr(program, "jaxpr") else bare(new)  # JAX 0.10 has open ones, too

    def changed(value: Any) -> Any:
        return tuple(map(again, value)) if isinstance(value, tuple) else again(value)

    if not summing:
        return equation
    return equation.replace(params={n: changed(value) for n, value in equation.params.items()})


def _is_sum(equation: Any) -> bool:
    return equation.primitive.name == CONVOLUTION and equation.params["batch_group_count"] > 1


def _programs(equation: Any) -> list[Any]:
    """The programs among an equation's parameters.

    Not those of a `shard_map`: their batch is a device's own, and the gradient that it sums.
    """
    if equation.primitive.name == "shard_map":
        return []
    values = (v if isinstance(v, tuple) else (v,) for v in equation.params.values())
    return [one for value in values for one in value if hasattr(bare(one), "eqns")]
