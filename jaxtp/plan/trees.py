"""Any Flax tree <-> `{path: Param}`.

Flax is never imported here. Its classes are recognised by what they offer, and only an `nnx` object
needs Flax itself, which is then already loaded.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, KeyEntry, keystr

from jaxtp.errors import BadTree
from jaxtp.plan.tree_kinds import refuse_endless

PyTree = Any
Annotation = tuple[str | tuple[str, ...] | None, ...]
"""Axis names as an author wrote them on a parameter, mesh axes or logical names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Param:
    """One array of a tree, without its data.

    Attributes:
        path: "/"-joined path from the root, e.g. "layers/3/attn/q_proj/kernel".
        shape: Global shape in elements.
        dtype: NumPy name of the dtype, or e.g. "key<fry>" for typed random keys.
        annotation: Names that Linen boxes or NNX metadata put on the dims; None without.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    annotation: Annotation | None = None

    @property
    def size(self) -> int:
        """Number of elements, global."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the array, global."""
        return self.size * itemsize(self.dtype)


def itemsize(dtype: str) -> int:
    """Bytes of one element; typed random keys count as two 32-bit words (threefry's key)."""
    return 8 if is_key_type(dtype) else jnp.dtype(dtype).itemsize


def is_key_type(dtype: str) -> bool:
    """Whether a type is that of typed random keys, which NumPy does not know."""
    return dtype.startswith("key<")


def stored_bytes(count: int, dtype: str) -> int:
    """Bytes of so many elements; GPUs store two integers of 4 bits in one."""
    return -(-count // 2) if dtype in ("int4", "uint4") else count * itemsize(dtype)


def spell(path: tuple[KeyEntry, ...]) -> str:
    """The "/"-joined spelling of a JAX key path, without the `value` of a Flax box.

    >>> spell((GetAttrKey("kernel"), GetAttrKey("value")))
    'kernel'
    """
    if len(path) > 1 and isinstance(path[-1], GetAttrKey) and path[-1].name == "value":
        path = path[:-1]
    return keystr(path, simple=True, separator="/")


def is_box(node: object) -> bool:
    """Whether a node is a Linen `Partitioned`-like box or an NNX `Variable`."""
    return hasattr(node, "unbox") or hasattr(node, "get_metadata")


def _annotation(box: Any) -> Annotation | None:
    """Names on a box's dims, or None. NNX renamed the field twice; all spellings are read.

    Logical names are those of the mesh where the box or Flax's context says by rules which.
    """
    rules: list[tuple[str, Any]] = []
    if hasattr(box, "get_metadata"):
        meta = box.get_metadata()
        names = next(
            (meta[k] for k in ("out_sharding", "sharding_names", "sharding") if meta.get(k)), None
        )
        rules = list(dict(_rules(meta.get("sharding_rules"))).items())  # the last of a name, in NNX
    else:
        names = getattr(box, "names", None)
        if hasattr(box, "rules"):  # `nn.LogicallyPartitioned`; names of `nn.Partitioned` are axes
            rules = _rules(box.rules)
    names = getattr(names, "spec", names)  # of a NamedSharding
    if isinstance(names, str):
        names = (names,)
    if not isinstance(names, tuple | list | PartitionSpec):
        return None
    named = tuple(tuple(n) if isinstance(n, list) else n for n in names)
    axes = _by_rules(named, rules)
    return tuple(axes.get(n, n) if isinstance(n, str) else n for n in named)


def _rules(own: Any) -> list[tuple[str, Any]]:
    """What logical names stand for: rules of a box, and of `nn.logical_axis_rules` around us."""
    spmd = sys.modules.get("flax.core.spmd")
    around = spmd.get_logical_axis_rules() if spmd is not None else ()
    return [*(own or ()), *(around or ())]


def _by_rules(names: Annotation, rules: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The axes of each name that has a rule.

    As in `flax.linen.logical_to_mesh_axes`, the first rule counts whose axes no other dim of the
    array has taken; a dim for which there is none is not sharded.
    """
    found: dict[str, Any] = dict.fromkeys(name for name, _ in rules)
    missing, taken = {name for name in names if name in found}, set[str]()
    for name, axes in rules:
        wanted = {axes} if isinstance(axes, str) else set(axes or ())
        if name in missing and not wanted & taken:
            found[name] = axes
            missing.remove(name)
            taken |= wanted
    return found


@dataclasses.dataclass(frozen=True)
class _Merge:
    """Turns an `nnx.State` back into the objects it was split from; equal where their graphs are.

    A class and not a closure, so that it can be a static argument of a jitted function.
    """

    graphdef: Any

    def __call__(self, state: PyTree) -> PyTree:
        return sys.modules["flax.nnx"].merge(self.graphdef, state)


def _same(tree: PyTree) -> PyTree:
    return tree


def as_pytree(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """A plain pytree for `tree`, and the hashable function that turns such a pytree back.

    An NNX module is a graph: flattening it directly would write a shared (tied) variable twice and
    untie it on the way back, so a tree with NNX objects in it goes through `nnx.split`.
    """
    refuse_endless(tree)
    if not has_objects(tree):
        return tree, _same
    graphdef, state = sys.modules["flax.nnx"].split(tree)
    return state, _Merge(graphdef)


def has_objects(tree: PyTree) -> bool:
    """Whether there are NNX objects in a tree, which a function may change in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = (nnx.Module, nnx.Optimizer, nnx.Rngs, nnx.Metric)
    nodes, _ = _flattened(tree, lambda node: isinstance(node, kinds))
    return any(isinstance(node, kinds) for _, node in nodes)


def leaves_put(tree: PyTree, before: PyTree) -> dict[str, Any]:
    """The leaves of a tree, by path, that are not those of `before`."""
    known = dict(leaves(before))
    return {path: leaf for path, leaf in leaves(tree) if leaf is not known.get(path)}


def put_leaves(tree: PyTree, changed: Mapping[str, Any]) -> list[str]:
    """Puts leaves into the NNX objects of a tree, in place.

    Args:
        tree: What `as_pytree` takes apart by `nnx.split`.
        changed: Leaves by path.

    Returns:
        Paths that the tree does not have.
    """
    nnx = sys.modules["flax.nnx"]
    plain, _ = as_pytree(tree)
    state = nnx.filter_state(plain, lambda path, _: "/".join(map(str, path)) in changed)
    if jax.tree.leaves(state):
        nnx.update(
            tree, jax.tree_util.tree_map_with_path(lambda path, _: changed[spell(path)], state)
        )
    return sorted(changed.keys() - dict(leaves(state)))


def parameters(tree: PyTree) -> PyTree:
    """The parameters of a train state; any other tree as it is.

    A train state has an optimizer's state among its parts, be they members of a tuple, values of a
    dict or attributes: called `opt_state`, or an `nnx.Optimizer`, or made of named tuples whose
    types are called `...State`, as those of optax are. Its parameters are the part called `params`,
    or else the one that has matrices; of several that are alike, such as averages, the first.
    Where matrices of the optimizer belong to none of its parameters, it is of something else.
    """
    refuse_endless(tree)
    parts = {spell(keys): part for keys, part in _flattened(tree, lambda x: x is not tree)[0]}
    states = {name: part for name, part in parts.items() if _is_optimizer_state(name, part)}
    if not states:
        return tree
    if "params" in parts:
        return parts["params"]
    shapes = {name: _shapes(part) for name, part in parts.items() if name not in states}
    models = [name for name, held in shapes.items() if _matrices(held)]
    if not models or any(shapes[name] != shapes[models[0]] for name in models):
        return tree
    paths = {path.removeprefix("params/") for path in shapes[models[0]]}
    kept = [path for state in states.values() for path in _matrices(_shapes(state))]
    return parts[models[0]] if all(paths & _within(path) for path in kept) else tree


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {path: np.shape(leaf) for path, leaf in leaves(tree)}


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [path for path, shape in shapes.items() if len(shape) > 1]


def _within(path: str) -> set[str]:
    """All paths that occur in a path."""
    keys = path.split("/")
    ends = range(1, len(keys) + 1)
    return {"/".join(keys[start:end]) for end in ends for start in range(end)}


def _is_optimizer_state(name: str, part: PyTree) -> bool:
    nnx = sys.modules.get("flax.nnx")
    if name == "opt_state" or (nnx is not None and isinstance(part, nnx.Optimizer)):
        return True
    states, _ = _flattened(part, _is_named_state)
    return bool(states) and all(_is_named_state(state) for _, state in states)


def _is_named_state(node: PyTree) -> bool:
    return hasattr(node, "_fields") and type(node).__name__.endswith("State")


def leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """`(path, leaf)` pairs in JAX's flattening order.

    Raises:
        BadTree: TP046, as in `FlatTree.of`.
    """
    return list(FlatTree.of(tree).values.items())


def _flattened(
    tree: PyTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[tuple[tuple[Any, ...], Any]], Any]:
    """The leaves of a tree with their keys, and its structure."""
    try:
        return jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    except ValueError as err:
        raise BadTree(
            f"cannot be taken apart: {err}", fix="the keys of one dict are of one type"
        ) from err


@dataclasses.dataclass(frozen=True, slots=True)
class FlatTree:
    """A tree taken apart once: what is in it by path, and the way back.

    Attributes:
        values: The leaves by path, in JAX's flattening order.
        treedef: The structure of the plain pytree.
        rebuild: What turns such a pytree into a tree of the type that came in.
    """

    values: Mapping[str, Any]
    treedef: Any
    rebuild: Callable[[PyTree], PyTree]

    @classmethod
    def of(cls, tree: PyTree) -> "FlatTree":
        """Any tree, taken apart.

        Raises:
            BadTree: TP046, if two leaves share a spelling, which an override or a plan could not
                tell apart, or keys of one dict have no order.
        """
        plain, rebuild = as_pytree(tree)
        pairs, treedef = _flattened(plain)
        values: dict[str, Any] = {}
        for keys, leaf in pairs:
            if (path := spell(keys)) in values:
                raise BadTree(
                    "two leaves have the same path; a key contains '/'?",
                    where=path,
                    fix="rename one of the keys so that '/'-joined paths are unique",
                )
            values[path] = leaf
        return cls(values, treedef, rebuild)

    def shapes(self) -> dict[str, Param]:
        """What each leaf is, without its data and its annotation.

        Raises:
            BadTree: TP046, if a leaf is not an array.
        """
        return {path: Param(path, *shape_dtype(leaf, path)) for path, leaf in self.values.items()}

    def like(self, values: Iterable[Any]) -> PyTree:
        """The tree with these leaves in place of its own, in the same order."""
        return self.rebuild(jax.tree.unflatten(self.treedef, list(values)))


def flatten(tree: PyTree) -> dict[str, Param]:
    """Every array of a tree as a `Param`, by path; scalars such as a step counter included.

    Raises:
        BadTree: TP046, if the tree is empty or a leaf is not an array.
    """
    plain, _ = as_pytree(tree)
    boxes, _ = _flattened(plain, is_box)
    named = {spell(p): _annotation(box) for p, box in boxes if is_box(box)}
    params = FlatTree.of(plain).shapes()
    if not params:
        raise BadTree("the tree has no arrays", fix="pass the initialised parameters")
    annotated = {path: names for path, names in named.items() if names and path in params}
    fitting = {
        (names, path.rpartition("/")[2])
        for path, names in annotated.items()
        if len(names) == len(params[path].shape)
    }
    for path, names in annotated.items():
        # Optimizers keep the box of a parameter around moments of fewer dims (optax.adafactor).
        is_moment = len(names) > len(params[path].shape) and (
            (names, path.rpartition("/")[2]) in fitting
        )
        if not is_moment:
            params[path] = dataclasses.replace(params[path], annotation=names)
    return params


TEXT_OR_OBJECTS = "OSUMm"
"""Kinds of NumPy types that no device holds; "V" is bfloat16 and its like."""


def shape_dtype(leaf: Any, path: str = "") -> tuple[tuple[int, ...], str]:
    """Global shape (elements) and dtype name of an array, a struct or a Python number.

    Raises:
        BadTree: TP046, for anything else.
    """
    if isinstance(leaf, bool | int | float | complex):
        dtype = jnp.result_type(leaf)
        if type(leaf) is int and leaf.bit_length() >= 8 * dtype.itemsize:
            raise BadTree(
                f"an integer of {leaf.bit_length()} bits does not fit into {dtype}",
                where=path,
                fix="a smaller number, or an array of another type",
            )
        return (), str(dtype)
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise BadTree(
            f"a leaf of type {type(leaf).__name__} is not an array",
            where=path,
            fix="pass arrays, jax.ShapeDtypeStruct or numbers; drop strings and functions",
        )
    if isinstance(leaf.dtype, np.dtype) and leaf.dtype.kind in TEXT_OR_OBJECTS:
        raise BadTree(
            f"an array of {leaf.dtype} has no numbers",
            where=path,
            fix="leave text, dates and objects out of what goes to the devices",
        )
    return tuple(int(n) for n in leaf.shape), str(leaf.dtype)


def refuse_shapes(leaf: Any, path: str = "") -> None:
    """Refuses a struct where numbers are computed with.

    Raises:
        BadTree: TP046, for a `jax.ShapeDtypeStruct`.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise BadTree(
            f"a shape {list(leaf.shape)} without numbers",
            where=path,
            fix="arrays: of shapes alone jaxtp makes plans, and compiles",
        )


def map_with_path(fn: Callable[[str, Any], Any], tree: PyTree) -> PyTree:
    """`fn(path, leaf)` on every leaf; the result has the structure and the type of `tree`."""
    plain, rebuild = as_pytree(tree)
    return rebuild(jax.tree_util.tree_map_with_path(lambda p, leaf: fn(spell(p), leaf), plain))
