"""gigatoken compared with tiktoken, and the fallback if they differ."""

from __future__ import annotations

import base64
from itertools import chain
from pathlib import Path
from typing import Any

import gigatoken
import numpy as np
import numpy.typing as npt
import pytest
import tiktoken

from payload.data.tokenizers.gpt2 import (
    _PATTERN,
    Gpt2Fast,
    gpt2_encoding,
    gpt2_tokenizer,
    may_differ,
)
from payload.data.writing import encoder_choice as encode
from payload.data.writing.encoder_choice import (
    TRICKY_TEXTS,
    EncoderMismatchError,
    GigatokenEncoder,
    ReferenceEncoder,
    choose_encoder,
)
from tests.data.running import stdlib_texts

UNICODE_17_LETTER = "\U000323b0"


def fast_encoder(tokenizer_class: Any = gigatoken.Tokenizer) -> GigatokenEncoder:
    return GigatokenEncoder(gpt2_tokenizer(), Gpt2Fast(tokenizer_class), seed=0)


def test_both_encoders_agree_on_real_text_and_nasty_strings() -> None:
    texts = [text.encode() for text in [*TRICKY_TEXTS, *stdlib_texts(min_bytes=2_000_000)]]
    fast, exact = fast_encoder().encode(texts), ReferenceEncoder(gpt2_tokenizer()).encode(texts)
    np.testing.assert_array_equal(fast.offsets, exact.offsets)
    np.testing.assert_array_equal(fast.tokens, exact.tokens)


def test_special_token_text_is_ordinary_text() -> None:
    text = "a<|endoftext|>b"
    encoded = fast_encoder().encode([text.encode()])
    assert encoded.tokens.tolist() == gpt2_encoding().encode_ordinary(text)


def test_documents_with_characters_that_may_differ_go_to_tiktoken() -> None:
    odd = f"{UNICODE_17_LETTER}\u8b9b"
    texts = ["before", odd, "after"]
    encoded = fast_encoder().encode([text.encode() for text in texts])
    expected = [gpt2_encoding().encode_ordinary(text) for text in texts]
    assert encoded.tokens.tolist() == list(chain.from_iterable(expected))
    assert np.diff(encoded.offsets).tolist() == [len(tokens) for tokens in expected]


@pytest.mark.slow
def test_both_encoders_agree_on_every_other_code_point(tmp_path: Path) -> None:
    # With these ranks, a letter, digit or sign joined to the next character is one token of both.
    # So equal tokens mean that the character is in the same class.
    ranks = {bytes([byte]): byte for byte in range(256)}
    for before in b"a1!":
        for byte in range(256):
            ranks[bytes([before, byte])] = len(ranks)
    path = tmp_path / "probe.tiktoken"
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items()))
    exact = tiktoken.Encoding("probe", pat_str=_PATTERN, mergeable_ranks=ranks, special_tokens={})
    fast = gigatoken.Tokenizer.from_tiktoken(path, pretokenizer="gpt2", special_tokens={})
    characters = [chr(c) for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    settled = [c for c in characters if not may_differ(c.encode())]
    assert 6_000 > len(characters) - len(settled) > 0
    probes = [f"a{c}\n1{c}\n!{c}\n" for c in settled]
    for start in range(0, len(probes), 4096):
        text = "".join(probes[start : start + 4096])
        same = exact.encode_ordinary(text) == fast.encode(text).tolist()
        assert same, f"between U+{ord(settled[start]):04X} and the next 4096"


def test_a_new_tokenizer_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = fast_encoder()
    before = encoder._tokenizer
    monkeypatch.setattr(encode, "_MIN_RENEWAL_BYTES", 10)
    monkeypatch.setattr(encode, "_GROWTH_BYTES", 10**15)
    encoder.encode([b"some text, longer than that"])
    assert encoder._tokenizer is before
    monkeypatch.setattr(encode, "_GROWTH_BYTES", -(10**15))
    encoder.encode([b"some text, longer than that"])
    assert encoder._tokenizer is not before


class _Layout:
    """The part of gigatoken's result that is used."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.layout = self
        self.offsets = self.content = self
        self._rows = rows
        self._asked = 0

    @property
    def data(self) -> npt.NDArray[np.uint32] | npt.NDArray[np.int64]:
        self._asked += 1
        if self._asked == 1:
            return np.cumsum([0, *map(len, self._rows)])
        return np.array(list(chain.from_iterable(self._rows)), dtype=np.uint32)


class _WrongOnZebra:
    """A tokenizer that encodes only the text "zebra" incorrectly."""

    @classmethod
    def from_tiktoken(cls, path: Path, **_: object) -> _WrongOnZebra:
        return cls()

    def encode_batch(self, texts: list[bytes], **_: object) -> _Layout:
        rows = [gpt2_encoding().encode_ordinary(text.decode()) for text in texts]
        return _Layout(
            [[*row[:-1], 0] if b"zebra" in t else row for t, row in zip(texts, rows, strict=True)]
        )


def test_a_wrong_token_in_a_sample_is_noticed() -> None:
    encoder = fast_encoder(_WrongOnZebra)
    encoder.check_sample([b"a horse"], encoder.encode([b"a horse"]))
    wrong = encoder.encode([b"a zebra"])
    with pytest.raises(EncoderMismatchError, match="different tokens for b'a zebra'"):
        encoder.check_sample([b"a zebra"], wrong)


def test_an_encoder_that_fails_the_first_check_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gigatoken, "Tokenizer", _WrongOnZebra)
    monkeypatch.setattr(encode, "TRICKY_TEXTS", ("a zebra",))
    said: list[str] = []
    chosen = choose_encoder(gpt2_tokenizer(), seed=0, log=said.append)
    assert isinstance(chosen, ReferenceEncoder)
    assert said == [
        "tokenizer: tiktoken; gigatoken failed a comparison with tiktoken: different tokens"
    ]
