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
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import Mesh

from jaxtp.errors import BadMesh, CommunicationTimeout, JaxtpError, join
from jaxtp.errors.arguments import TEXT, checked, instance, number, whole
from jaxtp.processes.lost_peer import sign_of_lost_peer
from jaxtp.processes.roster import Peer, Roster
from jaxtp.processes.waiting import wait_until_stuck

FIX = (
    "read that process's own log first; if it says nothing, set NCCL_DEBUG=WARN, "
    "NCCL_DEBUG_SUBSYS=INIT,NET,COLL and NCCL_RAS_ENABLE=1, or NCCL_SOCKET_IFNAME if the hosts "
    "have several networks, and start every process again: their devices stay blocked"
)
"""NCCL's variables: docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html."""

COMPILE_FACTOR = 10
"""Times the limit of a step that the first one may take."""

SETTLE_SECONDS = 2.0
"""How long an error of JAX waits for the roster to hear whom it is about: gloo notices a dead
process in milliseconds, and so may be first."""

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
        exit_code: What a SystemExit ends this process with.
    """

    def __init__(self) -> None:
        self.roster: Roster | None = None
        self.place, self.mesh = "start-up", ""
        self.done, self.done_at = "start-up", time.monotonic()
        self.uncaught: BaseException | None = None
        self.exit_code = 0
        self.ending = threading.Lock()

    def said(self) -> dict[str, Any]:
        """What goes with each heartbeat."""
        return {"done": self.done, "since": time.monotonic() - self.done_at, "at": _position()}


run = _Run()


def catch() -> None:
    """From here on an exception that nothing catches ends this process with its own exit code.

    So does a SystemExit with another code than 0. Python 3.11 shows none of them but those of
    `sys.exit`.
    """
    atexit.register(_at_exit)
    sys.excepthook = functools.partial(_on_uncaught, sys.excepthook)
    if not _monitor_exits():
        sys.exit = functools.partial(_exit, sys.exit)


def watch(roster: Roster) -> None:
    """Beats, and ends this process when another one is lost, or has left while this one waits."""
    run.roster, run.place = roster, "the first step"
    roster.beat(run.said, _on_loss, functools.partial(_on_leave, roster))


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
        BadConfig: TP020, for seconds that are no time.
        CommunicationTimeout: TP002, in place of an error of any type that says that a collective,
            a barrier or a connection between processes failed.
        BadMesh: TP010, if `mesh` is no jax Mesh.
    """

    @checked(
        seconds=number(0),
        mesh=instance(Mesh, takes="a jax Mesh", error=BadMesh).or_none(),
        first_step=whole(0),
        place=TEXT,
    )
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
        if sign := sign_of_lost_peer(error):
            raise _reported(sign) from error
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


def lost_error(what: str, *, settle: float = 0.0) -> CommunicationTimeout:
    """TP002 with what is known of each process: what it did last, and when it was last heard of.

    Args:
        what: What happened.
        settle: Seconds to wait at most until a process is known to be lost.
    """
    lines = [what, run.mesh] if run.mesh else [what]
    own = Peer(process=own_number(), said=run.said(), silent=0.0, state="here")
    peers = [own] if run.roster is None else _known(run.roster, settle)
    if not peers:
        lines.append("process 0 does not answer, so nothing is known of the others")
        peers = [own]
    # Those in trouble first, and no more than a screen.
    order = sorted(peers, key=lambda peer: (peer.state == "here", -peer.silent))
    lines += [_describe(peer) for peer in order[:16]]
    if len(order) > 16:
        lines.append(f"and {len(order) - 16} more")
    return CommunicationTimeout("\n  ".join(lines), where=run.place, fix=FIX)


def _known(roster: Roster, settle: float) -> list[Peer]:
    end = time.monotonic() + settle
    while True:
        peers = roster.peers()
        is_known = not peers or any(peer.state != "here" for peer in peers)
        if is_known or time.monotonic() >= end:
            return peers
        time.sleep(0.1)


def _reported(sign: BaseException) -> CommunicationTimeout:
    return lost_error(f"JAX reports {_first_line(sign)}", settle=SETTLE_SECONDS)


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
    code = error.exit_code if isinstance(error, JaxtpError) else run.exit_code or 1
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


def _on_leave(roster: Roster, left: list[int]) -> None:
    """Runs in the heartbeat's thread, which must go on to beat."""

    def watch_main_thread() -> None:
        if wait_until_stuck(roster.leaving):
            stop(lost_error(f"{_processes(left)} ended without an error, and this one waits"))

    threading.Thread(target=watch_main_thread, name="jaxtp last wait", daemon=True).start()


def _on_uncaught(
    show: Callable[[type[BaseException], BaseException, types.TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: types.TracebackType | None,
) -> None:
    """Shows the exception as ever; `_at_exit` then ends the process, after other handlers.

    One that says that another process is lost is shown as the TP002 that it is.
    """
    if sign := sign_of_lost_peer(error):
        error = _reported(sign)
        print(error, file=sys.stderr)  # noqa: T201
    else:
        show(kind, error, trace)
    run.uncaught = error


def _monitor_exits() -> bool:
    """Has Python tell of a SystemExit that leaves the last frame of the main thread.

    `sys.excepthook` and `atexit` learn nothing of it. False on Python 3.11, and where profilers and
    debuggers use all of the interpreter's places for tools.
    """
    if sys.version_info < (3, 12):
        return False
    monitoring = sys.monitoring
    for tool in range(3, 5):  # 0 to 2 and 5 are meant for others
        if monitoring.get_tool(tool) is None:
            monitoring.use_tool_id(tool, "jaxtp")
            unwind = monitoring.events.PY_UNWIND
            monitoring.register_callback(tool, unwind, _on_unwind)
            monitoring.set_events(tool, unwind)
            return True
    return False


def _on_unwind(code: types.CodeType, offset: int, error: BaseException) -> None:
    """Called for each frame that an exception leaves, and so at little cost."""
    if not isinstance(error, SystemExit) or error.code in (None, 0):
        return
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and sys._getframe(1).f_back is None:  # pyright: ignore[reportPrivateUsage]
        run.exit_code = error.code if isinstance(error.code, int) else 1
        run.uncaught = run.uncaught or error


class _Exit(SystemExit):
    """A SystemExit that knows when it ends the process, rather than being caught.

    For Python 3.11, which reads `code` when it ends the process for this exception, and only then
    is there no Python frame that could have asked.
    """

    @property
    def code(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        status = self.args[0] if self.args else None
        if sys._getframe().f_back is None and status not in (None, 0):  # pyright: ignore[reportPrivateUsage]
            run.exit_code = status if isinstance(status, int) else 1
            run.uncaught = run.uncaught or self
        return status


def _exit(leave: Callable[[Any], NoReturn], status: Any = None, /) -> NoReturn:
    """In place of `sys.exit`: in other threads than the main one it ends only those."""
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    leave(status)


def _at_exit() -> None:
    if run.uncaught is not None:
        end(run.uncaught)
    if run.roster is not None and (lost := run.roster.leave(EXIT_SECONDS)):
        # JAX's own handler would wait for them, and then abort. That others were lost afterwards is
        # no success of the run, whichever process's code a launcher looks at.
        run.place = "the end"
        stop(lost_error(f"{_processes(lost)} did not end with this one"))


def _first_line(error: BaseException | None) -> str:
    if isinstance(error, SystemExit):
        return f"exit code {error.args[0]}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'es' * (len(numbers) > 1)} {join(numbers)}"


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
