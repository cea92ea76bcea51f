"""The ranges of tokens of rendered texts, compared with the package `tokenizers`."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.data.tasks.sample_encoder import SampleEncoder
from payload.data.tasks.trained_tokens import in_spans
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.gpt2 import gpt2_tokenizer
from payload.data.tokenizers.hf import HfTokenizer
from payload.data.writing.encoder_choice import GigatokenEncoder
from tests.support.chat_data import END, START, make_tokenizer

_PIECES = (
    *("the", " a", "  of", "\n", "\n\n", "\t", " ", "one two", "0123", "it's", "!?", START, END),
    *("\u00e9", "e\u0301", "\u65e5\u672c", "\U0001f469\u200d\U0001f4bb", "\u00a0", "\u3000 "),
    *("\u0e01\u0e33", "\u0301", "\ufffd"),
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CASES: dict[str, Mapping[str, Any]] = {
    "plain": {},
    "trimmed": {"post_processor": _BYTES},
    "trimmed in a sequence": {"post_processor": {"type": "Sequence", "processors": [_BYTES]}},
    "untrimmed": {"post_processor": {**_BYTES, "trim_offsets": False}},
    "normalized": {"normalizer": {"type": "NFC"}},
    "digits": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTES],
        }
    },
}
_REFERENCE_CASES: dict[str, Mapping[str, Any]] = {
    "prefix space": {"pre_tokenizer": {**_BYTES, "add_prefix_space": True}},
    "lower case": {"normalizer": {"type": "Lowercase"}},
}


def tokenizer_with(folder: Path, changes: Mapping[str, Any]) -> HfTokenizer:
    path = make_tokenizer(folder) / "tokenizer.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**raw, **changes}), encoding="utf-8")
    return load_hf_tokenizer(str(folder))[0]


def random_texts(count: int) -> list[str]:
    draw = random.Random(3)
    return ["".join(draw.choices(_PIECES, k=draw.randint(0, 30))) for _ in range(count)]


@pytest.mark.parametrize("case", _CASES)
def test_gigatoken_gives_the_tokens_and_ranges_of_tokenizers(case: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_with(tmp_path, _CASES[case])
    encoder = SampleEncoder(tokenizer)
    texts = random_texts(400)
    exact = encoder.encode(texts)
    encoder.choose_fast(seed=1, log=lambda line: None)
    assert encoder.name.startswith("gigatoken ")
    found = encoder.encode(texts)
    for name in ("tokens", "offsets", "starts", "ends"):
        np.testing.assert_array_equal(getattr(found, name), getattr(exact, name))


@pytest.mark.parametrize("case", _REFERENCE_CASES)
def test_tokens_that_are_not_the_bytes_of_a_text_come_from_tokenizers(
    case: str, tmp_path: Path
) -> None:
    encoder = SampleEncoder(tokenizer_with(tmp_path, _REFERENCE_CASES[case]))
    encoder.choose_fast(seed=1, log=lambda line: None)
    assert encoder.name.startswith("tokenizers ")


def test_a_token_is_trained_if_a_character_of_it_is_in_a_span() -> None:
    offsets = [(0, 2), (2, 5), (5, 5), (6, 8), (8, 9)]
    assert in_spans(offsets, [(1, 2), (5, 6), (8, 9)]).tolist() == [True, False, True, False, True]
    assert in_spans(offsets, [(3, 7)]).tolist() == [False, True, True, True, False]
    assert not in_spans(offsets, []).any()
    assert in_spans([], [(0, 1)]).tolist() == []


def test_encoders_use_the_processors_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = gpt2_tokenizer()
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert not GigatokenEncoder(tokenizer, tokenizer.fast(), seed=0)._is_parallel
