"""Checkpoints with Orbax: written in the background on one mesh, read onto any other.

Orbax writes, keeps the newest few, and renames a folder when everything is in it: what has a number
for a name was complete once. In a store it adds a file last instead (`jaxtp.io.stores`). Each
process writes and reads what its own devices hold.
"""

import contextlib
import dataclasses
import json
import types
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxtp.config.named_files import as_folder
from jaxtp.errors import BadCheckpoint, BadConfig, CommunicationTimeout, JaxtpError, join, warn
from jaxtp.errors.arguments import MAPPING, Kind, checked, is_whole
from jaxtp.io import checkpoint_arrays, checkpoint_metadata, stores
from jaxtp.io.checkpoint_arrays import StoredArray, damaged
from jaxtp.io.fingerprint import fingerprints
from jaxtp.io.stores import Folder
from jaxtp.mesh.build import auto_context
from jaxtp.placement.arrays import refuse_donated
from jaxtp.placement.train_state import Overrides
from jaxtp.plan.decisions import A_PLAN, Plan, check_plan
from jaxtp.plan.trees import PyTree, leaves, map_with_path, shape_dtype
from jaxtp.processes.lost_peer import sign_of_lost_peer

State = TypeVar("State")

UNFINISHED = ".orbax-checkpoint-tmp"
"""What Orbax appends to a folder's name until everything is in it."""

SET_ASIDE = ".set-aside"
"""What a checkpoint's name ends in after the run went on from an older one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Restored(Generic[State]):
    """A checkpoint, read.

    Attributes:
        step: Its number.
        state: The state, placed and stored as the target; its arrays may be donated.
        plan: The plan that it was saved by, or None.
        origin: Where it was written: "mesh" (axis -> devices), "processes", "versions".
        extra: What was given to `save` to be kept beside.
    """

    step: int
    state: State
    plan: Plan | None
    origin: Mapping[str, Any]
    extra: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run, by step.

        with jaxtp.Checkpoints("runs/a/checkpoints") as checkpoints:
            if checkpoints.steps():
                restored = checkpoints.restore(state, plan=plan)
                step, state = restored.step, restored.state
            ...
            checkpoints.save(step, state, plan=plan, extra={"seed": 0})

    With several processes all of them make the same calls, on a folder that all of them see.

    Attributes:
        folder: Where they are, each in a folder called as its step: of a file system, or
            `gs://bucket/run` with `jaxtp[remote]`.
        keep_last: How many are kept.

    Raises:
        BadRunFolder: TP093, for the address of a store that Orbax cannot write to.
        BadUsage: TP132, for what is no path.
        BadConfig: TP020, if `keep_last` is no count of 1 or more, or gcsfs is missing.
    """

    def __init__(self, folder: Path | str, *, keep_last: int = 3) -> None:
        as_folder(folder)
        if not is_whole(keep_last) or keep_last < 1:
            raise BadConfig(f"is {keep_last!r}", where="keep_last", fix="an integer, 1 or more")
        self.folder, self.keep_last = stores.as_place(folder), keep_last
        self._manager: ocp.CheckpointManager | None = None
        self._restored: int | None = None

    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, or a damaged one, in order.

        Raises:
            BadCheckpoint: TP090, if the last one could not be written, or a store not be reached.
        """
        self.wait()
        with _reaching(self.folder):
            found = stores.steps_in(self.folder)
            return [step for step in found if stores.is_complete(self.folder / str(step))]

    def save(
        self,
        step: int,
        state: PyTree,
        *,
        plan: Plan | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Writes a checkpoint; returns when the arrays are copied, so the state may be donated.

        Checkpoints that are newer than the one that was restored, being damaged or not asked for,
        make room: the first save renames them.

        Args:
            step: Steps that the state has behind it, more than in any other checkpoint here.
            state: Any tree of arrays and numbers.
            plan: The plan that it is placed by; None if it has the model's own form.
            extra: What JSON can hold: settings, seeds, the position in the data.

        Raises:
            BadCheckpoint: TP090, if the step is no count, `extra` is not JSON, the state has no
                array, there are checkpoints of this or later steps and none was restored, or if
                this one or the one before it cannot be written.
            BadStep: TP133, if an array was donated to a step.
            BadTree: TP046, if a leaf is no array.
        """
        _check_note(step, extra)
        step = int(step)
        if plan is not None:
            check_plan(plan)
        found = dict(leaves(state))
        _check_arrays(found)
        with auto_context():
            note = checkpoint_metadata.About(
                step=step,
                plan=plan,
                fingerprints=_fingerprints(found),
                origin=checkpoint_metadata.origin(found.values()),
                extra=extra or {},
            )
        items: dict[str, Any] = {
            checkpoint_arrays.ITEM: checkpoint_arrays.save_args(found),
            checkpoint_metadata.ITEM: ocp.args.JsonSave(note.to_json()),
        }
        with _writing(self.folder):
            manager = self._manager or self._open()
            if newer := [number for number in manager.all_steps() if number >= step]:
                raise BadCheckpoint(
                    f"step {step} does not come after the steps {join(newer)}, which are there",
                    where=str(self.folder),
                    fix="restore before you save, or choose another folder",
                )
            manager.save(step, args=ocp.args.Composite(**items))

    @checked(
        plan=A_PLAN.or_none(),
        step=Kind(is_whole, "a step of steps()", BadCheckpoint).or_none(),
        state_overrides=MAPPING.or_none(),
    )
    def restore(
        self,
        like: State,
        *,
        plan: Plan | None = None,
        step: int | None = None,
        state_overrides: Overrides | None = None,
    ) -> Restored[State]:
        """The newest checkpoint that can be read, placed and stored as `like`.

        The mesh, the plan and the processes need not be those that it was saved with, and no
        process reads more than its devices hold. What is damaged is skipped with a warning.

        Args:
            like: A tree as the one that was saved, of arrays or of structs with shardings.
            plan: The plan that `like` is placed by; None if it has the model's own form.
            step: Take this one and no other.
            state_overrides: Those that `like` was placed with, see `jaxtp.state_specs`.

        Raises:
            BadCheckpoint: TP090, if there is none, or none that can be read.
            CheckpointMismatch: TP091, if paths, shapes or dtypes are not those of `like`.
            PlanMismatch: TP045, for a `plan` that is none.
            BadConfig: TP020, for `state_overrides` that are no dict.
        """
        numbers = self.steps()
        if step is not None:
            if step not in numbers:
                raise BadCheckpoint(
                    f"there is no checkpoint of step {step!r}",
                    where=str(self.folder),
                    fix=f"one of {join(numbers)}" if numbers else "save one first",
                )
            numbers = [int(step)]
        wanted = checkpoint_arrays.stored(like, plan, state_overrides)
        skipped: list[BadCheckpoint] = []
        for number in reversed(numbers):
            try:
                restored = self._read(number, like, wanted, state_overrides)
            except BadCheckpoint as err:
                skipped.append(err)
                continue
            for path in self._unfinished():
                skipped.append(damaged(path, "it was never finished"))
            for err in skipped:
                warn(f"{err.code} at {err.where}: skipped, {err.what}")
            self._restored = number
            return restored
        if len(skipped) == 1:
            raise skipped[0]
        listed = "; ".join(f"{Path(err.where).name}: {err.what}" for err in skipped)
        raise BadCheckpoint(
            f"none of {len(skipped)} checkpoints can be read: {listed}"
            if skipped
            else "no checkpoint",
            where=str(self.folder),
            fix="name a folder that Checkpoints.save wrote to, or choose another one to start anew",
        )

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
            BadCheckpoint: TP090, if it could not be.
        """
        if self._manager is not None:
            with _writing(self.folder):
                self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and ends the threads that write.

        Raises:
            BadCheckpoint: TP090, if the last checkpoint could not be written.
        """
        if self._manager is not None:
            manager, self._manager = self._manager, None
            with _writing(self.folder):
                manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        # A process that is lost writes no more, and the others would wait for it.
        if isinstance(error, CommunicationTimeout) or sign_of_lost_peer(error):
            return
        self.close()

    def _unfinished(self) -> list[Any]:
        """What a process that died while it wrote has left behind."""
        found = [self.folder / str(step) for step in stores.steps_in(self.folder)]
        found = [path for path in found if not stores.is_complete(path)]
        return [*found, *self.folder.glob(f"*{UNFINISHED}*")]

    def _open(self) -> ocp.CheckpointManager:
        """Makes room for what comes after the restored step, and lets Orbax manage the folder."""
        checkpoint_arrays.hush_abandoned()
        stores.check_writable(self.folder)
        if self._restored is not None and jax.process_index() == 0:
            for number in self.steps():
                if number > self._restored:
                    before = len(list(self.folder.glob(f"{number}{SET_ASIDE}*")))
                    name = f"{number}{SET_ASIDE}{before or ''}"
                    stores.rename(self.folder / str(number), name)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("jaxtp.io.checkpoints")
        options = ocp.CheckpointManagerOptions(
            preservation_policy=ocp.checkpoint_managers.LatestN(self.keep_last),
            cleanup_tmp_directories=True,
        )
        registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
        registry.add(checkpoint_arrays.ITEM, ocp.args.StandardSave, checkpoint_arrays.Handler())
        registry.add(checkpoint_metadata.ITEM, ocp.args.JsonSave)
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, handler_registry=registry
        )
        return self._manager

    def _read(
        self,
        number: int,
        like: State,
        wanted: Mapping[str, StoredArray],
        overrides: Overrides | None,
    ) -> Restored[State]:
        folder = self.folder / str(number)
        try:
            note = checkpoint_metadata.About.read(folder)
            found = checkpoint_arrays.read(folder, note.plan, wanted, overrides)
        except JaxtpError:
            _agree(folder, is_read=False)
            raise
        _agree(folder, is_read=True)
        with auto_context():
            settled = checkpoint_arrays.settle(found, wanted)
            marks = _fingerprints(settled)
        if wrong := [path for path, mark in marks.items() if note.fingerprints.get(path) != mark]:
            raise damaged(folder, f"other numbers than were saved, in {join(wrong)}")
        return Restored(
            step=number,
            state=map_with_path(lambda path, _: settled[path], like),
            plan=note.plan,
            origin=note.origin,
            extra=note.extra,
        )


def _agree(folder: Folder, *, is_read: bool) -> None:
    """Lets all processes skip a checkpoint that one of them cannot read.

    What follows is compiled for all devices, and would wait for that process for ever.
    """
    if jax.process_count() > 1:
        everywhere = multihost_utils.process_allgather(np.array(is_read))
        if is_read and not np.all(everywhere):
            raise damaged(folder, "another process cannot read its part")


def _check_note(step: Any, extra: Any) -> None:
    """Refuses, before anything is written, what no checkpoint can have."""
    if not is_whole(step) or step < 0:
        raise BadCheckpoint(f"step {step!r} is no count of steps", fix="an integer, 0 or more")
    try:
        if not isinstance(extra, Mapping | None):
            raise TypeError(f"it is a {type(extra).__name__}")
        json.dumps(extra)
        if other := [key for key in _keys(extra) if not isinstance(key, str)]:
            raise TypeError(f"the key {other[0]!r} would come back as text")
    except (TypeError, ValueError) as err:
        raise BadCheckpoint(
            f"extra cannot be written as JSON: {err}",
            fix="numbers, text, lists and dicts with text as keys",
        ) from None


def _keys(value: Any) -> list[Any]:
    """The keys of all mappings in what JSON can hold."""
    if isinstance(value, Mapping):
        return [*value, *(key for inner in value.values() for key in _keys(inner))]
    if isinstance(value, list | tuple):
        return [key for inner in value for key in _keys(inner)]
    return []


def _check_arrays(found: Mapping[str, Any]) -> None:
    """Refuses a state that holds something else than arrays, or arrays that are gone."""
    if not found:
        raise BadCheckpoint("the state has no arrays", fix="save(step, state)")
    for path, leaf in found.items():
        shape_dtype(leaf, path)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise BadCheckpoint(
                "a struct has a shape and no numbers", where=path, fix="save the arrays"
            )
    refuse_donated(found)


def _fingerprints(found: Mapping[str, Any]) -> dict[str, int]:
    return fingerprints({path: x for path, x in found.items() if isinstance(x, jax.Array)})


@contextlib.contextmanager
def _writing(folder: Folder) -> Generator[None]:
    """Inside the block, errors of the file system are coded ones.

    Raises:
        BadCheckpoint: TP090.
    """
    try:
        with stores.answering(folder):
            yield
    except BadCheckpoint:
        raise
    except (OSError, ValueError) as err:  # TensorStore raises ValueError for a full disk too
        if sign_of_lost_peer(err):
            raise
        raise _refused("written", folder, err) from err


@contextlib.contextmanager
def _reaching(folder: Folder) -> Generator[None]:
    """Inside the block, a store that does not answer is a coded error.

    Raises:
        BadCheckpoint: TP090.
    """
    try:
        with stores.answering(folder):
            yield
    except OSError as err:
        raise _refused("listed", folder, err) from err


def _refused(what: str, folder: Folder, err: Exception) -> BadCheckpoint:
    return BadCheckpoint(
        f"cannot be {what}: {checkpoint_arrays.shorten(err)}",
        where=str(folder),
        fix=stores.remedy(folder, err),
    )
