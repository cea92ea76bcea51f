"""Describes how a template treats thoughts, by rendering one short conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.core.errors import DataError
from payload.data.templates.chat_template import ChatTemplate
from payload.data.templates.thoughts import KEYS, prompt_tail
from payload.data.templates.turn_end import Part
from payload.formats.data_folder import Thoughts

# Texts that are in no template.
_QUESTION, _THOUGHT, _ANSWER = "Quxq3z", "Quxt4z", "Quxa5z"

_CHOICES: Mapping[Thoughts, str] = {
    "keep": "trains the thoughts that the template renders",
    "drop": "trains only the answers",
    "empty": "trains the end of the block before an answer without a thought",
    "refuse": "refuses rows without a thought if the prompt opens a block",
}


def how_thoughts(template: ChatTemplate, variables: Mapping[str, Any], thoughts: Thoughts) -> str:
    """Return text on how the template renders thoughts, and on which text --thoughts trains."""
    thought = dict.fromkeys(KEYS, _THOUGHT)
    messages = [
        {"role": "user", "content": _QUESTION},
        {"role": "assistant", "content": _ANSWER, **thought},
    ]
    parts: list[Part] = [(1, True), (2, False)]
    try:
        found = template.parts(messages, parts, variables=variables)
    except DataError:
        found = [{}, {}]
    prompt, answered = (str(each.get("text", "")) for each in found)
    tail = prompt_tail(prompt)
    if tail is None:
        opening = "the prompt has no block of thoughts"
    elif tail.closing is None:
        opening = "the prompt has an empty block of thoughts"
    else:
        opening = f"the prompt opens a block of thoughts ({tail.text.strip()})"
    is_rendered = "is rendered" if _THOUGHT in answered else "is not rendered"
    return (
        f"thoughts: {opening}, and {KEYS[0]} {is_rendered}; --thoughts {thoughts} "
        f"{_CHOICES[thoughts]}"
    )
