"""Numbered rows of every task, prepared, and which of them are in each file of the folder."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.core.tasks import TaskKind
from payload.data.__main__ import main
from payload.data.tokenizers import load_hf_tokenizer
from payload.formats.data_folder import TRAIN_NAME, VAL_NAME, load_meta
from tests.support.chat_data import turn, write_rows

TASKS: tuple[TaskKind, ...] = ("text", "chat", "classify", "preference")
TASK_CASES = (
    *("text", "chat", "classify"),
    pytest.param("preference", marks=pytest.mark.seeds),
)
_NUMBER = re.compile(r"row ([a-z]+)(\d+) ends")


def numbered(task: TaskKind, names: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each name, such as `a17`; equal names are equal rows."""
    rows: list[dict[str, Any]] = []
    for name in names:
        text = f"row {name} ends"
        if task == "chat":
            rows.append({"messages": turn("ask", text)})
        elif task == "preference":
            rows.append({"prompt": "ask", "chosen": text, "rejected": "no"})
        else:
            rows.append({"text": text, "label": "even" if int(name[-1]) % 2 == 0 else "odd"})
    return rows


def write_named(path: Path, task: TaskKind, names: Sequence[str]) -> Path:
    """Write the rows of `numbered`."""
    return write_rows(path, numbered(task, names))


def words(
    task: TaskKind, tokenizer: Path, out: Path, inputs: Sequence[object], *flags: object
) -> list[str]:
    """Return the arguments that prepare the inputs."""
    length = ("--sequence-length", 64) if task in ("chat", "preference") else ()
    given = ["prepare", "--task", task, "--source", "jsonl", "--tokenizer", tokenizer, "--quiet"]
    return [str(each) for each in (*given, *length, "--input", *inputs, "--out", out, *flags)]


def prepared(
    task: TaskKind, tokenizer: Path, out: Path, inputs: Sequence[object], *flags: object
) -> tuple[Counter[str], Counter[str]]:
    """Prepare the inputs; return how often each name is in training and in validation."""
    assert main(words(task, tokenizer, out, inputs, *flags)) == 0
    return found(tokenizer, out)


def found(tokenizer: Path, out: Path) -> tuple[Counter[str], Counter[str]]:
    """Return how often each name is in the training file and in the validation file."""
    meta = load_meta(out)
    backend = load_hf_tokenizer(str(tokenizer))[0].backend
    counts = []
    for name in (TRAIN_NAME, VAL_NAME):
        tokens = np.fromfile(out / name, dtype=meta.dtype).tolist()
        text = backend.decode(tokens, skip_special_tokens=False)
        counts.append(Counter(letter + digits for letter, digits in _NUMBER.findall(text)))
    return counts[0], counts[1]


def inputs_of(out: Path) -> list[dict[str, Any]]:
    """Return the records of the inputs in meta.json."""
    found: list[dict[str, Any]] = json.loads((out / "meta.json").read_text())["selection"]["inputs"]
    return found
