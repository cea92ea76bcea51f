"""Commands that messages tell the user to type, in words that work where the user is."""

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
"""Where `tileforge` lies, in the environment of what it starts."""

_CONSOLE_WORDS = {
    "orchestrate": (),
    **{name: (name,) for name in ("data", "train", "finetune", "generate", "evaluate", "export")},
    "report": ("report",),
    "storage": ("storage",),
}
"""Names that stand for a program after `tileforge`."""


def quoted(text: str) -> str:
    """Return text as one word of a shell's command line that is shown to people.

    What people see has no control characters, and one that is removed after quoting may take a
    quote with it: the rest of the text would be the shell's.
    """
    return shlex.quote(printable(text))


def program_name() -> str:
    """Return how the user calls the one command: `tileforge`, its path, or `python -m payload`."""
    console = os.environ.get(CONSOLE)
    if console is None:
        return f"{_interpreter_words()} -m payload"
    found = shutil.which("tileforge")
    is_on_path = found is not None and Path(found).absolute() == Path(console).absolute()
    return "tileforge" if is_on_path else quoted(console)


def command(program: str, *arguments: str) -> str:
    """Return the command line that starts `payload.<program>` from the user's current folder.

    Where the user typed `tileforge`, so does the message. Else it is `python -m payload.<program>
    ...` where `python` is the interpreter that runs this and the package can be imported.
    Otherwise the interpreter's path, PYTHONPATH or `cd` are added.
    """
    if CONSOLE in os.environ and program in _CONSOLE_WORDS:
        rest = map(quoted, (*_CONSOLE_WORDS[program], *arguments))
        return " ".join([program_name(), *rest])
    words = [_interpreter_words(), "-m", f"payload.{program}", *map(quoted, arguments)]
    return " ".join(words)


def _interpreter_words() -> str:
    return _command_words(
        executable=sys.executable,
        root=Path(__file__).resolve().parents[2],
        cwd=Path.cwd(),
        env=os.environ,
        site_folders=[*site.getsitepackages(), site.getusersitepackages()],
    )


def _command_words(
    *, executable: str, root: Path, cwd: Path, env: Mapping[str, str], site_folders: list[str]
) -> str:
    """Return what has to stand before `-m`; `root` is the folder that `payload` is in."""
    before = ""
    # `make -C` and a script's `cd` leave the user's shell where it was.
    shell_folder = env.get("TILEFORGE_SHELL_FOLDER")
    if shell_folder and Path(shell_folder).resolve() != cwd.resolve():
        before = f"cd {quoted(str(cwd))} && "
    if root != cwd.resolve() and root not in [Path(folder).resolve() for folder in site_folders]:
        # Repeated even if it is set here: it may have been set for this one command.
        old = env.get("PYTHONPATH", "").split(os.pathsep)
        others = [entry for entry in old if entry and Path(cwd, entry).resolve() != root]
        before += f"PYTHONPATH={quoted(os.pathsep.join([str(root), *others]))} "
    return before + quoted(_interpreter(executable, cwd=cwd, path=env.get("PATH", "")))


def _interpreter(executable: str, *, cwd: Path, path: str) -> str:
    """Return `python` where that is this interpreter, else its shortest path from `cwd`."""
    # The link itself is not resolved: it is what makes an environment's python the environment's.
    folder = Path(executable).parent.resolve()
    on_path = shutil.which("python", path=path)
    if on_path is not None and Path(cwd, on_path).parent.resolve() == folder:
        return "python"
    try:
        relative = Path(executable).relative_to(cwd)
    except ValueError:
        return executable
    return f"./{relative}" if len(relative.parts) == 1 else str(relative)
