"""A conversation as it is in a row, before a chat template renders it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One message in the form of transformers' `apply_chat_template`.

`role` is a text such as system, developer, user, assistant or tool. `content` is a text, None, or a
list of parts. Further keys, such as `tool_calls`, `tool_call_id`, `name`, `reasoning_content` and
`thinking`, are passed to the template unchanged.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a row, and for each message whether the model is trained on it."""

    messages: tuple[Message, ...]
    trained: tuple[bool, ...]
    """For each message, True if the model is trained on the message. Only messages of the assistant
    can be trained on."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the functions that the assistant can call."""
    documents: tuple[Mapping[str, Any], ...] = ()
    """Documents for templates with retrieval."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template that this row sets, such as `enable_thinking`."""

    def __post_init__(self) -> None:
        assert len(self.messages) == len(self.trained)
