"""Command lines for messages, which work when pasted into the user's shell."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import sys
from collections.abc import Mapping
from pathlib import Path

from payload.core.printable_text import printable

CONSOLE = "TILEFORGE_CONSOLE"
"""Environment variable with the path of `tileforge`, for the processes that it starts."""

_SUBCOMMANDS = {
    "orchestrate": (),
    **{name: (name,) for name in ("data", "train", "finetune", "generate", "evaluate", "export")},
    "report": ("report",),
    "storage": ("storage",),
}
"""The subcommand of `tileforge` for each program."""


def quoted(text: str) -> str:
    """Return text quoted for a shell command that is shown to people.

    Control characters are removed before quoting. After quoting, the removal of an escape sequence
    could also remove the closing quote, and the shell would run the rest of the text.
    """
    return shlex.quote(printable(text))


def program_name() -> str:
    """Return the program as the user calls it: `tileforge`, its path, or `python -m payload`."""
    console = os.environ.get(CONSOLE)
    if console is None:
        return f"{_python_command()} -m payload"
    found = shutil.which("tileforge")
    is_on_path = found is not None and Path(found).absolute() == Path(console).absolute()
    return "tileforge" if is_on_path else quoted(console)


def command(program: str, *arguments: str) -> str:
    """Return the command line that starts `payload.<program>` from the user's current folder.

    The command begins with `tileforge` if the user typed `tileforge`. Otherwise the command is
    `python -m payload.<program> ...`, with the interpreter's path, PYTHONPATH or `cd` if needed.
    """
    if CONSOLE in os.environ and program in _SUBCOMMANDS:
        rest = map(quoted, (*_SUBCOMMANDS[program], *arguments))
        return " ".join([program_name(), *rest])
    argv = [_python_command(), "-m", f"payload.{program}", *map(quoted, arguments)]
    return " ".join(argv)


def chat_command(model: str) -> str:
    """Return the command line that chats with a model."""
    if CONSOLE in os.environ:
        return f"{program_name()} chat {quoted(model)}"
    return command("generate", model, "--chat")


def _python_command() -> str:
    return _python_command_from(
        executable=sys.executable,
        root=Path(__file__).resolve().parents[2],
        cwd=Path.cwd(),
        env=os.environ,
        site_folders=[*site.getsitepackages(), site.getusersitepackages()],
    )


def _python_command_from(
    *, executable: str, root: Path, cwd: Path, env: Mapping[str, str], site_folders: list[str]
) -> str:
    """Return the part of a command line before `-m`; `root` is the parent folder of `payload`."""
    before = ""
    # The user's shell is still in its own folder after `make -C` or a `cd` in a script.
    shell_folder = env.get("TILEFORGE_SHELL_FOLDER")
    if shell_folder and Path(shell_folder).resolve() != cwd.resolve():
        before = f"cd {quoted(str(cwd))} && "
    if root != cwd.resolve() and root not in [Path(folder).resolve() for folder in site_folders]:
        # PYTHONPATH is repeated even if it is set: it may have been set for this command only.
        old = env.get("PYTHONPATH", "").split(os.pathsep)
        others = [entry for entry in old if entry and Path(cwd, entry).resolve() != root]
        before += f"PYTHONPATH={quoted(os.pathsep.join([str(root), *others]))} "
    return before + quoted(_interpreter(executable, cwd=cwd, path=env.get("PATH", "")))


def _interpreter(executable: str, *, cwd: Path, path: str) -> str:
    """Return `python` if it starts this interpreter, otherwise this interpreter's path."""
    # The link itself is not resolved: a virtual environment's python is a link.
    folder = Path(executable).parent.resolve()
    on_path = shutil.which("python", path=path)
    if on_path is not None and Path(cwd, on_path).parent.resolve() == folder:
        return "python"
    try:
        relative = Path(executable).relative_to(cwd)
    except ValueError:
        return executable
    return f"./{relative}" if len(relative.parts) == 1 else str(relative)
