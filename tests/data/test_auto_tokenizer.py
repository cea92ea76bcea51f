"""A note if transformers' AutoTokenizer makes other tokens than the tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from payload.data.tokenizers import load_hf_tokenizer
from payload.data.writing.tokenizer_check import TokenizerCheck


def llama_2(folder: Path, *, kind: str) -> Path:
    """Write a tokenizer in the form of Llama 2's: the normalizer replaces the spaces."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    words = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), "\u2581"]
    words += [*"abcdefghijklmnopqrstuvwxyz", "\u2581a", "\u2581b"]
    made = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)},
            merges=[("\u2581", "a"), ("\u2581", "b")],
            fuse_unk=True,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": kind, "bos_token": "<s>", "eos_token": "</s>"}
    config["unk_token"] = "<unk>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
def test_the_note_has_the_tokens_of_autotokenizer(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = llama_2(tmp_path / "model", kind=kind)
    tokenizer, _ = load_hf_tokenizer(str(folder))
    lines: list[str] = []
    TokenizerCheck(tokenizer, allow_odd=False, log=lines.append)
    text = "a<s>b <s> c"
    (ours,) = (each.ids for each in tokenizer.encodings([text]))
    theirs = AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False)
    assert (ours != theirs) is (kind == "LlamaTokenizer")
    expected = f"makes other tokens: of '{text}' {theirs}, but tokenizer.json makes {ours}, as this"
    assert [expected in line for line in lines] == ([True] if ours != theirs else [])
