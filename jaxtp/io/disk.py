"""What a run folder's disk can refuse, and what to do about each refusal.

In: an error of the file system, or of TensorStore that quotes one. Out: the fix of a coded error.
"""

import errno
import os

REMEDIES = {
    errno.ENOSPC: "make room on the disk, or choose another run.folder",
    errno.EDQUOT: "make room in the quota, or choose another run.folder",
    errno.EROFS: "mount the disk for writing, or choose another run.folder",
    errno.EACCES: "give the user of this process the right to write there, or choose another "
    "run.folder",
    errno.EPERM: "give the user of this process the right to write there, or choose another "
    "run.folder",
    errno.ENOENT: "the folder has been moved or deleted, or none can be made there: put it "
    "back, or choose another run.folder",
    errno.EEXIST: "there is a file of that name: move it away, or choose another run.folder",
    errno.EISDIR: "there is a folder of that name: move it away, or choose another run.folder",
    errno.ENOTDIR: "a part of the path is a file: move it away, or choose another run.folder",
    errno.ESTALE: "mount the disk again: its server has lost the folder",
    errno.ENOTCONN: "mount the disk again: the program that serves it has ended",
    errno.EFBIG: "raise the limit of a file's size: ulimit -f",
    errno.EIO: "have the disk checked, and choose another run.folder",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
}
"""What helps, by error number."""


def remedy(error: BaseException) -> str:
    """The fix for an error of the file system; TensorStore gives no number, only its text."""
    number = error.errno if isinstance(error, OSError) else None
    if number not in REMEDIES:
        text = str(error)
        number = next((n for n in REMEDIES if os.strerror(n) in text), None)
    return REMEDIES.get(number or 0, "look whether the disk works, or choose another run.folder")
