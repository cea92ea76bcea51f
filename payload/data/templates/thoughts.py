"""Finds the assistant's thoughts in messages, and the marks of thoughts at the end of a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from payload.data.rows.conversation import Message

KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys under which a message can have a thought, in the order in which transformers reads them."""

# Marks such as <think>, <seed:think>, <thought>, [THINK], <|START_THINKING|>, ◁think▷ and
# <|open|>think<|sep|>, and <|channel>thought. The mark that closes a block is the same with a
# slash, or with END for START and close for open, or <channel|>.
_WORD = r"(?:[\w:]*think(?:ing)?(?::\w+)?|thought|reasoning|start_thinking)"
_OPEN = rf"<\|?{_WORD}\|?>|\[{_WORD}\]|\u25c1{_WORD}\u25b7|<\|open\|>{_WORD}<\|sep\|>"
_OPEN += rf"|<\|channel>{_WORD}"
_CLOSE = (
    rf"</{_WORD}>|<\|end_thinking\|>|<\|/{_WORD}\|>|\[/{_WORD}\]|\u25c1/{_WORD}\u25b7"
    rf"|<\|close\|>{_WORD}<\|sep\|>|<channel\|>"
)
_TAIL = re.compile(rf"(?:(?:(?P<open>{_OPEN})|{_CLOSE})\s*)+\Z", re.IGNORECASE)
_EMPTY = re.compile(rf"\s*(?:{_OPEN})?\s*(?:{_CLOSE})\s*", re.IGNORECASE)
_IN_CONTENT = re.compile(rf"\s*(?P<mark>{_OPEN})", re.IGNORECASE)
_OPENING = re.compile(_OPEN, re.IGNORECASE)
_BORDER = re.compile(rf"{_OPEN}|{_CLOSE}|\n", re.IGNORECASE)
_TAIL_CHARS = 128
_FIRSTS = "<[\u25c1"
_FIRST_OF_MARKS = re.compile("[<[\u25c1]")
"""Matches the first characters of the marks. A text without these characters has no mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTail:
    """The marks of thoughts at the end of a prompt."""

    text: str
    """The marks with the white space after them."""
    closing: str | None
    """The mark that closes the block in which the prompt ends; None if the prompt ends outside of a
    block."""


def prompt_tail(prompt: str) -> PromptTail | None:
    """Return the marks of thoughts with which a prompt ends, or None without such marks."""
    end = prompt[-_TAIL_CHARS:]
    # Most prompts end with the same mark, which is no mark of thoughts.
    last = max(map(end.rfind, _FIRSTS))
    if last < 0 or not _may_end(end[last:]):
        return None
    found = _TAIL.search(end)
    if found is None:
        return None
    mark = found["open"]
    is_open = mark is not None and found.group().rstrip().endswith(mark)
    return PromptTail(text=found.group(), closing=_closing(mark) if is_open else None)


@lru_cache(maxsize=1024)
def _may_end(end: str) -> bool:
    """Return True if `end` is a mark of thoughts, or can be a suffix of such a mark."""
    return end.strip() == "<|sep|>" or _TAIL.search(end) is not None


def end_of_empty_thought(text: str, start: int) -> int:
    """Return the index after an empty block of thoughts at `start`, or `start` without one."""
    found = _EMPTY.match(text, start)
    return start if found is None else found.end()


def _closing(mark: str) -> str:
    for begin, end in (("START", "END"), ("<|open|>", "<|close|>")):
        if begin in mark:
            return mark.replace(begin, end)
    if mark.startswith("<|channel>"):
        return "<channel|>"
    size = 2 if mark.startswith("<|") else 1
    return f"{mark[:size]}/{mark[size:]}"


def thought_of(message: Message) -> str | None:
    """Return the message's thought, or None."""
    for key in KEYS:
        given = message.get(key)
        if given is not None:
            return given if isinstance(given, str) and given.strip() else None
    found = _split(message.get("content"))
    return None if found is None or not found[0].strip() else found[0]


def without_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message without a thought in its keys or at the beginning of its content."""
    rest = {key: value for key, value in message.items() if key not in KEYS}
    found = _split(message.get("content"))
    return rest if found is None else {**rest, "content": found[1]}


def pieces_of(content: str) -> Iterator[tuple[str, int, int]]:
    """Yield each line, and each text before or after a mark of thoughts, with the index of the
    first character and the index after the last character. The texts have no white space around
    them."""
    start = 0
    for border in (*_BORDER.finditer(content), None):
        end = len(content) if border is None else border.start()
        piece = content[start:end].strip()
        if piece:
            first = content.index(piece, start)
            yield piece, first, first + len(piece)
        start = end if border is None else border.end()


def _split(content: object) -> tuple[str, str] | None:
    """Return the thought and the answer of a text, or None without a block of thoughts.

    Text before the block belongs to the answer.
    """
    if not isinstance(content, str) or _FIRST_OF_MARKS.search(content) is None:
        return None
    begin = _IN_CONTENT.match(content)
    if begin is not None:
        before, start, close = "", begin.end(), _closing(begin["mark"])
    else:
        # Models whose prompt opens the block write only the closing mark.
        before, start, close = "", 0, "</think>"
        opening = _OPENING.search(content, 0, max(0, content.find(close)))
        if opening is not None:
            before, start = content[: opening.start()], opening.end()
    end = content.find(close, start)
    if end < 0:
        return None
    return content[start:end], before + content[end + len(close) :].lstrip()
