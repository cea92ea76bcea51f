"""Fits lines of text into the width of a terminal."""

from __future__ import annotations

import re
import textwrap

from rich.console import Console

from payload.core.suggested_commands import command

_STEP = re.compile(r"step +[0-9]+/[0-9]+  ")
_LABEL_WIDTH = 10
"""Width of the label that begins most lines of a rank's log."""
_NO_BREAK = "\x00"
"""Replaces a space at which a line is not wrapped; printable text does not contain it."""


def fitted_log_line(line: str, *, width: int) -> list[str]:
    """Return a line of a rank's log as lines of at most `width` characters.

    A step's line loses its last fields, which are the least important. Other lines are wrapped at
    spaces; a path longer than `width` stays whole.
    """
    if not _STEP.match(line):
        return wrapped(line, width=width, indent=_LABEL_WIDTH)
    fields = line.split("  ")
    while len(fields) > 2 and len("  ".join(fields)) > width:
        fields.pop()
    return ["  ".join(fields)]


def wrapped(line: str, *, width: int, indent: int) -> list[str]:
    """Return the line, wrapped at spaces if it is too long; further lines are indented.

    From a command of this project on, the line is not wrapped, so that it can be copied.
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


def print_message(console: Console, line: str) -> None:
    """Print a message; a terminal gets it in lines that fit, a pipe in one line."""
    for part in fitted_message(console, line):
        console.print(part)


def fitted_message(console: Console, line: str) -> list[str]:
    """Return the lines of a message for this console."""
    if not console.is_terminal:
        return [line]
    lines = line.splitlines()
    return [part for each in lines for part in wrapped(each, width=console.width, indent=2)]
