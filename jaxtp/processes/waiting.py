"""Whether the main thread waits for the devices of other processes, seen from another thread.

In: nothing. Out: whether it has waited for so long, doing nothing else, that no answer will come.

A process that has ended well takes part in no collective any more, but the others may go on: the
first of them often writes what all have computed. So its end alone is no fault; it is one for who
waits for it. JAX says that of arrays that are still being computed. On CPU devices, where jaxtp has
JAX wait in the call itself (`startup`), only the operating system knows: the thread sleeps on a
lock inside of a call that no Python code waits in. There a process that waits does no work either.
"""

import os
import platform
import sys
import sysconfig
import threading
import time
from pathlib import Path

import jax

PENDING_SECONDS = 10.0
"""How long the end of a program may take on a GPU after its last collective."""

ASLEEP_SECONDS = 1.0
"""How long a process may do nothing while it waits for CPU devices."""

LOOKS = 5
"""Looks in `ASLEEP_SECONDS`."""

BUSY_SHARE = 0.1
"""Of one core: what threads of jaxtp and JAX that only look at the clock stay below."""

FUTEX = {"x86_64": "202", "aarch64": "98"}
"""The number of Linux's system call that waits on a lock (asm/unistd.h), by machine."""


def wait_until_stuck(stopped: threading.Event) -> bool:
    """Returns True once the main thread has waited for other processes for too long.

    Args:
        stopped: Ends the watch; the result is then False.
    """
    on_cpu = jax.local_devices()[0].platform == "cpu"
    limit = ASLEEP_SECONDS if on_cpu else PENDING_SECONDS
    seen, since = None, time.monotonic()
    worked, looked = time.process_time(), since
    while not stopped.wait(ASLEEP_SECONDS / LOOKS):
        now, work = time.monotonic(), time.process_time()
        is_busy = on_cpu and work - worked > BUSY_SHARE * (now - looked)
        worked, looked = work, now
        found = None if is_busy else _pending() or (_asleep() if on_cpu else None)
        if found is None or found != seen:
            seen, since = found, now
        elif now - since >= limit:
            return True
    return False


def _pending() -> tuple[int, ...]:
    """The arrays over several processes that are still being computed."""
    shared = [x for x in jax.live_arrays() if not x.is_fully_addressable and not x.is_deleted()]
    return tuple(sorted(id(x) for x in shared if not x.is_ready()))


def _asleep() -> tuple[int, ...] | None:
    """Where the main thread sleeps on a lock in a call of compiled code; None if it does not.

    Waits of Python's own library, for threads, queues or processes, are none of JAX.
    """
    main = threading.main_thread()
    frame = sys._current_frames().get(main.ident or 0)  # pyright: ignore[reportPrivateUsage]
    if frame is None or _is_of_python(frame.f_code.co_filename):
        return None
    try:
        call = Path(f"/proc/self/task/{main.native_id}/syscall").read_text().split()[0]
    except (OSError, IndexError):  # not Linux, or not allowed
        return None
    is_waiting = call == FUTEX.get(platform.machine())
    return (id(frame), frame.f_lasti) if is_waiting else None


def _is_of_python(file: str) -> bool:
    library = sysconfig.get_path("stdlib") + os.sep
    return file.startswith(library) and "site-packages" not in file
