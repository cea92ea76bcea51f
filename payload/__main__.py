"""`tileforge COMMAND ...`, or `python -m payload COMMAND ...`: every command of the project."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import payload
from payload.cli import completion
from payload.cli.commands import BY_NAME, help_text
from payload.core.error_line import print_error
from payload.core.errors import ExitCode, TileforgeError
from payload.core.suggested_commands import CONSOLE, program_name

_HELP = ("-h", "--help", "--help-all")


def main() -> int:
    """Run the command in sys.argv; the entry point of `tileforge`."""
    if Path(sys.argv[0]).name == "tileforge":
        os.environ.setdefault(CONSOLE, sys.argv[0])
    if completion.REQUEST in os.environ:
        completion.complete(os.environ)
        return ExitCode.OK
    return _run(sys.argv[1:])


def _run(argv: Sequence[str]) -> int:
    program = program_name()
    if not argv or argv[0] in (*_HELP, "help"):
        (sys.stdout if argv else sys.stderr).write(help_text(program))
        return ExitCode.OK if argv else ExitCode.USAGE
    if argv[0] == "--version":
        print(payload.__version__)
        return ExitCode.OK
    row = BY_NAME.get(argv[0])
    if row is None:
        near = get_close_matches(argv[0], BY_NAME, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"{program} --help lists all commands."
        print_error(f"no command {argv[0]!r}. {fix}")
        return ExitCode.USAGE
    if row.package == "cli":
        return _run_own(row.name, argv[1:], program=program)
    sys.argv[1:] = [*row.arguments, *argv[1:]]
    is_mode = any(argument.startswith("--") for argument in row.arguments)  # such as `chat`
    if is_mode or any(argument in _HELP for argument in sys.argv[1:]):
        # The parser alone prints the help, and usage errors with the name of the typed command. A
        # program may import torch first, and prints its own name.
        completion.command_parser(row).parse_args()
        # runpy warns about a module that is imported before it runs.
        sys.modules.pop(f"payload.{row.package}.__main__", None)
    # Like `python -m payload.PACKAGE`: that module decides how the process ends.
    runpy.run_module(f"payload.{row.package}", run_name="__main__", alter_sys=True)
    return ExitCode.OK


def _run_own(name: str, argv: Sequence[str], *, program: str) -> int:
    """Run a command of payload.cli, and return the exit code."""
    module = completion.own_module(name)
    arguments = module.parser(prog=f"{program} {name}").parse_args(argv)
    is_styled = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    try:
        sys.stdout.write(module.output(arguments, is_styled=is_styled))
    except TileforgeError as error:
        print_error(error)
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
