"""Renders readable YAML: mappings, lists, scalars, and scripts as block text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

Value: TypeAlias = "str | int | bool | Mapping[str, Value] | Sequence[Value]"

_PLAIN = re.compile(r"[A-Za-z/][\w./-]*", re.ASCII)
# YAML 1.1 and many current parsers read these words as booleans or null.
_NOT_TEXT = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
# Text that is not printable ASCII, or has ambiguous indentation, is quoted instead.
_BLOCK = re.compile(r"[!-~](?:[ -~\n]*[!-~])?\n", re.ASCII)


def render(value: Mapping[str, Value]) -> str:
    """Return the text of one YAML document, with the keys in the order of `value`."""
    return "".join(f"{line}\n" if line else "\n" for line in _lines(value))


def _lines(value: Value) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _item(f"{_scalar(key)}:", inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from _in_list(inner)


def _in_list(value: Value) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        first, *rest = _lines(value)
        yield f"- {first}"
        yield from (f"  {line}" if line else "" for line in rest)
    else:
        yield from _item("-", value)


def _item(before: str, value: Value) -> Iterator[str]:
    """Yield the lines of `before` and a value, on the same line or indented below it."""
    if isinstance(value, str) and "\n" in value and _BLOCK.fullmatch(value):
        yield f"{before} |"
        inner: Iterator[str] = iter(value.splitlines())
    elif isinstance(value, str | int) or not value:
        yield f"{before} {_scalar(value)}"
        return
    else:
        yield before
        inner = _lines(value)
    yield from (f"  {line}" if line else "" for line in inner)


def _scalar(value: Value) -> str:
    """Return the text of a scalar or an empty collection; JSON syntax is valid YAML."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and not _NOT_TEXT.fullmatch(value):
        return value
    return json.dumps(value)
