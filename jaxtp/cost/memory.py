"""Bytes of parameters, gradients and optimizer state on one device, from shapes and a plan."""

import math
from collections.abc import Mapping
from typing import Protocol

from jaxtp.mesh.axes import MeshShape
from jaxtp.plan.specs import Spec
from jaxtp.plan.trees import Param, itemsize


class Placed(Protocol):
    """Where an array lies: a decision of a plan, or what `jaxtp.placement.train_state` derives."""

    @property
    def stored(self) -> tuple[int, ...]:
        """Global shape in elements, as placed."""
        ...

    @property
    def spec(self) -> Spec:
        """Mesh axes per dim."""
        ...


def state_bytes_per_device(
    state: Mapping[str, Param], places: Mapping[str, Placed], mesh: MeshShape, *, along: str = ""
) -> int:
    """Bytes of a train state or a part of it, padding included, that one device holds.

    Args:
        state: Its arrays by path.
        places: Path -> where that array lies, from `jaxtp.placement.train_state.slots`.
        mesh: The plan's mesh shape.
        along: Count only arrays that are sharded along this axis.
    """
    return sum(
        itemsize(array.dtype) * math.prod(places[path].stored) // mesh.pieces(places[path].spec)
        for path, array in state.items()
        if not along or any(along in axes for axes in places[path].spec)
    )
