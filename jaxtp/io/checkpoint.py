"""Checkpoints with Orbax: written from one mesh, read onto any other.

Stage in: a tree of placed arrays. Stage out: a folder; and back.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxtp.errors import BadCheckpoint, join
from jaxtp.trees import PyTree, leaves, map_with_path

Tree = TypeVar("Tree")


def save(folder: Path, tree: object) -> None:
    """Writes every array of `tree`; each process writes what its devices hold.

    Args:
        folder: A folder that does not exist yet; it appears only when it is complete.
        tree: A tree of arrays.

    Raises:
        BadCheckpoint: TP090, if `folder` exists.
    """
    if folder.exists():
        raise BadCheckpoint("the folder exists", where=str(folder), fix="choose a new folder")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute(), tree)


def restore(folder: Path, like: Tree) -> Tree:
    """The saved tree, placed as `like` is.

    Args:
        folder: What `save` wrote.
        like: A tree of the same structure, of arrays or of `jax.ShapeDtypeStruct` with shardings;
            its mesh need not be the one that the checkpoint was saved from.

    Raises:
        BadCheckpoint: TP090, if there is no checkpoint, or one of other paths or shapes.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        saved: Any = folder.is_dir() and checkpointer.metadata(folder.absolute()).item_metadata
        if not saved:
            raise BadCheckpoint("no checkpoint", where=str(folder), fix="name a folder of save()")
        if differences := sorted(_shapes(saved) ^ _shapes(like)):
            listed = join(f"{path} {list(shape)}" for path, shape in differences)
            raise BadCheckpoint(
                f"these arrays are in one of the checkpoint and the tree, not in both: {listed}",
                where=str(folder),
                fix="restore with the model and the optimizer that were saved",
            )
        return checkpointer.restore(folder.absolute(), jax.tree.map(_abstract, like))


def _shapes(tree: object) -> set[tuple[str, tuple[int, ...]]]:
    """Path and shape of every array; leaves of checkpoint metadata have a shape too."""
    return {
        (jax.tree_util.keystr(path, simple=True, separator="/"), _shape(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _shape(leaf: Any) -> tuple[int, ...]:
    return tuple(leaf.shape) if hasattr(leaf, "shape") else np.shape(leaf)


def _abstract(leaf: Any) -> Any:
    # A Flax TrainState counts its steps in a Python int until the first one.
    if not isinstance(leaf, jax.Array):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def by_path(tree: PyTree) -> dict[str, Any]:
    """The arrays of any tree by path: what a checkpoint of it holds, whatever its classes."""
    return dict(leaves(tree))


def from_paths(like: Tree, arrays: Mapping[str, Any]) -> Tree:
    """`like` with the arrays of `by_path`.

    Raises:
        KeyError: if a path is missing.
    """
    return map_with_path(lambda path, _: arrays[path], like)
