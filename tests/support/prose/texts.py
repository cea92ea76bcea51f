"""Finds the prose of a repository: docstrings, comments, messages, and pages without code."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Every string of these is checked; in tests only docstrings and comments are, as strings are
# inputs and expected outputs.
PROGRAMS = ("payload/", "infra/", "bootstrap/", "benchmarks/", "__main__.py")
# The changelog quotes the messages and names of earlier versions.
_SKIPPED = (
    "CHANGELOG.md",
    "docs/reference/moved",
    "benchmarks/results/",
    "tests/golden/",
    "tests/fixtures/",
    "tests/hostile/",
)
_CODE = re.compile(r"```.*?```|^(?: {4}|\t).*?$|`[^`\n]*`", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"`[^`\n]*`")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of prose, and the line of the file where it begins."""

    path: str
    line: int
    text: str


def texts_of(path: str, root: Path) -> Iterator[Text]:
    """Yield the prose of a tracked file; nothing for other kinds of files."""
    if path.startswith(_SKIPPED):
        return
    file = root / path
    if path.endswith(".py"):
        yield from _python(path, file.read_text(encoding="utf-8"))
    elif path.endswith(".md"):
        yield from _markdown(path, file.read_text(encoding="utf-8"))
    elif path.endswith((".sh", ".toml", ".yaml", ".cpp", ".h", ".js", ".css")) or path in (
        "Makefile",
        "bootstrap/tileforge",
        ".ci/run",
    ):
        yield from _comments(path, file.read_text(encoding="utf-8"))


def _python(path: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = {
        statement.value
        for node in ast.walk(tree)
        for statement in _body(node)
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    in_program = path.startswith(PROGRAMS)
    inside: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(ast.walk(node))
            if in_program:
                parts = (
                    str(each.value) if isinstance(each, ast.Constant) else "{}"
                    for each in node.values
                )
                yield Text(path, node.lineno, _INLINE.sub("`", "".join(parts)))
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (node in docstrings or (in_program and node not in inside and " " in node.value))
        ):
            yield Text(path, node.lineno, _INLINE.sub("`", node.value))
    for number, comment in _runs_of_comments(source):
        yield Text(path, number, _INLINE.sub("`", comment))


def _body(node: ast.AST) -> list[ast.stmt]:
    body = getattr(node, "body", None)
    return body if isinstance(body, list) else []


def _runs_of_comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments, joined with the comments on the following lines."""
    first, last, lines = 0, 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if lines and token.start[0] == last + 1:
            lines.append(token.string.lstrip("# "))
        else:
            if lines:
                yield first, " ".join(lines)
            first, lines = token.start[0], [token.string.lstrip("# ")]
        last = token.start[0]
    if lines:
        yield first, " ".join(lines)


def _markdown(path: str, page: str) -> Iterator[Text]:
    def blank(match: re.Match[str]) -> str:
        return "`" + "\n" * match.group().count("\n")

    number = 1
    for paragraph in _CODE.sub(blank, page).split("\n\n"):
        yield Text(path, number, paragraph)
        number += paragraph.count("\n") + 2


def _comments(path: str, source: str) -> Iterator[Text]:
    for number, line in enumerate(source.splitlines(), 1):
        if match := re.search(r"(?:^|\s)(?:#|//|/?\*)\s(.*)", line):
            yield Text(path, number, _INLINE.sub("`", match.group(1)))
