"""Conversations in the formats that instruction data comes in, as messages with roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from payload.untrusted import shown

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


class BadConversationError(ValueError):
    """A row that is no conversation; the text is the complaint, a sentence or two."""


def conversation_of(row: Mapping[str, Any]) -> Messages:
    """Return the row's messages. Raises BadConversationError."""
    if row.get("messages") is not None:
        messages = _chat(row["messages"], "messages", role="role", content="content", names=None)
    elif row.get("conversations") is not None:
        messages = _sharegpt(row)
    elif "completion" in row and "prompt" in row:
        messages = messages_of(row, "prompt", "user")
        messages += messages_of(row, "completion", "assistant")
    elif "instruction" in row and "output" in row:
        messages = _alpaca(row)
    else:
        keys = ", ".join(shown(key) for key in list(row)[:_KEYS_SHOWN]) or "none"
        raise BadConversationError(f"no conversation among the columns {keys}. Known: {FORMATS}.")
    if not any(message["role"] == "assistant" for message in messages):
        raise BadConversationError(
            "no message of the assistant, so nothing to train on. Add its answer."
        )
    return messages


def _sharegpt(row: Mapping[str, Any]) -> Messages:
    messages = _chat(
        row["conversations"], "conversations", role="from", content="value", names=_SHAREGPT_ROLES
    )
    system = row.get("system")
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return messages


def _alpaca(row: Mapping[str, Any]) -> Messages:
    question = _text(row["instruction"], "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + _text(row["input"], "input")
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text(row["output"], "output")},
    ]
    if row.get("system") not in (None, ""):
        messages.insert(0, {"role": "system", "content": _text(row["system"], "system")})
    return messages


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
    return {"role": known[said], "content": _text(given[content], f"{where} {content}")}


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise BadConversationError(f"{where} is {shown(value)}, not text.")
    # A lone surrogate from a \u escape has no bytes; replaced as tokenizers do it.
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
