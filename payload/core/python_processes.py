"""Builds command lines and environments for processes that run modules of this package."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
"""Environment variable with the effect of Python's option `-P`. The variable is for launchers that
build the ranks' command lines themselves."""


def module_command(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command line that runs a module.

    Without `-P`, Python searches the current folder first. A folder `payload` or a file `json.py`
    in that folder would replace this package or the standard library. With `-P`, the process needs
    `code_environment` if this package is not installed.
    """
    return [python, "-P", "-m", module, *arguments]


def code_path(env: Mapping[str, str]) -> str | None:
    """Return a PYTHONPATH that begins with this package's parent; None if the package is installed.

    Empty entries of `env`'s PYTHONPATH mean the current folder and are left out.
    """
    root = Path(__file__).absolute().parents[2]
    if root in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        return None
    return os.pathsep.join(dict.fromkeys((str(root), *_entries(env))))


def code_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return `env` with a PYTHONPATH from which this package can be imported.

    Empty entries are left out, even if this package is installed.
    """
    path = code_path(env) or os.pathsep.join(_entries(env))
    others = {name: value for name, value in env.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": path} if path else {})


def _entries(env: Mapping[str, str]) -> list[str]:
    return [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry]
