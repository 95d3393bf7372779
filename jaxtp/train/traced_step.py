"""What the compiled function of a step runs: the user's step, and checks of what it returns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtp.errors import BadStep, BadTree, Problems, join
from jaxtp.plan.trees import PyTree, as_pytree, leaves, shape_dtype
from jaxtp.train.arguments import Form, Static

Structure = tuple[jax.tree_util.PyTreeDef, Callable[[PyTree], PyTree]]
"""How to put leaves together again: the treedef of the plain tree, and the way back from there."""


def take_apart(tree: PyTree) -> tuple[Structure, list[Any]]:
    """How a tree is put together, and its leaves in JAX's flattening order."""
    plain, rebuild = as_pytree(tree)
    arrays, treedef = jax.tree.flatten(plain)
    return (treedef, rebuild), arrays


def put_together(structure: Structure, arrays: Iterable[Any]) -> PyTree:
    """The tree that `take_apart` took apart, with these leaves."""
    treedef, rebuild = structure
    return rebuild(jax.tree.unflatten(treedef, arrays))


def run(
    step_fn: Callable[..., Any],
    static: Static,
    arrays: list[jax.Array],
    batch: PyTree,
    others: Mapping[str, PyTree],
) -> tuple[list[jax.Array], tuple[Any, ...], dict[str, PyTree]]:
    """What is traced: leaves in; leaves, metrics in a tuple, and changed arguments out."""
    structure: Structure
    form: Form
    structure, form = static.value
    state = put_together(structure, arrays)
    paths = [path for path, _ in leaves(state)]
    values = form.build({form.names[0]: batch, **others} if form.names else others)
    out = form.call(step_fn, state, values)
    ways: list[tuple[Any, tuple[Any, ...]]] = [(out, ())]
    if isinstance(out, tuple) and len(out) == 2:
        ways.append((out[0], out[1:]))
    for new, rest in ways:
        found, new_arrays = take_apart(new)
        if found == structure or _same_leaves(structure, paths, found, new):
            _check_metrics(rest)
            return _successors(paths, arrays, new_arrays), rest, form.changed(values)
    returned = {path for path, _ in leaves(ways[-1][0])}
    raise BadStep(
        f"the step returns a {type(out).__name__} that is not the state, nor (state, metrics); "
        f"missing: {join(sorted(set(paths) - returned)) or 'nothing'}, "
        f"new: {join(sorted(returned - set(paths))) or 'nothing'}",
        fix="return (state, metrics) or state, with the types and static fields that came in",
    )


def _check_metrics(rest: PyTree) -> None:
    """Refuses, beside the state, what no compiled function can return."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(rest):
        try:
            shape_dtype(leaf)
        except BadTree as err:
            raise BadStep(
                f"beside the state the step returns what it cannot: {err.what}",
                where=f"metrics{jax.tree_util.keystr(path[1:])}",
                fix="return arrays and numbers; add text and what is static outside of the step",
            ) from None


def _same_leaves(old: Structure, paths: list[str], new: Structure, tree: PyTree) -> bool:
    """Whether NNX objects differ in the containers inside their variables only.

    SM3's state is a list for each parameter before the first update, and a mapping after it.
    """
    return new[1] == old[1] != as_pytree(())[1] and [path for path, _ in leaves(tree)] == paths


def _successors(
    paths: Sequence[str], old: Sequence[jax.Array], new: Sequence[Any]
) -> list[jax.Array]:
    """The new leaves, checked to be able to take the places of the old ones."""
    problems, checked = Problems(), list[jax.Array]()
    for path, before, after in zip(paths, old, new, strict=True):
        after = jnp.asarray(after)
        if (after.shape, after.dtype) != (before.shape, before.dtype):
            problems.add(
                BadStep(
                    f"{before.dtype}{list(before.shape)} comes back as "
                    f"{after.dtype}{list(after.shape)}",
                    where=path,
                    fix=f"return it as {before.dtype}{list(before.shape)}",
                )
            )
        elif jax.typeof(after).weak_type:  # as a state that comes in
            after = jax.lax.convert_element_type(after, before.dtype)
        checked.append(after)
    problems.raise_any()
    return checked
