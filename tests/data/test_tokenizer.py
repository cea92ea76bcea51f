"""The packaged GPT-2 tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiktoken_ext.openai_public import r50k_pat_str

from payload.core.errors import DataError
from payload.data.tokenizers import gpt2 as tokenizer
from payload.data.tokenizers.gpt2 import END_OF_TEXT, VOCAB_SIZE, gpt2_encoding, load_ranks


def test_tokens_are_those_of_gpt2() -> None:
    encoding = gpt2_encoding()
    assert encoding.encode_ordinary("Hello, I'm a language model,") == [
        15496, 11, 314, 1101, 257, 3303, 2746, 11,
    ]  # fmt: skip
    assert encoding.n_vocab == VOCAB_SIZE
    assert encoding.eot_token == END_OF_TEXT


def test_pattern_is_the_one_that_tiktoken_uses() -> None:
    assert r50k_pat_str == tokenizer._PATTERN


def test_damaged_ranks_are_refused_with_both_hashes(tmp_path: Path) -> None:
    damaged = tmp_path / "r50k_base.tiktoken"
    damaged.write_bytes(tokenizer.RANKS_PATH.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"sha256 is .*, not 306cd27f"):
        load_ranks(damaged)


def test_missing_ranks_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone: No such file or directory\. Install"):
        load_ranks(tmp_path / "gone")


def test_loading_keeps_no_copy_in_a_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    gpt2_encoding.cache_clear()
    gpt2_encoding()
    assert list(tmp_path.iterdir()) == []
