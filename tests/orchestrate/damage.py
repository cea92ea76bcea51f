"""The ten ways in which a test damages a file."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

HUGE_BYTES = 2**27
"""Sparse, and more than a record may have."""
HUGE_LOG_BYTES = 2**23


def missing(path: Path, _source: Path, _outside: Path) -> None:
    path.unlink(missing_ok=True)


def empty(path: Path, _source: Path, _outside: Path) -> None:
    path.write_bytes(b"")


def truncated(path: Path, _source: Path, _outside: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def bit_flip(path: Path, _source: Path, _outside: Path) -> None:
    content = bytearray(path.read_bytes() or b"x")
    content[len(content) // 3] ^= 4
    path.write_bytes(content)


def not_utf_8(path: Path, _source: Path, _outside: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + b"\xff\xfe\x80" + content[len(content) // 2 :])


def huge(path: Path, _source: Path, _outside: Path) -> None:
    with path.open("ab") as file:
        file.truncate(HUGE_LOG_BYTES if path.suffix == ".log" else HUGE_BYTES)


def folder_in_its_place(path: Path, _source: Path, _outside: Path) -> None:
    path.unlink(missing_ok=True)
    (path / "x").mkdir(parents=True)


def symlink(path: Path, _source: Path, outside: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(outside)


def copied(path: Path, source: Path, _outside: Path) -> None:
    if source.exists():
        shutil.copyfile(source, path)


Damage = Callable[[Path, Path, Path], None]
WAYS: dict[str, Damage] = {
    "missing": missing,
    "empty": empty,
    "truncated": truncated,
    "a bit flipped": bit_flip,
    "not UTF-8": not_utf_8,
    "huge": huge,
    "a folder in its place": folder_in_its_place,
    "a symlink": symlink,
    "an older copy": copied,
    "another run's": copied,
}


def damage_file(path: Path, *, way: str, source: Path, outside: Path) -> None:
    """Damage a file of a run; `source` is what it was or another run's, `outside` a link's target.

    No command may write to `outside`.
    """
    outside.write_text("not the run's")
    path.parent.mkdir(exist_ok=True)
    if way not in ("missing", "a symlink", "a folder in its place"):
        path.touch()
    WAYS[way](path, source, outside)
