"""Who takes part: what each process last said, held by process 0, readable by all in bounded time.

JAX's own key-value store is not public, and its collectives wait for ever. So this is a small
server: lines of JSON over TCP, which need no device and work before `jax.distributed` does.
"""

import contextlib
import dataclasses
import json
import platform
import socket
import socketserver
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, cast

from jaxtp.errors import BadProcesses

LINE_BYTES = 2**22
"""Longest message; all settings and flags of one process take about 10 kB."""

OVER = ("left", "gone")
"""States of a process that has ended, well or not."""

BEATS = 20
"""Heartbeats in the time after which a process counts as lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One process as process 0 knows it.

    Attributes:
        process: Its number.
        host: Where it runs; empty before it signs in.
        said: What came with its last heartbeat.
        silent: Seconds since it was last heard of.
        state: `absent` before it signs in; `here`; `gone` when its connection broke, which is what
            a crash looks like; `left` after a normal end.
    """

    process: int
    host: str = ""
    said: Mapping[str, Any]
    silent: float
    state: str


class Table:
    """What the server knows; every method may be called from any thread."""

    def __init__(self, num_processes: int) -> None:
        self._changed = threading.Condition()
        self._said: list[dict[str, Any]] = [{} for _ in range(num_processes)]
        self._heard = [time.monotonic()] * num_processes
        self._state = ["absent"] * num_processes
        self._beating: set[int] = set()
        self._owner = [("", "")] * num_processes  # host and token
        self._values: dict[str, dict[int, Any]] = {}
        self._given_up: set[str] = set()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to one message; waits where the message asks for that."""
        process, owner = request["process"], (request["host"], request["token"])
        with self._changed:
            # Another owner is a second process of this number, or this one after a restart.
            if self._owner[process] not in (("", ""), owner):
                return {"taken": self._owner[process][0]}
            self._owner[process] = owner
            self._heard[process] = time.monotonic()
            self._said[process] |= request.get("said", {})
            if request["kind"] == "gather":
                return self._gather(process, request)
            if request["kind"] == "beat":
                self._beating.add(process)
                if self._state[process] == "absent":
                    self._state[process] = "here"
            if request["kind"] == "end":
                self._state[process] = request["state"]
                self._changed.notify_all()
                # Who has failed waits for the others' last beats, who has not for their goodbyes.
                others = self._beating - {process} if request["state"] == "gone" else set[int]()
                self._changed.wait_for(
                    lambda: self._ended(request["limit"], others & self._beating),
                    request["timeout"],
                )
            left = [i for i, state in enumerate(self._state) if state == "left"]
            return {"peers": self._peers(request["limit"]), "left": left}

    def _gather(self, process: int, request: Mapping[str, Any]) -> dict[str, Any]:
        key, values = request["key"], self._values.setdefault(request["key"], {})
        values[process] = request["value"]
        self._changed.notify_all()

        def is_over() -> bool:
            # Who has ended will not come.
            open_ones = zip(self._state, range(len(self._owner)), strict=True)
            missing = [i for state, i in open_ones if i not in values and state not in OVER]
            return not missing or key in self._given_up

        if not self._changed.wait_for(is_over, request["timeout"]):
            # All who wait learn it now, before process 0 ends and takes the server with it.
            self._given_up.add(key)
            self._changed.notify_all()
        return {"values": dict(values)}

    def _peers(self, limit: float) -> list[dict[str, Any]]:
        """Those lost by `limit`; all of them where it is 0."""
        now = time.monotonic()
        rows = enumerate(zip(self._owner, self._said, self._heard, self._state, strict=True))
        return [
            {"process": i, "host": host, "said": dict(said), "silent": now - heard, "state": state}
            for i, ((host, _), said, heard, state) in rows
            if not limit or state == "gone" or (state == "here" and now - heard > limit)
        ]

    def broken(self, process: int) -> None:
        """A heartbeat connection ended; after a goodbye that is how it should be."""
        with self._changed:
            self._beating.discard(process)
            if self._state[process] == "here":
                self._state[process] = "gone"
            self._changed.notify_all()

    def _ended(self, limit: float, beating: set[int]) -> bool:
        """Whether nobody is left, these that beat included, but for those that are lost."""
        oldest = time.monotonic() - limit
        rows = enumerate(zip(self._state, self._heard, strict=True))
        return not any(
            (state == "here" or i in beating) and heard > oldest for i, (state, heard) in rows
        )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, port: int, table: Table) -> None:
        super().__init__(("", port), _Lines, bind_and_activate=False)
        self.socket.close()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(
            ("", port), family=family, dualstack_ipv6=both, backlog=4096
        )
        self.table = table
        threading.Thread(target=self.serve_forever, name="jaxtp roster", daemon=True).start()


class _Lines(socketserver.StreamRequestHandler):
    """One connection: a line in, a line out, until it ends."""

    def handle(self) -> None:
        table, beating = cast(_Server, self.server).table, None
        # What is not a message ends the connection: anything may knock on an open port.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            while line := self.rfile.readline(LINE_BYTES):
                request = json.loads(line)
                if request["kind"] == "beat":
                    beating = request["process"]
                self.wfile.write(json.dumps(table.answer(request)).encode() + b"\n")
        if beating is not None:
            table.broken(beating)


class Roster:
    """One process's end of the roster; process 0 also holds the server.

    Attributes:
        process: This process's number.
        num_processes: How many there are.
        limit: Seconds of silence after which a process counts as lost.
        leaving: Set when this process has begun to end well.
    """

    def __init__(
        self, address: tuple[str, int], process: int, num_processes: int, *, limit: float
    ) -> None:
        self.process, self.num_processes, self.limit = process, num_processes, limit
        self._address, self._token = address, uuid.uuid4().hex
        self._ended = threading.Event()
        self.leaving = threading.Event()
        if process == 0:
            try:
                _Server(address[1], Table(num_processes))
            except OSError as error:
                raise BadProcesses(
                    f"process 0 cannot listen on port {address[1]}: {error}",
                    fix="another job uses it; choose another port in the coordinator's address",
                ) from None
            self._address = ("localhost", address[1])

    def gather(self, key: str, value: Any, timeout: float) -> dict[int, Any]:
        """What each process gave under `key`; after `timeout` seconds, of those that gave any.

        Args:
            key: The same in every process, and used once.
            value: Anything JSON can hold.
            timeout: Seconds.

        Returns:
            Process -> value; empty if process 0 was not reached.

        Raises:
            BadProcesses: TP015, if another process has this one's number.
        """
        end, taken = time.monotonic() + timeout, None
        while (left := end - time.monotonic()) > 0:
            request = {"kind": "gather", "key": key, "value": value, "timeout": left}
            # Process 0 may not be up yet; and after a restart the server may be the old one, which
            # knows this number by another owner and will be gone soon.
            with contextlib.suppress(OSError, ValueError), self._connect(left + 1) as connection:
                reply = self._ask(connection, request)
                if "values" in reply:
                    return {int(process): given for process, given in reply["values"].items()}
                taken = reply["taken"]
            time.sleep(min(0.1, max(0.0, end - time.monotonic())))
        if taken is not None:
            raise BadProcesses(
                f"process {self.process} has already started on {taken}",
                fix="give every process its own process_id, from 0 to num_processes - 1",
            )
        return {}

    def peers(self) -> list[Peer]:
        """What is known of each process; empty if process 0 does not answer within two seconds."""
        with contextlib.suppress(OSError, ValueError), self._connect(2.0) as connection:
            reply = self._ask(connection, {"kind": "read", "limit": 0})
            return [Peer(**peer) for peer in reply.get("peers", [])]
        return []

    def beat(
        self,
        said: Callable[[], Mapping[str, Any]],
        on_loss: Callable[[list[Peer]], None],
        on_leave: Callable[[list[int]], None] = lambda _: None,
    ) -> None:
        """Starts to beat in a thread of its own, until `leave` or a loss.

        Args:
            said: What to send with each beat.
            on_loss: Called once, in that thread, with the lost processes. Process 0 is lost when
                its connection breaks or it does not answer for `limit` seconds.
            on_leave: Called there with the processes that have ended well, once there are any.
        """
        threading.Thread(
            target=self._beat, args=(said, on_loss, on_leave), name="jaxtp heartbeat", daemon=True
        ).start()

    def _beat(
        self,
        said: Callable[[], Mapping[str, Any]],
        on_loss: Callable[[list[Peer]], None],
        on_leave: Callable[[list[int]], None],
    ) -> None:
        told = False
        heard, lost = time.monotonic(), list[Peer]()
        # Not closed before on_loss has looked around: its end makes this process gone.
        connection: socket.socket | None = None
        try:
            connection = self._connect(self.limit)
            while not lost:
                connection.settimeout(self.limit)
                request = {"kind": "beat", "said": dict(said()), "limit": self.limit}
                reply = self._ask(connection, request)
                lost = [Peer(**peer) for peer in reply["peers"]]
                heard = time.monotonic()
                if reply["left"] and not told and not self.leaving.is_set():
                    told = True
                    on_leave(reply["left"])
                # Waits for the next beat where a broken connection is noticed at once: JAX's own
                # service ends this process some 20 ms after process 0 dies.
                connection.settimeout(min(self.limit / BEATS, 3.0))
                with contextlib.suppress(TimeoutError):
                    if not connection.recv(1):
                        raise ConnectionResetError("process 0 has closed the connection")
                if self._ended.is_set():
                    return
        except (OSError, ValueError) as error:
            state = "here" if isinstance(error, TimeoutError) else "gone"
            silent = time.monotonic() - heard
            lost = [Peer(process=0, said={}, silent=silent, state=state)]
        finally:
            if lost and not self._ended.is_set():
                on_loss(lost)
            if connection is not None:
                connection.close()

    def leave(self, timeout: float) -> list[int]:
        """Says goodbye, and waits until every other process has, or is gone.

        Process 0 must not go first, for it holds JAX's service too. Heartbeats go on until then.

        Args:
            timeout: Seconds to wait at most.

        Returns:
            The processes that are lost, or still here after that time.
        """
        self.leaving.set()
        self._end("left", {}, timeout)
        if lost := [peer.process for peer in self.peers() if peer.state != "left"]:
            return lost  # and goes on to beat, so that process 0 does not go first
        self._ended.set()
        return []

    def fail(self, why: str, timeout: float) -> None:
        """Makes this process lost to the others; process 0 waits `timeout` s for them to end."""
        self._ended.set()
        self._end("gone", {"failed": why}, timeout if self.process == 0 else 0.0)

    def _end(self, state: str, said: Mapping[str, Any], timeout: float) -> None:
        request = {"kind": "end", "state": state, "said": said, "timeout": timeout}
        request["limit"] = self.limit
        with contextlib.suppress(OSError, ValueError), self._connect(timeout + 1) as connection:
            self._ask(connection, request)

    def _connect(self, timeout: float) -> socket.socket:
        return socket.create_connection(self._address, timeout)

    def _ask(self, connection: socket.socket, request: Mapping[str, Any]) -> dict[str, Any]:
        own = {"process": self.process, "host": platform.node(), "token": self._token}
        connection.sendall(json.dumps(own | dict(request)).encode() + b"\n")
        with connection.makefile("rb") as lines:
            line = lines.readline()
        if not line:
            raise ConnectionResetError("process 0 has closed the connection")
        return json.loads(line)
