"""Special tokens that occur inside the text of a row, where they are encoded as plain text.

Only special tokens that the template writes are encoded as special tokens. Otherwise a special
token in a question, a tool result or a tool's description would end or begin a turn. Special tokens
in a row are enclosed in marks before the template renders the row. The marks are then removed from
the rendered text. The assistant's own messages are unchanged: data sets write calls and thoughts
into the answers as special tokens. Source of the approach: `sanitize_control_tokens` of
transformers 5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from payload.data.rows.conversation import Message

Span = tuple[int, int]
"""A range of characters in a text, as the start and the end (exclusive)."""

# Unicode's noncharacters, which no text may contain: a row that has one is refused.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKS = re.compile(f"[{_BEGIN}{_END}]")


class ControlTokens:
    """Finds and marks a tokenizer's special tokens in the values of rows."""

    def __init__(self, tokens: Sequence[str]) -> None:
        """`tokens` are the texts of the special tokens."""
        longest_first = sorted(filter(None, set(tokens)), key=len, reverse=True)
        self._pattern = _any_of(longest_first)
        self._in_json = _any_of([json.dumps(each)[1:-1] for each in longest_first])

    def may_be_in(self, request: str) -> bool:
        """Return False if no string in `request` has a special token.

        `request` is JSON in ASCII.
        """
        return self._in_json.search(request) is not None

    def is_in(self, value: object) -> bool:
        """Return True if a text inside a JSON value has a special token."""
        if isinstance(value, str):
            return self._pattern.search(value) is not None
        if isinstance(value, (list, tuple)):
            return any(map(self.is_in, value))
        if isinstance(value, (dict, Mapping)):
            return any(map(self.is_in, (*value, *value.values())))
        return False

    def mark(self, value: Any) -> Any:
        """Return a JSON value with marks around every special token in its texts."""
        if isinstance(value, str):
            return self._pattern.sub(f"{_BEGIN}\\g<0>{_END}", value)
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(each) for key, each in value.items()}
        return [self.mark(each) for each in value] if isinstance(value, (list, tuple)) else value

    def mark_messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages with marks. The assistant's messages stay unchanged."""
        return [
            message if message["role"] == "assistant" else self.mark(message)
            for message in messages
        ]


def _any_of(texts: Sequence[str]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, texts)) or "(?!)")


def mark_in(value: object) -> str | None:
    """Return the first mark in the texts of a JSON value, or None."""
    found = _MARKS.search(json.dumps(value, ensure_ascii=False, default=str))
    return None if found is None else found.group()


def without_marks(text: str) -> str:
    """Return a rendered text without marks."""
    return _MARKS.sub("", text) if _BEGIN in text or _END in text else text


def take_marks(text: str, spans: Sequence[Span]) -> tuple[str, list[Span], list[Span]]:
    """Remove the marks of a rendered text.

    Returns the text without marks, `spans` adapted to this text, and the spans that were marked.
    """
    if _BEGIN not in text and _END not in text:
        return text, list(spans), []
    kept: list[str] = []
    marked: list[Span] = []
    shifts: list[int] = []
    length = place = begin = 0
    for found in _MARKS.finditer(text):
        kept.append(text[place : found.start()])
        length += found.start() - place
        place = found.end()
        shifts.append(found.start())
        if found.group() == _BEGIN:
            begin = length
        else:
            marked.append((begin, length))
    kept.append(text[place:])

    def moved(index: int) -> int:
        return index - sum(each < index for each in shifts)

    return "".join(kept), [(moved(start), moved(end)) for start, end in spans], marked
