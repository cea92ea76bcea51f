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
from payload.core.errors import ExitCode, TileforgeError
from payload.core.suggested_commands import CONSOLE, program_name


def main() -> int:
    """Carry out the command that the process was started with; the entry point of `tileforge`."""
    if Path(sys.argv[0]).name == "tileforge":
        os.environ.setdefault(CONSOLE, sys.argv[0])
    if completion.ASKED in os.environ:
        completion.complete(os.environ)
        return ExitCode.OK
    return _run(sys.argv[1:])


def _run(words: Sequence[str]) -> int:
    program = program_name()
    if not words or words[0] in ("-h", "--help", "help"):
        (sys.stdout if words else sys.stderr).write(help_text(program))
        return ExitCode.OK if words else ExitCode.USAGE
    if words[0] == "--version":
        print(payload.__version__)
        return ExitCode.OK
    row = BY_NAME.get(words[0])
    if row is None:
        near = get_close_matches(words[0], BY_NAME, n=1)
        fix = f"Did you mean {near[0]}?" if near else f"{program} --help lists them all."
        print(f"error: {words[0]!r} is none of the commands. {fix}", file=sys.stderr)
        return ExitCode.USAGE
    if row.package == "cli":
        return _print_completion(words[1:], program=program)
    sys.argv[1:] = [*row.words, *words[1:]]
    # As `python -m payload.PACKAGE` does it: that module decides how the process ends.
    runpy.run_module(f"payload.{row.package}", run_name="__main__", alter_sys=True)
    return ExitCode.OK


def _print_completion(words: Sequence[str], *, program: str) -> int:
    shell = completion.parser(prog=f"{program} completion").parse_args(words).shell
    try:
        sys.stdout.write(completion.shell_code(shell))
    except TileforgeError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
