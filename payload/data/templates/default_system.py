"""Finds the system message that a template adds if a conversation has no system message."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from payload.core.errors import DataError
from payload.core.one_line import printable_line
from payload.data.templates.chat_template import ChatTemplate

_USER, _SYSTEM = "0f6e user 2b91", "7c3d system 5a80"
"""Texts that no template contains."""
_SHOWN_CHARS = 200


def default_system_lines(template: ChatTemplate, variables: Mapping[str, Any]) -> list[str]:
    """Return a line with the system message that the template adds, or no line."""
    text = default_system(template, variables)
    if text is None:
        return []
    shown = printable_line(text)
    if len(shown) > _SHOWN_CHARS:
        shown = f"{shown[: _SHOWN_CHARS - 3]}..."
    return [f'the template adds its own system message to conversations without one: "{shown}"']


def default_system(template: ChatTemplate, variables: Mapping[str, Any]) -> str | None:
    """Return the system message that the template adds to a conversation without one.

    Returns None if the template adds none. The template can also put text around a system message,
    for example a date. This text is not part of the result. It is found by rendering a conversation
    that has a system message.
    """
    user, system = {"role": "user", "content": _USER}, {"role": "system", "content": _SYSTEM}
    try:
        without, given = (
            template.render(messages, add_generation_prompt=True, variables=variables)
            for messages in ([user], [system, user])
        )
    except DataError:  # a template that rejects system messages
        return None
    before, found, after = given.partition(_USER)[0].partition(_SYSTEM)
    start, has_user, _ = without.partition(_USER)
    if not found or not has_user or len(start) < len(before) + len(after):
        return None
    if not (start.startswith(before) and start.endswith(after)):
        return None
    return start[len(before) : len(start) - len(after)].strip() or None
