"""Shell completion with argcomplete, from the parsers of the commands.

Only the parser of the typed command is loaded, and no parser imports torch or numpy.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping
from typing import Any

from payload.cli.commands import BY_NAME, Command
from payload.core.command_line import CommandParser
from payload.core.errors import UsageError
from payload.core.suggested_commands import program_name

SHELLS = ("bash", "zsh", "fish")
REQUEST = "_ARGCOMPLETE"
"""Environment variable that the shell sets during completion. The value is the number of words
before the first argument."""

_PARSERS = {
    "orchestrate": "payload.orchestrate.__main__",
    "data": "payload.data.__main__",
    "train": "payload.train.__main__",
    "finetune": "payload.finetune.__main__",
    "generate": "payload.generate.arguments",
    "evaluate": "payload.evaluate.__main__",
    "export": "payload.export.arguments",
    "report": "payload.report.__main__",
    "storage": "payload.storage.__main__",
}
"""Maps each package to the module with the package's function `parser`."""


def complete(env: Mapping[str, str]) -> None:
    """Print the possible next words for the shell, and end the process."""
    try:
        import argcomplete
        from argcomplete.lexers import split_line
    except ImportError:
        return
    *_, typed, _ = split_line(env.get("COMP_LINE", ""), int(env.get("COMP_POINT", "0")))
    start = int(env[REQUEST]) - 1
    row = BY_NAME.get(typed[start + 1]) if len(typed) > start + 1 else None
    if row is not None and not row.arguments:
        # The package's own command line begins after the command's name.
        os.environ[REQUEST] = str(start + 2)
    argcomplete.autocomplete(command_parser(row), always_complete_options="long")


def command_parser(row: Command | None) -> argparse.ArgumentParser:
    """Return the parser of a command's package; without a command, a parser of command names."""
    if row is None:
        made = argparse.ArgumentParser(prog="tileforge")
        made.add_argument("command", choices=tuple(BY_NAME))
        return made
    if row.package == "cli":
        own: argparse.ArgumentParser = own_module(row.name).parser(prog=f"tileforge {row.name}")
        return own
    module = importlib.import_module(_PARSERS[row.package])
    # orchestrate's parser adds only the options of the typed command.
    only = (row.name,) if row.package == "orchestrate" else ()
    build = module.compare_parser if row.name == "compare" else module.parser
    found: CommandParser = build(*only)
    if row.name == "chat":
        found.prog = f"{program_name()} chat"
        found.example = f"{found.prog} runs/latest"
    return found


def own_module(name: str) -> Any:
    """Return the module of a command of this package.

    The module has the functions `parser` and `output`. `output` returns the text to print.
    """
    return importlib.import_module(f"payload.cli.{name}")


def parser(*, prog: str) -> CommandParser:
    """Return the parser of `completion`."""
    made = CommandParser(
        prog=prog,
        description="Print a script that completes the commands and options of `tileforge`. Add "
        "the line for your shell below to its start file.",
        epilog="examples:\n"
        '  bash  eval "$(tileforge completion bash)"\n'
        '  zsh   eval "$(tileforge completion zsh)"\n'
        "  fish  tileforge completion fish | source",
    )
    made.add_argument("shell", choices=SHELLS, help="your shell")
    return made


def output(arguments: argparse.Namespace, *, is_styled: bool) -> str:
    """Return the script for the shell. Raises UsageError without argcomplete."""
    del is_styled
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise UsageError(
            "completion needs the package argcomplete, which is not installed. Run make setup."
        ) from None
    code: str = shellcode(["tileforge"], shell=arguments.shell)
    return code
