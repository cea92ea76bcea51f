"""Symbolic links: which lead out of a folder, and files opened without following one."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from payload.core.printable_text import printable


def inside_folder(path: Path, *, home: Path | None = None) -> Path:
    """Return the path of a file in the folder `home`, by default its own.

    Raises OSError for a link that leads out of that folder: whoever made the folder could have any
    file read, and copied into what is made of it. The hub's cache keeps its files in `blobs`,
    beside `snapshots`; links to them are followed.
    """
    folder, target = (Path(os.path.realpath(each)) for each in (home or path.parent, path))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.is_relative_to(folder) or target.is_relative_to(blobs):
        return path
    problem = f"a link that leads out of its folder, to {printable(str(target))}"
    raise OSError(errno.ELOOP, f"{problem}. Put the file itself there", str(path))


def links_out(folder: Path, *, home: Path | None = None) -> Iterator[Path]:
    """Yield the links below `folder` that lead out of the folder `home`, by default the same.

    `folder` itself is one of them where it leads out of `home`. A folder that cannot be listed has
    none.
    """
    inside, waiting = os.path.realpath(home or folder), [folder]
    if home is not None and _leads_out(folder, inside):
        yield folder
        return
    while waiting:
        with suppress(OSError), os.scandir(waiting.pop()) as entries:
            for each in entries:
                if each.is_symlink():
                    if _leads_out(each.path, inside):
                        yield Path(each.path)
                elif each.is_dir(follow_symlinks=False):
                    waiting.append(Path(each.path))


def _leads_out(path: Path | str, inside: str) -> bool:
    return not Path(os.path.realpath(path)).is_relative_to(inside)


def refuse_links(path: Path, *, below: Path) -> Path:
    """Return `path`. Raises OSError where a part of it below the folder `below` is a link."""
    place = below
    for part in path.relative_to(below).parts:
        place /= part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "A link, which is not followed. Move it away", str(place))
    return path


def is_own_folder(path: Path) -> bool:
    """Return True for a folder that is no link to one."""
    return path.is_dir() and not path.is_symlink()


def no_follow(path: str, flags: int) -> int:
    """Open a file, but never through a symlink in its place; an `opener` of `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
