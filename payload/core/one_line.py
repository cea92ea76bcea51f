"""Turn text of several lines into one line, for messages, notes and tables."""

from __future__ import annotations

from payload.core.printable_text import one_line, printable


def printable_line(text: str) -> str:
    """Return the text with line breaks as spaces, and without terminal control sequences."""
    return printable(text).replace("\n", " ")


def joined_lines(text: str, *, longest: int | None = 300) -> str:
    """Return all lines as one, with single spaces and without terminal control sequences.

    A longer text is shortened to `longest` characters; with None, no text is shortened.
    """
    flat = " ".join(printable(text).split())
    return flat if longest is None else shortened(flat, longest)


def shortened(text: str, longest: int) -> str:
    """Return the text, cut to `longest` characters with `...` at the end if it is longer."""
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def last_line(output: str, *, otherwise: str) -> str:
    """Return the last line of a failed program's output, without `error: `.

    Returns `otherwise` if the output is empty.
    """
    lines = output.strip().splitlines() or [otherwise]
    return one_line(lines[-1].removeprefix("error: "))
