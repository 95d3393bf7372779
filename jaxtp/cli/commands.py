"""The table of commands, each imported when it is the one that runs."""

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tyro

from jaxtp.errors import BadUsage, JaxtpError, join

COMMANDS: Mapping[str, str] = {
    "plan": "plan_commands",
    "explain": "plan_commands",
    "view": "view_command",
    "preflight": "preflight_command",
    "search": "search_command",
    "train": "train_command",
    "quickstart": "quickstart_command",
    "probe": "probe_command",
    "errors": "errors_command",
}
"""Name of the command -> the module of this room that holds a function of that name."""

READS_WORDS = ("train",)
"""Commands that read the command line themselves, and return an exit code."""


def command(name: str) -> Callable[..., Any]:
    """The function behind a command."""
    return getattr(importlib.import_module(f"jaxtp.cli.{COMMANDS[name]}"), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; a coded error goes to standard error, and the exit code is the error's."""
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(args)
    except JaxtpError as err:
        # A run with several processes tells the others; only then is the module loaded.
        faults = sys.modules.get("jaxtp.processes.faults")
        if faults is not None:
            faults.exit_with(err)
        print(err, file=sys.stderr)
        sys.exit(err.exit_code)
    if code:
        sys.exit(code)


def _run(args: Sequence[str]) -> int:
    name = args[0] if args else ""
    if name in READS_WORDS:
        return command(name)(args[1:])
    if name and not name.startswith("-") and name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fix = f"did you mean {near[0]}?" if near else f"one of {join(COMMANDS, 20)}"
        raise BadUsage(f"there is no command {name!r}", fix=fix)
    # A known command needs its own room alone; for help all are needed.
    names = [name] if name in COMMANDS else list(COMMANDS)
    app = tyro.extras.SubcommandApp()
    for one in names:
        app.command(command(one), name=one)
    app.cli(prog="jaxtp", description=__doc__, args=args)
    return 0


if __name__ == "__main__":
    main()
