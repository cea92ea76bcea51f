"""The rows that every template renders. Each field has a term that occurs in no other field."""

from __future__ import annotations

import json
from typing import Any

Messages = list[dict[str, Any]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_harvest",
            "description": "Return the marzipan of a town.",
            "parameters": {
                "type": "object",
                "properties": {"cobalt": {"type": "string", "description": "the lantern"}},
                "required": ["cobalt"],
            },
        },
    }
]
TOOL_WORDS = ("get_harvest", "marzipan", "cobalt", "lantern")

# Mistral's templates require nine letters or digits.
_CALL_ID = "abcd12345"
_CALL = {
    "id": _CALL_ID,
    "type": "function",
    "function": {"name": "get_harvest", "arguments": {"cobalt": "thimble"}},
}

ROWS: dict[str, dict[str, Any]] = {
    "one turn": {
        "messages": [
            {"role": "user", "content": "what is magnolia"},
            {"role": "assistant", "content": "one and parsnip"},
        ]
    },
    "three turns": {
        "messages": [
            {"role": "system", "content": "be the umbrella"},
            {"role": "user", "content": "what is magnolia"},
            {"role": "assistant", "content": "one and parsnip"},
            {"role": "user", "content": "and the walnut"},
            {"role": "assistant", "content": "two and bramble"},
            {"role": "user", "content": "and the cactus"},
            {"role": "assistant", "content": "three of gondola"},
        ]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "what is magnolia"},
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "tool_call_id": _CALL_ID, "content": "ocarina"},
            {"role": "assistant", "content": "one and parsnip"},
        ],
        "tools": TOOLS,
    },
    "thoughts": {
        "messages": [
            {"role": "user", "content": "what is magnolia"},
            {
                "role": "assistant",
                "reasoning_content": "count the periwinkle",
                "content": "one and parsnip",
            },
            {"role": "user", "content": "and the walnut"},
            {
                "role": "assistant",
                "reasoning_content": "weigh the sandpiper",
                "content": "two and bramble",
            },
        ]
    },
}
"""Rows in the form of transformers' `apply_chat_template`."""


def as_file_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row in OpenAI's format: the arguments of a call are JSON text."""
    copied: dict[str, Any] = json.loads(json.dumps(row))
    for message in copied["messages"]:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return copied


def answer_words(message: dict[str, Any]) -> list[str]:
    """Return the terms of a message that its rendering must contain, in the usual order."""
    texts = [message.get(key) for key in ("reasoning_content", "content")]
    words = [text.split()[-1] for text in texts if text]
    return words + ["thimble" for _ in message.get("tool_calls", ())]
