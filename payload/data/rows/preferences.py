"""Converts rows of preference data to a prompt, a chosen answer and a rejected answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from payload.core.printable_text import shown
from payload.data.rows.columns import ANSWERS as ANSWERS
from payload.data.rows.columns import (
    OPENAI_ANSWERS,
    OPENAI_PROMPT,
    PREFERENCE_PROMPTS,
    preference_columns,
    present,
)
from payload.data.rows.conversations import (
    Messages,
    documents_of,
    messages_of,
    require_trained,
    tools_of,
    variables_of,
    with_system,
)
from payload.data.rows.messages import (
    BadConversationError,
    MessageList,
    messages_in,
    parsed,
)

FORMATS = (
    "prompt, chosen, rejected; chosen, rejected (two conversations that begin with the same "
    "prompt); input, preferred_output, non_preferred_output (OpenAI)"
)
COLUMNS = preference_columns()
_KEYS_SHOWN = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """The messages of a prompt, and the messages of both answers, which follow the prompt."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant can call."""
    documents: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the template that this row sets."""


def preference_of(row: Mapping[str, Any]) -> Preference:
    """Return the row's pair.

    Raises BadConversationError, and UntrainedRowError for a row that is left out.
    """
    require_trained(row)
    row = _from_openai(row)
    missing = [name for name in ANSWERS if row.get(name) is None]
    if missing:
        keys = ", ".join(shown(key) for key in list(row)[:_KEYS_SHOWN]) or "none"
        raise BadConversationError(
            f"no {' and no '.join(missing)} in the columns {keys}. Formats: {FORMATS}. Map your "
            "columns to known names with --columns, such as --columns GOOD=chosen,BAD=rejected."
        )
    lists = [messages_of(row, name, "assistant") for name in ANSWERS]
    chosen, rejected = (each.messages for each in lists)
    column = present(row, PREFERENCE_PROMPTS)
    if column is not None:
        lists.insert(0, messages_of(row, column, "user"))
        prompt = lists[0].messages
        chosen, rejected = (
            _without_prompt(prompt, each, name)
            for each, name in zip((chosen, rejected), ANSWERS, strict=True)
        )
    else:
        texts = [name for name in ANSWERS if isinstance(messages_in(row[name]), str)]
        if texts:
            raise BadConversationError(
                f"no prompt for the plain text in {' and '.join(texts)}. Add a column 'prompt', or "
                "write chosen and rejected as whole conversations."
            )
        count = _num_common_messages(chosen, rejected)
        prompt, chosen, rejected = chosen[:count], chosen[count:], rejected[count:]
    _require_answers(prompt, chosen, rejected)
    whole = with_system(row, MessageList(prompt, [False] * len(prompt), lists[0].tools))
    return Preference(
        prompt=whole.messages,
        chosen=chosen,
        rejected=rejected,
        tools=tools_of(row, whole),
        documents=documents_of(row),
        variables=variables_of(row),
    )


def _from_openai(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row with our column names, converted if it has OpenAI's preference format."""
    given = parsed(row.get(OPENAI_PROMPT))
    if not isinstance(given, Mapping) or not all(name in row for name in OPENAI_ANSWERS):
        return row
    answers = {name: row[other] for name, other in zip(ANSWERS, OPENAI_ANSWERS, strict=True)}
    rest = {key: value for key, value in given.items() if key != "messages"}
    return {**rest, "prompt": parsed(given.get("messages")), **answers}


def _without_prompt(prompt: Messages, given: Messages, column: str) -> Messages:
    """Return the messages without the prompt.

    Some data sets repeat the prompt before each answer.
    """
    if given[0]["role"] == "assistant":
        return given
    if given[: len(prompt)] == prompt:
        return given[len(prompt) :]
    raise BadConversationError(
        f"{column} begins with a message of role {given[0]['role']!r}, which is not in the "
        "prompt. Begin it with the assistant's answer, or with the whole prompt."
    )


def _num_common_messages(chosen: Messages, rejected: Messages) -> int:
    """Return the number of leading messages that both conversations share."""
    count = 0
    for one, other in zip(chosen, rejected, strict=False):
        if one != other:
            return count
        count += 1
    return count


def _require_answers(prompt: Messages, chosen: Messages, rejected: Messages) -> None:
    if chosen == rejected:
        raise BadConversationError("chosen and rejected are equal. Remove the row.")
    if not prompt:
        raise BadConversationError(
            "chosen and rejected do not begin with the same message. Begin both with the same "
            "prompt."
        )
    for name, answer in zip(ANSWERS, (chosen, rejected), strict=True):
        if not answer or answer[0]["role"] != "assistant":
            found = f"a message of role {answer[0]['role']!r}" if answer else "nothing"
            raise BadConversationError(
                f"{name} has {found} after the prompt. Add the assistant's answer."
            )
