"""Converts rows of instruction data, in its common formats, to conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from payload.core.printable_text import shown
from payload.data.rows.columns import (
    CONTEXT,
    DOCUMENTS,
    HISTORY,
    LABEL,
    SYSTEM,
    TOOLS,
    TRAIN_KEYS,
    VARIABLES,
    RowFormat,
    chat_formats,
    format_of,
    is_absent,
    near_columns,
    present,
    texts_in,
)
from payload.data.rows.conversation import Conversation
from payload.data.rows.messages import (
    ASSISTANT,
    MessageList,
    clean,
    messages_in,
    number_of,
    parsed,
    read_messages,
    require_text,
    text_message,
    tool_list,
)
from payload.data.rows.messages import BadConversationError as BadConversationError

Messages = list[dict[str, Any]]
"""Messages in the form of transformers' chat templates."""
_KEYS_SHOWN = 6


class UntrainedRowError(BadConversationError):
    """Raised for a row that is excluded from training by a value, such as a false `label`."""


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Return the row's conversation.

    Raises BadConversationError, and UntrainedRowError for a row that is left out.
    """
    require_trained(row)
    if row and all(isinstance(each, str) and not each.strip() for each in row.values()):
        raise UntrainedRowError("every column is empty")
    form = format_of(row)
    if form is None:
        keys = ", ".join(shown(key) for key in list(row)[:_KEYS_SHOWN]) or "none"
        raise BadConversationError(
            f"no conversation in the columns {keys}.{near_columns(row)} Formats: {chat_formats()}. "
            "Map your columns to known names with --columns, such as --columns "
            "QUESTION=user,ANSWER=assistant."
        )
    _require_good(row.get(LABEL))
    found = (
        read_messages(parsed(row[form.question]), form.question)
        if form.answer is None
        else (_question_and_answer(row, form, form.answer))
    )
    if not any(found.trained):
        if not any(message["role"] == ASSISTANT for message in found.messages):
            raise BadConversationError(
                "no message has role 'assistant', so there is nothing to train on. Add the answer."
            )
        raise UntrainedRowError(
            "'weight' or 'train' excludes every message of the assistant from training"
        )
    found = with_system(row, found)
    return Conversation(
        messages=tuple(found.messages),
        trained=tuple(found.trained),
        tools=tools_of(row, found),
        documents=documents_of(row),
        variables=variables_of(row),
    )


def require_trained(row: Mapping[str, Any]) -> None:
    """Raise UntrainedRowError for a row that is marked as not trained.

    Raises BadConversationError for a weight other than 0 and 1.
    """
    for key in TRAIN_KEYS:
        weight = number_of(row.get(key))
        if weight is None or weight == 1:
            continue
        if weight == 0:
            raise UntrainedRowError(f"{key} = {shown(row[key])}")
        raise BadConversationError(
            f"{key} = {shown(row[key])} is not supported. Use 0 or 1, or ignore this key with "
            f"--ignore-key {key}."
        )


def _require_good(label: object) -> None:
    """Raise UntrainedRowError for a bad answer of KTO data.

    Raises BadConversationError for a number of 0 or less, because the number may also be a class.
    """
    if label is False or (isinstance(label, str) and label.strip().lower() == "false"):
        raise UntrainedRowError(f"{LABEL} = {shown(label)} marks a bad answer")
    number = number_of(label)
    if number is not None and not number > 0:
        raise BadConversationError(
            f"{LABEL} = {shown(label)} may mark a bad answer, which would be trained as a good "
            f"one. Write true and false as labels. If the label does not mean quality, ignore it "
            f"with --ignore-key {LABEL}."
        )


def columns_of(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the columns that `conversation_of` reads; empty if the row matches no format."""
    form = format_of(row)
    if form is None:
        return ()
    found = [*form.required(), *SYSTEM, *TOOLS, DOCUMENTS, VARIABLES, *TRAIN_KEYS]
    if form.answer is not None:
        found.append(HISTORY)
        if (context := _context(row, form)) is not None:
            found.append(context)
    if number_of(row.get(LABEL)) == 1 or row.get(LABEL) is False:
        found.append(LABEL)
    return tuple(found)


def unread_columns(row: Mapping[str, Any], read: Sequence[str]) -> list[str]:
    """Return the non-empty columns that are not in `read`.

    A column is left out if a column in `read` contains the same text.
    """
    found = [name for name, value in row.items() if name not in read and not is_absent(value)]
    if not any(isinstance(row[name], str) for name in found):
        return found
    texts = {text for name in read for text in texts_in(row.get(name))}
    return [name for name in found if not isinstance(row[name], str) or row[name] not in texts]


def with_system(row: Mapping[str, Any], found: MessageList) -> MessageList:
    """Return the messages, after the system message of the column `system` if the row has one.

    Raises BadConversationError if the messages begin with a different system message.
    """
    column = present(row, SYSTEM)
    if column is None:
        return found
    text = require_text(row[column], column)
    for other in SYSTEM:
        if other != column and not is_absent(row.get(other)) and row[other] != row[column]:
            raise BadConversationError(
                f"{column} and {other} have different system messages. Remove one of them, or use "
                f"--ignore-key {other}."
            )
    if not text.strip():
        return found
    first = found.messages[0]
    if first["role"] not in ("system", "developer"):
        return MessageList(
            [{"role": "system", "content": text}, *found.messages],
            [False, *found.trained],
            found.tools,
        )
    if first["content"] != text:
        raise BadConversationError(
            f"{column} is {shown(text)}, but the messages begin with the system message "
            f"{shown(first['content'])}. Remove one of the two, or use --ignore-key {column}."
        )
    return found


def _context(row: Mapping[str, Any], form: RowFormat) -> str | None:
    names = tuple(each for each in CONTEXT if each != form.question)
    return present(row, names) if isinstance(messages_in(row[form.question]), str) else None


def _question_and_answer(row: Mapping[str, Any], form: RowFormat, answer: str) -> MessageList:
    """Return the history, the question and the answer; the loss does not count the question."""
    found = _history(row.get(HISTORY))
    prompt = messages_of(row, form.question, "user").untrained()
    context = _context(row, form)
    if context is not None:
        message = prompt.messages[-1]
        message["content"] += "\n\n" + require_text(row[context], context)
    found += prompt
    found += messages_of(row, answer, ASSISTANT)
    return found


def _history(given: object) -> MessageList:
    """Return the earlier turns: a list of pairs of question and answer, or of messages."""
    found = MessageList()
    given = parsed(given)
    if is_absent(given):
        return found
    if not isinstance(given, (list, tuple)):
        raise BadConversationError(
            f"{HISTORY} is {shown(given)}, not a list. Write [[QUESTION, ANSWER], ...]."
        )
    if all(isinstance(each, Mapping) for each in given):
        return read_messages(given, HISTORY)
    for number, pair in enumerate(given):
        where = f"{HISTORY}[{number}]"
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadConversationError(
                f"{where} is {shown(pair)}, not a pair. Write [QUESTION, ANSWER]."
            )
        found += text_message(pair[0], where, "user")
        found += text_message(pair[1], where, ASSISTANT)
    return found


def messages_of(row: Mapping[str, Any], column: str, role: str) -> MessageList:
    """Return the messages in a column. A plain text becomes one message of `role`.

    Raises BadConversationError.
    """
    given = messages_in(row[column])
    if isinstance(given, (list, tuple)) and given and all(isinstance(each, str) for each in given):
        if len(given) > 1:
            raise BadConversationError(
                f"{column} is a list of {len(given)} texts, but a row has one. Write a row for "
                "each text, or keep only the best one."
            )
        given = given[0]
    if isinstance(given, (list, tuple, Mapping)) and given:
        return read_messages(given, column)
    if not isinstance(given, str):
        raise BadConversationError(
            f"{column} is {shown(given)}, not text and not a list of messages."
        )
    return text_message(given, column, role)


def tools_of(row: Mapping[str, Any], found: MessageList) -> tuple[Mapping[str, Any], ...]:
    """Return the functions of the row and of its messages. Raises BadConversationError."""
    tools = list(found.tools)
    for column in TOOLS:
        if not is_absent(row.get(column)):
            tools += tool_list(row[column], column)
    return tuple(tools)


def documents_of(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the documents for templates with retrieval. Raises BadConversationError."""
    given = parsed(row.get(DOCUMENTS))
    if is_absent(given):
        return ()
    if not isinstance(given, (list, tuple)) or not all(isinstance(each, Mapping) for each in given):
        raise BadConversationError(
            f"{DOCUMENTS} is {shown(given)}, not a list of objects. Write "
            '[{"title": ..., "text": ...}].'
        )
    return tuple(clean(given))


def variables_of(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values in the row for the template's variables. Raises BadConversationError."""
    given = parsed(row.get(VARIABLES))
    if is_absent(given):
        return {}
    if not isinstance(given, Mapping):
        raise BadConversationError(
            f'{VARIABLES} is {shown(given)}, not an object. Write {{"NAME": VALUE}}.'
        )
    return dict(clean(given))
