"""The files by which a run owns a folder: made only where there is none, renewed, read by others.

In: a folder of a file system or of a store. Out: the few things that `jaxtp.train.run_folder` asks
of either. What both do atomically is to create a name that is not there yet.
"""

import contextlib
import errno
import os
import uuid
from pathlib import Path
from typing import Protocol

from jaxtp.io import stores
from jaxtp.io.stores import Folder

PREFIX, SUFFIX = "owner-", ".json"


class OwnerFiles(Protocol):
    """Numbered files in one folder.

    Every method raises `OSError` where the disk or the store refuses, `FileNotFoundError` among
    them for a file that is not there.
    """

    def prepare(self) -> None:
        """Makes the folder if missing."""
        ...

    def exists(self) -> bool:
        """Whether the folder is there."""
        ...

    def path(self, number: int) -> Folder:
        """Where a file is."""
        ...

    def numbers(self) -> list[int]:
        """Those that are there."""
        ...

    def read(self, number: int) -> str:
        """What is in a file."""
        ...

    def create(self, number: int, text: str) -> bool:
        """Makes a file with all that is in it, unless there is one of its number."""
        ...

    def delete(self, number: int) -> None:
        """Removes a file, if it is there."""
        ...

    def renew(self, number: int) -> None:
        """Changes the heartbeat of a file."""
        ...

    def beat(self, number: int) -> int | None:
        """A number that each renewal changes; None if the file is not there."""
        ...

    def silence(self, number: int) -> float:
        """Seconds since a file's last renewal, as far as the folder's own clock tells."""
        ...


def owner_files(folder: Folder) -> OwnerFiles:
    """Those of a folder."""
    return _OnDisk(folder) if isinstance(folder, Path) else _InStore(folder)


def _number_of(name: str) -> int | None:
    number = name.removeprefix(PREFIX).removesuffix(SUFFIX)
    is_one = name == f"{PREFIX}{number}{SUFFIX}" and number.isdecimal()
    return int(number) if is_one else None


def _name_of(number: int) -> str:
    return f"{PREFIX}{number:06d}{SUFFIX}"


class _OnDisk:
    """Of a file system, see `OwnerFiles`. A file's modification time is its heartbeat.

    Locks are not used: NFS servers lose them, and some clusters' file systems have none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def exists(self) -> bool:
        return self._folder.exists()

    def path(self, number: int) -> Path:
        return self._folder / _name_of(number)

    def numbers(self) -> list[int]:
        found = map(_number_of, (path.name for path in self._folder.glob(f"{PREFIX}*{SUFFIX}")))
        return [number for number in found if number is not None]

    def read(self, number: int) -> str:
        return self.path(number).read_text()

    def create(self, number: int, text: str) -> bool:
        path = self.path(number)
        new = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
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

    def delete(self, number: int) -> None:
        self.path(number).unlink(missing_ok=True)

    def renew(self, number: int) -> None:
        os.utime(self.path(number))

    def beat(self, number: int) -> int | None:
        try:
            # Opened, so that NFS clients ask the server.
            with self.path(number).open("rb") as file:
                return os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def silence(self, number: int) -> float:
        beat = self.beat(number)
        clock = self._folder / f".clock-{uuid.uuid4().hex}"
        try:
            with clock.open("x") as file:
                file.write("x")
                file.flush()
                return (os.fstat(file.fileno()).st_mtime_ns - (beat or 0)) / 1e9
        finally:
            clock.unlink(missing_ok=True)


class _InStore:
    """Of Google Cloud Storage, see `OwnerFiles`. What renews an object is new metadata.

    Objects are created on the condition that there is none (`ifGenerationMatch=0`), and metadata is
    only changed of one that is there.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder, self._store = folder, stores.file_system()

    def prepare(self) -> None:
        stores.check_writable(self._folder)

    def exists(self) -> bool:
        return True  # a store's folders are the beginnings of names

    def path(self, number: int) -> Folder:
        return self._folder / _name_of(number)

    def numbers(self) -> list[int]:
        with stores.answering(self._folder):
            names = self._store.glob(f"{self._folder}/{PREFIX}*{SUFFIX}")
        found = map(_number_of, (name.rpartition("/")[2] for name in names))
        return [number for number in found if number is not None]

    def read(self, number: int) -> str:
        with stores.answering(self._folder):
            return self._store.cat_file(str(self.path(number))).decode()

    def create(self, number: int, text: str) -> bool:
        try:
            with stores.answering(self._folder):
                self._store.pipe_file(str(self.path(number)), text.encode(), mode="create")
        except FileExistsError:
            return False
        return True

    def delete(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError), stores.answering(self._folder):
            self._store.rm_file(str(self.path(number)))

    def renew(self, number: int) -> None:
        with stores.answering(self._folder):
            self._store.setxattrs(str(self.path(number)), heartbeat=uuid.uuid4().hex)

    def beat(self, number: int) -> int | None:
        try:
            with stores.answering(self._folder):
                return int(self._store.info(str(self.path(number)))["metageneration"])
        except FileNotFoundError:
            return None

    def silence(self, number: int) -> float:
        del number
        return 0.0  # clocks of hosts differ from the store's; what is watched here counts
