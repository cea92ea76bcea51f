"""Command lines and environments of Python processes that run modules of this package."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
"""`-P` as a variable, for a launcher that writes its ranks' command lines itself."""


def module_words(module: str, *words: str, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a module.

    Without `-P`, Python looks in the current folder first: a folder `payload` or a file `json.py`
    that somebody has put there would run in place of this package or the standard library. So the
    process needs `code_environment`, or this package installed.
    """
    return [python, "-P", "-m", module, *words]


def code_path(env: Mapping[str, str]) -> str | None:
    """Return a PYTHONPATH that begins with this package's parent folder; None if installed.

    Empty entries of the one in `env`, which stand for the current folder, are left out.
    """
    root = Path(__file__).absolute().parents[2]
    if root in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        return None
    return os.pathsep.join(dict.fromkeys((str(root), *_entries(env))))


def code_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with this package on Python's path, for processes of its modules.

    An empty entry of the path is left out, also where this package is installed.
    """
    path = code_path(env) or os.pathsep.join(_entries(env))
    others = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": path} if path else {})


def _entries(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
