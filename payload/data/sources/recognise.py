"""Decides for `--source auto` whether files hold rows with columns, or plain text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from payload.core.errors import DataError
from payload.data.sources.file_format import ROW_KINDS, FileKind, detect_format
from payload.data.sources.split_files import split_files
from payload.data.sources.text_files import BACKUPS, find_files

_MOST_FILES = 1000
"""Limit on the number of files that are read to find their kinds."""
_ABOUT_DATA = ("readme", "license", "licence", "changelog", "citation", ".gitattributes")
"""Beginnings of the names of files that describe the data in a folder."""


def file_kinds(inputs: Sequence[str], glob: str | None) -> tuple[list[Path], set[FileKind]]:
    """Return the files to read from the inputs, and the kinds of these files.

    Files that describe the data, such as README.md, are left out if other files have rows.

    Raises DataError, also if the inputs are files of which only some have rows: as plain text, the
    others would keep their headers and commas.
    """
    found = find_files(
        [Path(each) for each in inputs], glob=glob or "*", leave_out=() if glob else BACKUPS
    )
    # A pipe would block; the source reports it.
    read = [path for path in split_files(found).read() if path.is_file()]
    kinds: dict[Path, FileKind] = {}
    for path in read[:_MOST_FILES]:
        kinds[path] = detect_format(path).kind
    has_rows = any(kind in ROW_KINDS for kind in kinds.values())
    about = {path for path in kinds if path.name.lower().startswith(_ABOUT_DATA)}
    if has_rows:
        found = [path for path in found if path not in about]
        kinds = {path: kind for path, kind in kinds.items() if path not in about}
    rows = [path for path, kind in kinds.items() if kind in ROW_KINDS]
    texts = [path for path, kind in kinds.items() if kind not in ROW_KINDS]
    if rows and texts and kinds.keys() <= {Path(each) for each in inputs}:
        raise DataError(
            f"{texts[0]} is plain text, but {rows[0]} has rows ({kinds[rows[0]]}). Use files of "
            "one kind."
        )
    return found, set(kinds.values())


def has_rows(kinds: set[FileKind]) -> bool:
    """Return True if every file has rows.

    If some files are plain text, all are read as plain text.
    """
    return bool(kinds) and kinds <= set(ROW_KINDS)
