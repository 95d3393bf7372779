"""Where the inputs of a traced function go: a cache follows the heads that write and read it.

Of an input a dim is sharded in two cases only: it is the batch, or its class is split in the
parameters, so that keys made by sharded kernels lie where they are made. A position in a sequence
and the width inside a head belong to neither.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jaxtp.errors import join
from jaxtp.mesh.axes import Axis
from jaxtp.plan.decisions import Plan
from jaxtp.plan.inputs import INPUT, STATE, InputDecision
from jaxtp.plan.specs import Spec
from jaxtp.plan.trees import is_key_type, leaves, shape_dtype
from jaxtp.rules.jaxpr import Analysis, DimClass
from jaxtp.rules.jaxpr.classes import Dim


def leads(analysis: Analysis, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Group -> leading class of its parameters, for groups that the plan splits.

    A dim with another leading class (tiled kv heads, which are minor in the queries) would hold
    other units on a device than the parameters do.
    """
    found: dict[str, tuple[int, ...]] = {}
    for finding in analysis.findings.values():
        if finding.dim is not None and finding.classes:
            placed = plan[finding.path].dim_on(plan.mesh.tp)
            if placed == finding.dim:
                found.setdefault(finding.group, finding.classes[:1])
    return found


def input_decisions(
    analysis: Analysis, plan: Plan, fn: Callable[..., Any] | None, inputs: Sequence[Any]
) -> tuple[InputDecision, ...]:
    """One decision for every array of the inputs, in JAX's flattening order.

    Args:
        analysis: Of the function on these inputs.
        plan: What is decided about the parameters.
        fn: The function, for the names of its arguments; None for an `nnx.Module`.
        inputs: The arguments after the parameters.
    """
    if plan.sequence_parallel or plan.mesh.size_of(Axis.CP) > 1:
        analysis = analysis.of_one_row()
    places = _Places(analysis, plan)
    names = argument_names(fn, len(inputs))
    flat = [
        (name, path, *shape_dtype(leaf, path))
        for name, tree in zip(names, inputs, strict=True)
        for path, leaf in leaves(tree)
    ]
    comes_back = Counter((v.shape, str(v.aval.dtype)) for v in analysis.outputs)
    kept = {
        name
        for name in names
        if _is_kept([(shape, dtype) for n, _, shape, dtype in flat if n == name], comes_back)
    }
    decisions: list[InputDecision] = []
    for (name, path, shape, dtype), value in zip(flat, analysis.inputs, strict=True):
        spec, reasons = places.of(value.dims, shape)
        decisions.append(
            InputDecision(
                path=f"{name}/{path}" if path else name,
                argument=name,
                shape=shape,
                dtype=dtype,
                spec=spec,
                role=STATE if name in kept else INPUT,
                reasons=reasons,
            )
        )
    return tuple(decisions)


def argument_names(fn: Callable[..., Any] | None, count: int) -> list[str]:
    """Names of the arguments after the parameters, as far as the function has names for them."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        given = inspect.signature(fn).parameters.values() if fn is not None else ()
        named = [p.name for p in given if p.kind in kinds][1:]
    except (TypeError, ValueError):  # some callables have no signature
        named = []
    return [named[i] if i < len(named) else f"input{i}" for i in range(count)]


def _is_kept(
    arrays: Sequence[tuple[tuple[int, ...], str]],
    comes_back: Mapping[tuple[tuple[int, ...], str], int],
) -> bool:
    """Whether an argument comes back: arrays of its shapes and types are among the results.

    Token ids and positions may come back too, and are no state: people keep them.
    """
    own = Counter(arrays)
    is_index = all(_is_index(dtype) for _, dtype in arrays)
    return bool(arrays) and not is_index and all(comes_back[a] >= n for a, n in own.items())


def _is_index(dtype: str) -> bool:
    return (
        not is_key_type(dtype) and jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits > 8
    )


class _Places:
    """What all inputs of one function need to know."""

    def __init__(self, analysis: Analysis, plan: Plan) -> None:
        self._analysis, self._plan = analysis, plan
        self._leads = leads(analysis, plan)
        self._members = {
            group: max(
                (plan[p] for p in paths if plan[p].dim_on(plan.mesh.tp) is not None),
                key=lambda d: d.num_bytes,
            ).path
            for group, paths in analysis.groups.items()
            if group in self._leads
        }

    def of(self, dims: Sequence[Dim], shape: Sequence[int]) -> tuple[Spec, tuple[str, ...]]:
        """The spec of an array, and a reason for each dim, tensor axes first."""
        mesh = self._plan.mesh
        spec: list[tuple[str, ...]] = []
        first: list[str] = []
        rest: list[str] = []
        for axis, (dim, size) in enumerate(zip(dims, shape, strict=True)):
            known = self._analysis.dim_class(dim)
            taken = {a for axes in spec for a in axes}
            axes = () if taken & set(mesh.tp) else self._tensor_axes(known)
            if axes:
                first.append(f"dim {axis}: {self._follows(known, axes)}")
            elif mesh.batch_ways > 1 and self._analysis.is_batch(dim):
                if size % mesh.batch_ways == 0:
                    axes = mesh.batch
                    rest.append(f"dim {axis}: rows of the batch, over {join(axes)}")
                else:
                    rest.append(
                        f"dim {axis}: replicated, {size} rows of the batch do not divide over "
                        f"{join(mesh.batch)}"
                    )
            elif size % mesh.size_of(Axis.CP) == 0 and self._shared(dim):
                axes = self._shared(dim)
                rest.append(f"dim {axis}: tokens of a sequence, over {join(axes)}")
            elif size > 1:
                rest.append(f"dim {axis}: not sharded, {self._why_not(known, dim, size)}")
            spec.append(axes)
        return tuple(spec), (*first, *rest) or ("nothing to shard",)

    def _shared(self, dim: Dim) -> tuple[str, ...]:
        """The axes that share the tokens of a sequence, if a dim is these."""
        name = self._plan.mesh.name_of(Axis.CP)
        is_shared = self._plan.mesh.size_of(Axis.CP) > 1 and self._analysis.is_sequence(dim)
        return (name,) if is_shared else ()

    def _tensor_axes(self, known: DimClass) -> tuple[str, ...]:
        lead = self._leads.get(known.group)
        if lead is None or known.pieces or known.classes[:1] != lead:
            return ()
        return self._plan.axes_for(known.units)

    def _follows(self, known: DimClass, axes: tuple[str, ...]) -> str:
        mesh = self._plan.mesh
        ways, count = mesh.ways(axes), known.units[0]
        said = f"{count} units, {ways}-way over {join(axes)} like `{self._members[known.group]}`"
        copies = mesh.tp_size // ways
        if copies > 1:
            over = join(a for a in mesh.tp if a not in axes)
            said += f"; {copies} copies of each over {over}, since a unit is never divided"
        return said

    def _why_not(self, known: DimClass, dim: Dim, size: int) -> str:
        if self._analysis.is_batch(dim):
            return f"{size} rows of the batch"
        if known.kind == "region" and known.pieces:
            return f"{size} holds several pieces, which contiguous shards would mix"
        if known.kind == "region":
            units = known.units[0]
            return f"{units} units, of which the parameters of their group are replicated"
        return self._analysis.why_not(dim) or f"no sharded parameter makes or reads its {size}"
