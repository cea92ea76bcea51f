"""`python -m payload.orchestrate`: plan, preflight, run, attach, status, logs, up, down..."""

from __future__ import annotations

if __name__ == "__main__":
    from payload.core.missing_packages import explain_missing_packages

    explain_missing_packages()

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from payload.core.command_line import CommandParser, from_arguments
from payload.core.errors import INTERRUPTED, TileforgeError, UsageError
from payload.core.interrupts import interrupt_once
from payload.core.printable_text import printable
from payload.core.suggested_commands import command
from payload.orchestrate.commands.registry import COMMANDS
from payload.run_record.run_files import default_runs_dir

if TYPE_CHECKING:
    from payload.orchestrate.machine_profiles.local_profile import LocalAccess


def main(argv: Sequence[str], env: Mapping[str, str], *, access: LocalAccess | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = parser(argv[0] if argv else None).parse_args(argv)
    # rich takes 50 ms to import, which --help does not need.
    from payload.orchestrate.terminal.console import text_console
    from payload.orchestrate.terminal.narrow import print_message

    row = COMMANDS[arguments.command]
    try:
        if "runs_dir" in arguments:
            arguments.runs_dir = _resolved(arguments.runs_dir)
        _check_run_ids(arguments, row.takes_address)
        options = from_arguments(row.options, arguments)
        program = row.load()
        if row.takes_env:
            return program(options, env if access is None else access.environment())
        return program(options, access or _this_machine(env))
    except TileforgeError as error:
        print_message(text_console(stderr=True), f"error: {printable(str(error))}")
        return error.exit_code
    except KeyboardInterrupt:
        text_console(stderr=True).print("interrupted")
        return INTERRUPTED


def _this_machine(env: Mapping[str, str]) -> LocalAccess:
    from payload.orchestrate.machine_profiles.local_profile import LocalAccess

    return LocalAccess(env)


def _resolved(runs_dir: str | None) -> Path:
    """Return the folder of runs with all links resolved. Raises UsageError."""
    try:
        return (Path(runs_dir) if runs_dir else default_runs_dir()).resolve()
    except (OSError, RuntimeError):  # RuntimeError: a link loop, before Python 3.13
        raise UsageError(
            f"--runs-dir {runs_dir}: the symbolic links in this path form a loop. Choose another "
            "folder."
        ) from None


def _check_run_ids(arguments: argparse.Namespace, takes_address: Sequence[str]) -> None:
    """Raise UsageError for a malformed run id. Run ids become parts of paths."""
    new, named = getattr(arguments, "run_id", None), list(getattr(arguments, "runs", ()))
    given = {name: getattr(arguments, name, None) for name in ("run", "resume")}
    if new is None and not named and all(each is None for each in given.values()):
        return
    from payload.orchestrate.runs.run_index import check_named_id, check_new_id
    from payload.storage.store_access import is_address, run_address

    if new is not None:
        check_new_id(new)
    for name, run in given.items():
        if run is None:
            continue
        if name in takes_address and is_address(run):
            run_address(run)
        else:
            check_named_id(run)
    for run in named:
        check_named_id(run)


def parser(only: str | None = None) -> CommandParser:
    """Return the parser. If `only` is a command, no other command has options."""
    made = CommandParser(
        prog=command("orchestrate"),
        description="Build clusters; plan, start and follow training runs. Results go to stdout, "
        "messages to stderr.",
        example=command("orchestrate", "run", "payload/configs/quickstart.toml"),
    )
    commands = made.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, row in COMMANDS.items():
        each = commands.add_parser(
            name,
            help=row.summary,
            description=row.description,
            example=command("orchestrate", name, *row.example.split()),
        )
        if only == name or only not in COMMANDS:
            each.add_options(row.options)
            if name == "run":
                estimates = command("orchestrate", "plan")
                each.refuse_option("--dry-run", f"The estimates of a run: {estimates} FILE.toml")
    return made


if __name__ == "__main__":
    interrupt_once(by_system=True)
    sys.exit(main(sys.argv[1:], os.environ))
