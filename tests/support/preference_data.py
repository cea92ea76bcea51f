"""Small preference pairs."""

from __future__ import annotations

from typing import Any

from tests.support.chat_data import conversations


def pairs(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts whose chosen answer has the reversed words, and whose rejected lacks one."""
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
