"""Make text of other programs safe to print in a terminal."""

from __future__ import annotations

import re

PLAIN_TEXT = re.compile(r"[^\x00-\x08\x0a-\x1f\x7f-\x9f]*")
"""One line without control characters: a valid path or description in a command line."""
# C0 without tab and newline, DEL, C1, lone surrogates, and bidirectional controls (CVE-2021-42574).
# With these, a log could change the terminal's title or overwrite the screen.
_CONTROLS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
# CSI, OSC and the other string sequences with their parameters, so that no parameter remains as
# text.
_SEQUENCES = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)?"
    r"|\x1b[ -/]*[0-~]?"
)
_SHOWN_CHARS = 60
_LINE_CHARS = 300


def printable(text: str) -> str:
    """Return `text` without terminal escape sequences and control characters; newlines stay."""
    return _CONTROLS.sub("", _SEQUENCES.sub("", text))


def shown(value: object) -> str:
    """Return `value` quoted for an error message: printable, on one line and short."""
    try:
        text = printable(repr(value)).replace("\n", " ")
    except (ValueError, RecursionError):
        text = f"a {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


def shown_name(name: str) -> str:
    """Return the name of a file or an object, printable and on one line."""
    return printable(name).replace("\n", " ")


def counted(count: int, noun: str) -> str:
    """Return the number and the noun, in the plural unless the number is 1."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def one_line(text: object) -> str:
    """Return the first line of another program's message, shortened, with a full stop."""
    lines = printable(str(text)).strip().splitlines() or [type(text).__name__]
    line = lines[0] if len(lines[0]) <= _LINE_CHARS else f"{lines[0][: _LINE_CHARS - 3]}..."
    return f"{line.rstrip('.')}."
