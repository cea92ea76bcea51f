"""JSON Lines: damaged .gz files, lines that are too long, and resuming after them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError
from payload.data.sources.documents import Batch
from payload.data.sources.source_flags import SourceRequest
from payload.data.tasks.text_source import build_source
from tests.data.running import stdlib_texts

LINE_BYTES = 1000


def line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def read(path: Path, cursor: dict[str, Any] | None = None) -> list[Batch]:
    """Return all batches from `cursor` on, with bad documents skipped."""
    source = build_source(SourceRequest(kind="jsonl", inputs=(str(path),), skip_bad=True))
    source.identity()
    source.survey()
    return list(source.batches(cursor or {}))


def documents(batches: Sequence[Batch]) -> list[tuple[int, bytes]]:
    """Return numbers and texts, and the numbers of bad documents with their messages."""
    good = [pair for b in batches for pair in zip(b.numbers, b.pieces, strict=True)]
    bad = [(number, said.encode()) for b in batches for number, _, said in b.skipped]
    return sorted([*good, *bad], key=lambda entry: entry[0])


@pytest.fixture
def long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write lines just around the limit and far beyond it, between short lines."""
    monkeypatch.setattr("payload.data.sources.jsonl.LINE_BYTES", LINE_BYTES)
    monkeypatch.setattr("payload.data.sources.documents.BATCH_BYTES", 1)
    path = tmp_path / "in.jsonl"
    around = [b"x" * (LINE_BYTES + more) + b"\n" for more in range(-2, 3)]
    lines = [*around, b"y" * 2 * 1024 * 1024 + b"\n"]
    path.write_bytes(b"".join(line(f"before {i}") + bad for i, bad in enumerate(lines)))
    with path.open("ab") as file:
        file.write(line("last"))
    return path


def test_a_line_that_is_too_long_affects_no_other_line(long_lines: Path) -> None:
    found = documents(read(long_lines))
    texts = [*(f"before {i}" for i in range(6)), "last"]
    assert found[::2] == [(2 * i, text.encode()) for i, text in enumerate(texts)]
    assert len(found) == 13


def test_reading_resumes_at_any_cursor_after_a_line_that_is_too_long(long_lines: Path) -> None:
    batches = read(long_lines)
    assert len(batches) > 6
    for index, batch in enumerate(batches[:-1]):
        cursor = json.loads(json.dumps(batch.cursor))
        assert documents(read(long_lines, cursor)) == documents(batches[index + 1 :])


def test_a_damaged_gz_is_named_wherever_the_damage_is(tmp_path: Path) -> None:
    sound = gzip.compress(b"".join(map(line, stdlib_texts(min_bytes=20_000)[:20])), mtime=0)
    path = tmp_path / "in.jsonl.gz"
    by_zlib = 0
    # The first ten bytes are the header, which no checksum covers.
    for place in range(10, len(sound), len(sound) // 40):
        damaged = bytearray(sound)
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        try:
            gzip.decompress(damaged)
        except zlib.error:
            by_zlib += 1
        except (OSError, EOFError):
            pass
        with pytest.raises(
            DataError, match=r"in\.jsonl\.gz: damaged gzip file: .* Copy the file again"
        ):
            read(path)
    assert by_zlib, "the checksum alone would have found every damage"
