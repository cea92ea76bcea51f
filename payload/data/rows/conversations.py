"""Conversations in the formats that instruction data comes in, as messages with roles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from payload.core.printable_text import shown

Messages = list[dict[str, str]]
"""Each with `role` (system, user or assistant) and `content`."""

ROLES = ("system", "user", "assistant")
FORMATS = "messages; conversations (ShareGPT); prompt, completion; instruction, output (Alpaca)"
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
_KEYS_SHOWN = 6
_SYSTEM = "system"
"""A column with the system message of any format."""
_COLUMNS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output", "input"),
)
"""Columns that each format reads, the first that a row has; the optional ones behind two."""
_ABOUT = re.compile(
    r"(?!(?:.*_)?(?:no|non|un|is)?(?:train|weight|loss|mask))"
    r"(?:name|model|id|ids|uuid|index|idx|turn|.*_(id|ids|identifier|index|at|time|ip)"
    r"|timestamp|date|time|created|updated|lang|language|country)"
)
"""Keys of a message that are about it, and no part of what a template renders.

A key with a part about training, as in `no_train_id`, is never one of them.
"""
_TRAINED = ("weight", "train")
"""Keys that say whether a message is trained."""


class BadConversationError(ValueError):
    """A row that is no conversation; the text is the complaint, a sentence or two."""


def conversation_of(row: Mapping[str, Any]) -> Messages:
    """Return the row's messages. Raises BadConversationError."""
    require_trained(row)
    columns = columns_of(row)
    if columns and _is_negative(row.get("label")):
        raise BadConversationError(
            f"label = {shown(row['label'])}: the answer is one of those to avoid, and would be "
            "trained as a good one. Leave such rows out, or make pairs of chosen and rejected. If "
            "the label is about something else, remove the column."
        )
    if columns == ("messages",):
        messages = _chat(row["messages"], "messages", role="role", content="content", names=None)
    elif columns == ("conversations",):
        messages = _chat(
            row["conversations"],
            "conversations",
            role="from",
            content="value",
            names=_SHAREGPT_ROLES,
        )
    elif columns[:1] == ("prompt",):
        messages = messages_of(row, "prompt", "user")
        messages += messages_of(row, "completion", "assistant")
    elif columns:
        messages = _alpaca(row)
    else:
        keys = ", ".join(shown(key) for key in list(row)[:_KEYS_SHOWN]) or "none"
        raise BadConversationError(f"no conversation among the columns {keys}. Known: {FORMATS}.")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadConversationError(
            "no message of the assistant, so nothing to train on. Add its answer."
        )
    return with_system(row, messages)


def require_trained(row: Mapping[str, Any]) -> None:
    """Raise BadConversationError for a row that says of itself that it is not trained."""
    for key in _TRAINED:
        value = row.get(key)
        if _is_negative(value):
            raise BadConversationError(
                f"{key} = {shown(value)}, and this version would train the row. Leave it out."
            )


def _is_negative(value: object) -> bool:
    """Return True for false, and for a number that is not over 0, also as the text of a CSV."""
    if isinstance(value, str) and value.strip().lower() == "false":
        return True
    if not isinstance(value, (str, bool, int, float, Decimal)):
        return False
    try:
        return not float(value) > 0
    except (ValueError, OverflowError):
        return False


def unread_columns(row: Mapping[str, Any], read: Sequence[str]) -> list[str]:
    """Return the row's columns with a value, without those in `read` and `system`."""
    return [
        name
        for name, value in row.items()
        if name not in read and name != _SYSTEM and not _is_absent(value)
    ]


def with_system(row: Mapping[str, Any], messages: Messages) -> Messages:
    """Return the messages behind that of the column `system`, where they have none of their own.

    Raises BadConversationError.
    """
    given = row.get(_SYSTEM)
    if _is_absent(given) or messages[0]["role"] == "system":
        return messages
    text = _text(given, _SYSTEM)
    return [{"role": "system", "content": text}, *messages] if text.strip() else messages


def columns_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the row's format; none for a row that is no conversation."""
    for columns in _COLUMNS:
        is_one = len(columns) == 1
        if row.get(columns[0]) is not None if is_one else all(each in row for each in columns[:2]):
            return columns
    return ()


def _is_absent(value: object) -> bool:
    """Say whether a key has a value that says no more than its absence."""
    return value is None or (isinstance(value, (str, Sequence, Mapping)) and not value)


def _alpaca(row: Mapping[str, Any]) -> Messages:
    question = _text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + _text(row["input"], "input")
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text(row["output"], "output")},
    ]


def messages_of(row: Mapping[str, Any], column: str, role: str) -> Messages:
    """Return a column as messages; a text is one message of `role`.

    Raises BadConversationError.
    """
    if isinstance(row[column], str):
        return [{"role": role, "content": row[column]}]
    return _chat(row[column], column, role="role", content="content", names=None)


def _chat(
    given: Any, column: str, *, role: str, content: str, names: Mapping[str, str] | None
) -> Messages:
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise BadConversationError(
            f"{column} is {shown(given)}, not a list of messages. Write "
            f'[{{"{role}": ..., "{content}": ...}}, ...].'
        )
    return [
        _message(each, f"{column}[{number}]", role=role, content=content, names=names)
        for number, each in enumerate(given)
    ]


def _message(
    given: Any, where: str, *, role: str, content: str, names: Mapping[str, str] | None
) -> dict[str, str]:
    if not isinstance(given, Mapping) or role not in given or content not in given:
        raise BadConversationError(
            f"{where} is {shown(given)}. A message has {role!r} and {content!r}."
        )
    said = given[role]
    known = dict(zip(ROLES, ROLES, strict=True)) if names is None else names
    if not isinstance(said, str) or said not in known:
        raise BadConversationError(
            f"{where}: unknown role {shown(said)}. Known: {', '.join(known)}."
        )
    for key, value in given.items():
        _require_nothing_lost(key, value, where, role=known[said], read=(role, content))
    return {"role": known[said], "content": _text(given[content], f"{where} {content}")}


def _require_nothing_lost(
    key: str, value: object, where: str, *, role: str, read: tuple[str, str]
) -> None:
    """Raise BadConversationError for a key that would change what is trained, and is not read."""
    if key in read or _is_absent(value) or _ABOUT.fullmatch(key):
        return
    if key in _TRAINED and isinstance(value, (bool, int, float)):
        if value == (role == "assistant"):
            return
        done = "is trained" if role == "assistant" else "is not trained"
        raise BadConversationError(
            f"{where}: {key} = {shown(value)}, and this version does not read it: a message of "
            f"role {role!r} {done}."
        )
    raise BadConversationError(
        f"{where}: this version does not read {shown(key)} ({shown(value)}), so training would "
        "lose it. Remove the key."
    )


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadConversationError(f"{where} is {shown(value)}, not text.")
    # A lone surrogate from a \u escape has no bytes; replaced as tokenizers do it.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
