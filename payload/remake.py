"""How a data folder is made, or made again: the words of every command that finds it unfit."""

from __future__ import annotations

import shlex
from pathlib import Path

_COMMAND = "python -m payload.data prepare"
# Folders whose name says what is in them. What lies under any other name is the user's own, and no
# source may be named for it: the command would put that in its place.
_KNOWN = ("openwebtext", "stdlib")


def how_to_make(folder: Path) -> str:
    """The command for a folder that is not there or not finished, as a sentence."""
    out = shlex.quote(str(folder))
    if folder.name in _KNOWN:
        return f"Make it with: {_COMMAND} --source {folder.name} --out {out}"
    return (
        f"Make it with: {_COMMAND} --source KIND --input PATH --out {out} "
        "(prepare --help has the kinds; one that was stopped goes on)"
    )


def how_to_make_again(folder: Path, *, source: object) -> str:
    """The same for a damaged folder; `source` is what its meta.json says that it was made from."""
    if not isinstance(source, str):
        source = None
    was = "" if source is None else f" (it was: {source})"
    if folder.name in _KNOWN and (source is None or source.startswith(f"{folder.name}:")):
        out = shlex.quote(str(folder))
        return f"Make it again with: {_COMMAND} --source {folder.name} --out {out} --force{was}"
    return f"Repeat the command that made it with --force{was}."
