"""Small preference pairs, and their data folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from payload.data.__main__ import main as data
from payload.errors import ExitCode
from tests.support.chat_data import conversations


def pairs(count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """Return prompts with the reversed words as the better answer, and all but one as the worse."""
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


def prepare(tokenizer: Path, source: Path, out: Path, *flags: object) -> Path:
    """Make the data folder of a jsonl file and expect success."""
    arguments = ["prepare", "--task", "preference", "--source", "jsonl", "--input", str(source)]
    arguments += ["--quiet", "--tokenizer", str(tokenizer), "--out", str(out), *map(str, flags)]
    assert data(arguments) == ExitCode.OK
    return out
