"""The commands and options that texts name, to be compared with the parsers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*(?![\w-]|\.\w)")
_CONSOLE = re.compile(r"\btileforge ([a-z][a-z-]+)")
_MODULE = re.compile(r"-m (payload(?:\.[a-z_]+)+)")
PROGRAMS = frozenset(
    {"gcloud", "pulumi", "mpirun", "torchrun", "accelerate", "sbatch", "srun", "sacct", "squeue"}
    | {"nvidia-smi", "cloud-init", "git", "uv", "pip", "make", "numactl", "timeout", "tar", "ssh"}
)
"""Other programs; names after them are not our commands."""
_VALUE = re.compile(r"[A-Z{<\[('\"/]|\S*[./=@{]\S*$|\d")


@dataclass(frozen=True, slots=True)
class Mention:
    """An option in a text, with the command it follows; None if the text names no command."""

    where: str
    command: str | None
    option: str


@cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every string in a Python file; `{}` replaces a formatted value.

    Docstrings and bare strings are left out.
    """
    nodes = _nodes(path)
    skipped = {
        id(each)
        for node in nodes
        if isinstance(node, ast.Expr | ast.JoinedStr)
        for each in ([node.value] if isinstance(node, ast.Expr) else node.values)
    }
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        if isinstance(node, ast.JoinedStr):
            parts = (each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)
            yield node.lineno, "".join(map(str, parts))


def command_calls(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and command line of every call of `command`; `{}` replaces a variable."""
    for node in _nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "command":
            yield node.lineno, " ".join(map(_literal, _flat(node.args)))


def _flat(nodes: Sequence[ast.expr]) -> Iterator[ast.expr]:
    for node in nodes:
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple):
            yield from _flat(node.value.elts)
        else:
            yield node


def _literal(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def declared_options(path: Path) -> Iterator[str]:
    """Yield the options that a program declares: calls of add_argument, or cases of a shell."""
    if path.suffix == ".sh":
        yield from _OPTION.findall(path.read_text(encoding="utf-8"))
        return
    for node in _nodes(path):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
            yield from (name for name in map(_literal, node.args) if name.startswith("--"))


def mentions(text: str, *, where: str, commands: Set[str]) -> Iterator[Mention]:
    """Yield the options in a text.

    An option belongs to a command if only options and values are between the two; `commands` are
    names, or a program and its verb.
    """
    command, before, is_value = None, "", False
    for word in text.split():
        plain = word.strip("`'\".,;:()[]*_")
        options = _OPTION.findall(word)
        if options:
            yield from (Mention(where, command, option) for option in options)
        elif f"{before} {plain}" in commands:
            command = f"{before} {plain}"
        elif plain in commands and not is_value and command not in PROGRAMS:
            command = plain
        elif command not in PROGRAMS and not (is_value or _VALUE.match(word)):
            command = None
        is_value = bool(options) and "=" not in word
        before = plain
        if word.endswith((";", ":", ".", ")", "`")):
            command, is_value = None, False


def named_commands(text: str) -> list[str]:
    """Return the command after each `tileforge`."""
    return _CONSOLE.findall(text)


def named_modules(text: str) -> list[str]:
    """Return the module after each `-m`."""
    return _MODULE.findall(text)
