"""Builds conversations from the standard library: a function, and a JSON record that describes it.

The prompt is a short function of the running Python's library. The answer is a JSON object with the
function's name, its arguments and the first sentence of its docstring.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from payload.core.one_line import joined_lines

KEYS = ("function", "arguments", "summary")
_QUESTION = "Describe this Python function.\n\n"
EXAMPLES = (
    "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)",
    "def longest(words, count=10):\n    return sorted(words, key=len, reverse=True)[:count]",
    'def read_lines(path, encoding="utf-8"):\n'
    "    with open(path, encoding=encoding) as file:\n        return file.read().splitlines()",
)
"""Functions that are not in the standard library, for the answers that the command prints."""
_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
)
_MAX_CODE_CHARS = 180
_MIN_SUMMARY_CHARS, _MAX_SUMMARY_CHARS = 20, 72
_HELD_OUT = 20
_SENTENCE = re.compile(r"(.+?[.])(?:\s|$)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionRecord:
    """A function's code and the JSON that describes it."""

    code: str
    answer: Mapping[str, Any]

    def prompt(self) -> str:
        """Return the user's message."""
        return question(self.code)

    def row(self) -> dict[str, Any]:
        """Return the conversation as a row of a JSON Lines file."""
        return {
            "messages": [
                {"role": "user", "content": self.prompt()},
                {"role": "assistant", "content": json.dumps(self.answer, ensure_ascii=False)},
            ]
        }


def question(code: str) -> str:
    """Return the user's message about a function."""
    return _QUESTION + code


def split(records: Iterable[FunctionRecord]) -> tuple[list[FunctionRecord], list[FunctionRecord]]:
    """Return records for training and 20 held-out records, in an order that is always the same.

    The order follows a hash of the code, so the rows of a module are spread over the file.
    """
    ordered = sorted(records, key=lambda each: hashlib.sha256(each.code.encode()).digest())
    return ordered[_HELD_OUT:], ordered[:_HELD_OUT]


def standard_library() -> Iterator[FunctionRecord]:
    """Yield a record of each short function with a docstring, without duplicates."""
    root = Path(sysconfig.get_path("stdlib"))
    seen: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef):
                continue
            record = record_of(node)
            if record is not None and record.code not in seen:
                seen.add(record.code)
                yield record


def record_of(node: ast.FunctionDef) -> FunctionRecord | None:
    """Return a function's record; None if its code or docstring has an unsuitable length."""
    docstring = ast.get_docstring(node, clean=False)
    if docstring is None or len(node.body) < 2 or node.name.startswith("_"):
        return None
    found = _SENTENCE.match(inspect.cleandoc(docstring))
    summary = joined_lines(found[1], longest=None) if found else ""
    if not _MIN_SUMMARY_CHARS <= len(summary) <= _MAX_SUMMARY_CHARS or not summary.isascii():
        return None
    bare = ast.FunctionDef(
        name=node.name, args=node.args, body=node.body[1:], decorator_list=[], returns=node.returns
    )
    code = ast.unparse(ast.fix_missing_locations(bare))
    if len(code) > _MAX_CODE_CHARS:
        return None
    return FunctionRecord(
        code=code,
        answer={"function": node.name, "arguments": _arguments(node.args), "summary": summary},
    )


def _arguments(found: ast.arguments) -> list[str]:
    """Return the names of a function's arguments, without `self` and `cls`."""
    plain = [*found.posonlyargs, *found.args]
    more = [each for each in (found.vararg, *found.kwonlyargs, found.kwarg) if each is not None]
    return [each.arg for each in (*plain, *more) if each.arg not in ("self", "cls")]
