"""Activation constraints in a model that never heard of jaxtp.

The function is traced, read by `rules.jaxpr`, and run again equation by equation, with sharding
constraints where the dataflow says that they matter:

- products that enter a split region (heads, MLP width, vocabulary) put it out split;
- products that leave one are summed there and then, as part of the residual stream;
- the residual stream is sharded along the batch, and under sequence parallelism along the sequence;
- what enters a region under sequence parallelism is gathered once, in its own type.

XLA would often find the same by itself; in loops, in backward passes and around norms it does not.
"""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Literal, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxtp.activations.ahead.scans import overlapped, shards_weights
from jaxtp.activations.half_batches import on_halves
from jaxtp.activations.left_alone import Told
from jaxtp.activations.placer import Placer
from jaxtp.activations.sequences import check_tokens
from jaxtp.errors import BadMesh, BadOption, BadTree, join
from jaxtp.errors.arguments import FUNCTION, checked, instance, one_of
from jaxtp.mesh.axes import Axis
from jaxtp.mesh.build import (
    own_mesh,
    refuse_explicit_context,
    refuse_manual_context,
    without_explicit_axes,
)
from jaxtp.plan.decisions import A_PLAN, Plan
from jaxtp.plan.trees import (
    as_pytree,
    has_objects,
    leaves,
    leaves_put,
    put_leaves,
    refuse_shapes,
    shape_dtype,
)
from jaxtp.rules.jaxpr import analyse_jaxpr

F = TypeVar("F", bound=Callable[..., Any])


@checked(
    fn=FUNCTION.raising(BadTree),
    plan=A_PLAN,
    mesh=instance(Mesh, AbstractMesh, takes="a jax Mesh", error=BadMesh).or_none(),
    overlap=one_of("auto", "aggressive").raising(BadOption),
)
def parallelize(
    fn: F,
    plan: Plan,
    mesh: Mesh | AbstractMesh | None = None,
    *,
    overlap: Literal["auto", "aggressive"] = "auto",
) -> F:
    """`fn` with activation constraints placed by its dataflow.

    It takes and returns what `fn` does and may be jitted, differentiated (in reverse mode only
    along cp, and where `overlap="aggressive"` gathers weights ahead), vmapped or scanned. It is
    traced once more each time that it is traced. Where the plan has nothing to say, nothing is
    added.

    Args:
        fn: `fn(params, *inputs)`, a pure function; `params` is any tree that `make_plan` takes,
            such as an `nnx.Module` inside `nnx.jit`. What it changes in the variables of such a
            module, or of `nnx.Rngs` among the inputs, random counts or running means, is changed
            in the caller's.
        plan: Made from these parameters; with `sequence_parallel` the residual stream is split
            along the sequence.
        mesh: The jax Mesh that the parameters were placed with, or an AbstractMesh to compile only;
            by default all devices in order.
        overlap: "aggressive" runs two halves of the batch in turns, so that the all-reduces over
            tp of one half move beside the products of the other, in the derivative too; compile
            with `jaxtp.compile_options(overlap="aggressive")`. It pays where all-reduces are long,
            as over 8 devices; over fewer, gradients of two halves may cost more than is hidden:
            `jaxtp.preflight` tells. Numbers stay those of `fn`, up to the order of sums. It
            traces `fn` once more, on half of the batch; from the first equation on that mixes rows
            of the batch (a mean, random numbers) the whole batch runs as with "auto". Needs an even
            number of rows on each replica. Warns with the text of TP073 where nothing, or not all
            products, can take turns. Where the batch axes shard weights, scans that slice them
            gather those of the next turn beside each turn, once each way, and reduce gradients
            likewise, for one more layer of gathered weights (of nested scans, one more turn of the
            outermost that slices them). So do layers that stand one after the other, such as those
            of a Python loop, each of which hands on one array; what stands outside of both runs as
            with "auto". A token table is gathered whole where all replicas take at
            least as much from it as it holds. A custom derivative rule is taken to treat rows alone
            where its function does.

    Raises:
        BadOption: If `overlap` is neither of the two.
        BadTree: TP046, if `fn` cannot be called, or, when called, for an input that is no array.
        BadMesh: TP010, when called, if the mesh has another number of devices than the plan,
            the mesh of `jax.set_mesh` has Explicit axes, or inside a `jax.shard_map` over axes of
            the plan's mesh.
        PlanMismatch: TP045, when called, if the plan lacks a parameter of the call.
        IdleDevices: TP011, when called, if the plan's mesh has devices along cp and the function
            has no sequence that they could share.
        SizeMismatch: TP003, when called, if its tokens do not divide over cp.
    """
    told = Told()

    @wraps(fn)
    def placed(params: Any, *inputs: Any, **keywords: Any) -> Any:
        refuse_explicit_context()
        refuse_manual_context(plan.mesh)
        objects = {name: value for name, value in keywords.items() if has_objects(value)}
        callers = params, (inputs, objects)
        parts, rebuilds = zip(*map(as_pytree, callers), strict=True)
        for leaf in jax.tree.leaves(parts):
            shape_dtype(leaf)  # refuses what is no array
            refuse_shapes(leaf)
        parts, keywords = jax.tree.map(
            without_explicit_axes, (parts, {n: v for n, v in keywords.items() if n not in objects})
        )

        def pure(*trees: Any) -> Any:
            before = jax.tree.map(lambda leaf: leaf, trees)  # rebuilt objects may share its boxes
            given = [rebuild(tree) for rebuild, tree in zip(rebuilds, trees, strict=True)]
            model, (args, named) = given
            results = fn(model, *args, **named, **keywords)
            return results, [*map(leaves_put, given, before)]

        closed, shapes = jax.make_jaxpr(pure, return_shape=True)(*parts)
        paths = [plan[path].path for path, _ in leaves(parts[0])]
        analysis = analyse_jaxpr(closed, paths)
        if plan.sequence_parallel or plan.mesh.size_of(Axis.CP) > 1:
            analysis = analysis.of_one_row()
        if plan.mesh.size_of(Axis.CP) > 1:
            check_tokens(analysis, plan)
        placer = Placer(analysis, plan, own_mesh(mesh, plan.mesh))
        results, notes = None, list[str]()
        if overlap == "aggressive":
            run = overlapped if shards_weights(placer, paths) else partial(on_halves, closed=closed)
            results, notes = run(placer, pure, paths, parts, keywords)
        if results is None:
            weights, others = map(jax.tree.leaves, parts)
            results = placer.run(analysis.scope, [*weights, *placer.inputs(others)])
        outputs, changed = jax.tree.unflatten(jax.tree.structure(shapes), results)
        for tree, put in zip(callers, changed, strict=True):
            # A state is no object: whoever merges it has the changes.
            if put and has_objects(tree) and (new := put_leaves(tree, put)):
                notes.append(f"parallelize does not keep {join(new)}, new in it: make it before")
        told.tell(placer.left.values(), placer.scores(), notes)
        return outputs

    return cast(F, placed)
