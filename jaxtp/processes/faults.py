"""The coded end of a process whose peers are lost, or whose own step takes too long.

A process that waits for its devices can neither raise nor handle a signal, so the threads here
print and end it. What JAX does alone, on 0.10 and 0.12 alike: when a process dies or is stopped,
the others end by SIGABRT with a C++ stack trace, 100 s later, or at once if it was process 0; when
one is alive but stuck, the others wait for ever.
"""

import atexit
import contextlib
import functools
import os
import re
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from jaxtp.errors import CommunicationTimeout, JaxtpError, join
from jaxtp.processes.roster import Peer, Roster

FIX = (
    "read that process's own log first; if it says nothing, set NCCL_DEBUG=WARN, "
    "NCCL_DEBUG_SUBSYS=INIT,NET,COLL and NCCL_RAS_ENABLE=1, or NCCL_SOCKET_IFNAME if the hosts "
    "have several networks, and start every process again: their devices stay blocked"
)
"""NCCL's variables: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html."""

COMMUNICATION = re.compile(r"NCCL|[Gg]loo|DEADLINE_EXCEEDED|UNAVAILABLE|[Bb]arrier|rendezvous")
"""What errors of JAX that concern other processes contain."""

COMPILE_FACTOR = 10
"""Times the limit of a step that the first one may take."""

GRACE_SECONDS = 5.0
"""How long process 0 lets the others end first: JAX ends them at once when it is gone."""

EXIT_SECONDS = 300.0
"""How long a process that is done waits for the others to be done; JAX's own value."""


class _Run:
    """What this process knows of itself; one for each interpreter, as `jax.distributed` is.

    Attributes:
        roster: The link to the others; None for a process that runs alone.
        place: Where a fault would happen, e.g. `step 13`.
        mesh: The mesh as text, once a watchdog knows it.
        done: What was last done, and `done_at` when, in seconds of the monotonic clock.
        uncaught: The exception that ends this process, if one does.
    """

    def __init__(self) -> None:
        self.roster: Roster | None = None
        self.place, self.mesh = "start-up", ""
        self.done, self.done_at = "start-up", time.monotonic()
        self.uncaught: BaseException | None = None
        self.ending = threading.Lock()

    def said(self) -> dict[str, Any]:
        """What goes with each heartbeat."""
        return {"done": self.done, "since": time.monotonic() - self.done_at, "at": _position()}


run = _Run()


def catch() -> None:
    """From here on an exception that nothing catches ends this process with its own exit code."""
    atexit.register(_at_exit)
    sys.excepthook = functools.partial(_on_uncaught, sys.excepthook)


def watch(roster: Roster) -> None:
    """Beats, and ends this process when another one is lost."""
    run.roster, run.place = roster, "the first step"
    roster.beat(run.said, _on_loss)


class watchdog:
    """Ends this process with TP002 if a step takes too long: `with watchdog(600) as done`.

    Inside the block each call of `done(n)` says that step n is done, and gives the next one as many
    seconds. Without several processes it works too, and names only its own position.

    with jaxtp.watchdog(600, mesh) as done:
        for number in range(1, num_steps + 1):
            state, metrics = step(state, batch)
            jax.block_until_ready(metrics)
            done(number)

    Args:
        seconds: For each step; the first one, which compiles, may take `COMPILE_FACTOR` times as
            long. 0 for no limit.
        mesh: Named in the message.
        first_step: The number of the first step.
        place: What to name in place of a step: then the block as a whole has `seconds`.

    Raises:
        CommunicationTimeout: TP002, in place of an error of JAX that says that a collective, a
            barrier or a connection failed.
    """

    def __init__(
        self, seconds: float, mesh: Mesh | None = None, *, first_step: int = 1, place: str = ""
    ) -> None:
        self._seconds, self._mesh = seconds, mesh
        self._limit = seconds if place else COMPILE_FACTOR * seconds
        self._place = place or f"step {first_step}"
        self._start = time.monotonic()
        self._closed = threading.Event()

    def __enter__(self) -> Callable[[int], None]:
        if self._mesh is not None:
            axes = ", ".join(f"{name}={size}" for name, size in self._mesh.shape.items())
            count = jax.process_count()
            run.mesh = f"mesh {axes} over {count} process{'es' * (count > 1)}"
        # Blocks may be nested: an outer one is again where a fault would be after the inner one.
        self._outside, run.place = run.place, self._place
        self._start = time.monotonic()
        if self._seconds:
            threading.Thread(target=self._wait, name="jaxtp watchdog", daemon=True).start()
        return self._done

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._closed.set()
        if isinstance(error, jax.errors.JaxRuntimeError) and COMMUNICATION.search(str(error)):
            raise lost_error(f"JAX reports {_first_line(error)}") from error
        run.place = self._outside

    def _done(self, step: int) -> None:
        # In this order: the thread must not see the new limit with the old start.
        self._start = time.monotonic()
        self._limit = self._seconds
        run.done, run.done_at, run.place = f"step {step}", self._start, f"step {step + 1}"

    def _wait(self) -> None:
        while (left := self._start + self._limit - time.monotonic()) > 0:
            # Not longer than a step: the first one may take more, and its end shortens the limit.
            if self._closed.wait(min(left, self._seconds)):
                return
        if not self._closed.is_set():
            stop(lost_error(f"not done after {self._limit:g} s"))


def lost_error(what: str) -> CommunicationTimeout:
    """TP002 with what is known of each process: what it did last, and when it was last heard of."""
    lines = [what, run.mesh] if run.mesh else [what]
    own = Peer(process=own_number(), said=run.said(), silent=0.0, state="here")
    peers = [own] if run.roster is None else run.roster.peers()
    if not peers:
        lines.append("process 0 does not answer, so nothing is known of the others")
        peers = [own]
    # Those in trouble first, and no more than a screen.
    order = sorted(peers, key=lambda peer: (peer.state == "here", -peer.silent))
    lines += [_describe(peer) for peer in order[:16]]
    if len(order) > 16:
        lines.append(f"and {len(order) - 16} more")
    return CommunicationTimeout("\n  ".join(lines), where=run.place, fix=FIX)


def own_number() -> int:
    """This process's number, without starting a backend."""
    return 0 if run.roster is None else run.roster.process


def stop(error: JaxtpError) -> NoReturn:
    """Prints a coded error and ends this process with its exit code, from any thread.

    With several processes, handlers of `atexit` are skipped: JAX's own would wait for the others,
    which wait for this one.
    """
    with run.ending:  # who comes second waits here for the end
        os.write(2, f"{error}\n".encode())
        end(error)


def end(error: BaseException) -> NoReturn:
    """Ends this process after an error that is printed already; the others learn of it.

    Process 0 goes last: without the service that it holds, JAX ends all others within 20 ms.
    """
    code = error.exit_code if isinstance(error, JaxtpError) else 1
    backstop = threading.Timer(2 * GRACE_SECONDS, os._exit, (code,))
    backstop.daemon = True
    backstop.start()  # flushing waits where the main thread holds a stream
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if run.roster is not None:
        run.roster.fail(_first_line(error), GRACE_SECONDS)
    os._exit(code)


def exit_with(error: JaxtpError) -> NoReturn:
    """What a program does with an error that it can do nothing about: prints it, and exits.

    Handlers of `atexit` run, down to the one that `initialize` has registered.
    """
    print(error, file=sys.stderr)  # noqa: T201
    run.uncaught = error
    sys.exit(error.exit_code)


def _on_loss(lost: list[Peer]) -> None:
    """Runs in the heartbeat's thread."""
    # Who has been silent longest went first; the others may have given up because of it.
    first, *others = sorted(lost, key=lambda peer: -peer.silent)
    how = "has ended or crashed" if first.state == "gone" else "is not heard of any more"
    more = f"; lost too: {join(p.process for p in others)}" if others else ""
    stop(lost_error(f"process {first.process}{_host(first)} {how}{more}"))


def _on_uncaught(
    show: Callable[[type[BaseException], BaseException, types.TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
    """Shows the exception as ever; `_at_exit` then ends the process, after other handlers."""
    show(kind, error, trace)
    run.uncaught = error


def _at_exit() -> None:
    if run.uncaught is not None:
        end(run.uncaught)
    if run.roster is not None:
        run.roster.leave(EXIT_SECONDS)


def _first_line(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _host(peer: Peer) -> str:
    return f" ({peer.host})" if peer.host else ""


def _describe(peer: Peer) -> str:
    said = peer.said
    if "done" not in said:
        return f"process {peer.process}{_host(peer)}: {peer.state}"
    failed = f"; it failed with {said['failed']}" if "failed" in said else ""
    return (
        f"process {peer.process}{_host(peer)}: {peer.state}, heard of {peer.silent:.1f} s ago; "
        f"{said['done']} done {said['since'] + peer.silent:.1f} s ago, then at {said['at']}{failed}"
    )


def _position() -> str:
    """Where the main thread is: its innermost line outside of JAX."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)  # pyright: ignore[reportPrivateUsage]
    found = "?"
    while frame is not None:
        code = frame.f_code
        found = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
        if not any(part in code.co_filename for part in ("/jax/", "/jaxlib/")):
            break
        frame = frame.f_back
    return found
