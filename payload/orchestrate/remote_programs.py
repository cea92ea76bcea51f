"""How a program of `remote/` is run on a node, and how its answer is read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

from payload.errors import PreflightError


def remote_argv(arguments: Mapping[str, Any]) -> list[str]:
    """The command; the program's text goes to its stdin."""
    # -I: nothing of the login's own Python settings.
    return ["python3", "-I", "-", json.dumps(arguments)]


def remote_program(name: str) -> bytes:
    """The text of a program in `remote/`."""
    return (resources.files("payload.orchestrate.remote") / name).read_bytes()


def parse_answer(text: bytes, *, node: str) -> dict[str, Any]:
    """The JSON object that a program on a node printed last. Raises PreflightError."""
    # A login shell's greeting may come before it.
    last = text.decode(errors="replace").strip().rpartition("\n")[2]
    try:
        answer = json.loads(last)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PreflightError(
            f"{node}: the probe printed no result but {last[:80]!r}. See that python3 works there."
        )
    return answer
