"""JSON beside the arrays of a checkpoint: what a run needs to go on, and people to read."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from jaxtp.io import stores
from jaxtp.io.checkpoint_arrays import damaged, reading
from jaxtp.io.stores import Folder
from jaxtp.plan.decisions import Plan

ITEM = "jaxtp"
"""What Orbax calls the object, and its folder."""

FORMAT = 2
"""Version of the object; readers refuse newer ones. 1 had no digest."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """One checkpoint, without its arrays.

    Attributes:
        step: Its number.
        plan: The plan that its state was placed by, or None.
        fingerprints: Of each array by path, see `jaxtp.io.fingerprint`.
        origin: Where it was written: "mesh" (axis -> devices), "processes", "devices" (that these
            had), "versions".
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
        data = {"format": FORMAT, **fields, "plan": plan}
        return {**data, "digest": _digest(data)}

    @classmethod
    def read(cls, folder: Folder) -> "About":
        """What `to_json` gave, from a checkpoint's folder.

        Raises:
            BadCheckpoint: TP090, if it is missing, damaged in any bit, or written by a newer jaxtp.
        """
        handler: Any = ocp.JsonCheckpointHandler()
        with reading(folder):
            data = dict(handler.restore(folder / ITEM))
            if data["format"] > FORMAT:
                raise damaged(folder, "it was written by a newer jaxtp")
            if not _is_as_written(data):
                raise damaged(folder, f"{ITEM}/metadata is not what was written")
            del data["format"]
            data.pop("digest", None)
            plan = data.pop("plan")
            return cls(plan=plan and Plan.from_json(json.dumps(plan)), **data)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run needs to know of its newest checkpoint before it has started JAX.

    Attributes:
        step: Its number.
        mesh: Axis -> devices.
        num_processes: That wrote it.
        num_devices: That all of these had; the mesh may have left some out.
        settings: Of the run that wrote it, by dotted name, if it has left them.
    """

    step: int
    mesh: Mapping[str, int]
    num_processes: int
    num_devices: int
    settings: Mapping[str, Any]

    @classmethod
    def of_newest(cls, folder: Folder) -> "Summary | None":
        """Of the newest checkpoint below a folder of them; None if there is none to be read.

        One whose note is damaged is skipped here as in `restore`.
        """
        for step in reversed(stores.steps_in(folder)):
            if not stores.is_complete(folder / str(step)):
                continue
            with contextlib.suppress(
                OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError
            ):
                data = json.loads((folder / str(step) / ITEM / "metadata").read_text())
                if not _is_as_written(data):
                    continue
                origin, mesh = data["origin"], dict(data["origin"]["mesh"])
                return cls(
                    step=step,
                    mesh=mesh,
                    num_processes=origin["processes"],
                    num_devices=origin.get("devices", math.prod(mesh.values())),
                    settings=dict(data["extra"].get("settings", {})),
                )
        return None


def _is_as_written(data: Mapping[str, Any]) -> bool:
    """Whether an object has the digest of what is in it; those of format 1 have none."""
    digest = data.get("digest")
    rest = {name: value for name, value in data.items() if name != "digest"}
    return (data["format"], digest) == (1, None) or digest == _digest(rest)


def _digest(data: Mapping[str, Any]) -> str:
    """SHA-256 of an object, the same before it is written and after it is read."""
    as_read = json.loads(json.dumps(data))  # keys may be numbers before
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def origin(arrays: Iterable[Any]) -> dict[str, Any]:
    """Where arrays lie, and what made them."""
    shardings = [getattr(x, "sharding", None) for x in arrays]
    meshes = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    return {
        "mesh": dict(meshes[0].shape) if meshes else {},
        "processes": jax.process_count(),
        "devices": jax.device_count(),
        "versions": {name: _version(name) for name in ("jaxtp", "jax", "orbax-checkpoint")},
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        return "unknown"
