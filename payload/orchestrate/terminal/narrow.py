"""Fits lines of text into the width of a terminal."""

from __future__ import annotations

import re

from rich.console import Console

from payload.core.wrapped_lines import wrapped

_STEP = re.compile(r"step +[0-9]+/[0-9]+  ")
_LABEL_WIDTH = 10
"""Width of the label that begins most lines of a rank's log."""


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


def print_message(console: Console, line: str) -> None:
    """Print a message; a terminal gets it in lines that fit, a pipe in one line."""
    for part in fitted_message(console, line):
        console.print(part)


def fitted_message(console: Console, line: str) -> list[str]:
    """Return the lines of a message, wrapped for a terminal, as one line for a pipe."""
    if not console.is_terminal:
        return [line]
    lines = line.splitlines()
    return [part for each in lines for part in wrapped(each, width=console.width, indent=2)]
