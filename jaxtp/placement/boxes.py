"""Linen boxes whose names mean no axis of the mesh, which Flax would ask for all the same.

In: a flat tree, the slots of its leaves. Out: it, with boxes that say where their arrays lie.
"""

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jaxtp.errors import BadSpec
from jaxtp.mesh.axes import MeshShape
from jaxtp.placement.train_state import Slot
from jaxtp.plan.trees import FlatTree, is_box, spell

NO_SUCH_AXIS = "Resource axis: "
"""How JAX's error begins when a spec names an axis that the ambient mesh lacks."""


def name_axes_of_mesh(flat: FlatTree, found: Mapping[str, Slot], shape: MeshShape) -> FlatTree:
    """Boxes that name axes which the mesh lacks, with the names that their plan has instead.

    Under `jax.set_mesh` Flax constrains every unboxed array by its box's names, and raises on those
    of another mesh. All other boxes stay as they are.

    Args:
        flat: Any tree; boxes are a part of its structure.
        found: The slot of each of its leaves.
        shape: The plan's mesh shape.
    """
    meta = sys.modules.get("flax.core.meta")
    if meta is None:
        return flat
    axes = {name for name, _ in shape.whole}

    def named(path: Any, node: Any) -> Any:
        # Of this class alone: names of its subclasses are logical, and Flax has rules for them.
        if type(node) is not meta.Partitioned or axes.issuperset(_flat(node.names)):
            return node
        spec = found[spell(path)].spec
        # A factor of the tensor axis is no axis of the user's mesh: left to XLA.
        names = [_entry(e) if axes.issuperset(e) else PartitionSpec.UNCONSTRAINED for e in spec]
        return node.replace(names=tuple(names))

    plain = jax.tree.unflatten(flat.treedef, list(flat.values.values()))
    boxed = jax.tree_util.tree_map_with_path(named, plain, is_leaf=is_box)
    return dataclasses.replace(flat, treedef=jax.tree.structure(boxed))


def refuse_names(error: ValueError) -> None:
    """Raises what Flax or a model says about a name that the ambient mesh lacks, in our words.

    Raises:
        BadSpec: TP044, if that is what the error is about.
    """
    if str(error).startswith(NO_SUCH_AXIS):
        raise BadSpec(
            f"the model is annotated with an axis that the mesh of jax.set_mesh lacks: {error}",
            fix="call it outside of jax.set_mesh, where they have no effect; or annotate the model "
            "with axes of the mesh",
        ) from error


def _flat(names: tuple[Any, ...]) -> set[str]:
    """The axis names of a box, of which a dim may have none, one or several."""
    groups = [(n,) if isinstance(n, str) else tuple(n or ()) for n in names]
    return {name for group in groups for name in group}


def _entry(axes: tuple[str, ...]) -> Any:
    return axes[0] if len(axes) == 1 else axes or None
