"""Parses a variable of a chat template that is given on a command line."""

from __future__ import annotations

import argparse
import json
from typing import Any


def template_variable(text: str) -> tuple[str, Any]:
    """Return the name and value of NAME=VALUE; a value that is not JSON is text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=VALUE, such as enable_thinking=false"
        )
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value
