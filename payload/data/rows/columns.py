"""The names of columns and keys that rows of conversations and pairs may have.

The documentation and messages are generated from these tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from payload.core.printable_text import shown
from payload.core.validation.suggestion import nearest

SYSTEM = ("system", "system_prompt")
"""Columns with the system message, in any format."""
HISTORY = "history"
"""Column with the turns before the question: pairs of question and answer, or messages."""
CONTEXT = ("input", "context")
"""Columns with a text that is appended to the question, after an empty line."""
TOOLS = ("tools", "functions")
"""Columns with the functions that the assistant can call: a list, or JSON text of a list."""
DOCUMENTS = "documents"
VARIABLES = "chat_template_kwargs"
"""Column with variables of the template, such as `enable_thinking`."""
LABEL = "label"
"""Column of data for KTO training: false marks a bad answer."""
TRAIN_KEYS = ("weight", "train")
"""Keys that exclude a row or a message from training if their value is 0 or false."""
CALLS = "tool_calls"
THOUGHT_KEYS = ("reasoning_content", "thinking", "reasoning")
NO_CONTENT_KEYS = (CALLS, "function_call", *THOUGHT_KEYS)
"""Keys that allow a message without content."""


@dataclass(frozen=True, slots=True)
class RowFormat:
    """The columns of one format of conversations."""

    question: str
    """Column with the messages, or with the question if there is a column `answer`."""
    answer: str | None = None

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Return True if a row has this format."""
        if self.answer is None:
            return row.get(self.question) is not None
        return self.question in row and self.answer in row

    def required(self) -> tuple[str, ...]:
        """Return the columns that every row of the format has."""
        return (self.question,) if self.answer is None else (self.question, self.answer)


CHAT_FORMATS = (
    RowFormat("messages"),
    RowFormat("conversations"),
    RowFormat("conversation"),
    RowFormat("prompt", "completion"),
    RowFormat("instruction", "output"),
    RowFormat("instruction", "response"),
    RowFormat("question", "answer"),
    RowFormat("question", "response"),
    RowFormat("query", "response"),
    RowFormat("query", "answer"),
    RowFormat("prompt", "response"),
    RowFormat("problem", "solution"),
    RowFormat("user", "assistant"),
    RowFormat("input", "output"),
)
"""Formats of conversations. The format of a row is the first format that matches."""

ANSWERS = ("chosen", "rejected")
PREFERENCE_PROMPTS = ("prompt", "messages", "conversations", "question", "instruction")
"""Columns that can hold the prompt of a pair. The first column that is not empty is used."""
OPENAI_PROMPT = "input"
"""Column with the object that holds `messages` and `tools` in OpenAI's preference tuning."""
OPENAI_ANSWERS = ("preferred_output", "non_preferred_output")

_LEAVES = frozenset((str, int, float, bool, type(None)))
"""Types that contain no other values. Testing for them is faster than testing for a mapping."""
_NEAR = 0.8
"""Lowest similarity at which a column's name counts as a misspelt known name."""
_MOST_LEVELS = 100
"""Limit on the nesting depth of a row's values; the schema of a tool has about ten levels."""
METADATA = re.compile(
    r"(?!(?:.*_)?(?:no|non|un|is)?(?:train|weight|loss|mask))"
    r"(?:name|model|id|ids|uuid|index|idx|turn|.*_(id|ids|identifier|index|at|time|ip|model)"
    r"|timestamp|date|time|created|updated|lang|language|country"
    r"|source|sources|dataset|origin|url|license|author|split|domain|category|subcategory|topic"
    r"|tag|tags|metadata|meta|hash|(?:num|n)_.*|.*_(?:count|hash|score|rating)|score_.*"
    r"|temperature|top_p|max_tokens|max_completion_tokens|stream|tool_choice|parallel_tool_calls)"
)
"""Matches the names of keys and columns with metadata or with settings of a request. Templates do
not render such keys.

A name that mentions training, such as `no_train_id`, never matches.
"""


def chat_columns() -> tuple[str, ...]:
    """Return the name of every column that the task `chat` can read."""
    named = (name for each in CHAT_FORMATS for name in each.required())
    more = (*SYSTEM, HISTORY, *CONTEXT, *TOOLS, DOCUMENTS, VARIABLES, LABEL, *TRAIN_KEYS)
    return tuple(dict.fromkeys((*named, *more)))


def preference_columns() -> tuple[str, ...]:
    """Return the name of every column that the task `preference` can read."""
    more = (*SYSTEM, *TOOLS, DOCUMENTS, VARIABLES, *TRAIN_KEYS)
    named = (*PREFERENCE_PROMPTS, *ANSWERS, OPENAI_PROMPT, *OPENAI_ANSWERS)
    return tuple(dict.fromkeys((*named, *more)))


def near_columns(columns: Iterable[str]) -> str:
    """Return the hint " Did you mean ...?" for a misspelt column, or "" if no name is similar."""
    known = {*chat_columns(), *preference_columns()}
    for name in columns:
        near = nearest(name.casefold(), known, cutoff=_NEAR)
        if near not in (None, name.casefold()):
            return f" Did you mean {near!r} instead of {shown(name)}?"
    return ""


def chat_formats() -> str:
    """Return text for error messages that lists the columns of each conversation format."""
    return "; ".join(", ".join(each.required()) for each in CHAT_FORMATS)


def format_of(row: Mapping[str, Any]) -> RowFormat | None:
    """Return the format of a row of conversations, or None."""
    return next((each for each in CHAT_FORMATS if each.matches(row)), None)


def is_absent(value: object) -> bool:
    """Return True for a null or empty value, which means the same as an absent key."""
    return value is None or (isinstance(value, (str, list, tuple, dict, Mapping)) and not value)


def present(row: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """Return the first of these columns that has a value in the row."""
    return next((name for name in names if not is_absent(row.get(name))), None)


def texts_in(value: object) -> Iterator[str]:
    """Yield every text within a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from texts_in(each)


def is_deep(value: object) -> bool:
    """Return True if converting a JSON value could exceed the recursion limit."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for each in level
            if type(each) not in _LEAVES and isinstance(each, (dict, list, tuple, Mapping))
            for inner in (each if isinstance(each, (list, tuple)) else each.values())
        ]
        if not level:
            return False
    return True


def without_nulls(value: Any) -> Any:
    """Return a JSON value without keys that have the value null, in all objects inside it.

    Tables add such keys, because all objects of a column must have the same keys.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [without_nulls(each) for each in value]
    return value
