"""Prints the error with which a command ends."""

from __future__ import annotations

import sys

from payload.core.printable_text import printable
from payload.core.wrapped_lines import fitted


def print_error(message: object) -> None:
    """Print `error: ` and the message on stderr; on a terminal, in lines that fit its width."""
    for line in f"error: {printable(str(message))}".splitlines():
        sys.stderr.write(f"{fitted(line, sys.stderr)}\n")
