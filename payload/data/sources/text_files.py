"""Sources that read text files with one document per file, such as Python's standard library."""

from __future__ import annotations

import codecs
import fnmatch
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.errors import DataError
from payload.core.one_line import printable_line
from payload.core.printable_text import shown_name
from payload.core.symlink_safety import inside_folder
from payload.data.sources.documents import PIECE_BYTES, Batch, Batcher, Cursor, Survey, read_pieces
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.split import FileSplit
from payload.data.sources.split_files import SplitFiles, split_files
from payload.data.sources.text_sections import Division, divide

BACKUPS = (".bak", ".old", ".orig", ".tmp", ".swp", ".part", ".partial", ".incomplete", "~")
"""Suffixes that programs give to backups and unfinished files."""
_SHARD = re.compile(r"(?P<start>.*)-(?P<number>\d{1,9})-of-(?P<count>\d{1,9})(?P<end>[^/]*)", re.S)
_NAMES_SHOWN = 3
STDLIB_VAL_FRACTION = 0.02
"""Fraction of the standard library's files that is used for validation."""


def find_files(
    given: Sequence[Path], *, glob: str | Sequence[str], leave_out: tuple[str, ...] = ()
) -> list[Path]:
    """Return the given files, and the matching files of given folders, sorted. Raises DataError.

    In given folders, hidden files and folders are skipped, as are files with a suffix in
    `leave_out`.
    """
    found: list[Path] = []
    globs = [glob] if isinstance(glob, str) else list(glob)
    for path in given:
        if path.is_file():
            found.append(path)
        elif path.is_dir():
            inside = [name for name in _walk(path, *globs) if not name.endswith(leave_out)]
            if not inside:
                raise DataError(
                    f"{path}: no file matches {' or '.join(map(repr, globs))}. Choose another "
                    "pattern with --glob."
                )
            found += [_require_inside(Path(name), path) for name in inside]
        elif path.exists():
            raise DataError(f"{path}: not a file or folder. Check --input.")
        else:
            raise DataError(f"{path}: does not exist. Check --input.")
    return found


def inputs_of(
    given: Sequence[Path], *, glob: str | Sequence[str], leave_out: tuple[str, ...] = ()
) -> list[tuple[Path, int]]:
    """Return the files that `find_files` finds, each with the index of the path that led to it."""
    return [
        (path, index)
        for index, each in enumerate(given)
        for path in find_files([each], glob=glob, leave_out=leave_out)
    ]


def in_order(found: Sequence[tuple[Path, int]], files: Sequence[Path]) -> list[int]:
    """Return for each of `files` the index of the given path under which the file was found."""
    index_of = dict(found)
    return [index_of[path] for path in files]


def _require_inside(path: Path, folder: Path) -> Path:
    """Return the path of a file found in a folder.

    Raises DataError for a link out of the folder.
    """
    try:
        return inside_folder(path, home=folder) if path.is_symlink() else path
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}, pass the file with --input, or exclude it with --glob."
        ) from None


def _walk(root: Path, *globs: str, leave_out: frozenset[str] = frozenset()) -> list[str]:
    # os.walk does not enter skipped folders, and is 5 times as fast as Path.rglob.
    found = []
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in leave_out and name[0] != "."]
        fitting = {name for glob in globs for name in fnmatch.filter(names, glob)}
        found += [os.path.join(folder, name) for name in fitting if name[0] != "."]  # noqa: PTH118
    return sorted(found)


def missing_shards(files: Sequence[Path | str]) -> str | None:
    """Return a note if files with names such as train-00000-of-00003 are missing, otherwise None.

    Such names contain the number of shards, so a missing file shows that a download is unfinished.
    """
    found: dict[tuple[str, int], set[int]] = {}
    for file in map(str, files):
        if shard := _SHARD.fullmatch(file):
            key = f"{shard['start']}-*-of-{shard['count']}{shard['end']}", int(shard["count"])
            found.setdefault(key, set()).add(int(shard["number"]))
    incomplete = [
        f"{shown_name(name)}: {len(numbers)} of {count} files"
        for (name, count), numbers in found.items()
        if len(numbers) < count
    ]
    return f"files are missing: {', '.join(incomplete[:_NAMES_SHOWN])}" if incomplete else None


def join_notes(*notes: str | None) -> str | None:
    """Return the notes joined to one text, or None without notes."""
    return "; ".join(filter(None, notes)) or None


def file_identity(files: Sequence[Path]) -> list[Any]:
    """Return the path, size and time of every file. None replaces an unknown size or time."""
    result: list[Any] = []
    for path in files:
        try:
            status = path.stat()
        except OSError:
            status = None
        if status is None or not stat.S_ISREG(status.st_mode):
            result.append([str(path.absolute()), None, None])
        else:
            result.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
    return result


class ColumnFiles:
    """Base of the sources that read documents from the column `text_column` of files."""

    default_val_fraction: float | None = None
    revision: str | None = None
    inputs_of_files: Sequence[int] = ()

    def __init__(
        self,
        kind: str,
        given: Sequence[Path],
        *,
        glob: str | Sequence[str],
        request: SourceRequest,
    ) -> None:
        """`glob` selects the files in folders if the request has no pattern."""
        self.label = describe_inputs(kind, given)
        self._given = given
        self._input_numbers = request.input_numbers
        self._glob: str | Sequence[str] = request.glob or glob
        self._leave_out = () if request.glob else BACKUPS
        self._column = request.column()
        self._skip_bad = request.skip_bad
        self._files: list[Path] = []
        self.splits = SplitFiles(())

    def identity(self) -> list[Any]:
        """Return the path, size and time of every file that is read.

        Raises DataError for a missing file.
        """
        found = inputs_of(self._given, glob=self._glob, leave_out=self._leave_out)
        self.splits = split_files([path for path, _ in found])
        self._files = self.splits.read()
        self.inputs_of_files = in_order(found, self._files)
        if self._input_numbers:
            self.inputs_of_files = [self._input_numbers[each] for each in self.inputs_of_files]
        identity = file_identity(self._files)
        for path, (_, size, _) in zip(self._files, identity, strict=True):
            if size is None:
                raise DataError(f"{path}: {_NOT_REGULAR} Remove it, or exclude it with --glob.")
        return identity

    def note(self) -> str | None:
        """Return a note about missing shards and about the splits; call `identity` first."""
        return join_notes(missing_shards(self._files), self.splits.note())


def describe_inputs(kind: str, given: Sequence[Path]) -> str:
    """Return the kind of source and the first three paths, for messages."""
    shown = ", ".join(str(path) for path in given[:3])
    more = f" and {len(given) - 3} more" if len(given) > 3 else ""
    return printable_line(f"{kind}: {shown}{more}")


class TextSource:
    """Documents of text files: every file, or the sections of a single file."""

    default_val_fraction: float | None = None
    revision: str | None = None
    inputs_of_files: Sequence[int] = ()

    def __init__(self, given: Sequence[Path], *, glob: str | None, skip_bad: bool) -> None:
        self.label = describe_inputs("text", given)
        self._given = given
        self._glob = glob or "*"
        self._skip_bad = skip_bad
        # Strings, because for many small files Path objects take as long as reading the files.
        self._files: list[str] = []
        self._size = 0
        self._division: Division | None = None
        self._splits = SplitFiles(())

    def identity(self) -> list[Any]:
        """Return the path, size and time of every file. Raises DataError for a missing file."""
        found = inputs_of(self._given, glob=self._glob)
        self._splits = split_files([path for path, _ in found], is_text=True)
        files = self._splits.read()
        self.inputs_of_files = in_order(found, files)
        self._files = list(map(str, files))
        identity = file_identity(files)
        self._size = sum(size or 0 for _, size, _ in identity)
        return identity

    def survey(self) -> Survey:
        """Count files and bytes; a single file is read to find out how it can be split."""
        if len(self._files) == 1:
            division = divide(Path(self._files[0]))
            if division.documents > 1:
                self._division = division
                return Survey(
                    documents=division.documents,
                    text_bytes=self._size,
                    note=join_notes(division.note, self._splits.note()),
                )
        split, count = None, len(self._files)
        if self._splits.valid:
            split = FileSplit.of(first_val=len(self._splits.train), documents=count)
        return Survey(
            documents=count,
            text_bytes=self._size,
            bytes_are_exact=True,
            split=split,
            note=join_notes(missing_shards(self._files), self._splits.note()),
        )

    def batches(self, cursor: Cursor) -> Iterator[Batch]:
        """Yield the files, or the sections of a single file, as documents."""
        batcher = Batcher(skip_bad=self._skip_bad)
        if self._division is not None:
            yield from self._sections(self._division, batcher, cursor)
            return
        number, offset = cursor.get("document", 0), cursor.get("offset", 0)
        while number < len(self._files):
            path = self._files[number]
            batcher.begin_file(number, number=number)
            text = _NotRead(None) if offset else self._read(path)
            if isinstance(text, bytes):
                batcher.add(text, number=number)
            else:
                complaint = text.complaint or _find_fault(path)
                if complaint is not None:
                    batcher.skip(complaint, number=number)
                else:
                    for reached in _add_large(path, batcher, number=number, offset=offset):
                        yield batcher.take({"document": number, "offset": reached})
            number, offset = number + 1, 0
            if batcher.is_full:
                yield batcher.take({"document": number})
        yield batcher.take({"document": number})

    def _sections(self, division: Division, batcher: Batcher, cursor: Cursor) -> Iterator[Batch]:
        path, reached = self._files[0], cursor.get("offset", 0)
        number = cursor.get("document", 0)
        for section, end, cut in division.sections(Path(path), offset=reached):
            try:
                section.decode("utf-8")
            except UnicodeDecodeError as error:
                begin = end - len(section) - (cut == "form feed")
                batcher.skip(_not_utf8(path, held=begin, error=error), number=number)
            else:
                batcher.add(section, number=number)
            number, reached = number + 1, end
            if batcher.is_full:
                yield batcher.take({"document": number, "offset": reached})
        yield batcher.take({"document": number, "offset": reached})

    def _read(self, path: str) -> bytes | _NotRead:
        """Return the whole file if it fits into one piece."""
        return _read_small(path)


def stdlib_source(*, skip_bad: bool) -> TextSource:
    """Return a source of the running Python's standard library, without installed packages."""
    return _StdlibSource(Path(sysconfig.get_path("stdlib")), skip_bad=skip_bad)


class _StdlibSource(TextSource):
    default_val_fraction = STDLIB_VAL_FRACTION

    def __init__(self, root: Path, *, skip_bad: bool) -> None:
        super().__init__([root], glob="*.py", skip_bad=skip_bad)
        self.label = f"stdlib: Python {platform.python_version()}"
        self.revision = platform.python_version()
        self._root = root
        # Kept from `survey`, which reads the files to find the valid ones: 31 MB.
        self._texts: dict[str, bytes] = {}

    def identity(self) -> list[Any]:
        """Return names and sizes, which are equal in every installation of a Python version."""
        self._files = _walk(self._root, "*.py", leave_out=_NOT_STDLIB)
        skip = len(str(self._root)) + 1
        return [self.revision, [[path[skip:], _size(path)] for path in self._files]]

    def survey(self) -> Survey:
        """Count the valid files: a few of Python's tests have other encodings, and are left out."""
        for path in self._files:
            text = _read_small(path)
            if isinstance(text, bytes) and text:
                self._texts[path] = text
        self._files = list(self._texts)
        size = sum(map(len, self._texts.values()))
        return Survey(documents=len(self._files), text_bytes=size, bytes_are_exact=True)

    def _read(self, path: str) -> bytes | _NotRead:
        return self._texts.pop(path, None) or super()._read(path)


_NOT_REGULAR = "not a regular file (a broken link, a pipe or a device)."
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, slots=True)
class _NotRead:
    """Reason why a file was not read in one piece."""

    complaint: str | None
    """The file's fault; None if the file is only too large for one piece."""


def _size(path: str) -> int:
    """Return the size of a file in bytes; 0 for a broken link."""
    try:
        return os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0


def _find_fault(path: str) -> str | None:
    """Return the reason why a file cannot be a document, or None. Reads the file in pieces."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    try:
        with Path(path).open("rb") as file:
            while chunk := file.read(PIECE_BYTES):
                decoder.decode(chunk)
                read += len(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        return _not_utf8(path, held=read - len(decoder.getstate()[0]), error=error)
    except OSError as error:
        return f"{path}: {error.strerror}."
    return None


def _not_utf8(path: str, *, held: int, error: UnicodeDecodeError) -> str:
    """Return the message with the line number.

    `held` bytes of the file precede the decoder's input.
    """
    place = held + error.start
    with Path(path).open("rb") as file:
        before = file.read(place)
        wrong = file.read(1)
    line = before.count(b"\n") + 1
    return f"{path} line {line}: byte {place} (0x{wrong.hex()}) is not UTF-8."


def _read_small(path: str) -> bytes | _NotRead:
    """Return the text of a file if it is valid and no larger than a piece."""
    try:
        # os.read of the known size takes half the time of a file object. O_NONBLOCK, because
        # opening a pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                return _NotRead(f"{path}: {_NOT_REGULAR}")
            size = status.st_size
            text = os.read(descriptor, size) if size <= PIECE_BYTES else None
        finally:
            os.close(descriptor)
    except OSError as error:
        return _NotRead(f"{path}: {error.strerror}.")
    if text is None:
        return _NotRead(None)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        return _NotRead(_not_utf8(path, held=0, error=error))
    return text


def _add_large(path: str, batcher: Batcher, *, number: int, offset: int) -> Iterator[int]:
    """Add pieces from `offset` on.

    Yield the offset whenever the batch is full within the document.
    """
    with Path(path).open("rb") as file:
        file.seek(offset)
        for piece, is_last in read_pieces(file):
            batcher.add(piece, number=number, is_last=is_last)
            offset += len(piece)
            if batcher.is_full and not is_last:
                yield offset
