"""Streamed text is complete, for any tokenizer and wherever a token cuts a character."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.llama_cpp import add_tokenizer
from payload.data.tokenizer_files import gpt2_files
from payload.generate.codec import find_codec
from payload.generate.detokenizer import StopText, TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    """Decode with a tokenizer of one byte a token."""
    return bytes(tokens).decode("utf-8", errors="replace")


def decode_words(tokens: Sequence[int]) -> str:
    """Decode with a tokenizer that drops the space before the first word, like SentencePiece."""
    return "".join(f" w{token}" for token in tokens).removeprefix(" ")


@pytest.mark.parametrize(
    "content",
    [
        b"plain text",
        "Grüße, 世界 \U0001f600!".encode(),
        b"\xff\xfe broken \xe4\xb8",
        b"\xe4\xb8A\xe4\xb8\x96\xf0\x9f\x98",
        "\ufffd kept".encode(),
        bytes(random.Random(5).randbytes(500)),
    ],
)
def test_the_pieces_of_bytes_joined_are_the_text(content: bytes) -> None:
    stream = TextStream(decode_bytes, prompt=b"prompt")
    pieces = [stream.add(token) for token in content] + [stream.finish()]
    assert "".join(pieces) == content.decode("utf-8", errors="replace") == stream.text


def test_no_piece_has_half_a_character() -> None:
    stream = TextStream(decode_bytes, prompt=())
    assert [stream.add(token) for token in "é世".encode()] == ["", "é", "", "", "世"]


def test_the_space_before_the_first_word_of_a_continuation_is_kept() -> None:
    stream = TextStream(decode_words, prompt=[1, 2])
    assert [stream.add(3), stream.add(4), stream.finish()] == [" w3", " w4", ""]


def test_a_long_text_is_the_same_though_its_first_tokens_are_forgotten() -> None:
    stream = TextStream(decode_words, prompt=[0])
    pieces = [stream.add(token) for token in range(1, 200)]
    assert "w0" + "".join(pieces) == decode_words(range(200))


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("aaab", ["aab"], "a"),
        ("ab ab ac", ["abc"], "ab ab ac"),
        ("ends with sto", ["stop"], "ends with sto"),
        ("nothing", [], "nothing"),
        ("empty", [""], "empty"),
    ],
)
def test_a_text_ends_before_the_first_stop_however_it_is_cut(
    text: str, stops: list[str], expected: str, size: int
) -> None:
    stop = StopText(stops)
    pieces = [stop.add(text[i : i + size]) for i in range(0, len(text), size)]
    assert "".join([*pieces, stop.finish()]) == expected
    assert stop.found == (expected != text)


def test_a_gpt2_that_was_trained_on_another_tokenizers_tokens_has_that_tokenizer(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "eos_token_id": 1000}')
    assert find_codec(tmp_path).vocab_size == 50_257
    (tmp_path / "tokenizer.json").write_bytes(gpt2_files(context=64)["tokenizer.json"])
    assert find_codec(tmp_path).name == "GPT-2's"
    add_tokenizer(tmp_path)
    codec = find_codec(tmp_path)
    assert (codec.vocab_size, codec.stop_tokens) == (1001, frozenset({1000}))
    assert codec.decode(codec.encode("In 1984")) == "In 1984"
    assert max(codec.encode("In 1984")) < 1001
