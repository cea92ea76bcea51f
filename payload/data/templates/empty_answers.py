"""Finds answers in which the stop token is the only trained token."""

from __future__ import annotations

from collections.abc import Sequence

from payload.data.rows.conversation import Message
from payload.data.templates.rendered_row import SampleOptions
from payload.data.templates.thoughts import KEYS, without_thoughts

EMPTY_ANSWER = "an empty answer, of which training covers only the stop token"


def empty_answers(
    messages: Sequence[Message], trained: Sequence[bool], options: SampleOptions
) -> list[str]:
    """Return EMPTY_ANSWER if a trained message has no content, thought or call; otherwise []."""
    numbers = [number for number, is_trained in enumerate(trained) if is_trained]
    numbers = numbers[-1:] if options.train_on == "last" else numbers
    for message in (messages[number] for number in numbers):
        if options.thoughts == "drop":
            message = without_thoughts(message)
        values = (message.get(key) for key in ("content", "tool_calls", *KEYS))
        if not any(each.strip() if isinstance(each, str) else each for each in values):
            return [EMPTY_ANSWER]
    return []
