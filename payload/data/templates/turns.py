"""Renders a conversation to texts to train on, with every turn as the model will see it.

A turn is a trained message of the assistant. At inference a server renders the messages before the
turn with the generation prompt, and the model continues this prompt up to a stop token. So the
model is trained on the text that the template adds to the prompt when the turn is the last message.
Several turns share one sample if a longer rendered text begins with each turn's prompt and text.
Templates that render earlier turns differently, for example without thoughts, need several samples.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from payload.data.rows.conversation import Conversation, Message
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.control_tokens import Span, take_marks
from payload.data.templates.rendered_row import RejectedError
from payload.data.templates.rendered_row import SampleOptions as SampleOptions
from payload.data.templates.rendered_row import TrainOn as TrainOn
from payload.data.templates.turn_end import num_common
from payload.data.templates.turn_finder import Turn, TurnFinder

_DEFAULTS = SampleOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedSample:
    """A text to train on."""

    text: str
    spans: list[Span]
    """Ranges of the characters that the loss counts, in order; each ends with a stop token."""
    literal: list[Span] = field(default_factory=list)
    """Ranges of special tokens from the row, which are encoded as text."""
    has_unmarked: bool = False
    """True if `literal` lacks special tokens from the row, because marking the tokens would change
    the rendered text."""


def render_samples(
    template: ChatTemplate,
    conversation: Conversation,
    options: SampleOptions = _DEFAULTS,
) -> list[RenderedSample]:
    """Return the texts to train on, each with the spans of its trained turns, in order.

    The spans come from the template's `{% generation %}` blocks. Without blocks, a span is the text
    that an answer adds to its prompt, up to the stop token. Raises DataError if the template
    rejects the conversation, leaves out a key, or writes no stop token after a turn.
    """
    return RowRendering(template, conversation, options).samples()


class RowRendering:
    """`render_samples` in two steps, so that the first requests of several rows can be batched."""

    def __init__(
        self, template: ChatTemplate, conversation: Conversation, options: SampleOptions
    ) -> None:
        """Raises DataError like `render_samples`."""
        self._conversation = conversation
        self._new_row = partial(TurnFinder, template, options=options)
        try:
            self._row = self._new_row(conversation)
        except RejectedError:
            self._row = self._with_text_arguments()

    def request(self) -> str:
        """Return the request that `samples` sends first."""
        return self._row.request

    def take(self, answer: list[dict[str, Any]] | None) -> None:
        """Take the process's answer to `request`.

        Without an answer, `samples` sends the request.
        """
        self._row.answer = answer

    def samples(self) -> list[RenderedSample]:
        """Return the result of `render_samples`. Raises DataError."""
        try:
            whole, turns = self._row.turns()
        except RejectedError:
            self._row = self._with_text_arguments()
            whole, turns = self._row.turns()
        return _samples(whole, turns, has_unmarked=self._row.has_unmarked)

    def _with_text_arguments(self) -> TurnFinder:
        """Return the finder for a row with the calls' arguments as JSON text.

        Some templates require this.

        Called while a RejectedError is handled. For a row without such calls, the error is raised
        again.
        """
        changed = _with_text_arguments(self._conversation)
        if changed is None:
            raise
        self._conversation = changed
        return self._new_row(changed)


def _samples(whole: str, turns: list[Turn], *, has_unmarked: bool) -> list[RenderedSample]:
    """Return the samples.

    Several turns share a sample if the sample's text begins with the text of each of these turns.
    """
    texts: list[tuple[str, list[Span]]] = []
    for turn in reversed(turns):
        if not texts and whole.startswith(turn.text[: turn.through]):
            texts.append((whole, []))
        for text, spans in texts:
            if text.startswith(turn.text[: turn.through]):
                same = num_common(text, turn.text)
                spans[:0] = [
                    (start, end if end <= same else turn.through)
                    for start, end in turn.spans
                    if end <= same or start < turn.through
                ]
                break
        else:
            texts.append((turn.text, list(turn.spans)))
    if not turns:
        texts = [(whole, [])]
    samples = []
    for text, spans in reversed(texts):
        plain, ranges, literal = take_marks(text, spans)
        samples.append(
            RenderedSample(text=plain, spans=ranges, literal=literal, has_unmarked=has_unmarked)
        )
    return samples


def _with_text_arguments(conversation: Conversation) -> Conversation | None:
    """Return the conversation with the calls' arguments as JSON text; None if nothing changes."""
    messages: list[Message] = []
    for message in conversation.messages:
        calls = [dict(each) for each in message.get("tool_calls") or ()]
        for call in calls:
            function = call.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("arguments"), Mapping):
                text = json.dumps(function["arguments"], ensure_ascii=False)
                call["function"] = {**function, "arguments": text}
        messages.append({**message, "tool_calls": calls} if calls else message)
    if messages == list(conversation.messages):
        return None
    return replace(conversation, messages=tuple(messages))
