"""The tokenizer and the chat template in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.llama_cpp import EOS
from payload.core.errors import CheckpointError, ExitCode
from payload.data.tokenizers import load_hf_tokenizer
from payload.data.tokenizers.hf import hf_tokenizer
from payload.export.vocabulary import Vocabulary, read_vocabulary
from tests.export.models import (
    VOCAB,
    change_config,
    complaint,
    export,
    make_gpt2,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_file_has_the_tokenizer_and_the_chat_template(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    source = make_gpt2(tmp_path / "model")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    assert export(source, tmp_path / "out.gguf") == ExitCode.OK
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file="out.gguf")
    own = AutoTokenizer.from_pretrained(source)
    text = "Grüße, 世界! It's 1234 \n\n  lines<|endoftext|>"
    assert read(text)["input_ids"] == own(text)["input_ids"]
    assert read.chat_template == "{{ messages[0].content }}"
    assert read.eos_token_id == EOS


def change_tokenizer(folder: Path, name: str, **changes: Any) -> None:
    path = folder / name
    raw = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(raw | changes), encoding="utf-8")


def around(before: list[str], after: list[str], ids: Mapping[str, int]) -> dict[str, Any]:
    """Return a post-processor that puts tokens around a text."""
    single = [{"SpecialToken": {"id": text, "type_id": 0}} for text in before]
    single += [{"Sequence": {"id": "A", "type_id": 0}}]
    single += [{"SpecialToken": {"id": text, "type_id": 0}} for text in after]
    known = {text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in before + after}
    parts = {"single": single, "pair": [], "special_tokens": known}
    return {"type": "TemplateProcessing", **parts}


def test_tokens_around_a_text_are_those_of_the_gguf_file_or_refused(tmp_path: Path) -> None:
    source = make_gpt2(tmp_path / "model")
    ids = {"!": 0, "#": 2, "<|endoftext|>": EOS}

    def vocabulary(*, bos: str, before: list[str], after: list[str]) -> Vocabulary:
        change_tokenizer(source, "tokenizer.json", post_processor=around(before, after, ids))
        change_tokenizer(source, "tokenizer_config.json", bos_token=bos)
        return read_vocabulary(source, rows=VOCAB, eos=None)

    found = vocabulary(bos="!", before=["!"], after=["<|endoftext|>"])
    assert (found.adds_bos, found.adds_eos, found.special["bos"]) == (True, True, 0)
    found = vocabulary(bos="!", before=[], after=[])
    assert not found.adds_bos and not found.adds_eos
    for before, after, words in (
        (["#"], [], "adds '#' before each text, but llama.cpp can add only the bos_token"),
        (["!", "#"], [], "adds '!', '#' before"),
        (["!"], ["#"], "adds '#' after each text, but llama.cpp can add only the eos_token"),
    ):
        with pytest.raises(CheckpointError, match=words):
            vocabulary(bos="!", before=before, after=after)


def test_the_file_ends_texts_with_the_token_that_prepare_ends_them_with(tmp_path: Path) -> None:
    source = make_gpt2(tmp_path / "model")
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    declared = {**raw["added_tokens"][0], "id": 65, "content": "b"}
    change_tokenizer(source, "tokenizer.json", added_tokens=[declared, *raw["added_tokens"]])
    change_tokenizer(source, "special_tokens_map.json", eos_token="b")
    _, folder = load_hf_tokenizer(str(source))
    tokenizer = hf_tokenizer(folder, name="x")
    found = read_vocabulary(source, rows=VOCAB, eos=EOS)
    assert tokenizer.end == (found.special["eos"],) == (65,)
    (source / "special_tokens_map.json").unlink()
    change_tokenizer(source, "tokenizer_config.json", eos_token=None)
    change_tokenizer(source, "generation_config.json", eos_token_id=[66, EOS])
    assert read_vocabulary(source, rows=VOCAB, eos=EOS).special["eos"] == 66
    (source / "generation_config.json").unlink()
    change_config(source, eos_token_id=None)
    assert read_vocabulary(source, rows=VOCAB, eos=EOS).special["eos"] == EOS


def test_several_chat_templates_keep_their_names(tmp_path: Path) -> None:
    import gguf

    source, file = make_gpt2(tmp_path / "model"), tmp_path / "out.gguf"
    templates = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    change_tokenizer(source, "tokenizer_config.json", chat_template=templates)
    assert export(source, file) == ExitCode.OK
    fields = gguf.GGUFReader(file).fields
    assert fields["tokenizer.chat_template"].contents() == "one"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "two"
    (source / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read"):
        read_vocabulary(source, rows=VOCAB, eos=None)


def test_a_pre_tokenizer_unknown_to_llama_cpp_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_gpt2(tmp_path / "model")
    raw = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    raw["pre_tokenizer"] = {"type": "Whitespace"}
    (source / "tokenizer.json").write_text(json.dumps(raw), encoding="utf-8")
    assert "llama.cpp does not support its pre-tokenizer" in complaint(
        export(source, tmp_path / "o.gguf"), capsys
    )
    (source / "tokenizer.json").unlink()
    assert "needs the tokenizer" in complaint(export(source, tmp_path / "o.gguf"), capsys)
