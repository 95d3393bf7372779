"""The table of commands, each imported when it is the one that runs."""

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import tyro

from jaxtp.cli.host import has_no_gpu, keep_to_the_host
from jaxtp.errors import BadUsage, JaxtpError, join

COMMANDS: Mapping[str, str] = {
    "plan": "plan_commands",
    "explain": "plan_commands",
    "view": "view_command",
    "preflight": "preflight_command",
    "search": "search_command",
    "train": "train_command",
    "generate": "generate_command",
    "quickstart": "quickstart_command",
    "probe": "probe_command",
    "errors": "errors_command",
}
"""Name of the command -> the module of this room that holds a function of that name."""

ON_DEVICES = ("train", "generate", "quickstart", "probe")
"""Commands that compute; the others read, plan and compile for machines that are not there."""

COMPILES = ("preflight", "search")
"""Commands that start JAX in this process too, to ask the compiler which options it knows."""

READS_WORDS = ("train",)
"""Commands that read the command line themselves, and return an exit code."""


def command(name: str) -> Callable[..., Any]:
    """The function behind a command."""
    return getattr(importlib.import_module(f"jaxtp.cli.{COMMANDS[name]}"), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; a coded error goes to standard error, and the exit code is the error's.

    Interrupted it ends with 130, and with 141 where nobody reads on, as other tools do. Standard
    output that takes no more, as on a full disk, is a coded error too.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # whoever read this has gone, as `head` does
        _print_no_more()
        sys.exit(141)
    except JaxtpError as err:
        _exit_with(err)
    except OSError:
        # Of a file, or of standard output? That takes one line more, or is the one that failed.
        try:
            print(flush=True)
        except OSError as err:
            _print_no_more()
            _exit_with(
                BadUsage(
                    f"cannot write it: {err.strerror}",
                    where="standard output",
                    fix="send it to a disk with room, or to a terminal",
                )
            )
        raise
    if code:
        sys.exit(code)


def _exit_with(err: JaxtpError) -> NoReturn:
    # A run with several processes tells the others; only then is the module loaded.
    faults = sys.modules.get("jaxtp.processes.faults")
    if faults is not None:
        faults.exit_with(err)
    print(err, file=sys.stderr)
    sys.exit(err.exit_code)


def _print_no_more() -> None:
    """Python would try once more at the end, and fail with a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(args: Sequence[str]) -> int:
    name = args[0] if args else ""
    if name not in ON_DEVICES:
        keep_to_the_host(start=name in COMPILES)
    elif has_no_gpu():
        keep_to_the_host(start=False)
    if name == "--version":
        print(f"jaxtp {vars(sys.modules['jaxtp'])['__version__']}")
        return 0
    if name in READS_WORDS:
        return command(name)(args[1:])
    if name and not name.startswith("-") and name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"one of {join(COMMANDS, 20)}"
        raise BadUsage(f"there is no command {name!r}", fix=fix)
    # A known command needs its own room alone; for help all are needed.
    names = [name] if name in COMMANDS else list(COMMANDS)
    app: Any = tyro.extras.SubcommandApp()  # its overloads do not know keyword use as a call
    for one in names:
        app.command(name=one)(command(one))
    app.cli(prog="jaxtp", description=__doc__, args=args)
    return 0


if __name__ == "__main__":
    main()
