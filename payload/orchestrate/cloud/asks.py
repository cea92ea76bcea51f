"""Questions to the operator, and who may answer them."""

from __future__ import annotations

import sys

from payload.errors import UsageError
from payload.orchestrate.console import text_console


def confirm(question: str, *, assume_yes: bool) -> bool:
    """Return whether the operator agrees. Raises UsageError where nobody can be asked."""
    if assume_yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Nobody is here to say yes: repeat with --yes.")
    return _answer(f"{question} [y/N] ").lower() in ("y", "yes")


def confirm_by_name(question: str, *, name: str) -> bool:
    """Return whether the operator types `name`, which --yes does not answer.

    Raises UsageError where nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise UsageError(f"{question} Only a person at a terminal can answer this, not --yes.")
    return _answer(f"{question} Type {name} to go on: ") == name


def _answer(prompt: str) -> str:
    text_console(stderr=True).print(prompt, end="")
    return sys.stdin.readline().strip()
