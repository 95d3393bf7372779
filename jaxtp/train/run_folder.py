"""A run folder belongs to one run at a time, and says so to every host that sees it.

In: a folder on any file system that hosts share, or in a store. Out: a lease on it, or the refusal
that names who has it; and coded errors for a disk that takes no more.

`owner-N.json` names the process that owns the folder, and is renewed as its heartbeat. What file
systems and stores do atomically everywhere is to create a name that is not there yet, so that is
all that owning rests on: a new owner creates the file of the next number, and of several that try
one succeeds. An owner that was frozen meanwhile finds the higher number, and ends before it writes.

Whether an owner still lives is certain on its own machine, where its process is there or not.
Other machines compare the file's time with that of a file that they create beside it, since clocks
of hosts differ, and take it for dead after `LEASE_SECONDS` of silence.
"""

import contextlib
import dataclasses
import datetime
import errno
import json
import os
import platform
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax

from jaxtp.errors import BadRunFolder, RunFolderTaken
from jaxtp.io import stores
from jaxtp.io.owner_files import OwnerFiles, owner_files
from jaxtp.io.stores import Folder
from jaxtp.processes import faults
from jaxtp.processes.startup import gather

BEAT_SECONDS = 5.0
"""Between two heartbeats."""

LEASE_SECONDS = 60.0
"""Silence after which an owner on another machine counts as dead: time for a dozen heartbeats, and
as long as NFS clients may keep a file's times (acregmax)."""

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
"""What a disk answers to a write that names no file."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that owns a folder, as its file says.

    Attributes:
        number: Of the file; the highest one owns.
        token: Random; no two owners have the same.
        host: Its host's name.
        pid: Its process number.
        kernel: Names the running kernel and the process numbers that hold there (the boot's id and
            the PID namespace); empty where the system has none.
        started: When the process began, in the kernel's ticks, since numbers are used again.
        since: When it took the folder, in UTC.
        command: What was run.
    """

    number: int
    token: str
    host: str
    pid: int
    kernel: str
    started: int
    since: str
    command: str

    def lives(self) -> bool | None:
        """Whether its process is there; None where only its own machine knows."""
        if not self.kernel or self.kernel != _kernel():
            return None
        started = _start_of(self.pid)
        return started is not None and started == self.started


class RunFolder:
    """This process's lease on a folder; use `hold`.

    Attributes:
        path: The folder.
        owner: What its file says.
    """

    def __init__(self, path: Folder, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self._files = owner_files(path)
        self._heard = time.monotonic()
        self._problem: BadRunFolder | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="jaxtp run folder", daemon=True).start()

    def check(self, *, now: bool = False) -> None:
        """Raises if the folder is not this run's any more; call it before writing there.

        Args:
            now: Look at the folder, rather than rely on the last heartbeat as long as it is young.

        Raises:
            BadRunFolder: TP093.
        """
        if now or time.monotonic() - self._heard > LEASE_SECONDS / 2:
            self._problem = self._look()
        if self._problem is not None:
            raise self._problem

    def release(self) -> None:
        """Ends the heartbeats and frees the folder."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._files.delete(self.owner.number)

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            problem = self._look()
            if problem is not None and not self._closed.is_set():
                faults.stop(problem)

    def _look(self) -> BadRunFolder | None:
        """Renews the lease; what is wrong, if it is lost."""
        try:
            self._files.renew(self.owner.number)
            newest = _newest(self._files)
        except FileNotFoundError:
            newest = None
        except OSError as error:
            # A server that does not answer for a moment; the lease is still this one's.
            silent = time.monotonic() - self._heard
            return _refused(self.path, error) if silent > LEASE_SECONDS / 2 else None
        if newest is not None and newest.token == self.owner.token:
            self._heard = time.monotonic()
            return None
        if not self._files.exists():
            return _refused(self.path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        by = f"process {newest.pid} on {newest.host}" if newest else "whoever deleted its file"
        return BadRunFolder(
            f"this run does not own the folder any more: it was taken over by {by}",
            where=str(self.path),
            fix="nothing, if that was meant; else start this run again when the other has ended",
        )


_held: dict[Folder, RunFolder | None] = {}
"""What this run owns; its first process has the lease."""


@contextlib.contextmanager
def hold(
    folder: Folder, *, say: Callable[[str], None] = lambda _: None
) -> Generator[RunFolder | None]:
    """Owns a run folder inside the block; errors of its disk are coded ones.

    With several processes the first one owns it for all of them. Blocks may be nested.

    Args:
        folder: Made if missing; also one of a store, see `jaxtp.io.stores.as_place`.
        say: Gets a line where the owner's machine is another one and has to be waited for.

    Yields:
        The lease, in the first process.

    Raises:
        RunFolderTaken: TP092, in every process, if it belongs to a run that still lives.
        BadRunFolder: TP093, in every process, if it cannot be written to; and whenever inside the
            block an error of the file system comes from this folder.
    """
    place = stores.as_place(folder)
    if place in _held:
        yield _held[place]
        return
    lease = _held[place] = _take_for_all(place, say)
    try:
        with _writing(place):
            yield lease
    finally:
        del _held[place]
        if lease is not None:
            lease.release()


def _take_for_all(folder: Folder, say: Callable[[str], None]) -> RunFolder | None:
    lease, refusal = None, None
    if jax.process_index() == 0:
        try:
            with _writing(folder):
                lease = RunFolder(folder, _take(folder, say))
        except (RunFolderTaken, BadRunFolder) as error:
            refusal = error
    said = refusal and (refusal.code, refusal.what, refusal.fix, refusal.where)
    first: Any = gather("run folder", said, LEASE_SECONDS + 60)[0]
    if first is not None:
        code, what, fix, where = first
        kind = RunFolderTaken if code == RunFolderTaken.code else BadRunFolder
        raise kind(what, fix=fix, where=where) from refusal
    return lease


def _take(folder: Folder, say: Callable[[str], None]) -> Owner:
    files = owner_files(folder)
    files.prepare()
    while True:
        newest = _newest(files)
        if newest is not None:
            _outlive(folder, files, newest, say)
        owner = _this_process((newest.number if newest else 0) + 1)
        # Looked for once more: a directory that was read from a cache may have lacked the newest.
        if not files.create(owner.number, json.dumps(dataclasses.asdict(owner), indent=1)):
            continue
        if _newest(files) == owner:
            for number in files.numbers():
                if number != owner.number:
                    files.delete(number)
            return owner
        files.delete(owner.number)


def _outlive(folder: Folder, files: OwnerFiles, owner: Owner, say: Callable[[str], None]) -> None:
    """Returns when an owner is known to be gone.

    Raises:
        RunFolderTaken: TP092, if it lives.
    """
    lives, beat = owner.lives(), files.beat(owner.number)
    if lives is None and beat is not None:
        silence, start = files.silence(owner.number), time.monotonic()
        if silence < LEASE_SECONDS:
            say(
                f"{folder} belonged to process {owner.pid} on {owner.host}: waiting up to "
                f"{LEASE_SECONDS:g} s for a sign of life"
            )
        while lives is None and silence + time.monotonic() - start < LEASE_SECONDS:
            time.sleep(BEAT_SECONDS / 5)
            now = files.beat(owner.number)
            if now is None:
                return
            lives = True if now != beat else None
    if lives:
        raise RunFolderTaken(
            f"it belongs to a run that still lives: process {owner.pid} on {owner.host}, since "
            f"{owner.since}: {owner.command}",
            where=str(folder),
            fix=f"another run.folder; or end that run (kill {owner.pid} on {owner.host}), and the "
            f"folder is free; or delete {files.path(owner.number)}, and that run ends by itself "
            f"within {BEAT_SECONDS:g} s",
        )


def _newest(files: OwnerFiles) -> Owner | None:
    """The owner of the highest number, alive or not."""
    for number in sorted(files.numbers(), reverse=True):
        try:
            return Owner(**json.loads(files.read(number)))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError):  # just being written, or written by another version
            empty = {field.name: "" for field in dataclasses.fields(Owner)}
            return Owner(**empty | {"number": number, "host": "?", "pid": 0, "started": 0})  # pyright: ignore[reportArgumentType]
    return None


def _this_process(number: int) -> Owner:
    return Owner(
        number=number,
        token=uuid.uuid4().hex,
        host=platform.node(),
        pid=os.getpid(),
        kernel=_kernel(),
        started=_start_of(os.getpid()) or 0,
        since=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} UTC",
        command=shlex.join(sys.argv),
    )


def _kernel() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_of(pid: int) -> int | None:
    """When a process of this machine began; None if there is none, or only what is left of one."""
    try:
        # Behind the name, which may hold anything: state, ..., and as the 20th the start (proc(5)).
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


@contextlib.contextmanager
def _writing(folder: Folder) -> Generator[None]:
    """Inside the block, errors of the file system that come from a folder are coded ones."""
    try:
        yield
    except OSError as error:
        if not (error.errno in DISK_ERRORS or _is_within(folder, error.filename)):
            raise
        raise _refused(folder, error) from error


def _is_within(folder: Folder, name: Any) -> bool:
    if not isinstance(name, str | os.PathLike):
        return False
    if not isinstance(folder, Path):
        return os.fspath(name).startswith(str(folder))
    return Path(name).absolute().is_relative_to(folder)


def _refused(folder: Folder, error: OSError) -> BadRunFolder:
    place = f" ({error.filename})" if error.filename not in (None, str(folder)) else ""
    return BadRunFolder(
        f"cannot be written: {error.strerror or error}{place}",
        where=str(folder),
        fix=stores.remedy(folder, error),
    )
