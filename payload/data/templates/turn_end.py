"""Renders short conversations to find the text with which a template ends a turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from payload.data.rows.conversation import Message
from payload.data.templates.stop_tokens import KnownTokens, first_marker, first_of

Part = tuple[int, bool]
"""A part of a conversation: how many leading messages, and whether to add a generation prompt."""
Render = Callable[..., Sequence[str | None]]
"""A function that renders parts of a conversation. It takes the parts, and the keyword arguments
`messages` and `tools`. It returns None for a part that the template rejects."""

# Texts that no template changes, and that are in no template.
_ASKED, _ANSWERED, _NEXT = "Quxa0z", "Quxb1z", "Quxc2z"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnd:
    """The end of an assistant's turn before a message of a given role: `user` or `tool`."""

    stops: tuple[str, ...]
    """The model's stop tokens, if the template writes one of them after an answer; otherwise the
    token that the template writes there.

    Empty if the template does not write a token there before a message of this role.
    """
    last: str
    """The text after the answer, if no message follows."""
    next: str
    """The text after the answer, up to the stop token, if another message follows."""
    prompt_only: str = ""
    """Suffix of the generation prompt that an answered turn does not contain; "" without such
    text."""
    opener: str = ""
    """The first token of the generation prompt, which begins a turn of the assistant."""
    header: str = ""
    """The generation prompt after a question."""

    @property
    def is_same(self) -> bool:
        """True if the turn ends in the same way with and without a next message."""
        return bool(self.stops) and self.last.startswith(self.next)


def turn_ends(render: Render, known: KnownTokens) -> Mapping[str, TurnEnd]:
    """Return how the assistant's turn ends before the user's message, and before a tool's message.

    The keys are the roles `user` and `tool`. A role that the template rejects is left out.
    """
    function = {"name": "qux_f", "parameters": {"type": "object", "properties": {}}}
    function["description"] = "qux"
    tools = [{"type": "function", "function": function}]
    arguments: list[Any] = [{"a": _ANSWERED}, f'{{"a": "{_ANSWERED}"}}']
    candidates: dict[str, list[tuple[list[dict[str, Any]], Any]]] = {
        "user": [([_message("assistant", _ANSWERED), _message("user", _NEXT)], None)],
        "tool": [
            (
                [
                    {
                        **_message("assistant", ""),
                        "tool_calls": [
                            {
                                "id": "qux000000",
                                "type": "function",
                                "function": {"name": "qux_f", "arguments": each},
                            }
                        ],
                    },
                    {
                        **_message("tool", _NEXT),
                        "name": "qux_f",
                        "tool_call_id": "qux000000",
                    },
                ],
                tools,
            )
            for each in arguments
        ],
    }
    found: dict[str, TurnEnd] = {}
    for role, options in candidates.items():
        for messages, with_tools in options:
            end = _turn_end(render, known, [_message("user", _ASKED), *messages], with_tools)
            if end is not None:
                found[role] = end
                break
    if any(end.stops == known.stops for end in found.values()):
        # A model that stops at its own tokens does not stop at others.
        found = {
            role: end if end.stops == known.stops else replace(end, stops=())
            for role, end in found.items()
        }
    return found


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _turn_end(
    render: Render,
    known: KnownTokens,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
) -> TurnEnd | None:
    parts: list[Part] = [(1, True), (1, False), (2, False), (3, False), (3, True)]
    prompt, asked, last_text, *followed = render(parts, messages=messages, tools=tools)
    last = _after(last_text, _ANSWERED)
    between = [
        text.partition(_NEXT)[0]
        for text in (_after(each, _ANSWERED) for each in followed)
        if text is not None and _NEXT in text
    ]
    if last is None or last_text is None:
        return None
    opener = _opener(known, prompt, asked)
    next_text = between[0] if between else last
    texts = [_before(text, opener) for text in (last, next_text)]
    stops = _stops(known, texts)
    source = next((text for text in reversed(texts) if first_of(stops, text)), "")
    stop = first_of(stops, source) or (0, 0)
    return TurnEnd(
        stops=stops,
        last=last,
        next=source[: stop[1]],
        opener=opener,
        header=prompt[len(asked) :] if prompt and asked and prompt.startswith(asked) else "",
        prompt_only=_prompt_only(prompt, last_text),
    )


def _opener(known: KnownTokens, prompt: str | None, asked: str | None) -> str:
    """Return the first token of the generation prompt that is not a stop token, or ""."""
    if prompt is None or asked is None or not prompt.startswith(asked):
        return ""
    added = prompt[len(asked) :]
    found = first_of(tuple(each for each in known.added if each not in known.stops), added)
    return (first_marker(added) or "") if found is None else added[slice(*found)]


def _before(text: str, opener: str) -> str:
    """Return the part of a text before `opener`, the token that begins another turn."""
    return text.partition(opener)[0] if opener else text


def _stops(known: KnownTokens, texts: Sequence[str]) -> tuple[str, ...]:
    """Return the model's stop tokens if a text has one of them.

    Otherwise, return the first special or added token in the texts.
    """
    if any(first_of(known.stops, text) for text in texts):
        return known.stops
    for tokens in (known.special, known.added):
        for text in texts:
            if found := first_of(tokens, text):
                return (text[slice(*found)],)
    # A tokenizer may have no token for such a mark, so that several tokens end a turn.
    marker = next(filter(None, map(first_marker, texts)), None)
    return () if marker is None else (marker,)


def _after(text: str | None, mark: str) -> str | None:
    return None if text is None or mark not in text else text.rpartition(mark)[2]


def _prompt_only(prompt: str | None, answered: str) -> str:
    if prompt is None or answered.startswith(prompt):
        return ""
    size = num_common(prompt, answered)
    # If the texts differ before the end of the question, they differ in more than the prompt.
    return prompt[size:] if _ASKED in prompt[:size] else ""


def num_common(one: str, other: str) -> int:
    """Return the number of leading characters that two texts share."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next((n for n in range(size) if one[n] != other[n]), size)
