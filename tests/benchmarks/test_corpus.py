"""The generated corpus: deterministic, without repeated texts."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

from benchmarks.corpus import FILES, generate, write_corpus
from benchmarks.prepare_corpus import exit_status

TEXTS = [
    "\n".join(f"def number_{word}(value): return value + {i}  # é" for i in range(200)).encode()
    for word in ("seventeen", "hundred", "thousand")
]


def _texts_of(folder: Path) -> list[str]:
    files = sorted(folder.iterdir())
    return [json.loads(line)["text"] for file in files for line in file.open(encoding="utf-8")]


def test_a_seed_makes_the_same_corpus_and_another_seed_another() -> None:
    first, again, other = (list(itertools.islice(generate(TEXTS, seed=s), 50)) for s in (1, 1, 2))
    assert first == again
    assert first != other


def test_a_corpus_has_the_size_and_a_smaller_one_is_its_beginning(tmp_path: Path) -> None:
    for name, size in (("large", 400_000), ("small", 100_000)):
        (tmp_path / name).mkdir()
        written = write_corpus(tmp_path / name, TEXTS, size_bytes=size, seed=3)
        texts = _texts_of(tmp_path / name)
        assert len(list((tmp_path / name).iterdir())) == FILES
        assert size <= written == sum(len(text.encode()) for text in texts)
    small = _texts_of(tmp_path / "small")
    assert _texts_of(tmp_path / "large")[: len(small)] == small


def test_new_words_keep_coming() -> None:
    documents = generate(TEXTS, seed=1)
    seen: list[int] = []
    words: set[bytes] = set()
    for _ in range(3):
        for document in itertools.islice(documents, 100):
            words |= set(re.findall(rb"\w+", document))
        seen.append(len(words))
    assert seen[0] < seen[1] < seen[2]


def test_other_tokens_than_the_peers_are_a_failure() -> None:
    alone = {"peak_rss_bytes": 540_000_000}
    assert exit_status(alone) == 0
    assert exit_status(alone | {"ratio": 10.1, "tokens_equal": True}) == 0
    assert exit_status(alone | {"ratio": 10.1, "tokens_equal": False}) == 1
    assert exit_status(alone | {"ratio": 4.9, "tokens_equal": True}) == 1
    assert exit_status({"peak_rss_bytes": 2_000_000_000}) == 1
