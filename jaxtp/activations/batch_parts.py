"""A function traced on an equal part of its batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxtp.activations.placer import FREE, Placer
from jaxtp.errors import NotInterleaved, join
from jaxtp.rules.jaxpr.rows import Lies


def batch_of(whole: Placer, parts: int) -> tuple[int, list[Lies | None]]:
    """Rows of the batch, and where it lies in parameters and inputs.

    Args:
        whole: Runs the function on the whole batch.
        parts: Into how many equal ones it is to be divided, replicas or twice as many.

    Raises:
        NotInterleaved: TP073, if the batch is not found, or does not divide.
    """
    plan, analysis = whole.plan, whole.analysis
    if plan.sequence_parallel:
        raise NotInterleaved(
            "sequence parallelism shards the residual stream", fix="one of the two, not both"
        )
    inputs = [(v.shape, [analysis.is_batch(dim) for dim in v.dims]) for v in analysis.inputs]
    rows = next((shape[0] for shape, found in inputs if found[:1] == [True]), 0)
    replicas = plan.mesh.batch_ways
    if not rows:
        raise NotInterleaved(
            f"no input leads with rows of the batch (shapes {join(shape for shape, _ in inputs)})",
            fix=f"inputs (batch, ...), of a batch that is a multiple of {parts}",
        )
    if rows % parts:
        missing = "" if parts == replicas else " do not make two equal halves"
        raise NotInterleaved(
            f"{rows} sequences on {replicas} replicas{missing}",
            fix=f"a batch that is a multiple of {parts}",
        )
    if any(any(found[1:]) or (found[:1] == [True] and shape[0] != rows) for shape, found in inputs):
        raise NotInterleaved("the batch does not lead in every input", fix="inputs (batch, ...)")
    held = [Lies(0) if found[:1] == [True] else None for _, found in inputs]
    return rows, [None] * analysis.num_params + held


def traced_on_part(
    fn: Callable[..., Any], args: tuple[Any, ...], lies: Sequence[Lies | None], rows: int
) -> Any:
    """The jaxpr of a function on so many rows of the batch.

    Args:
        fn: Of the trees in `args`.
        args: Trees of parameters, then of inputs.
        lies: Where the batch lies in each of their leaves.
        rows: How many.
    """
    flat, tree = jax.tree.flatten(args)
    smaller = [
        jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) if where else x
        for x, where in zip(flat, lies, strict=True)
    ]
    return jax.make_jaxpr(fn)(*jax.tree.unflatten(tree, smaller))


def another(
    error: Exception, keywords: Mapping[str, Any], rows: int, part: str = "half"
) -> NotInterleaved:
    """What to say of a function that is another one on a part of the batch.

    Args:
        error: What it raised there, or how it differs.
        keywords: What it is called with by name.
        rows: Of the whole batch.
        part: What to call the part.
    """
    whole = [
        name
        for name, value in keywords.items()
        if any(jax.numpy.shape(x)[:1] == (rows,) for x in jax.tree.leaves(value) if _is_array(x))
    ]
    fix = "sizes that follow from the arguments"
    if whole:
        fix = f"{join(f'`{name}`' for name in whole)} came as a keyword: pass it in order"
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return NotInterleaved(f"the function is not the same on {part} of the batch: {reason}", fix=fix)


def along_batch(whole: Placer, x: Any, dim: int) -> Any:
    """An array whose dim is sharded along the batch axes, as its parts are."""
    entries = [whole.plan.mesh.batch if d == dim else FREE for d in range(x.ndim)]
    return whole.constrain(x, entries)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")
