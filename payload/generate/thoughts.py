"""Separates a reasoning model's thoughts from its answer, in the format of the chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from payload.core.errors import DataError
from payload.data.rows.conversation import Message
from payload.data.templates.chat_template import ChatTemplate
from payload.generate.shared_text import unfinished
from payload.generate.tool_calls import after_prompt

_THOUGHT, _ANSWER = "probe thought", "probe answer"
_KEYS = "reasoning_content", "thinking"
"""Keys of a message that templates render as the thoughts."""
_TOKEN_AT_END = re.compile(r"(<[^<>]*>|\[[^\[\]]*\])\s*\Z")
_TOKEN_AT_START = re.compile(r"\s*(<[^<>]*>|\[[^\[\]]*\])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoughts:
    """Delimiters of the thoughts, and of the text after them."""

    begin: str = "<think>"
    end: str = "</think>"
    """Text after the thoughts. The defaults of `begin` and `end` are for templates that do not
    render thoughts."""
    header: str = ""
    """Text between the end of the thoughts and the answer; empty for most models."""
    first_header: str = ""
    """Text before an answer that has no thoughts."""
    key: str | None = None
    """Key of a message that the template renders as the thoughts; None if the template renders no
    thoughts."""

    def divide(self, answer: str, *, is_open: bool, is_finished: bool) -> tuple[str, str]:
        """Return the thoughts and the rest of an answer.

        `is_open` is True if the prompt ends with `begin`. In an unfinished answer, trailing
        characters that may belong to a delimiter are left out.
        """
        start = answer.lstrip()
        if not is_open:
            if not is_finished and self.begin.startswith(start):
                return "", ""
            if not start.startswith(self.begin):
                return "", _without_header(answer, self.first_header, is_finished=is_finished)
            start = start.removeprefix(self.begin)
        thoughts, end, rest = start.partition(self.end)
        if not end:
            held = 0 if is_finished else unfinished(thoughts, self.end)
            return thoughts[: len(thoughts) - held].strip(), ""
        return thoughts.strip(), _without_header(rest, self.header, is_finished=is_finished)

    def is_opened_by(self, prompt: str) -> bool:
        """Return True if a rendered prompt ends with the beginning of thoughts."""
        return prompt.rstrip().endswith(self.begin)


def learn_thoughts(template: ChatTemplate, variables: Mapping[str, Any]) -> Thoughts:
    """Return how `template` writes thoughts.

    Raises DataError if the template rejects a user's message.
    """
    question: Message = {"role": "user", "content": "probe"}

    def render(messages: Sequence[Message], *, is_prompt: bool = False) -> str:
        return template.render(messages, add_generation_prompt=is_prompt, variables=variables)

    prompt = render([question], is_prompt=True)
    for key in _KEYS:
        message = {"role": "assistant", "content": _ANSWER, key: _THOUGHT}
        try:
            whole = render([question, message])
            plain = render([question, {"role": "assistant", "content": _ANSWER}])
        except DataError:
            continue
        before, found, after = whole.partition(_THOUGHT)
        if not found or _ANSWER not in after:
            continue
        begin = before[len(prompt) :].strip() if before.startswith(prompt) else ""
        token = _TOKEN_AT_END.search(before)
        begin = begin or (token[1] if token else "")
        between = after[: after.index(_ANSWER)]
        end = _TOKEN_AT_START.match(between)
        if not begin or end is None:
            continue
        header = after_prompt(plain, prompt).partition(_ANSWER)[0]
        return Thoughts(
            begin=begin,
            end=end[1],
            header=between[end.end() :].strip(),
            first_header="" if begin in header else header.strip(),
            key=key,
        )
    return Thoughts()


def _without_header(text: str, header: str, *, is_finished: bool) -> str:
    """Return `text` without `header` at its beginning."""
    start = text.lstrip()
    if not header:
        return start
    if not is_finished and header.startswith(start):
        return ""
    return start.removeprefix(header).lstrip()
