"""Converts rows of instruction data, in its common formats, to messages with roles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from payload.core.printable_text import shown
from payload.data.rows.conversation import Conversation

Messages = list[dict[str, str]]
"""Each message has `role` (system, user or assistant) and `content`."""

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
_SYSTEM_COLUMN = "system"
"""Column that holds the system message in any format."""
_COLUMNS = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output", "input"),
)
"""Columns that each format reads; a row has the first format that matches.

The third column of a format is optional.
"""
_METADATA_KEYS = re.compile(
    r"(?!(?:.*_)?(?:no|non|un|is)?(?:train|weight|loss|mask))"
    r"(?:name|model|id|ids|uuid|index|idx|turn|.*_(id|ids|identifier|index|at|time|ip)"
    r"|timestamp|date|time|created|updated|lang|language|country)"
)
"""Keys with metadata of a message, which templates do not render.

A key with a part about training, such as `no_train_id`, never matches.
"""
_TRAIN_KEYS = ("weight", "train")
"""Keys that mark whether a message is trained."""


class BadConversationError(ValueError):
    """Raised for a row that is not a valid conversation; the text describes the fault."""


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Return the row's conversation. Raises BadConversationError."""
    require_trained(row)
    columns = columns_of(row)
    if columns and _is_negative(row.get("label")):
        raise BadConversationError(
            f"label = {shown(row['label'])} marks a bad answer, which would be trained as a good "
            "one. Remove such rows, or make pairs of chosen and rejected. If the label means "
            "something other than quality, remove the column."
        )
    if columns == ("messages",):
        messages = _message_list(
            row["messages"], "messages", role="role", content="content", names=None
        )
    elif columns == ("conversations",):
        messages = _message_list(
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
        raise BadConversationError(f"no conversation in the columns {keys}. Formats: {FORMATS}.")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadConversationError(
            "no message of the assistant, so nothing to train on. Add the assistant's answer."
        )
    messages = with_system(row, messages)
    return Conversation(
        messages=tuple(messages),
        trained=tuple(each["role"] == "assistant" for each in messages),
    )


def require_trained(row: Mapping[str, Any]) -> None:
    """Raise BadConversationError for a row that is marked as not trained."""
    for key in _TRAIN_KEYS:
        value = row.get(key)
        if _is_negative(value):
            raise BadConversationError(
                f"{key} = {shown(value)} excludes the row from training, which is not supported. "
                "Remove the row."
            )


def _is_negative(value: object) -> bool:
    """Return True for false and for numbers up to 0, also as text from a CSV file."""
    if isinstance(value, str) and value.strip().lower() == "false":
        return True
    if not isinstance(value, (str, bool, int, float, Decimal)):
        return False
    try:
        return not float(value) > 0
    except (ValueError, OverflowError):
        return False


def unread_columns(row: Mapping[str, Any], read: Sequence[str]) -> list[str]:
    """Return the row's non-empty columns, except `system` and those in `read`."""
    return [
        name
        for name, value in row.items()
        if name not in read and name != _SYSTEM_COLUMN and not _is_absent(value)
    ]


def with_system(row: Mapping[str, Any], messages: Messages) -> Messages:
    """Prepend the message of the column `system`, unless the messages begin with a system message.

    Raises BadConversationError.
    """
    given = row.get(_SYSTEM_COLUMN)
    if _is_absent(given) or messages[0]["role"] == "system":
        return messages
    text = _require_text(given, _SYSTEM_COLUMN)
    return [{"role": "system", "content": text}, *messages] if text.strip() else messages


def columns_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns of the row's format; empty if the row matches no format."""
    for columns in _COLUMNS:
        is_one = len(columns) == 1
        if row.get(columns[0]) is not None if is_one else all(each in row for each in columns[:2]):
            return columns
    return ()


def _is_absent(value: object) -> bool:
    """Return True for a null or empty value, which means the same as an absent key."""
    return value is None or (isinstance(value, (str, Sequence, Mapping)) and not value)


def _alpaca(row: Mapping[str, Any]) -> Messages:
    question = _require_text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + _require_text(row["input"], "input")
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _require_text(row["output"], "output")},
    ]


def messages_of(row: Mapping[str, Any], column: str, role: str) -> Messages:
    """Return a column as messages; a text becomes one message of `role`.

    Raises BadConversationError.
    """
    if isinstance(row[column], str):
        return [{"role": role, "content": row[column]}]
    return _message_list(row[column], column, role="role", content="content", names=None)


def _message_list(
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
            f"{where} is {shown(given)}. A message needs the keys {role!r} and {content!r}."
        )
    given_role = given[role]
    known = dict(zip(ROLES, ROLES, strict=True)) if names is None else names
    if not isinstance(given_role, str) or given_role not in known:
        raise BadConversationError(
            f"{where}: unknown role {shown(given_role)}. Use one of: {', '.join(known)}."
        )
    for key, value in given.items():
        _require_supported_key(key, value, where, role=known[given_role], read=(role, content))
    return {
        "role": known[given_role],
        "content": _require_text(given[content], f"{where} {content}"),
    }


def _require_supported_key(
    key: str, value: object, where: str, *, role: str, read: tuple[str, str]
) -> None:
    """Raise BadConversationError for a key that is not read, although it would change training."""
    if key in read or _is_absent(value) or _METADATA_KEYS.fullmatch(key):
        return
    if key in _TRAIN_KEYS and isinstance(value, (bool, int, float)):
        if value == (role == "assistant"):
            return
        done = "is trained" if role == "assistant" else "is not trained"
        raise BadConversationError(
            f"{where}: {key} = {shown(value)} is not supported: a message of role {role!r} "
            f"{done}. Remove the key."
        )
    raise BadConversationError(
        f"{where}: the key {shown(key)} ({shown(value)}) is not supported, and training would "
        "lose it. Remove the key."
    )


def _require_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadConversationError(f"{where} is {shown(value)}, not text.")
    # A lone surrogate from a \u escape cannot be encoded; replaced as tokenizers does.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
