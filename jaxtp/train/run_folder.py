"""A run folder belongs to one run at a time, and says so to every host that sees it.

In: a folder on any file system that hosts share. Out: a lease on it, or the refusal that names who
has it; and coded errors for a disk that takes no more.

`owner-N.json` names the process that owns the folder, and its modification time is its heartbeat.
What file systems do atomically everywhere is to create a name that is not there yet, so that is
all that owning rests on: a new owner creates the file of the next number, and of several that try
one succeeds. An owner that was frozen meanwhile finds the higher number, and ends before it writes.
Locks are not used: NFS servers lose them, and some clusters' file systems have none.

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
from jaxtp.io import disk
from jaxtp.processes import faults
from jaxtp.processes.startup import gather

BEAT_SECONDS = 5.0
"""Between two heartbeats."""

LEASE_SECONDS = 60.0
"""Silence after which an owner on another machine counts as dead: time for a dozen heartbeats, and
as long as NFS clients may keep a file's times (acregmax)."""

DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE}
"""What a disk answers to a write that names no file."""

PREFIX, SUFFIX = "owner-", ".json"


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

    def __init__(self, path: Path, owner: Owner) -> None:
        self.path, self.owner = path, owner
        self._file = _file_of(path, owner.number)
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
            self._file.unlink()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_SECONDS):
            problem = self._look()
            if problem is not None and not self._closed.is_set():
                faults.stop(problem)

    def _look(self) -> BadRunFolder | None:
        """Renews the lease; what is wrong, if it is lost."""
        try:
            os.utime(self._file)
            newest = _newest(self.path)
        except FileNotFoundError:
            newest = None
        except OSError as error:
            # A server that does not answer for a moment; the lease is still this one's.
            silent = time.monotonic() - self._heard
            return _refused(self.path, error) if silent > LEASE_SECONDS / 2 else None
        if newest is not None and newest.token == self.owner.token:
            self._heard = time.monotonic()
            return None
        if not self.path.exists():
            return _refused(self.path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))
        by = f"process {newest.pid} on {newest.host}" if newest else "whoever deleted its file"
        return BadRunFolder(
            f"this run does not own the folder any more: it was taken over by {by}",
            where=str(self.path),
            fix="nothing, if that was meant; else start this run again when the other has ended",
        )


_held: dict[Path, RunFolder | None] = {}
"""What this run owns; its first process has the lease."""


@contextlib.contextmanager
def hold(
    folder: Path, *, say: Callable[[str], None] = lambda _: None
) -> Generator[RunFolder | None]:
    """Owns a run folder inside the block; errors of its disk are coded ones.

    With several processes the first one owns it for all of them. Blocks may be nested.

    Args:
        folder: Made if missing.
        say: Gets a line where the owner's machine is another one and has to be waited for.

    Yields:
        The lease, in the first process.

    Raises:
        RunFolderTaken: TP092, in every process, if it belongs to a run that still lives.
        BadRunFolder: TP093, in every process, if it cannot be written to, or is an address such as
            `gs://bucket/run`; and whenever inside the block an error of the file system comes from
            this folder.
    """
    disk.refuse_address(folder)
    place = folder.absolute()
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


def _take_for_all(folder: Path, say: Callable[[str], None]) -> RunFolder | None:
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


def _take(folder: Path, say: Callable[[str], None]) -> Owner:
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        newest = _newest(folder)
        if newest is not None:
            _outlive(folder, newest, say)
        owner = _this_process((newest.number if newest else 0) + 1)
        # Looked for once more: a directory that was read from a cache may have lacked the newest.
        if not _create(folder, owner):
            continue
        own = _file_of(folder, owner.number)
        if _newest(folder) == owner:
            for path in folder.glob(f"{PREFIX}*{SUFFIX}"):
                if path != own:
                    path.unlink(missing_ok=True)
            return owner
        own.unlink(missing_ok=True)


def _outlive(folder: Path, owner: Owner, say: Callable[[str], None]) -> None:
    """Returns when an owner is known to be gone.

    Raises:
        RunFolderTaken: TP092, if it lives.
    """
    lives, beat = owner.lives(), _beat_of(folder, owner)
    if lives is None and beat is not None and _age(folder, beat) < LEASE_SECONDS:
        say(
            f"{folder} belonged to process {owner.pid} on {owner.host}: waiting up to "
            f"{LEASE_SECONDS:g} s for a sign of life"
        )
        while lives is None and _age(folder, beat) < LEASE_SECONDS:
            time.sleep(BEAT_SECONDS / 5)
            now = _beat_of(folder, owner)
            if now is None:
                return
            lives = True if now != beat else None
    if lives:
        raise RunFolderTaken(
            f"it belongs to a run that still lives: process {owner.pid} on {owner.host}, since "
            f"{owner.since}: {owner.command}",
            where=str(folder),
            fix=f"another run.folder; or end that run (kill {owner.pid} on {owner.host}), and the "
            f"folder is free; or delete {_file_of(folder, owner.number)}, and that run ends by "
            f"itself within {BEAT_SECONDS:g} s",
        )


def _create(folder: Path, owner: Owner) -> bool:
    """Makes an owner's file with all that is in it, unless there is one of its number."""
    path = _file_of(folder, owner.number)
    text = json.dumps(dataclasses.asdict(owner), indent=1)
    new = path.with_name(f".{path.name}.{owner.token}")
    try:
        new.write_text(text)
        os.link(new, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # Without hard links the file is there before what is in it.
        try:
            with path.open("x") as file:
                file.write(text)
        except FileExistsError:
            return False
    finally:
        with contextlib.suppress(OSError):
            new.unlink()
    return True


def _newest(folder: Path) -> Owner | None:
    """The owner of the highest number, alive or not."""
    numbers = [path.name[len(PREFIX) : -len(SUFFIX)] for path in folder.glob(f"{PREFIX}*{SUFFIX}")]
    for number in sorted((int(n) for n in numbers if n.isdigit()), reverse=True):
        try:
            return Owner(**json.loads(_file_of(folder, number).read_text()))
        except FileNotFoundError:
            continue
        except (ValueError, TypeError):  # just being written, or written by another version
            empty = {field.name: "" for field in dataclasses.fields(Owner)}
            return Owner(**empty | {"number": number, "host": "?", "pid": 0, "started": 0})  # pyright: ignore[reportArgumentType]
    return None


def _beat_of(folder: Path, owner: Owner) -> int | None:
    """The time of an owner's last heartbeat, in the file system's nanoseconds."""
    try:
        # Opened, so that NFS clients ask the server.
        with _file_of(folder, owner.number).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def _age(folder: Path, beat: int) -> float:
    """Seconds since a heartbeat by the file system's own clock."""
    path = folder / f".clock-{uuid.uuid4().hex}"
    try:
        with path.open("x") as file:
            file.write("x")
            file.flush()
            return (os.fstat(file.fileno()).st_mtime_ns - beat) / 1e9
    finally:
        path.unlink(missing_ok=True)


def _file_of(folder: Path, number: int) -> Path:
    return folder / f"{PREFIX}{number:06d}{SUFFIX}"


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
def _writing(folder: Path) -> Generator[None]:
    """Inside the block, errors of the file system that come from a folder are coded ones."""
    try:
        yield
    except OSError as error:
        is_own = error.errno in DISK_ERRORS or (
            isinstance(error.filename, str | os.PathLike)
            and Path(error.filename).absolute().is_relative_to(folder)
        )
        if not is_own:
            raise
        raise _refused(folder, error) from error


def _refused(folder: Path, error: OSError) -> BadRunFolder:
    place = f" ({error.filename})" if error.filename else ""
    return BadRunFolder(
        f"cannot be written: {error.strerror or error}{place}",
        where=str(folder),
        fix=disk.remedy(error),
    )
