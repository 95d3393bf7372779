"""Is it the same function? Sharded against unsharded, a little wider at each step."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, subjaxprs
from jax.sharding import Mesh

from jaxtp.activations.grouped_kernels import sums_kernels, sums_over_rows
from jaxtp.errors import ParityFailed
from jaxtp.errors.arguments import FLAG, FUNCTION, checked
from jaxtp.mesh.axes import MeshShape
from jaxtp.mesh.build import auto_context, auto_mesh, check_devices, make_mesh, plan_mesh
from jaxtp.placement.arrays import shard, shard_batch, unshard
from jaxtp.plan.decisions import Plan
from jaxtp.plan.stored_form import Padding, masks_seen, unpad
from jaxtp.plan.trees import PyTree, as_pytree, leaves, map_with_path
from jaxtp.rules.dataflow import check_inputs, check_outputs, forward, tracing
from jaxtp.rules.planner import check_options, make_plan

NO_PROGRAM = "a function that JAX can trace: try jax.make_jaxpr(fn)(params, *inputs)"
NO_GRADIENTS = "a function with a gradient; gradients=False compares its outputs alone"

Layers = tuple[tuple[str, Padding], ...]
"""Path -> how its layers are stored, as a static argument."""


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One mesh against one device.

    Attributes:
        mesh: The plan's mesh, as text.
        sharded: Parameters on the tensor axis, and all.
        bytes_per_device: Parameters on one device.
        worst: The array that differs most: "output ..." or "gradient ...".
        error: Its largest difference over its largest magnitude.
        tolerance: What was allowed.
    """

    mesh: str
    sharded: str
    bytes_per_device: int
    worst: str
    error: float
    tolerance: float


@dataclasses.dataclass(frozen=True, slots=True)
class Verification:
    """All comparisons, narrow to wide."""

    rows: tuple[Comparison, ...]

    def __str__(self) -> str:
        head = ("mesh", "on the tensor axis", "MB/device", "largest difference", "of", "allowed")
        body = [
            (
                row.mesh,
                row.sharded,
                f"{row.bytes_per_device / 1e6:,.3f}",
                f"{row.error:.1e}",
                row.worst,
                f"{row.tolerance:.1e}",
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *body)
        )


@checked(gradients=FLAG, show=FUNCTION)
def verify(
    fn: Callable[..., Any] | None,
    params: PyTree,
    inputs: Sequence[Any],
    mesh: Mesh,
    *,
    gradients: bool = True,
    show: Callable[[str], None] = print,
    **options: Any,
) -> Verification:
    """Runs a function on one device and sharded over 1, 2, 4, ... tensor devices, then on the mesh.

    Outputs are compared, and the gradients of their random projection, which every output takes
    part in. An array may differ by the square root of the machine epsilon, relative to its largest
    element: half of the digits of the coarsest type that the function computes in, since with bf16
    products a float32 gradient has no more. Sums in another order stay far below that, a wrong
    program far above. Products run at the highest precision, or GPUs would round float32 to ten
    bits first.

    Args:
        fn: `fn(params, *inputs)`, a Linen module, or None for an `nnx.Module`. Deterministic.
        params: The parameters, placed or not; they must fit on one device.
        inputs: Inputs after the parameters, batch first.
        mesh: The mesh to end with.
        gradients: Whether to compare gradients with respect to floating-point parameters too.
        show: Where the table goes.
        **options: Options of `make_plan`.

    Returns:
        The comparisons; all of them held.

    Raises:
        ParityFailed: TP071, at the first mesh where an array differs by more.
        BadTree: TP046, for a function that cannot be traced or has no gradient, or parameters that
            are shapes alone.
        JaxtpError: whatever `make_plan` and `shard` raise.
        BadConfig: TP020, if `gradients` is neither True nor False, or `show` cannot be called.
    """
    # Whatever mesh they lie on: on the host all meshes below, and the one device, can take them.
    check_inputs(inputs)
    check_devices(mesh)
    plain, rebuild = as_pytree(unshard(params))
    given, rebuild_inputs = as_pytree(tuple(inputs))  # each call draws from an `nnx.Rngs` anew
    call = forward(fn, params, inputs)
    names = options.get("axis_names")
    rows: list[Comparison] = []

    def apply(tree: PyTree, args: PyTree) -> Any:  # with objects of the trace that it runs in
        args = rebuild_inputs(jax.tree.map(lambda leaf: leaf, args))
        return jax.tree.map(jnp.asarray, call(rebuild(tree), *args))

    def run(layers: Layers, tree: PyTree, args: PyTree) -> tuple[Any, Any, Any]:
        def projected(tree: PyTree) -> tuple[jax.Array, Any]:
            # Logits of a padded vocabulary are longer than those of one device.
            out = apply(_in_order(tree, layers), args)
            leaking = _leaking(out, shapes)
            out = jax.tree.map(_cut, out, shapes)
            return _projection(out), (out, leaking)

        if not gradients:
            return *projected(tree)[1], {}
        is_float, join = _split(tree)
        grads, (out, leaking) = jax.grad(lambda part: projected(join(part)), has_aux=True)(is_float)
        return out, leaking, grads

    jitted = jax.jit(run, static_argnums=0)
    with auto_context(), jax.default_matmul_precision("highest"):
        with masks_seen() as masked, tracing(inputs):
            shapes = jax.eval_shape(apply, plain, given)
        check_outputs(shapes)
        if options.get("pad_vocab") and masked:
            options["pad_vocab"] = "masked"
        plans = _plans(params, mesh, options)
        with tracing(inputs, NO_GRADIENTS if gradients else NO_PROGRAM):
            program = jax.make_jaxpr(run, static_argnums=0)((), plain, given)
        allowed, has_groups = _coarsest(program.jaxpr) ** 0.5, sums_kernels(program)
        want = jax.device_get(jitted((), plain, given))[::2]
        _check_finite(want)
        for wide, plan in plans:
            placed = as_pytree(shard(rebuild(plain), wide, plan=plan))[0]
            sharded = _over_rows(run, wide, plan) if has_groups else jitted
            batch = shard_batch(given, wide, axis_names=names)
            out, leaking, grads = sharded(_layers(plan), placed, batch)
            _check_masked(bool(leaking), plan)
            grads = unshard(grads, plan) if gradients else grads
            rows.append(_compare(want, (unshard(out), grads), plan, allowed))
    show(str(result := Verification(tuple(rows))))
    return result


def _check_finite(want: Any) -> None:
    """Refuses a function that is not finite on one device already: nothing can be compared."""
    for kind, tree in zip(("output", "gradient"), want, strict=True):
        for path, x in leaves(tree):
            if jnp.issubdtype(x.dtype, jnp.inexact) and not np.all(np.isfinite(x)):
                raise ParityFailed(
                    "has NaN or infinity on one device already, so there is nothing to compare",
                    where=f"{kind} {path}".strip(),
                    fix="mend the function, or give inputs and parameters on which it is finite",
                )


def _over_rows(run: Callable[..., Any], mesh: Mesh, plan: Plan) -> Callable[..., Any]:
    """`run`, jitted, with gradients of grouped convolutions as `jit_step` sums them."""
    rowwise = sums_over_rows(run, plan.mesh.batch, plan_mesh(mesh, plan.mesh))
    return jax.jit(rowwise, static_argnums=0)


def _layers(plan: Plan) -> Layers:
    """The padding of parameters whose layers are stored by pipeline stage."""
    return tuple(
        (d.path, tuple(blocks for blocks in d.padding if len(blocks.pieces) > 1))
        for d in plan.decisions
    )


def _in_order(tree: PyTree, layers: Layers) -> PyTree:
    """Parameters with all layers in the order of the model, for functions that know no stages."""
    padding = dict(layers)
    return map_with_path(lambda path, x: unpad(x, padding.get(path, ())), tree)


def _cut(x: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    return x[tuple(slice(n) for n in like.shape)]


def _leaking(out: Any, shapes: Any) -> jax.Array:
    """Whether logits beyond the model's vocabulary are large enough to take part in a softmax."""
    found = jnp.zeros((), bool)
    for x, like in zip(jax.tree.leaves(out), jax.tree.leaves(shapes), strict=True):
        if x.shape[:-1] == like.shape[:-1] and x.shape != like.shape:
            padded = x[..., like.shape[-1] :]
            found |= jnp.any(padded > jnp.finfo(x.dtype).min / 4)
    return found


def _check_masked(leaking: bool, plan: Plan) -> None:
    if leaking:
        raise ParityFailed(
            f"the logits of the padded vocabulary on {plan.mesh} are not masked, and would take "
            "part in a softmax",
            where="output",
            fix="logits = jaxtp.mask_padding(logits, vocab_size) at the end of the model",
        )


def _coarsest(jaxpr: Jaxpr) -> float:
    """The largest machine epsilon of all floating-point types that a program's values have."""
    avals = (var.aval for eqn in jaxpr.eqns for var in eqn.outvars)
    types = {getattr(aval, "dtype", jnp.int32) for aval in avals}
    epsilons = [float(jnp.finfo(t).eps) for t in types if jnp.issubdtype(t, jnp.floating)]
    return max([*epsilons, *map(_coarsest, subjaxprs(jaxpr))], default=0.0)


def _meshes(mesh: Mesh, axis_names: Any) -> Iterator[Mesh]:
    """Tensor-only meshes of 1, 2, 4, ... of the mesh's devices, then the mesh itself."""
    shape = MeshShape.of(mesh, axis_names)
    devices = list(mesh.devices.flat)
    ways = 1
    while ways <= shape.tp_size:
        yield _renamed(make_mesh(tp=ways, devices=devices[:ways]), shape)
        ways *= 2
    if shape.num_devices != shape.tp_size or ways // 2 != shape.tp_size:
        yield mesh


def _plans(params: PyTree, mesh: Mesh, options: Mapping[str, Any]) -> list[tuple[Mesh, Plan]]:
    """The plan of every mesh, so that all that can be refused is before anything compiles."""
    check_options(options)
    narrow = {k: v for k, v in options.items() if k != "stages"}  # smaller meshes have none
    return [
        (small, make_plan(params, small, **(options if small is mesh else narrow)))
        for small in _meshes(mesh, options.get("axis_names"))
    ]


def _renamed(mesh: Mesh, shape: MeshShape) -> Mesh:
    """The small mesh with the user's axis names, the other axes having size one."""
    sizes = [mesh.size if name == shape.tp_name else 1 for name in shape.names]
    return auto_mesh(Mesh(mesh.devices.reshape(sizes), shape.names))


def _split(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """The floating-point leaves (None elsewhere), and the way back to the whole tree."""
    is_float = jax.tree.map(lambda x: jnp.issubdtype(jnp.result_type(x), jnp.floating), tree)
    part = jax.tree.map(lambda x, f: x if f else None, tree, is_float)

    def join(part: PyTree) -> PyTree:
        return jax.tree.map(
            lambda x, f, p: p if f else x, tree, is_float, part, is_leaf=lambda x: x is None
        )

    return part, join


def _projection(out: Any) -> jax.Array:
    """The sum of all floating-point outputs times fixed random weights, a float32 scalar."""
    total = jnp.zeros((), jnp.float32)
    for index, x in enumerate(jax.tree.leaves(out)):
        if jnp.issubdtype(jnp.result_type(x), jnp.floating):
            weights = jax.random.normal(jax.random.key(index), jnp.shape(x))
            total += jnp.sum(x.astype(jnp.float32) * weights)
    return total


def _compare(want: Any, got: Any, plan: Plan, allowed: float) -> Comparison:
    """The worst array of outputs and gradients; raises if it is too far off."""
    worst, error = "", 0.0
    for kind, a, b in zip(("output", "gradient"), want, got, strict=True):
        pairs = [
            (path, np.asarray(x), np.asarray(y))
            for (path, x), (_, y) in zip(leaves(a), leaves(b), strict=True)
        ]
        # A key bias has no gradient, since softmax ignores it: what is there is rounding of its
        # neighbours' size, so an array is never held to less than a hundredth of the largest.
        largest = max((_magnitude(x) for _, x, _ in pairs), default=0.0)
        for path, x, y in pairs:
            found = _difference(x, y, largest / 100)
            if not found < error:  # also when it is not a number
                worst, error = f"{kind} {path}".strip(), found
    if not error <= allowed:
        raise ParityFailed(
            f"differs by {error:.2e} of its largest element on {plan.mesh}, allowed {allowed:.1e}",
            where=worst,
            fix="is the function deterministic and pure? if so, this is a bug of jaxtp: "
            "`jaxtp plan` on the tree and this message say which",
        )
    split = sum(d.dim_on(plan.mesh.tp) is not None for d in plan.decisions)
    count = f"{split} of {len(plan.decisions)}"
    return Comparison(str(plan.mesh), count, plan.bytes_per_device, worst, error, allowed)


def _magnitude(x: np.ndarray[Any, Any]) -> float:
    is_float = jnp.issubdtype(x.dtype, jnp.floating)
    return float(np.max(np.abs(x.astype(np.float64)), initial=0.0)) if is_float else 0.0


def _difference(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], least: float) -> float:
    """Largest difference over largest magnitude (at least `least`); 1 for integers that differ."""
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return float(np.any(a != b))
    return _magnitude(a - b) / (max(_magnitude(a), least) or 1.0)
