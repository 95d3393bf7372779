"""Ending a run on request, and starting it again when it did not end by itself.

What a process ends with says what should happen next:

- 0: the run is complete.
- 143, 130: it was asked to stop, by SIGTERM or SIGINT, and has saved. 128 + the signal's number is
  what shells report of a process that the signal ended. It must not be 0: Kubernetes would take the
  job for complete and not start it again, and Slurm's own requeueing ignores the code.
- 2: a coded error that would come again: settings, data, a diverged loss.
- 75, EX_TEMPFAIL of BSD's sysexits.h: a coded error that starting again may cure: a lost peer.
- anything else: not foreseen, such as 137 after the kernel's out-of-memory killer.
"""

import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

FINAL = (0, 2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
"""Exit codes after which a run is not started again."""

LONGEST_WAIT = 60.0
"""Seconds; waits double up to this."""


class Preemption:
    """Notes that the run shall stop; call it between two steps.

        with Preemption() as preemption:
            state = fit(..., stop=preemption)
        if preemption.exit_code:
            sys.exit(preemption.exit_code)

    In one process it is SIGTERM or SIGINT that asks; a second SIGINT ends the process at once. With
    several, JAX notes SIGTERM to any of them and lets all stop after the same step.

    Attributes:
        exit_code: What the process shall end with; 0 if nobody asked.
    """

    def __init__(self) -> None:
        self.exit_code = 0
        self._before: dict[int, Any] = {}

    def __call__(self, step: int) -> bool:
        """Whether to stop after this step; all processes get the same answer.

        Args:
            step: The step that has just ended.
        """
        if jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step):
            self.exit_code = 128 + signal.SIGTERM
        return self.exit_code != 0

    def __enter__(self) -> "Preemption":
        is_main = threading.current_thread() is threading.main_thread()
        # JAX's own handler must stay where it is needed.
        if is_main and jax.process_count() == 1:
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.exit_code = 128 + number
        # SIGTERM may come twice: Slurm sends it to all processes, and `supervise` passes it on.
        if number == signal.SIGINT:
            signal.signal(number, self._before[number])


def supervise(
    command: Sequence[str],
    max_restarts: int,
    *,
    wait: float = 1.0,
    say: Callable[[str], None],
) -> int:
    """Runs a command until it ends for good, and returns its exit code.

    SIGTERM is passed on to it. SIGINT is not: a terminal sends it to both.

    Args:
        command: What to run; it resumes by itself.
        max_restarts: How often it is started again.
        wait: Seconds before it is started again, the first time; then twice as long each time, at
            most `LONGEST_WAIT`.
        say: Gets a line of text before each wait.
    """
    asked, stopped = 0, threading.Event()
    child: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del frame
        asked = number
        stopped.set()
        if child is not None and number == signal.SIGTERM:
            child.terminate()

    before = {n: signal.signal(n, stop) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        for restart in range(max_restarts + 1):
            child = subprocess.Popen(command)
            code = child.wait()
            code = 128 - code if code < 0 else code  # Popen's spelling of an end by a signal
            if asked or code in FINAL or restart == max_restarts:
                return code
            seconds = min(wait * 2**restart, LONGEST_WAIT)
            say(f"the run ended with {code}; start {restart + 2} follows in {seconds:g} s")
            if stopped.wait(seconds):
                return 128 + asked
        raise AssertionError("the last restart returns")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
