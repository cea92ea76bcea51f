"""Converts the messages of a row to the form that transformers' chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from payload.core.printable_text import shown
from payload.core.validation.suggestion import nearest
from payload.data.rows.columns import (
    CALLS,
    METADATA,
    NO_CONTENT_KEYS,
    THOUGHT_KEYS,
    TOOLS,
    TRAIN_KEYS,
    is_absent,
    is_deep,
)
from payload.data.sources.jsonl import object_of_pairs

ASSISTANT = "assistant"
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "ai": ASSISTANT,
    "bing": ASSISTANT,
    "bard": ASSISTANT,
    "model": ASSISTANT,
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "ipython": "ipython",
    "function_call": "function_call",
    "tool_call": "function_call",
}
"""For each role in a row, the role that templates know.

`function_call` becomes a message of the assistant with `tool_calls`.
"""
_SPOKEN = ("system", "developer", "user", ASSISTANT)
_FORMS = (("role", "content"), ("from", "value"))
"""Keys of the role and the text, in OpenAI's and in ShareGPT's messages."""
_ARGUMENTS = ("arguments", "parameters", "input", "args")
"""Keys of a call's arguments: OpenAI's, Llama's, Anthropic's and LangChain's."""
_RENDERED_METADATA = ("name", "tool_call_id")
"""Keys that look like metadata although templates render them."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the content parts that hold text, in messages of OpenAI and of Anthropic."""
_PART_KEYS = ("type", "text", "cache_control", "annotations", "logprobs", "citations")
"""Keys of a content part that are either read or only settings of a request."""
_CHANNELS = ("analysis", "commentary", "final")
"""Channels of Harmony, the format of gpt-oss."""
_FUNCTIONS = "functions."


class BadConversationError(ValueError):
    """Raised for a row that is not a valid conversation. The error's text describes the fault."""


@dataclass(slots=True)
class MessageList:
    """Messages, and a flag for each message that is True if the model is trained on the message."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    trained: list[bool] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Functions that a message lists. Some data sets list them in the system message."""

    def __iadd__(self, other: MessageList) -> MessageList:
        self.messages += other.messages
        self.trained += other.trained
        self.tools += other.tools
        return self

    def untrained(self) -> MessageList:
        """Return the same messages, all of them untrained."""
        return MessageList(self.messages, [False] * len(self.messages), self.tools)


def text_message(text: object, where: str, role: str) -> MessageList:
    """Return one message. Raises BadConversationError."""
    message = {"role": role, "content": require_text(text, where)}
    return MessageList([message], [role == ASSISTANT])


def read_messages(given: object, column: str) -> MessageList:
    """Return the messages of a list. Raises BadConversationError."""
    # The built-in type is checked first, because the check of an abstract type is slow.
    if not isinstance(given, list) and isinstance(given, Mapping):
        given = [given]
    if not isinstance(given, (list, Sequence)) or isinstance(given, str):
        raise BadConversationError(
            f"{column} is {shown(given)}, not a list of messages. Write "
            '[{"role": ..., "content": ...}, ...].'
        )
    if not given:
        raise BadConversationError(f"{column} is an empty list. Add messages, or remove the row.")
    found = MessageList()
    thoughts: list[str] = []
    for number, each in enumerate(given):
        if not thoughts and (plain := _plain_message(each)) is not None:
            found.messages.append(plain)
            found.trained.append(plain["role"] == ASSISTANT)
            continue
        where = f"{column}[{number}]"
        message, is_trained = _message(each, where, found.tools)
        channel, recipient = message.get("channel"), message.get("recipient")
        if message["role"] == ASSISTANT and channel in _CHANNELS:
            del message["channel"]
            if channel == "analysis":
                thoughts.append(_analysis(message, where, is_trained=is_trained))
                continue
            if channel == "commentary":
                if not isinstance(recipient, str):
                    raise BadConversationError(
                        f"{where}: a message with channel 'commentary' and without 'recipient' "
                        "would be trained as a final answer. Write it as 'content' of the message "
                        "with the call, or give it the channel 'final'."
                    )
                del message["recipient"]
                name = recipient.removeprefix(_FUNCTIONS)
                call = {"name": name, "arguments": message["content"]}
                message |= {"content": "", CALLS: [_tool_call(call, where)]}
        if thoughts:
            if message["role"] != ASSISTANT:
                raise BadConversationError(
                    f"{where}: a message with channel 'analysis' is followed by a message with "
                    f"role {message['role']!r}. After the 'analysis' message, put the assistant's "
                    "answer or tool call."
                )
            if any(key in message for key in THOUGHT_KEYS):
                raise BadConversationError(
                    f"{where}: the message has a thought, and follows a message with channel "
                    "'analysis'. Remove the thought or that message."
                )
            # The name of the key in the template of gpt-oss.
            message["thinking"] = "\n".join(thoughts)
            thoughts = []
        found.messages.append(message)
        found.trained.append(is_trained)
    if thoughts:
        raise BadConversationError(
            f"{column} ends with a message with channel 'analysis'. Add the assistant's final "
            "answer."
        )
    return found


def _analysis(message: Mapping[str, Any], where: str, *, is_trained: bool) -> str:
    """Return the thought in a message with channel 'analysis'.

    The model is trained on the thought together with the answer that follows.
    """
    lost = [key for key in message if key not in ("role", "content")]
    if lost or not is_trained:
        unread = f"the key {lost[0]!r}" if lost else "a weight"
        raise BadConversationError(
            f"{where}: a message with channel 'analysis' has {unread}, which would be ignored. The "
            "message is trained together with the answer that follows. Remove the key from the row."
        )
    return require_text(message["content"], f"{where} content")


def _plain_message(given: object) -> dict[str, Any] | None:
    """Return the converted message if `given` has only a role and a text, as most messages do;
    otherwise None."""
    if type(given) is not dict or len(given) != 2:
        return None
    for role_key, content_key in _FORMS:
        role, content = given.get(role_key), given.get(content_key)
        if isinstance(role, str) and isinstance(content, str):
            known = ROLES.get(role)
            if known is None or known == "function_call":
                return None
            return {"role": known, "content": clean(content)}
    return None


def _message(given: object, where: str, tools: list[dict[str, Any]]) -> tuple[dict[str, Any], bool]:
    """Return a message, and True if it is trained. Adds the message's functions to `tools`."""
    role_key, content_key = _form(given, where)
    assert isinstance(given, Mapping)
    name = given[role_key]
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadConversationError(
            f"{where}: unknown role {shown(given[role_key])}. Use one of: {', '.join(ROLES)}."
        )
    content = given.get(content_key)
    if isinstance(content, Mapping) and role in _SPOKEN and "recipient" not in given:
        content = [content]  # one part, not a function's result or arguments
    found: dict[str, Any] = {"role": role, "content": _content(content, f"{where} {content_key}")}
    is_trained = role in (ASSISTANT, "function_call")
    for key, value in given.items():
        if key in (role_key, content_key) or is_absent(value):
            continue
        if key in ("role", "content"):
            raise BadConversationError(
                f"{where} has the key {key!r} in addition to {role_key!r} and {content_key!r}. "
                f"Remove one of them, or ignore one with --ignore-key {key}."
            )
        if key in TRAIN_KEYS and (weight := number_of(value)) is not None:
            is_trained = _is_trained(key, weight, where, role=role, is_trained=is_trained)
        elif key in TOOLS and role in ("system", "developer"):
            tools += tool_list(value, f"{where} {key}")
        elif key in _RENDERED_METADATA or not METADATA.fullmatch(key):
            found[key] = clean(value)
    _convert_calls(found, where)
    _convert_thoughts(found, where)
    return found, is_trained


def _convert_thoughts(message: dict[str, Any], where: str) -> None:
    """Convert the message's thought to a text. Raises BadConversationError for two thoughts."""
    keys = [key for key in THOUGHT_KEYS if key in message]
    for key in keys:
        message[key] = _content(message[key], f"{where} {key}", is_object_text=False)
    if len({message[key].strip() for key in keys}) > 1:
        raise BadConversationError(
            f"{where} has different thoughts in {' and '.join(map(repr, keys))}, and one would be "
            f"lost. Remove one, or ignore one with --ignore-key {keys[-1]}."
        )
    if "reasoning" in message:
        message["reasoning_content"] = message.pop("reasoning")


def _form(given: object, where: str) -> tuple[str, str]:
    """Return the names of the keys with role and content. Raises BadConversationError."""
    if isinstance(given, (dict, Mapping)):
        for role, content in _FORMS:
            has_content = content in given or any(given.get(key) for key in NO_CONTENT_KEYS)
            if role in given and has_content:
                return role, content
    raise BadConversationError(f"{where} is {shown(given)}. {_missing_keys(given)}")


def _missing_keys(given: object) -> str:
    """Return sentences with the keys that a message needs, and with hints on misspelled keys."""
    keys = [key for key in given if isinstance(key, str)] if isinstance(given, Mapping) else []
    distances = {form: sum(nearest(key, keys) is None for key in form) for form in _FORMS}
    form = min(_FORMS, key=distances.__getitem__)
    missing = [key for key in form if key not in keys]
    hints = [
        f"{shown(near)} for {shown(key)}"
        for key in missing
        if (near := nearest(key, [each for each in keys if each not in form])) is not None
    ]
    meant = f" Did you write {' and '.join(hints)}?" if hints else ""
    return f"A message needs the keys {form[0]!r} and {form[1]!r}.{meant}"


def _content(value: object, where: str, *, is_object_text: bool = True) -> str | None:
    """Return the text of a message; with `is_object_text`, an object becomes JSON text.

    Raises BadConversationError for a part that is not text.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return require_text(value, where)
    if is_object_text and isinstance(value, Mapping):
        # A function's result can be an object, but templates print only text.
        return json.dumps(clean(value), ensure_ascii=False)
    if not isinstance(value, Sequence):
        return require_text(value, where)
    texts = []
    for number, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type", "text") if isinstance(part, Mapping) else None
        if not isinstance(part, Mapping) or kind not in _TEXT_PARTS:
            found = shown(part) if kind is None else f"a part of type {shown(kind)}"
            raise BadConversationError(
                f"{where}[{number}] is {found}, and only text can be trained. "
                "Remove the part, or the row."
            )
        if "text" not in part:
            raise BadConversationError(
                f"{where}[{number}] is {shown(part)}, a part without the key 'text'. Write "
                '{"type": "text", "text": ...}, or remove the part.'
            )
        _require_part_read(part, f"{where}[{number}]")
        texts.append(require_text(part["text"], f"{where}[{number}]"))
    # Templates that take parts print one directly after the other.
    return require_text("".join(texts), where)


def _require_part_read(part: Mapping[str, Any], where: str) -> None:
    """Raise BadConversationError for a key of a content part that would be lost."""
    for key, value in part.items():
        if key in _PART_KEYS or is_absent(value) or METADATA.fullmatch(key):
            continue
        if key in TRAIN_KEYS and number_of(value) == 1:
            continue
        raise BadConversationError(
            f"{where}: a part has {key} = {shown(value)}, which would be ignored. A message is "
            "trained as a whole or not at all. Split the message, or ignore the key with "
            f"--ignore-key {key}."
        )


def _is_trained(key: str, weight: float, where: str, *, role: str, is_trained: bool) -> bool:
    if weight in (0, 1) and (is_trained or weight == 0):
        return bool(weight)
    if weight not in (0, 1):
        raise BadConversationError(
            f"{where}: {key} = {weight:g} is not supported. Use 0 or 1, or ignore this key with "
            f"--ignore-key {key}."
        )
    raise BadConversationError(
        f"{where}: {key} = {weight:g} is not supported: a message of role {role!r} is not "
        f"trained. Remove this key, or ignore it with --ignore-key {key}."
    )


def number_of(value: object) -> float | None:
    """Return a boolean, a number or a text such as "true" or "1" as a number; otherwise None."""
    if isinstance(value, str):
        value = {"true": 1, "false": 0}.get(value.strip().lower(), value)
    if not isinstance(value, (str, int, float, Decimal)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def _convert_calls(message: dict[str, Any], where: str) -> None:
    """Convert each form of function calls to `tool_calls`. Raises BadConversationError."""
    if message["role"] == "function_call":
        message["role"] = ASSISTANT
        value = parsed(message["content"])
        message |= {"content": "", CALLS: value if isinstance(value, list) else [value]}
    call = message.get("function_call")
    if call is not None and isinstance(call, Mapping) and CALLS not in message:
        message[CALLS] = [message.pop("function_call")]
    if CALLS not in message:
        return
    calls = parsed(message[CALLS])
    if not isinstance(calls, list):
        raise BadConversationError(
            f"{where} {CALLS} is {shown(calls)}, not a list of function calls."
        )
    message[CALLS] = [
        _tool_call(call, f"{where} {CALLS}[{number}]") for number, call in enumerate(calls)
    ]


def _tool_call(given: object, where: str) -> dict[str, Any]:
    """Return a call as `{"type": "function", "function": {"name", "arguments"}}`.

    OpenAI writes the arguments as JSON text, which becomes an object here. Templates print the
    arguments with `tojson`, which would quote a text a second time.
    """
    if not isinstance(given, Mapping):
        raise BadConversationError(f'{where} is {shown(given)}. Write {{"name": ..., ...}}.')
    nested = given.get("function")
    function = dict(nested) if isinstance(nested, Mapping) else dict(given)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise BadConversationError(
            f"{where} is {shown(given)}, a function call without a name. Write the name as text."
        )
    if not isinstance(nested, Mapping):
        outer = {key: function.pop(key) for key in ("id", "type") if key in function}
        return {**outer, "type": "function", "function": _with_arguments(function, where)}
    kind = given.get("type", "function")
    return {**given, "type": kind, "function": _with_arguments(function, where)}


def _with_arguments(function: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the function's name and arguments.

    The arguments can be under any of the known keys.
    """
    values = {key: function[key] for key in _ARGUMENTS if key in function}
    filled = [key for key, value in values.items() if not is_absent(value)]
    if len(filled) > 1:
        raise BadConversationError(
            f"{where} has arguments in {' and '.join(map(repr, filled))}. Keep one of them."
        )
    given = next((values[key] for key in (*filled, *values)), None)
    arguments = parsed(given)
    rest = {key: each for key, each in function.items() if key not in _ARGUMENTS[1:]}
    return {**rest, "arguments": {} if arguments is None else arguments}


def parsed(value: object) -> object:
    """Return the object or list that a JSON text contains. Return any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        with suppress(ValueError, RecursionError):
            # A text with a repeated key stays as given: an object would lose a value.
            found = json.loads(value, object_pairs_hook=object_of_pairs)
            return value if is_deep(found) else found
    return value


def messages_in(value: object) -> object:
    """Return the list in a JSON text of messages; another value is returned unchanged."""
    found = parsed(value) if isinstance(value, str) else value
    if found is value or not isinstance(found, list) or not found:
        return value
    is_list = all(
        isinstance(each, dict) and any(role in each and text in each for role, text in _FORMS)
        for each in found
    )
    return found if is_list else value


def tool_list(value: object, where: str) -> list[dict[str, Any]]:
    """Return functions as `{"type": "function", "function": ...}`, from a list or JSON text.

    Raises BadConversationError.
    """
    given = parsed(value)
    given = [given] if isinstance(given, Mapping) else given
    if not isinstance(given, list) or not all(isinstance(each, Mapping) for each in given):
        raise BadConversationError(
            f"{where} is {shown(value)}, not a list of functions. Write "
            '[{"type": "function", "function": {"name": ..., "parameters": ...}}].'
        )
    return [
        clean(each) if "function" in each or "name" not in each else _wrapped(each)
        for each in given
    ]


def _wrapped(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function's schema as an entry of `tools`, with the wrapper that OpenAI's `functions`
    lack."""
    inner = {key: value for key, value in clean(function).items() if key != "type"}
    return {"type": "function", "function": inner}


def require_text(value: object, where: str) -> str:
    """Return a text. Raises BadConversationError for any other type."""
    if not isinstance(value, str):
        raise BadConversationError(f"{where} is {shown(value)}, not text.")
    return str(clean(value))


def clean(value: Any) -> Any:
    """Replace lone surrogates in the same way as the package `tokenizers`.

    They cannot be encoded.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return value
    if isinstance(value, Mapping):
        return {clean(key): clean(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(each) for each in value]
    return value
