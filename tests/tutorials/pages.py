"""The commands of a page, its expected output, and what a test replaces to run them quickly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NUMBER = re.compile(r"\d[\d.,:]*(e[+-]\d+)?")
_FILE_NAME = re.compile(r"# (\w+\.py)\n")


@dataclass(frozen=True, slots=True)
class Page:
    """A page's commands, in order; the outputs that follow them; the files that it lists."""

    commands: tuple[str, ...]
    outputs: tuple[str, ...]
    """Lines of the text blocks that directly follow a block of commands."""
    files: Mapping[str, str]
    """Python blocks whose first line is a comment with their name."""


@dataclass(frozen=True, slots=True)
class Reduced:
    """Replacements in a page's commands, each with its reason in a comment of the table."""

    replace: Mapping[str, str] = field(default_factory=dict)
    """A part of a command to the text that replaces it; `{tiny}` is the folder of the model."""
    skip: Mapping[str, str] = field(default_factory=dict)
    """A command that is not run, to the reason."""
    varies: frozenset[str] = frozenset()
    """Lines of expected output that only the full-size model prints."""


def read_page(path: Path) -> Page:
    """Return the parts of a page."""
    commands: list[str] = []
    outputs: list[str] = []
    files: dict[str, str] = {}
    before, end = "", 0
    text = path.read_text(encoding="utf-8")
    for block in _BLOCK.finditer(text):
        kind, body = block.groups()
        if kind == "bash":
            commands += [line for line in body.replace("\\\n", " ").splitlines() if line.strip()]
        elif kind == "text" and before == "bash" and _is_output(text[end : block.start()]):
            outputs += [line for line in body.splitlines() if line.strip()]
        elif kind == "python" and (name := _FILE_NAME.match(body)) is not None:
            files[name[1]] = body
        before, end = kind, block.end()
    return Page(tuple(commands), tuple(outputs), files)


def script(page: Page, reduced: Reduced, **values: str) -> str:
    """Return a bash script of the page's commands, which stops at the first failure.

    Raises AssertionError for a replacement or an exception that no command needs.
    """
    lines, used = ["set -euo pipefail"], set()
    for command in page.commands:
        if command in reduced.skip:
            used.add(command)
            continue
        shown = command
        for old, new in reduced.replace.items():
            if old in command:
                used.add(old)
                shown = shown.replace(old, new.format(**values))
        lines += [f"echo {_quoted(f'$ {command}')} >&2", shown]
    unused = {*reduced.replace, *reduced.skip} - used
    assert not unused, f"no command has these: {sorted(unused)}"
    return "\n".join(lines) + "\n"


def missing_lines(page: Page, reduced: Reduced, printed: str) -> list[str]:
    """Return the lines of the expected output that were not printed, whatever their numbers."""
    found = {_shape(line) for line in printed.replace("\r", "\n").splitlines()}
    wanted = [line for line in page.outputs if line not in reduced.varies]
    return [line for line in wanted if _shape(line) not in found]


def _is_output(between: str) -> bool:
    """Return whether a text block follows its commands, with at most one paragraph between."""
    return "#" not in between and between.strip().count("\n\n") == 0


def _shape(line: str) -> str:
    """Return a line without its numbers and without the length of its spaces."""
    return " ".join(_NUMBER.sub("N", line).split())


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
