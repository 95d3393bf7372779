"""JSON beside the arrays of a checkpoint: what a run needs to go on, and people to read."""

import dataclasses
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxtp.io.checkpoint_arrays import damaged, reading
from jaxtp.plan.decisions import Plan

ITEM = "jaxtp"
"""What Orbax calls the object, and its folder."""

FORMAT = 1
"""Version of the object; readers refuse newer ones."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One checkpoint, without its arrays.

    Attributes:
        step: Its number.
        plan: The plan that its state was placed by, or None.
        fingerprints: Of each array by path, see `jaxtp.io.fingerprint`.
        origin: Where it was written: "mesh" (axis -> devices), "processes", "versions".
        extra: What the run wants to remember.
    """

    step: int
    plan: Plan | None
    fingerprints: Mapping[str, int]
    origin: Mapping[str, Any]
    extra: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """The object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plan = self.plan and json.loads(self.plan.to_json())
        return {"format": FORMAT, **fields, "plan": plan}

    @classmethod
    def read(cls, folder: Path) -> "About":
        """What `to_json` gave, from a checkpoint's folder.

        Raises:
            BadCheckpoint: TP090, if it is missing, damaged, or written by a newer jaxtp.
        """
        handler: Any = ocp.JsonCheckpointHandler()
        with reading(folder):
            data = dict(handler.restore(folder / ITEM))
            if data.pop("format") > FORMAT:
                raise damaged(folder, "it was written by a newer jaxtp")
            plan = data.pop("plan")
            return cls(plan=plan and Plan.from_json(json.dumps(plan)), **data)


def origin(arrays: Iterable[Any]) -> dict[str, Any]:
    """Where arrays lie, and what made them."""
    shardings = [getattr(x, "sharding", None) for x in arrays]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    return {
        "mesh": dict(meshes[0].shape) if meshes else {},
        "processes": jax.process_count(),
        "versions": {name: _version(name) for name in ("jaxtp", "jax", "orbax-checkpoint")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
