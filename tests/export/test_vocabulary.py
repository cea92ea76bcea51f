"""The vocabulary of a GGUF file: its tokens are those of the tokenizer.json, or it is refused."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import CheckpointError
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.gguf import write_tokenizer
from payload.data.tokenizers.pre_tokenizers import LLAMA3, PREPEND_SPACE, SPACES, TEKKEN
from payload.export.vocabulary import Vocabulary, read_vocabulary
from tests.data.running import stdlib_texts
from tests.data.test_hf_tokenizer import trained_tokenizer

ROWS = 710
ADDED = {
    **{"id": 700, "content": "<x>", "special": False},
    **dict.fromkeys(("normalized", "single_word", "lstrip", "rstrip"), False),
}
TEXTS = (
    "Hello 123 two",
    "  lead",
    "\n\nabc",
    "<s>foo</s> bar",
    "</s>a",
    "a <x> b<x>c  <x>  d",
    "é☃",
)
GEMMA_SPLIT = {
    **{"type": "Split", "pattern": {"String": " "}},
    **{"behavior": "MergedWithPrevious", "invert": False},
}
Change = Callable[[dict[str, Any]], object]


@functools.cache
def sentencepiece() -> str:
    """Return a tokenizer.json like Llama 2's, trained on real text."""
    from tokenizers import Tokenizer, models, normalizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    texts = [text[:20_000] for text in stdlib_texts(min_bytes=100_000)[:4]]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    raw = json.loads(tokenizer.to_str())
    raw["added_tokens"] = [*raw["added_tokens"][:3], ADDED]
    return json.dumps(raw)


def folder_with(path: Path, raw: Mapping[str, Any]) -> Path:
    path.mkdir()
    (path / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    (path / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    return path


def write_file(path: Path, vocabulary: Vocabulary, *, has_bos_key: bool = True) -> Path:
    """Write a GGUF file with a vocabulary and one small tensor."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types([int(kind) for kind in vocabulary.kinds])
    if vocabulary.scores:
        writer.add_token_scores(list(vocabulary.scores))
        writer.add_add_space_prefix(vocabulary.adds_space)
    if vocabulary.merges:
        writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(vocabulary.special["bos"])
    writer.add_eos_token_id(vocabulary.special["eos"])
    if has_bos_key:
        writer.add_add_bos_token(vocabulary.adds_bos)
    writer.add_tensor("output_norm.weight", np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokens(folder: Path) -> list[tuple[int, ...]]:
    """Return the tokens of each text with those around it."""
    tokenizer, _ = load_hf_tokenizer(str(folder))
    return [
        (*tokenizer.begin, *tokenizer.encode_one(text.encode()).tolist(), *tokenizer.end)
        for text in TEXTS
    ]


def without_prefix(raw: dict[str, Any]) -> None:
    raw["normalizer"] = dict(SPACES)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda raw: None, id="Llama 2"),
        pytest.param(without_prefix, id="no space before a text"),
        pytest.param(
            lambda raw: raw.update(normalizer=dict(SPACES), pre_tokenizer=GEMMA_SPLIT), id="Gemma"
        ),
    ],
)
def test_a_sentencepiece_vocabulary_comes_back_with_the_same_tokens(
    change: Change, tmp_path: Path
) -> None:
    raw = json.loads(sentencepiece())
    change(raw)
    source, read = folder_with(tmp_path / "source", raw), tmp_path / "read"
    read.mkdir()
    file = write_file(tmp_path / "a.gguf", read_vocabulary(source, rows=ROWS, eos=None))
    write_tokenizer(file, read)
    assert tokens(read) == tokens(source)
    ours, _ = load_hf_tokenizer(str(read))
    assert ours.decode(ours.encode_one(b"  two spaces").tolist()) == "  two spaces"


@pytest.mark.parametrize(("kind", "pattern"), [("llama-bpe", LLAMA3), ("tekken", TEKKEN)])
@pytest.mark.parametrize("has_bos_key", [True, False])
def test_a_byte_level_vocabulary_gets_the_steps_that_llama_cpp_adds_by_its_name(
    kind: str, pattern: str, has_bos_key: bool, tmp_path: Path
) -> None:
    raw = json.loads(trained_tokenizer("llama3", bos=True))
    raw["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": pattern}
    raw["model"]["ignore_merges"] = True
    # No merge makes this text: it is one token only where merges are ignored.
    raw["model"]["vocab"]["lead"] = len(raw["model"]["vocab"])
    source, read = folder_with(tmp_path / "source", raw), tmp_path / "read"
    read.mkdir()
    vocabulary = read_vocabulary(source, rows=ROWS, eos=None)
    assert vocabulary.pre == kind and vocabulary.adds_bos
    file = write_file(tmp_path / "a.gguf", vocabulary, has_bos_key=has_bos_key)
    write_tokenizer(file, read)
    assert tokens(read) == tokens(source)
    assert tokens(read)[0][0] == vocabulary.special["bos"]


def test_a_vocabulary_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = folder_with(tmp_path / "source", json.loads(sentencepiece()))
    content = write_file(tmp_path / "a.gguf", read_vocabulary(source, rows=ROWS, eos=None))
    name = b"tokenizer.ggml.model"
    before = content.read_bytes()
    start = before.index(name) + len(name)
    content.write_bytes(before[:start] + before[start:].replace(b"llama", b"plamo", 1))
    (tmp_path / "read").mkdir()
    with pytest.raises(CheckpointError, match="tokenizer"):
        write_tokenizer(content, tmp_path / "read")


def set_words(step: Mapping[str, Any] | None, *, keeps: bool = True) -> Change:
    """Return a change of the pre-tokenizer; without `keeps`, the normalizer is removed."""

    def change(raw: dict[str, Any]) -> None:
        raw["pre_tokenizer"] = step
        if not keeps:
            raw["normalizer"] = None

    return change


def set_flag(flag: str) -> Change:
    return lambda raw: raw["added_tokens"][-1].update({flag: True})


def metaspace(**more: Any) -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", **more}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (set_words({"type": "Digits", "individual_digits": True}), "its pre-tokenizer"),
        (set_words({"type": "Digits", "individual_digits": True}, keeps=False), "pre-tokenizer"),
        (set_words(None, keeps=False), "its pre-tokenizer"),
        (set_words(metaspace(split=True), keeps=False), "its pre-tokenizer"),
        (set_words(metaspace(split=False, replacement="_"), keeps=False), "its pre-tokenizer"),
        (lambda raw: raw.update(normalizer=dict(PREPEND_SPACE)), "its normalizer"),
        (lambda raw: raw["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix = '</w>'"),
        (set_flag("lstrip"), "'<x>' has lstrip = true"),
        (set_flag("rstrip"), "'<x>' has rstrip = true"),
        (set_flag("single_word"), "'<x>' has single_word = true"),
    ],
)
def test_a_sentencepiece_tokenizer_with_other_steps_than_llama_cpps_is_refused(
    change: Change, problem: str, tmp_path: Path
) -> None:
    raw = json.loads(sentencepiece())
    change(raw)
    with pytest.raises(CheckpointError, match=problem):
        read_vocabulary(folder_with(tmp_path / "source", raw), rows=ROWS, eos=None)


@pytest.mark.parametrize(
    ("number", "problem"),
    [
        (ROWS, rf"the largest token id is {ROWS}, but the model's embedding has {ROWS} rows"),
        (-1, "the token id -1 is negative"),
    ],
)
def test_a_token_without_a_row_is_named(number: int, problem: str, tmp_path: Path) -> None:
    raw = json.loads(sentencepiece())
    raw["model"]["vocab"]["lead"] = number
    with pytest.raises(CheckpointError, match=problem):
        read_vocabulary(folder_with(tmp_path / "source", raw), rows=ROWS, eos=None)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda steps: steps[0].update(behavior="Removed"), "its pre-tokenizer"),
        (lambda steps: steps[0].update(invert=True), "its pre-tokenizer"),
        (lambda steps: steps[1].update(use_regex=True), "its pre-tokenizer"),
        (lambda steps: steps[1].update(add_prefix_space=True), "its pre-tokenizer"),
        (lambda steps: steps[0].update(pattern={"Regex": TEKKEN}), "model.ignore_merges = False"),
    ],
)
def test_a_byte_level_tokenizer_with_other_steps_than_llama_cpps_is_refused(
    change: Callable[[list[dict[str, Any]]], object], problem: str, tmp_path: Path
) -> None:
    raw = json.loads(trained_tokenizer("llama3", bos=False))
    change(raw["pre_tokenizer"]["pretokenizers"])
    with pytest.raises(CheckpointError, match=problem):
        read_vocabulary(folder_with(tmp_path / "source", raw), rows=ROWS, eos=None)
