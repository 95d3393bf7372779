"""Folders in an object store, `gs://bucket/run`: what Orbax keeps there, and its owner's files.

In: an address. Out: a path that Orbax and this package read and write as one of a file system, and
errors of a file system for what the store answers.

Orbax writes arrays to Google Cloud Storage with TensorStore's own driver, and all else with
`etils.epath` over gcsfs. For other stores it has no driver: the arrays would go to a folder of this
machine that is called `s3:`.
"""

import contextlib
import errno
import importlib
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

from etils import epath

from jaxtp.errors import BadConfig, BadRunFolder
from jaxtp.io import disk

ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/")
"""How `gs://bucket/run` begins, also after `Path` has taken one slash away."""

COMMITTED = "commit_success.txt"
"""What Orbax writes last into a checkpoint of a store, where no folder can be renamed."""

STATUS = {401: errno.EACCES, 403: errno.EACCES, 404: errno.ENOENT, 412: errno.EEXIST}
"""The error of a file system that says what an answer of HTTP says; any other is `EIO`."""

REMEDIES = {
    errno.EACCES: "credentials for an account with roles/storage.objectUser on the bucket: gcloud "
    "auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
    errno.ENOENT: "name a bucket that is there, or make it: gcloud storage buckets create",
}
"""What helps, by error number."""

Folder = Path | epath.Path
"""A folder of a file system or of a store."""


def refuse_address(folder: Folder | str) -> None:
    """Refuses `gs://bucket/run` and the like, which would else be a folder called `gs:` here.

    Raises:
        BadRunFolder: TP093.
    """
    if found := ADDRESS.match(str(folder)):
        raise BadRunFolder(
            f"{found[1]}:// is the address of a store, and a run's metrics grow line by line, which"
            " stores cannot do",
            where=str(folder),
            fix="a folder of a file system that every host sees; its checkpoints may be in a store:"
            " --run.checkpoints gs://bucket/run",
        )


def as_place(folder: Folder | str) -> Folder:
    """The absolute path of a folder of checkpoints.

    Raises:
        BadRunFolder: TP093, for a store that Orbax cannot write to, or no bucket.
        BadConfig: TP020, without gcsfs.
    """
    found = ADDRESS.match(str(folder))
    if not found:
        return Path(folder).absolute()
    if found[1] != "gs":
        raise BadRunFolder(
            f"Orbax has no driver for {found[1]}://, only for gs://",
            where=str(folder),
            fix="mount the store on every host (mountpoint-s3, blobfuse2), and name the folder "
            "there",
        )
    rest = str(folder)[found.end() :].strip("/")
    if not rest:
        raise BadRunFolder("names no bucket", where=str(folder), fix="gs://bucket/run")
    file_system()
    return epath.Path(f"gs://{rest}")


def is_remote(folder: Folder) -> bool:
    """Whether a folder is one of a store."""
    return not isinstance(folder, Path)


def is_complete(checkpoint: Folder) -> bool:
    """Whether everything is in a checkpoint; on a file system its name says so."""
    return not is_remote(checkpoint) or (checkpoint / COMMITTED).exists()


def steps_in(folder: Folder) -> list[int]:
    """The numbers of the checkpoints below a folder, complete or not, in order."""
    names = [path.name for path in folder.glob("*")]
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name))


def sizes(folder: Folder) -> dict[str, int]:
    """Bytes of every file below a folder, by its path from there; asks a store once."""
    if isinstance(folder, Path):
        files = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}
    found = file_system().find(str(folder), detail=True)
    start = len(str(folder).removeprefix("gs://")) + 1
    return {name[start:]: entry["size"] for name, entry in found.items()}


def rename(folder: Folder, name: str) -> None:
    """Gives a folder another name, beside the old one.

    In a store its objects are copied first, which the store does by itself, and deleted then: a
    process that dies between leaves the old ones whole.
    """
    if isinstance(folder, Path):
        folder.rename(folder.with_name(name))
        return
    file_system().copy(str(folder), str(folder.parent / name), recursive=True)
    file_system().rm(str(folder), recursive=True)


def remedy(folder: Folder, error: BaseException) -> str:
    """The fix for what a disk or a store refuses; TensorStore gives no number, only its text."""
    if not is_remote(folder):
        return disk.remedy(error)
    number = error.errno if isinstance(error, OSError) else None
    if any(word in str(error) for word in ("PERMISSION_DENIED", "UNAUTHENTICATED")):
        number = errno.EACCES
    return REMEDIES.get(number or 0, "look whether this host reaches the store, and start again")


def refuse_silence(folder: Folder, error: Exception) -> None:
    """Tells a store that does not answer, or not this account, from a file that is damaged.

    Raises:
        BadRunFolder: TP093.
    """
    said = re.search("PERMISSION_DENIED|UNAUTHENTICATED|UNAVAILABLE|DEADLINE_EXCEEDED", str(error))
    number = error.errno if isinstance(error, OSError) else None
    if is_remote(folder) and (said or number in (errno.EACCES, errno.EIO)):
        raise BadRunFolder(
            f"cannot be read: {' '.join(str(error).split())[:200]}",
            where=str(folder),
            fix=remedy(folder, error),
        ) from error


def check_writable(folder: Folder) -> None:
    """Writes and deletes an object, since Orbax would make a bucket that is not there.

    Raises:
        OSError: If the store does not let it.
    """
    if is_remote(folder):
        with answering(folder):
            path = str(folder / f".{os.urandom(8).hex()}")
            file_system().pipe_file(path, b"x")
            file_system().rm_file(path)


@contextlib.contextmanager
def answering(folder: Folder) -> Generator[None]:
    """Inside the block, what a store answers is raised as an error of a file system.

    Raises:
        OSError: With a number, the store's text and the folder.
    """
    if not is_remote(folder):
        yield
        return
    try:
        yield
    except Exception as err:
        number = _error_number(err)
        if number is None:
            raise
        text = " ".join(str(err).split()) or type(err).__name__
        raise OSError(number, f"{os.strerror(number)}: {text}", str(folder)) from err


def _error_number(error: Exception) -> int | None:
    """The error number of a file system for an error of gcsfs; None for what is none of a store."""
    if isinstance(error, OSError):
        if error.errno is None and str(error).startswith("Forbidden"):
            return errno.EACCES
        plain = ((FileNotFoundError, errno.ENOENT), (FileExistsError, errno.EEXIST))
        known = (number for kind, number in plain if isinstance(error, kind))
        return error.errno or next(known, errno.EIO)
    home = type(error).__module__.partition(".")[0]
    if home == "google" and "auth" in type(error).__module__:
        return errno.EACCES
    if home in ("gcsfs", "google", "aiohttp"):
        code = str(getattr(error, "code", ""))
        return STATUS.get(int(code), errno.EIO) if code.isdigit() else errno.EIO
    return None


def file_system() -> Any:
    """Of Google Cloud Storage; does not remember listings, which other processes change.

    Raises:
        BadConfig: TP020, without gcsfs.
    """
    config = importlib.import_module("fsspec.config")
    # Those of Orbax too: its first process lists what the others have written.
    config.conf.setdefault("gcs", {}).setdefault("use_listings_cache", False)
    try:
        return importlib.import_module("fsspec").filesystem("gs")
    except ImportError:
        raise BadConfig(
            "gcsfs is not installed, by which gs:// is read and written",
            where="run.checkpoints",
            fix='pip install "jaxtp[remote]"',
        ) from None
