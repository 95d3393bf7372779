"""Whether an exception says that another process is lost: by its text, whatever its type is.

In: an exception. Out: yes or no, and which of the exceptions behind it says so.

XLA has one status for each failure, but what Python gets depends on the call that meets it: the
same `Gloo all-reduce failed` is a JaxRuntimeError from a launch and a ValueError from a read, and
Orbax wraps either. The words are those of XLA's CPU and GPU collectives (gloo, NCCL), of its
coordination service and of gRPC under it, as jaxlib 0.10 to 0.12 print them.
"""

import re
from collections.abc import Iterator

import jax

from jaxtp.errors import CommunicationTimeout, JaxtpError

COLLECTIVE = re.compile(
    r"[Gg]loo [\w-]+ failed|NCCL (operation|error)|nccl(System|Remote|Internal)Error|"
    r"remote process exited|stopped sending heartbeats|tasks have crashed|coordination service"
)
"""What only a failed exchange between processes says."""

STATUS = re.compile(
    r"\b(UNKNOWN|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED|FAILED_PRECONDITION): "
)
"""How errors of XLA begin that are of no Python type of their own."""

COMMUNICATION = re.compile(
    r"NCCL|[Gg]loo|DEADLINE_EXCEEDED|UNAVAILABLE|[Bb]arrier|[Rr]endezvous|[Ss]ocket closed|"
    r"[Cc]onnection (closed|reset) by peer|Broken pipe|heartbeat"
)
"""What errors of XLA that concern other processes contain; other programs use such words too."""


def sign_of_lost_peer(error: BaseException | None) -> BaseException | None:
    """The exception, of `error` and those that it came from, that says another process is lost.

    Args:
        error: Any exception.

    Returns:
        None if none does, or if it is a TP002 already.
    """
    if isinstance(error, CommunicationTimeout):
        return None
    return next((each for each in _chain(error) if _is_sign(each)), None)


def _is_sign(error: BaseException) -> bool:
    if isinstance(error, JaxtpError) or not isinstance(error, Exception):
        return False
    text = str(error)
    if isinstance(error, jax.errors.JaxRuntimeError) or STATUS.search(text):
        return bool(COLLECTIVE.search(text) or COMMUNICATION.search(text))
    return bool(COLLECTIVE.search(text)) and not isinstance(error, OSError)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception, what it was raised from, and what that was; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
