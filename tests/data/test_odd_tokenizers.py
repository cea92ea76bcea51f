"""prepare rejects a tokenizer whose tokens do not represent the text, and reports measurements."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.core.errors import DataError
from payload.data.tokenizers import load_tokenizer
from payload.data.writing.encoder_choice import ReferenceEncoder
from payload.data.writing.tokenizer_check import TokenizerCheck
from payload.formats.data_folder import load_meta
from tests.data.running import run_here, stdlib_texts
from tests.support.smollm2 import smollm2_folder

_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
_END = {
    "id": 0,
    "content": "</s>",
    "single_word": False,
    "lstrip": False,
    "rstrip": False,
    "normalized": False,
    "special": True,
}
_TEMPLATE = (
    "{% for m in messages %}"
    "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %} "
    "{% endfor %}"
)
_SENTENCE = "The quick brown fox jumps over the lazy dog"


def odd_tokenizer(folder: Path, model: dict[str, Any], **parts: object) -> Path:
    """Write a tokenizer.json with an end-of-text token."""
    folder.mkdir(parents=True)
    raw = {"version": "1.0", "added_tokens": [_END], "model": model, **parts}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "</s>", "chat_template": _TEMPLATE})
    )
    return folder


def empty(folder: Path) -> Path:
    """Write a byte-level tokenizer without a vocabulary."""
    model = {"type": "BPE", "vocab": {"</s>": 0}, "merges": []}
    return odd_tokenizer(folder, model, pre_tokenizer=_BYTE_LEVEL, decoder=_BYTE_LEVEL)


def words(folder: Path, *known: str, **parts: object) -> Path:
    """Write a tokenizer with one token for each known word, and a token for unknown words."""
    vocabulary = {word: number for number, word in enumerate(["</s>", "<unk>", *known])}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
    return odd_tokenizer(folder, model, **{"pre_tokenizer": {"type": "Whitespace"}, **parts})


def rows_of(task: str) -> list[dict[str, object]]:
    """Return rows of a task."""
    found: list[dict[str, object]] = []
    for number in range(40):
        text = f"{_SENTENCE} {number}"
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
        tasks: dict[str, dict[str, object]] = {
            "text": {"text": text},
            "classify": {"text": text, "label": number % 2},
            "chat": {"messages": turns},
            "preference": {"prompt": text, "chosen": text, "rejected": "No"},
        }
        found.append(tasks[task])
    return found


def prepare(
    tmp_path: Path, tokenizer: Path, *more: object, task: str = "text"
) -> subprocess.CompletedProcess[str]:
    """Prepare rows of a task with a tokenizer."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows_of(task)))
    return run_here(
        "prepare", "--task", task, "--source", "jsonl", "--input", source,
        "--tokenizer", tokenizer, "--out", tmp_path / "out", *more,
    )  # fmt: skip


def test_a_vocabulary_without_tokens_is_refused(tmp_path: Path) -> None:
    model = {"type": "BPE", "vocab": {}, "merges": []}
    with pytest.raises(DataError, match="its vocabulary has no tokens"):
        load_tokenizer(str(odd_tokenizer(tmp_path / "model", model, added_tokens=[])))


@pytest.mark.processes
@pytest.mark.parametrize("task", ["text", "classify", "chat", "preference"])
def test_an_empty_vocabulary_is_refused_by_every_task(tmp_path: Path, task: str) -> None:
    done = prepare(tmp_path, empty(tmp_path / "model"), task=task)

    assert done.returncode == 10
    assert f"bytes of text became no token: '{_SENTENCE} 0" in done.stderr
    assert "--allow-odd-tokenizer." in done.stderr
    assert not (tmp_path / "out").exists()


def test_merges_on_which_the_package_would_end_the_process_are_refused(tmp_path: Path) -> None:
    model = {
        **{"type": "BPE", "vocab": {"</s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        "continuing_subword_prefix": "##",
    }
    folder = odd_tokenizer(tmp_path / "tokenizer", model)
    with pytest.raises(DataError, match=r"merge \['a', 'b'\] lacks model.continuing_subword_pre"):
        load_tokenizer(str(folder))
    model |= {"vocab": {"</s>": 0, "a": 1, "##b": 2, "ab": 3}, "merges": [["a", "##b"]]}
    load_tokenizer(str(odd_tokenizer(tmp_path / "valid", model)))


@pytest.mark.parametrize(
    "steps",
    [
        [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16}] * 8,
        [{"type": "Replace", "pattern": {"Regex": "."}, "content": "ab" * 1000}] * 3,
        [{"type": "Prepend", "prepend": "ab" * 1000}],
    ],
)
def test_a_normalizer_or_decoder_that_multiplies_a_text_is_refused(
    steps: list[dict[str, Any]], tmp_path: Path
) -> None:
    parts = {"normalizer": {"type": "Sequence", "normalizers": steps}}
    with pytest.raises(DataError, match=r"its normalizer can make a text \d+ times as long"):
        load_tokenizer(str(words(tmp_path / "one", "a", **parts)))
    parts = {"decoder": {"type": "Sequence", "decoders": steps}}
    with pytest.raises(DataError, match=r"its decoder can make a text \d+ times as long"):
        load_tokenizer(str(words(tmp_path / "two", "a", **parts)))


@pytest.mark.parametrize("number", [7, 70_000])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_token_around_a_text_beyond_the_vocabulary_is_refused(
    number: int, place: str, tmp_path: Path
) -> None:
    token = {"SpecialToken": {"id": "</s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    around = {
        "type": "TemplateProcessing",
        "single": [token, text] if place == "before" else [text, token],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"</s>": {"id": "</s>", "ids": [number], "tokens": ["</s>"]}},
    }
    folder = words(tmp_path / "tokenizer", "a", "b", post_processor=around)
    with pytest.raises(DataError, match=f"puts token {number} around a text, .* token is 3"):
        load_tokenizer(str(folder))


def test_the_flag_continues_with_a_note(tmp_path: Path) -> None:
    done = prepare(tmp_path, empty(tmp_path / "model"), "--allow-odd-tokenizer", task="classify")

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Continuing because of --allow-odd-tokenizer.") == 3
    assert "1,830 bytes of text became 0 tokens, no tokens: expected 0.5 to 20." in done.stderr
    meta = load_meta(tmp_path / "out")
    assert meta.train_tokens + meta.val_tokens == 40


def test_unknown_tokens_are_measured(tmp_path: Path) -> None:
    known = [*_SENTENCE.split(), *map(str, range(30))]

    done = prepare(tmp_path, words(tmp_path / "model", *known))

    assert done.returncode == 10
    assert "2.5% of the tokens are the unknown token 1; the limit is 1%" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_vocabulary_of_all_words_is_accepted(tmp_path: Path) -> None:
    known = [*_SENTENCE.split(), *map(str, range(40))]

    assert prepare(tmp_path, words(tmp_path / "model", *known)).returncode == 0


@pytest.mark.parametrize("copies", [1, 50])
def test_text_that_decoding_loses_is_measured(tmp_path: Path, copies: int) -> None:
    """Documents of 80 kB are included, of which the beginnings are decoded."""
    known = [*_SENTENCE.split(), *map(str, range(40))]
    cut = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"String": "fox"},
                "behavior": "Removed",
                "invert": False,
            },
            {"type": "Whitespace"},
        ],
    }

    tokenizer = words(tmp_path / "model", *known, pre_tokenizer=cut)
    source = tmp_path / "texts.jsonl"
    texts = [str(row["text"]) for row in rows_of("text")]
    if copies == 1:
        rows = [{"text": text} for text in texts]
    else:
        rows = [{"text": " ".join(texts) * copies} for _ in range(3)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_here(
        "prepare", "--source", "jsonl", "--input", source, "--tokenizer", tokenizer,
        "--out", tmp_path / "out",
    )  # fmt: skip

    assert done.returncode == 10
    assert re.search(
        r"decoding the tokens loses 8\.\d% of the characters of a sample, .* limit is 1%",
        done.stderr,
    ), done.stderr


def test_what_the_normalizer_changes_is_no_loss(tmp_path: Path) -> None:
    known = [*_SENTENCE.lower().split(), *map(str, range(40))]
    lower = words(tmp_path / "model", *known, normalizer={"type": "Lowercase"})

    assert prepare(tmp_path, lower).returncode == 0


@pytest.mark.parametrize(
    ("content", "measured"),
    [("x" * 50, "50 bytes a token"), ("\u00e9" * 4 + " x", "0.476 bytes a token")],
)
def test_odd_rates_of_bytes_a_token_are_refused(
    tmp_path: Path, content: str, measured: str
) -> None:
    """Whole lines as tokens, and characters that become five tokens each."""
    known = ["x", "x" * 50]
    parts: dict[str, object] = {}
    if len(content) < 50:
        known = ["e", "x"]
        parts = {
            "normalizer": {
                "type": "Replace",
                "pattern": {"String": "\u00e9"},
                "content": " e e e e e",
            }
        }
    tokenizer = load_tokenizer(str(words(tmp_path / "model", *known, **parts)))
    check = TokenizerCheck(tokenizer, allow_odd=False, log=lambda note: None)
    texts = [content.encode()] * 8
    encoded = ReferenceEncoder(tokenizer).encode(texts)
    check.add(texts, encoded.tokens, encoded.offsets)

    with pytest.raises(DataError, match=measured):
        check.finish()


@pytest.mark.parametrize(("rows", "is_fit"), [(50, False), (51, True), (102, True), (104, False)])
def test_the_vocabulary_fits_the_model_beside_it(tmp_path: Path, rows: int, is_fit: bool) -> None:
    folder = words(tmp_path / "model", *_SENTENCE.split(), *map(str, range(40)))
    (folder / "config.json").write_text(json.dumps({"vocab_size": rows}))

    done = prepare(tmp_path, folder)

    assert (done.returncode == 0) == is_fit
    said = f"has tokens up to 50, but config.json in the same folder has vocab_size = {rows}"
    assert (said in done.stderr) != is_fit


def test_a_text_of_spaces_or_of_what_a_normalizer_removes_may_become_no_token(
    tmp_path: Path,
) -> None:
    normalizer = {"type": "Replace", "pattern": {"String": "\u200b"}, "content": ""}
    tokenizer = load_tokenizer(str(words(tmp_path / "model", "x", normalizer=normalizer)))
    check = TokenizerCheck(tokenizer, allow_odd=False, log=lambda note: None)
    texts = [each.encode() for each in ("x x x", "", " \n", "\u200b")]

    check.add_rows(texts, tokenizer.encode_texts(texts))
    check.finish()


@pytest.mark.parametrize("name", ["gpt2", "smollm2"])
def test_a_real_tokenizer_on_real_text_is_not_odd(name: str) -> None:
    tokenizer = load_tokenizer("gpt2" if name == "gpt2" else str(smollm2_folder()))
    check = TokenizerCheck(tokenizer, allow_odd=False, log=lambda note: None)
    texts = [text.encode() for text in stdlib_texts(min_bytes=1)[::40]]
    encoded = ReferenceEncoder(tokenizer).encode(texts)

    check.add(texts, encoded.tokens, encoded.offsets)
    check.finish()

    assert isinstance(encoded.tokens, np.ndarray)


def test_a_refusal_at_the_end_is_repeated_by_the_next_run(tmp_path: Path) -> None:
    known = [*_SENTENCE.split(), *map(str, range(30))]
    folder = words(tmp_path / "model", *known)

    first, second = prepare(tmp_path, folder), prepare(tmp_path, folder)
    third = prepare(tmp_path, folder, "--allow-odd-tokenizer")

    assert (first.returncode, second.returncode, third.returncode) == (10, 10, 0)
    assert "note: tokenizer" in third.stderr
