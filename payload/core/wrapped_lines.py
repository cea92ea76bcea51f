"""Wraps a line of text for a terminal, without breaking a command that the user may copy."""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO

from payload.core.suggested_commands import command

_NO_BREAK = "\x00"
"""Replaces a space at which a line is not wrapped; printable text does not contain it."""


def fitted(line: str, stream: TextIO, *, indent: int = 2) -> str:
    """Return the line, wrapped at the width of the terminal that `stream` writes to.

    A pipe or a file has no width, so the line stays whole.
    """
    if not stream.isatty():
        return line
    return "\n".join(wrapped(line, width=shutil.get_terminal_size().columns, indent=indent))


def wrapped(line: str, *, width: int, indent: int) -> list[str]:
    """Return the line, wrapped at spaces if it is too long; further lines are indented.

    If the line contains a command of this project, the part from the command on is not wrapped, so
    that the command can be copied.
    """
    if len(line) <= width or width < 2 * indent:
        return [line]
    text, program, rest = line.partition(command("orchestrate").removesuffix("orchestrate"))
    parts = textwrap.wrap(
        text + f"{program}{rest}".replace(" ", _NO_BREAK),
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [part.replace(_NO_BREAK, " ") for part in parts]
