"""Small preference pairs."""

from __future__ import annotations

from typing import Any

from tests.support.chat_data import conversations


def pairs(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts with a chosen answer, and a rejected answer that differs in a few tokens."""
    made = []
    for number, (asked, answer) in enumerate(conversations(count, seed=seed)):
        words = answer["content"].split()
        worse = [*words[1:], "what"] if number % 2 else [*words, "b", "b"]
        made.append(
            {
                "prompt": asked["content"],
                "chosen": answer["content"],
                "rejected": " ".join(worse),
            }
        )
    return made
