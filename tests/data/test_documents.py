"""Long documents in pieces."""

from __future__ import annotations

import io
import random

import pytest

from payload.data.sources import documents
from payload.data.sources.documents import last_safe_cut, read_pieces
from payload.data.tokenizers.gpt2 import gpt2_encoding

SPACES = [" ", "  ", "\n", "\n\n ", "\t", "\u00a0", "\u3000 ", " \u2028", "\r\n"]
WORDS = ["it's", "caf\u00e9", "x" * 40, "12.5", "!!", "\u65e5\u672c", "\U0001f600", "_a(b)"]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_have_the_tokens_of_the_whole(seed: int) -> None:
    chosen = random.Random(seed)
    parts = [chosen.choice(WORDS if chosen.random() < 0.6 else SPACES) for _ in range(300)]
    text = "".join(parts)
    data = text.encode()
    encoding = gpt2_encoding()
    tokens: list[int] = []
    while len(data) > 100:
        place = last_safe_cut(data[: chosen.randint(90, len(data))])
        if place is None:
            break
        tokens += encoding.encode_ordinary(data[:place].decode())
        data = data[place:]
    assert tokens, "at least one cut"
    assert tokens + encoding.encode_ordinary(data.decode()) == encoding.encode_ordinary(text)


def test_text_without_white_space_has_no_place_to_cut() -> None:
    assert last_safe_cut(b"x" * 1000) is None
    assert last_safe_cut(b" x") is None


def test_unbroken_text_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PIECE_BYTES", 100)
    text = "\u65e5" * 500
    pieces = list(read_pieces(io.BytesIO(text.encode())))
    assert "".join(piece.decode() for piece, _ in pieces) == text
    assert [is_last for _, is_last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert max(len(piece) for piece, _ in pieces) <= 104


def test_an_empty_document_is_one_empty_piece() -> None:
    assert list(read_pieces(io.BytesIO(b""))) == [(b"", True)]
