"""Checks that a template renders all contents, calls, thoughts and tools of a conversation.

A value is not lost if the rendered text contains the value's text. For other values, the
conversation is rendered again without the value, or with a different value. If the rendered text
stays the same, the template does not read the value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from payload.core.errors import DataError
from payload.core.printable_text import shown as shown_text
from payload.data.rows.columns import is_absent
from payload.data.rows.conversation import Message
from payload.data.templates.template_files import TOOLS_FIX
from payload.data.templates.thoughts import KEYS as THOUGHT_KEYS
from payload.data.templates.thoughts import pieces_of, thought_of, without_thoughts

Probe = Callable[[Sequence[Message], Any], str | None]
"""Renders messages with the given tools. Returns None if the template rejects the messages."""

_UNCHECKED_KEYS = frozenset({"role", "content", "id", "tool_call_id"})
"""Keys that the format needs or that only number a message."""
_NAME = "name"
"""Key with the name of a speaker, or of the function that produced the result in a message."""
_TOOL_ROLES = ("tool", "function", "ipython", "observation")
_CALLS = "tool_calls"
_CALL_KEYS = ("id", "type", "index", "function")
"""Keys of a call that are part of the format, or that only name the call."""
_OTHER_CONTENT = "Quxd3z"
_OTHER_TEMPLATE = "Use another template with --chat-template."
_LONG_ENOUGH = 4
"""Minimum length of a text that another text does not contain by chance."""
_MOST_PIECES = 16
"""Limit on the number of pieces of a content. Each piece is changed and rendered to find out if the
template leaves it out."""


def require_rendered(
    messages: Sequence[Message],
    number: int,
    text: str,
    *,
    start: int,
    tools: Sequence[Mapping[str, Any]] | None,
    ignored: frozenset[str],
    where: str,
    render: Probe,
) -> None:
    """Raise DataError if `text` lacks a value of message `number` or of an earlier message.

    `text` ends with message `number`, which begins at `start`. Thoughts and calls of earlier
    answers are not checked: many templates leave them out.
    """
    shown = list(messages[: number + 1])

    whole_text = list[str | None]()

    def unchanged() -> str | None:
        if not whole_text:
            whole_text.append(render(shown, tools))
        return whole_text[0]

    def is_lost(changed: Message, index: int) -> bool:
        return unchanged() == render([*shown[:index], changed, *shown[index + 1 :]], tools)

    def complain(index: int, key: str, fix: str) -> DataError:
        return DataError(
            f"{where}: message {index + 1} of {len(messages)}: the template leaves out the key "
            f"{key!r}, so training would lose its value. {fix} Or ignore the key with --ignore-key "
            f"{key}."
        )

    for index, message in enumerate(shown):
        is_turn = index == number
        if message["role"] == "assistant" and not is_turn:
            continue
        own = text[start:] if is_turn else text
        content = message.get("content")
        if len(message) == 2 and isinstance(content, str) and content.strip() in own:
            continue  # only a role and a content with all of its thoughts
        thought = thought_of(message) if is_turn else None
        thought_key = next((key for key in THOUGHT_KEYS if key in message), "thought")
        if (
            thought is not None
            and thought_key not in ignored
            and thought.strip() not in own
            and is_lost(_with_other_thought(message, thought), index)
        ):
            raise complain(
                index,
                thought_key,
                "Train without thoughts with --thoughts drop, or use a template with thoughts.",
            )
        bare = without_thoughts(message) if is_turn else message
        whole = bare if thought_key in ignored else message
        for piece, changed in _changed_pieces(whole.get("content"), own):
            if is_lost({**message, "content": changed}, index):
                raise DataError(
                    f"{where}: message {index + 1} of {len(messages)}: the template leaves out "
                    f"the text {shown_text(piece)} of its content, so training would lose this "
                    f"text. {_OTHER_TEMPLATE}"
                )
        for key, value in bare.items():
            if key in _UNCHECKED_KEYS or key in ignored or is_absent(value):
                continue
            if key == _NAME and message["role"] in _TOOL_ROLES:
                continue  # the result belongs to the call before
            # The texts of a conversation often have the name of a speaker, too.
            is_shown = key in THOUGHT_KEYS or (key != _NAME and _is_surely_in(_texts(value), own))
            rest = {name: each for name, each in message.items() if name != key}
            if not is_shown and is_lost(rest, index):
                raise complain(index, key, TOOLS_FIX if key == _CALLS else _OTHER_TEMPLATE)
            if key == _CALLS and is_turn:
                for name, without in _smaller_calls(value, ignored, own):
                    if is_lost({**message, _CALLS: without}, index):
                        raise complain(index, name, _OTHER_TEMPLATE)
    if (
        tools
        and "tools" not in ignored
        and not _is_surely_in(_descriptions(tools), text)
        and unchanged() == render(shown, [_renamed(each) for each in tools])
    ):
        raise DataError(
            f"{where}: the template leaves out the tools, so training would lose them. "
            f"{TOOLS_FIX} Or ignore the tools with --ignore-key tools."
        )


def _with_other_thought(message: Message, thought: str) -> Message:
    """Return the message with another thought. The white space around the thought stays."""
    texts = {key: message.get(key) for key in (*THOUGHT_KEYS, "content")}
    return {
        **message,
        **{
            key: text.replace(thought.strip(), _OTHER_CONTENT, 1)
            for key, text in texts.items()
            if isinstance(text, str)
        },
    }


def _changed_pieces(content: object, text: str) -> Iterator[tuple[str, str]]:
    """Yield pieces of a content that `text` may lack, and the content with each piece changed.

    The pieces are lines, and the texts between marks of thoughts.
    """
    if not isinstance(content, str) or _is_in([content.strip()], text):
        return
    found = (each for each in pieces_of(content) if not _is_surely_in([each[0]], text))
    for piece, *places in islice(found, _MOST_PIECES):
        # The template may leave out only the end of a piece, or only its beginning.
        for place in reversed(places):
            yield piece, f"{content[:place]}{_OTHER_CONTENT}{content[place:]}"


def _smaller_calls(
    calls: object, ignored: frozenset[str], text: str
) -> Iterator[tuple[str, list[Any]]]:
    """Yield each key of the calls that `text` may lack, and the calls without this key.

    For a whole call, the key is `tool_calls`. Keys that only name a call are not yielded.
    """
    if not isinstance(calls, list) or not all(isinstance(each, Mapping) for each in calls):
        return
    for number, call in enumerate(calls):
        before, after = calls[:number], calls[number + 1 :]
        function = call.get("function")
        function = function if isinstance(function, Mapping) else {}
        is_shown = _is_surely_in(_texts(function), text)
        if len(calls) > 1 and not is_shown:
            yield _CALLS, [*before, *after]
        for key, value in call.items():
            if key not in (*_CALL_KEYS, *ignored) and not is_absent(value):
                rest = {name: each for name, each in call.items() if name != key}
                yield key, [*before, rest, *after]
        for key, value in function.items():
            if key in ("name", *ignored) or is_absent(value) or (key == "arguments" and is_shown):
                continue
            rest = {name: each for name, each in function.items() if name != key}
            if key == "arguments":
                rest[key] = {}
            yield key, [*before, {**call, "function": rest}, *after]


def _is_in(texts: Sequence[str], text: str) -> bool:
    return all(each in text or json.dumps(each)[1:-1] in text for each in texts)


def _is_surely_in(texts: Sequence[str], text: str) -> bool:
    """Return True if `text` contains all of `texts`, and one of them is too long to match by
    chance."""
    return any(len(each) >= _LONG_ENOUGH for each in texts) and _is_in(texts, text)


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value.strip()]
    return [each.strip() for each in leaves(value)]


def leaves(value: object) -> Iterator[str]:
    """Yield the texts and numbers of a JSON value, except the values of `type` and `id`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, Mapping)):
        for key, each in value.items():
            if key not in ("type", "id"):
                yield from leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield json.dumps(value)


def _renamed(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if isinstance(function, Mapping):
        return {**tool, "function": _renamed(function)}
    return {**tool, "name": _OTHER_CONTENT, "description": _OTHER_CONTENT}


def _descriptions(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the tools' descriptions.

    If a tool has no description, a text that occurs nowhere replaces it.
    """
    functions = [each.get("function", each) for each in tools]
    found = [each.get("description") for each in functions if isinstance(each, Mapping)]
    return [str(each) if each else "\0" for each in found]
