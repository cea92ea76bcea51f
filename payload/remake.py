"""How a data folder is made, or made again: the words of every command that finds it unfit."""

from __future__ import annotations

from pathlib import Path

from payload.hints import command

# Folders whose name says what is in them. What lies under any other name is the user's own, and no
# source may be named for it: the command would put that in its place.
_KNOWN = ("openwebtext", "stdlib")


def how_to_make(folder: Path) -> str:
    """The command for a folder that is not there or not finished, as a sentence."""
    if folder.name in _KNOWN:
        return f"Make it with: {_prepare(folder.name, '--out', str(folder))}"
    return (
        f"Make it with: {_prepare('KIND', '--input', 'PATH', '--out', str(folder))} "
        "(prepare --help has the kinds; one that was stopped goes on)"
    )


def how_to_make_again(folder: Path, *, source: object) -> str:
    """The same for a damaged folder; `source` is what its meta.json says that it was made from."""
    if not isinstance(source, str):
        source = None
    was = "" if source is None else f" (it was: {source})"
    if folder.name in _KNOWN and (source is None or source.startswith(f"{folder.name}:")):
        again = _prepare(folder.name, "--out", str(folder), "--force")
        return f"Make it again with: {again}{was}"
    return f"Repeat the command that made it with --force{was}."


def _prepare(source: str, *arguments: str) -> str:
    return command("data", "prepare", "--source", source, *arguments)
