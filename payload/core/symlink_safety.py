"""Symbolic links: find links that lead out of a folder, and open files without following links."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from payload.core.printable_text import printable


def inside_folder(path: Path, *, home: Path | None = None) -> Path:
    """Return `path` if it resolves to a file inside the folder `home`.

    By default, `home` is the parent of `path`. Raises OSError for a link that leads out of that
    folder. Through such a link, its author could make a command copy any file to the output. The
    hub's cache stores files in `blobs`, next to `snapshots`. Links to files in `blobs` are
    followed.
    """
    folder, target = (Path(os.path.realpath(each)) for each in (home or path.parent, path))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else folder
    if target.is_relative_to(folder) or target.is_relative_to(blobs):
        return path
    problem = f"a link that leads out of its folder, to {printable(str(target))}"
    raise OSError(errno.ELOOP, f"{problem}. Replace the link with the file", str(path))


def links_out(folder: Path, *, home: Path | None = None) -> Iterator[Path]:
    """Yield the links below `folder` that lead out of the folder `home`, by default `folder`.

    If `folder` itself leads out of `home`, only `folder` is yielded. Folders that cannot be listed
    are skipped.
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
    """Return `path`. Raises OSError if a part of the path below the folder `below` is a link."""
    place = below
    for part in path.relative_to(below).parts:
        place /= part
        if place.is_symlink():
            raise OSError(errno.ELOOP, "Links are not followed. Move the link away", str(place))
    return path


def is_own_folder(path: Path) -> bool:
    """Return True if the path is a folder and not a link to one."""
    return path.is_dir() and not path.is_symlink()


def no_follow(path: str, flags: int) -> int:
    """Open a file without following a symlink at `path`; usable as the `opener` of `open`."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
