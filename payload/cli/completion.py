"""Shell completion through argcomplete, from the parsers that carry out the commands.

Only the parser of the command that is being typed is loaded, and no parser loads torch or numpy.
"""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Mapping

from payload.cli.commands import BY_NAME, Command
from payload.core.errors import UsageError

SHELLS = ("bash", "zsh", "fish")
ASKED = "_ARGCOMPLETE"
"""Set by the shell's completion: the number of words before the first argument."""

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
"""The module of each package whose `parser()` is its command line."""


def complete(env: Mapping[str, str]) -> None:
    """Tell the shell what may come next, and end the process."""
    try:
        import argcomplete
        from argcomplete.lexers import split_line
    except ImportError:
        return
    *_, words, _ = split_line(env.get("COMP_LINE", ""), int(env.get("COMP_POINT", "0")))
    start = int(env[ASKED]) - 1
    row = BY_NAME.get(words[start + 1]) if len(words) > start + 1 else None
    if row is not None and not row.words:
        # The package's own command line begins after the command's name.
        os.environ[ASKED] = str(start + 2)
    argcomplete.autocomplete(command_parser(row), always_complete_options="long")


def command_parser(row: Command | None) -> argparse.ArgumentParser:
    """Return the parser of a command's package; without a command, one that takes its name."""
    if row is None:
        made = argparse.ArgumentParser(prog="tileforge")
        made.add_argument("command", choices=tuple(BY_NAME))
        return made
    if row.package == "cli":
        return parser(prog="tileforge completion")
    module = importlib.import_module(_PARSERS[row.package])
    parsed: argparse.ArgumentParser = module.parser()
    return parsed


def parser(*, prog: str) -> argparse.ArgumentParser:
    """Return the command line of `completion`."""
    made = argparse.ArgumentParser(
        prog=prog,
        description="Print what makes a shell complete `tileforge`'s commands and options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        '  bash  eval "$(tileforge completion bash)"\n'
        '  zsh   eval "$(tileforge completion zsh)"\n'
        "  fish  tileforge completion fish | source",
    )
    made.add_argument("shell", choices=SHELLS)
    return made


def shell_code(shell: str) -> str:
    """Return what the shell is to evaluate. Raises UsageError without argcomplete."""
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise UsageError(
            "completion needs the package argcomplete, which is not installed. Run make setup."
        ) from None
    code: str = shellcode(["tileforge"], shell=shell)
    return code
