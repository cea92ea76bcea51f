"""A large corpus made of the standard library's text, the same every time.

Plain copies of the library's 31 MB would be easy for a tokenizer that caches words. So a document
has one to six random passages of the library. In every passage a few words are replaced by new
words, each made of the halves of two other words. So the number of different words grows with the
corpus, as in natural text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PASSAGE_BYTES = 2000
"""Minimum size of a passage, which ends at the end of a line."""
MOST_PASSAGES = 6
RENAMED_WORDS = 4
"""Number of different words that are replaced in each passage, wherever they occur."""
FILES = 16
"""Number of files; with several files, a reader can use several processes."""

_WORD = re.compile(rb"[A-Za-z]{5,}")


@dataclass(frozen=True, slots=True)
class _Passage:
    text: bytes
    words: tuple[bytes, ...]
    """The different words in the passage."""


def write_corpus(folder: Path, texts: Sequence[bytes], *, size_bytes: int, seed: int) -> int:
    """Write `FILES` files of JSON lines with at least `size_bytes` of text; return its size.

    A smaller corpus of the same seed has the first documents of a larger one.
    """
    documents = generate(texts, seed=seed)
    written = 0
    for i in range(FILES):
        left = size_bytes // FILES
        with (folder / f"part_{i:02d}.jsonl").open("w", encoding="utf-8") as file:
            while left > 0:
                document = next(documents)
                left -= len(document)
                file.write(json.dumps({"text": document.decode("utf-8")}, ensure_ascii=False))
                file.write("\n")
                written += len(document)
    return written


def generate(texts: Sequence[bytes], *, seed: int) -> Iterator[bytes]:
    """Yield documents endlessly."""
    random = np.random.default_rng(seed)
    passages = [passage for text in texts for passage in _passages(text)]
    words = sorted({word for passage in passages for word in passage.words})
    while True:
        chosen = random.integers(len(passages), size=random.integers(1, MOST_PASSAGES + 1))
        yield b"".join(_renamed(passages[i], words, random) for i in chosen)


def _passages(text: bytes) -> Iterator[_Passage]:
    start = 0
    while start < len(text):
        end = text.find(b"\n", start + PASSAGE_BYTES)
        end = len(text) if end < 0 else end + 1
        part = text[start:end]
        yield _Passage(part, tuple(sorted(set(_WORD.findall(part)))))
        start = end


def _renamed(passage: _Passage, words: Sequence[bytes], random: np.random.Generator) -> bytes:
    if not passage.words:
        return passage.text
    text = passage.text
    old = random.integers(len(passage.words), size=RENAMED_WORDS)
    halves = random.integers(len(words), size=(RENAMED_WORDS, 2))
    for i, (first, second) in zip(old, halves, strict=True):
        head, tail = words[first], words[second]
        new = head[: (len(head) + 1) // 2] + tail[len(tail) // 2 :]
        text = text.replace(passage.words[i], new)
    return text
