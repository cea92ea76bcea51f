"""Streams the objects of a JSON file that does not have one object on each line.

The file is an array of objects, one object, or several objects one after the other. It can also be
an object that holds an array of objects under a common name such as `data`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from payload.core.errors import DataError
from payload.core.printable_text import shown
from payload.data.sources.documents import MIB
from payload.data.sources.jsonl import LINE_BYTES, object_of_pairs

ARRAY_NAMES = ("data", "rows", "examples", "items", "records", "samples", "entries", "instances")
"""Keys of an object under which an array can hold the rows of the file."""
WRAPPED = re.compile(rf'\s*\{{\s*"(?:{"|".join(ARRAY_NAMES)})"\s*:\s*\[\s*[{{\]]')
"""Matches the start of an object that holds the rows under its first key."""
_SPACE = re.compile(r"\s*")
_READ_CHARS = MIB
_WINDOW_CHARS = 1000


class _Text:
    """A window that moves forward over a JSON text."""

    def __init__(self, file: BinaryIO, path: Path, encoding: str) -> None:
        self._file = io.TextIOWrapper(file, encoding=encoding)
        self._path = path
        self._buffer = ""
        self._place = 0
        self._line = 1
        self._decoder = json.JSONDecoder(object_pairs_hook=object_of_pairs)

    def line(self) -> int:
        """Return the number of the current line, from 1."""
        return self._line

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            match = _SPACE.match(self._buffer, self._place)
            assert match is not None
            self._move(match.end())
            if self._place < len(self._buffer):
                return self._buffer[self._place]
            if not self._fill():
                return ""

    def take(self, expected: str) -> None:
        """Move past the next character.

        Raises DataError if `expected` does not contain the character.
        """
        found = self.peek()
        if not found or found not in expected:
            what = f"the character {found!r}" if found else "the end of the file"
            raise self.error(f"{what} instead of {' or '.join(map(repr, expected))}")
        self._move(self._place + 1)

    def value(self) -> Any:
        """Return the JSON value at the current place. Raises DataError."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._buffer, self._place)
            except RecursionError:
                raise self.error("nested too deeply") from None
            except ValueError as error:
                length = len(self._buffer) - self._place
                if length > LINE_BYTES:
                    raise self.error(f"a value longer than {LINE_BYTES // MIB} MiB") from None
                if self._fill(length):
                    continue
                raise self._error_of(error) from None
            # A number at the end of the window may have more digits.
            if end == len(self._buffer) and not isinstance(value, (dict, list)) and self._fill():
                continue
            self._move(end)
            return value

    def window(self) -> str:
        """Return the characters that follow the current place, up to a limit."""
        self.peek()
        return self._buffer[self._place : self._place + _WINDOW_CHARS]

    def error(self, what: str) -> DataError:
        """Return the error for the current line."""
        return DataError(f"{self._path} line {self._line}: not JSON: {what}. Correct it.")

    def _error_of(self, error: ValueError) -> DataError:
        if isinstance(error, json.JSONDecodeError):
            self._move(min(error.pos, len(self._buffer)))
        return self.error(getattr(error, "msg", str(error)))

    def _move(self, place: int) -> None:
        self._line += self._buffer.count("\n", self._place, place)
        self._place = place

    def _fill(self, least: int = 0) -> bool:
        """Read more text, at least `least` characters. Return False at the end of the file.

        `value` passes the length of the unread text as `least`. The text then at least doubles, so
        that the time stays linear.
        """
        try:
            more = self._file.read(max(_READ_CHARS, least))
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self._path}: not UTF-8: {error.reason} after line {self._line}. Convert the "
                "file to UTF-8."
            ) from None
        self._buffer = self._buffer[self._place :] + more
        self._place = 0
        return bool(more)


def read_objects(file: BinaryIO, path: Path, *, encoding: str) -> Iterator[tuple[int, Any]]:
    """Yield the line and value of each row. Raises DataError for a text that is not JSON."""
    text = _Text(file, path, encoding)
    while first := text.peek():
        if first == "[":
            yield from _array(text)
        elif first == "{" and (rows := _wrapped(text)) is not None:
            yield from rows
        else:
            line = text.line()
            yield line, text.value()


def _array(text: _Text) -> Iterator[tuple[int, Any]]:
    text.take("[")
    if text.peek() == "]":
        text.take("]")
        return
    while True:
        text.peek()
        line = text.line()
        yield line, text.value()
        if text.peek() == "]":
            text.take("]")
            return
        text.take(",]")


def _wrapped(text: _Text) -> Iterator[tuple[int, Any]] | None:
    """Return the rows that an object holds under its first key; None for any other object."""
    start = text.window()
    return _wrapped_rows(text) if WRAPPED.match(start) else None


def _wrapped_rows(text: _Text) -> Iterator[tuple[int, Any]]:
    text.take("{")
    name = text.value()
    text.take(":")
    yield from _array(text)
    while text.peek() == ",":
        text.take(",")
        other = text.value()
        text.take(":")
        if text.peek() == "[":
            raise text.error(
                f"a second array, {shown(other)}, after {shown(name)}; put each array into a "
                "separate file"
            )
        text.value()
    text.take("}")
