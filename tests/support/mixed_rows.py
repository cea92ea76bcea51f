"""Rows of conversations with many kinds of faults, and a digest of the folder made from them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.support.chat_data import END, conversations, turn

CASES: dict[str, tuple[str, ...]] = {
    "best-fit": (),
    "groups": ("--group-column", "topic", "--val-fraction", "0.2"),
    "none and split": ("--packing", "none", "--on-long", "split", "--max-documents", "300"),
    "drop": ("--on-long", "drop", "--train-on", "last"),
    "refuse": ("--on-long", "refuse", "--val-fraction", "0.5", "--seed", "7"),
    "files": ("--source", "jsonl"),
}
"""Flags of each case; in the case `files`, a second file has the validation data."""
FLAGS = (
    *("--skip-bad", "--ignore-key", "note", "--sequence-length", "64"),
    # Older releases kept training rows that also stand in validation.
    *("--dedup", "none"),
)


def write_mixed(folder: Path, case: str, *, count: int = 700) -> Path:
    """Write the rows of a case; return the file or folder to prepare."""
    lines = [_line(number) for number in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    if case != "files":
        (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
        return folder / "rows.jsonl"
    (folder / "train.jsonl").write_text("".join(lines[:-100]), encoding="utf-8")
    (folder / "valid.jsonl").write_text("".join(lines[-100:]), encoding="utf-8")
    return folder


def _line(number: int) -> str:
    if number % 19 == 7:
        return f'{{"messages": row {number}\n'
    (messages,) = conversations(1, turns=1 + number % 3, seed=number)
    row: dict[str, Any] = {"messages": messages, "topic": f"t{number % 50}", "note": number}
    if number % 13 == 3:
        row["weight"] = 0
    if number % 17 == 5:
        messages[0]["role"] = "nobody"
    if number % 23 == 9:
        messages += turn("and now", "word " * (10 * (number % 29)))
    if number % 29 == 4:
        messages[0]["content"] += f" {END} is text"
    if number % 31 == 6:
        row["messages"] = turn("one", "two " * 80) if number % 2 else turn("word " * 99, "cut off")
    if number % 11 == 1:
        row["id"] = number
    if number % 41 == 8:
        messages[-1]["content"] = "\ufdd0 is no character"
    return json.dumps(row) + "\n"


def digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of data; of meta.json without paths and versions."""
    found = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.bin"))
    }
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    varying = ("source", "fingerprint", "encoder", "tokenizer", "tokenizer_files")
    for name in (*varying, "skipped_examples"):
        del meta[name]
    text = json.dumps(meta)
    return {**found, "meta.json": hashlib.sha256(text.encode()).hexdigest()}
