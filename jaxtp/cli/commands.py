"""The table of commands, each imported when it is the one that runs."""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from jaxtp.errors import JaxtpError

COMMANDS = {
    "plan": "plan_commands",
    "explain": "plan_commands",
    "view": "view_command",
    "preflight": "preflight_command",
    "search": "search_command",
    "probe": "probe_command",
    "errors": "errors_command",
}
"""Name of the command -> the module of this room that holds a function of that name."""


def command(name: str) -> Callable[..., Any]:
    """The function behind a command."""
    return getattr(importlib.import_module(f"jaxtp.cli.{COMMANDS[name]}"), name)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command; a coded error goes to standard error and gives exit code 2."""
    args = list(sys.argv[1:] if argv is None else argv)
    # A known command needs its own room alone; for help and for typing errors all are needed.
    names = args[:1] if args and args[0] in COMMANDS else list(COMMANDS)
    app = tyro.extras.SubcommandApp()
    for name in names:
        app.command(command(name), name=name)
    try:
        app.cli(prog="jaxtp", description=__doc__, args=args)
    except JaxtpError as err:
        print(err, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
