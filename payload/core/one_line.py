"""Texts of several lines as one line: for messages, notes and tables."""

from __future__ import annotations

from payload.core.printable_text import one_line, printable


def printable_line(text: str) -> str:
    """Return the text without what a terminal would obey, each line break as a space."""
    return printable(text).replace("\n", " ")


def joined_lines(text: str, *, longest: int | None = 300) -> str:
    """Return the words of all lines, one space between them, without what a terminal would obey.

    More than `longest` characters are shortened; None = any number.
    """
    flat = " ".join(printable(text).split())
    return flat if longest is None else shortened(flat, longest)


def shortened(text: str, longest: int) -> str:
    """Return the text, or its beginning with `...` where it has more than `longest` characters."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def last_line(said: str, *, otherwise: str) -> str:
    """Return the last line of a failed program's output, made by `one_line`, without `error: `.

    `otherwise` takes its place where the program wrote nothing.
    """
    lines = said.strip().splitlines() or [otherwise]
    return one_line(lines[-1].removeprefix("error: "))
