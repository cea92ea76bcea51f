"""Finds tool calls in a model's answer, in the format of the model's chat template.

The format is not known in advance. The template renders calls with known names and arguments. The
text around the names and arguments shows how the template writes a call. See `call_formats`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import DataError
from payload.data.rows.conversation import Message
from payload.data.templates.chat_template import ChatTemplate
from payload.generate.call_formats import (
    KEYS,
    NAMES,
    VALUES,
    CallFormat,
    ToolCall,
    call_format_of,
)
from payload.generate.shared_text import common_end, common_start, unfinished


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallFormat:
    """The format in which a template writes the calls of an answer."""

    before_all: str
    """Text before the first call, such as a token that begins a list; often empty. `NAMES[0]`
    in this text is replaced by the name of the first call."""
    call: CallFormat
    has_text_arguments: bool
    """True if the template needs a call's arguments as JSON text, and rejects an object."""

    def divide(self, answer: str) -> tuple[str, tuple[ToolCall, ...]]:
        """Return the answer's text and its calls."""
        calls: list[ToolCall] = []
        first, position = len(answer), 0
        while (found := self.call.find(answer, position)) is not None:
            first = min(first, found.start)
            calls.append(found.call)
            position = found.end
        text = answer[:first].rstrip()
        if calls:
            text = text.removesuffix(self.before_all.replace(NAMES[0], calls[0].name)).rstrip()
        return text, tuple(calls)

    def begin(self, answer: str) -> int:
        """Return the index from which an unfinished answer may be part of a call."""
        before_all = self.before_all.partition(NAMES[0])[0]
        markers = [each for each in (before_all, self.call.before) if each]
        if not markers:
            # A call is a bare JSON object.
            return 0 if answer.lstrip()[:1] in ("", "{") else len(answer)
        return min(_begin_of(marker, answer) for marker in markers)

    def message(self, text: str, calls: Sequence[ToolCall]) -> Message:
        """Return the assistant's message, for the next turn of the conversation."""
        return _message(text, calls, as_text=self.has_text_arguments)


def learn_tool_calls(
    template: ChatTemplate, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> ToolCallFormat | None:
    """Return the format in which `template` writes calls; None if it writes no calls.

    `tools` and `variables` belong to the conversation. Raises DataError if the template
    refuses a conversation without calls.
    """
    probes = _Probes(template, tools, variables)
    for as_text in (False, True):
        one = probes.answer("", count=1, as_text=as_text)
        if one is not None and NAMES[0] in one:
            break
    else:
        return None
    # What precedes a call depends on the text of the answer, and on whether it is the first call.
    after_text = probes.answer("probe text", count=1, as_text=as_text)
    two = probes.answer("", count=2, as_text=as_text)
    prefixes = [one[: one.rindex(NAMES[0])]]
    if after_text is not None and NAMES[0] in after_text:
        prefixes.append(after_text[: after_text.rindex(NAMES[0])])
    first = common_end(prefixes)
    if two is not None and NAMES[1] in two:
        prefixes.append(two[: two.rindex(NAMES[1])])
    call = call_format_of(one, before=common_end(prefixes), tools=tools)
    if call is None:
        return None
    if call.before:
        first = first[: first.rfind(call.before)]
    elif "{" in first:
        first = first[: first.rfind("{")]
    return ToolCallFormat(before_all=first.strip(), call=call, has_text_arguments=as_text)


_QUESTION: Message = {"role": "user", "content": "probe"}


@dataclass(frozen=True, slots=True)
class _Probes:
    template: ChatTemplate
    tools: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any]

    def answer(self, text: str, *, count: int, as_text: bool) -> str | None:
        """Return the rendered text of an answer with `count` calls; None if the template rejects
        the calls."""
        calls = [
            ToolCall(name=name, arguments=dict(zip(KEYS, values, strict=True)))
            for name, values in zip(NAMES[:count], VALUES, strict=False)
        ]
        prompt = self._render([_QUESTION], add_generation_prompt=True)
        try:
            whole = self._render([_QUESTION, _message(text, calls, as_text=as_text)])
        except DataError:
            return None
        return after_prompt(whole, prompt)

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        return self.template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=self.tools,
            variables=self.variables,
        )


def _message(text: str, calls: Sequence[ToolCall], *, as_text: bool) -> Message:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            call.as_entry(number, as_text=as_text) for number, call in enumerate(calls)
        ]
    return message


def after_prompt(text: str, prompt: str) -> str:
    """Return the answer in `text`, a rendered conversation.

    A template can render the beginning of the answer differently in the prompt. In this case, the
    answer begins with the last token, such as `<think>`, that both texts contain in full.
    """
    if text.startswith(prompt):
        return text[len(prompt) :]
    shared = common_start([text, prompt])
    return text[max(shared.rfind(each) for each in ">]\n") + 1 :]


def _begin_of(marker: str, answer: str) -> int:
    """Return the index of `marker` in the answer, or of a prefix of `marker` at the answer's
    end."""
    place = answer.find(marker)
    if place >= 0:
        return place
    return len(answer) - unfinished(answer, marker)
