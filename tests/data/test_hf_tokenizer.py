"""prepare --tokenizer with any tokenizer.json, and gigatoken if its tokens are the same."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.core.errors import CheckpointError, DataError
from payload.data.tokenizer_files import gpt2_files
from payload.data.tokenizers import load_hf_tokenizer, load_tokenizer
from payload.data.writing.encoder_choice import (
    TRICKY_TEXTS,
    GigatokenEncoder,
    ReferenceEncoder,
    choose_encoder,
)
from payload.formats.data_folder import load_meta
from payload.formats.tokenizer_identity import GPT2_SHA256, folder_identity, require_same_tokenizer
from tests.data.running import contents, run_here, stdlib_texts
from tests.support.smollm2 import smollm2_folder

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def trained_tokenizer(kind: str, *, bos: bool) -> str:
    """Return the tokenizer.json of a small tokenizer trained on real text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if kind == "digits":
        words = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    elif kind != "gpt2":
        pattern = LLAMA3 if kind == "llama3" else r"\w+|[^\w\s]+|\s+"
        cut = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        words = pre_tokenizers.Sequence([cut, level])
    tokenizer.pre_tokenizer = words
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(stdlib_texts(min_bytes=200_000)[:20], trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    return tokenizer.to_str()


def write_tokenizer(folder: Path, *, kind: str = "gpt2", bos: bool = False) -> Path:
    """Write a small tokenizer trained on real text, in the Hugging Face layout."""
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text(trained_tokenizer(kind, bos=bos), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "model_max_length": 10**30,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.processes  # one makes the cached model, if the cache is empty
def test_prepare_gives_transformers_own_tokens_of_real_text(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    texts = stdlib_texts(min_bytes=1)[::12]
    source = tmp_path / "texts"
    source.mkdir()
    for number, text in enumerate(texts):
        (source / f"{number:04}.txt").write_bytes(text.encode())
    out = tmp_path / "out"

    done = run_here(
        "prepare", "--source", "text", "--input", source, "--tokenizer", smollm2_folder(),
        "--out", out, "--val-fraction", "0.1",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert "documents end with '<|im_end|>' (2), eos_token of tokenizer_config.json" in done.stderr
    assert "gigatoken 0.10.0, checked against tokenizers" in done.stderr
    meta = load_meta(out)
    assert (meta.vocab_size, meta.end_of_text, meta.dtype) == (49152, 2, "uint16")
    found = np.concatenate([np.fromfile(out / n, np.uint16) for n in ("train.bin", "val.bin")])
    documents = np.split(found, np.flatnonzero(found == 2) + 1)[:-1]
    own = AutoTokenizer.from_pretrained(out)
    expected = own(texts)["input_ids"]
    assert sorted(d[:-1].tolist() for d in documents) == sorted(expected)


@pytest.mark.parametrize("kind", ["gpt2", "digits", "llama3"])
def test_gigatoken_gives_the_tokens_of_tokenizers(tmp_path: Path, kind: str) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / kind, kind=kind)))
    texts = [
        t.encode() for t in (*TRICKY_TEXTS, *stdlib_texts(min_bytes=1)[::8], "½½  ½1 x", "</s>a")
    ]

    encoder = choose_encoder(tokenizer, seed=0, log=lambda note: None)
    found, exact = encoder.encode(texts), ReferenceEncoder(tokenizer).encode(texts)

    assert isinstance(encoder, GigatokenEncoder)
    np.testing.assert_array_equal(found.offsets, exact.offsets)
    np.testing.assert_array_equal(found.tokens, exact.tokens)


@pytest.mark.parametrize("flag", ["single_word", "lstrip"])
def test_the_last_of_many_added_tokens_is_compared_too(tmp_path: Path, flag: str) -> None:
    folder = write_tokenizer(tmp_path / "many")
    raw = json.loads((folder / "tokenizer.json").read_text())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = max(raw["model"]["vocab"].values()) + 1
    raw["added_tokens"] += [
        {"id": first + n, "content": f"<many{n}>", "special": False, **flags} for n in range(320)
    ]
    raw["added_tokens"][-1] |= {"content": "foo", flag: True}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = load_tokenizer(str(folder))
    text = b"a food is  foo in food. (foo)"

    encoder = choose_encoder(tokenizer, seed=0, log=lambda note: None)

    assert encoder.encode([text]).tokens.tolist() == tokenizer.encode_one(text).tolist()


def test_a_tokenizer_that_gives_other_tokens_each_time_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "one")
    raw = json.loads((folder / "tokenizer.json").read_text())
    raw["model"]["dropout"] = 0.5
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(DataError, match=r"model\.dropout = 0\.5 makes tokens random"):
        load_tokenizer(str(folder))
    raw["model"]["dropout"] = 0.0
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    load_tokenizer(str(folder))


def added(number: int) -> dict[str, Any]:
    """Return the entry of `</s>` in added_tokens."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": "</s>", "special": True, **flags}


def failing(folder: Path) -> Path:
    """Write a tokenizer that raises for unknown words, and whose decoder panics."""
    folder.mkdir()
    vocabulary = {"a b": 0, "</s>": 1, "a": 2}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<gone>"}
    strip = {"type": "Strip", "content": "a", "start": 5, "stop": 5}
    raw = {"version": "1.0", "added_tokens": [added(1)], "model": model, "decoder": strip}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    config = {
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_tokenizer_that_fails_on_a_text_is_one_line(tmp_path: Path) -> None:
    tokenizer, _ = load_hf_tokenizer(str(failing(tmp_path / "model")))
    calls: list[Any] = [
        lambda: tokenizer.encode_one(b"zebra"),
        lambda: tokenizer.encodings(["zebra"]),
        lambda: tokenizer.decode([2]),  # PanicException, not a subclass of Exception
    ]
    for call in calls:
        with pytest.raises(DataError, match="encoding a text fails: ") as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("task", ["text", "classify", "chat"])
@pytest.mark.processes
def test_prepare_with_a_tokenizer_that_fails_ends_in_one_line(tmp_path: Path, task: str) -> None:
    source = tmp_path / "in.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "zebra"}]
    texts = [{"text": "zebra", "label": n % 2 + 1} for n in range(9)]
    rows = [{"messages": turns}] * 9 if task == "chat" else texts
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run_here(
        "prepare", "--task", task, "--source", "jsonl", "--input", source, "--quiet",
        "--tokenizer", failing(tmp_path / "model"), "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 10
    assert "encoding a text fails: " in done.stderr and "Traceback" not in done.stderr


def test_a_tokenizer_that_gigatoken_does_not_support_goes_through_tokenizers(
    tmp_path: Path,
) -> None:
    tokenizer = load_tokenizer(str(write_tokenizer(tmp_path / "own", kind="own")))
    said: list[str] = []

    encoder = choose_encoder(tokenizer, seed=0, log=said.append)

    assert isinstance(encoder, ReferenceEncoder)
    assert said[0].startswith(
        "tokenizer: tokenizers; the faster gigatoken cannot be used for this tokenizer: Unknown"
    )


@pytest.mark.processes
def test_texts_with_a_byte_that_the_vocabulary_lacks_go_to_tokenizers() -> None:
    tokenizer = load_tokenizer(str(smollm2_folder()))
    encoder = GigatokenEncoder(tokenizer, tokenizer.fast(), seed=0)
    texts = ["ab\x04cd", "a  7", "\u2167  \u2167", "\U00040000"]

    found = encoder.encode([text.encode() for text in texts])

    expected = [tokenizer.encode_one(text.encode()).tolist() for text in texts]
    rows = np.split(found.tokens, found.offsets[1:-1])
    assert [row.tolist() for row in rows] == expected


def test_a_document_begins_with_the_tokenizers_own_token(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path / "bos", bos=True)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    out = tmp_path / "out"

    done = run_here(
        "prepare", "--source", "jsonl", "--input", source, "--tokenizer", folder, "--out", out
    )

    assert done.returncode == 0, done.stderr
    tokens = np.fromfile(out / "train.bin", np.uint16).tolist()
    ids = load_tokenizer(str(folder)).encode_one(b"text 1").tolist()
    assert tokens.count(0) == tokens.count(1) == 9
    assert ",".join(map(str, [0, *ids, 1])) in ",".join(map(str, tokens))


def test_a_folder_with_gpt2s_files_gives_the_same_data_as_the_packaged_one(tmp_path: Path) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    for name, content in gpt2_files(context=1024).items():
        (folder / name).write_bytes(content)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    common = ["prepare", "--source", "jsonl", "--input", source]

    assert run_here(*common, "--out", tmp_path / "a").returncode == 0
    assert run_here(*common, "--tokenizer", folder, "--out", tmp_path / "b").returncode == 0

    identity = folder_identity(folder)
    assert identity is not None and identity.is_gpt2()
    assert identity.vocabulary_sha256 == GPT2_SHA256
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert set(contents(tmp_path / "a")) == {"meta.json", "train.bin", "val.bin"}


def test_data_with_another_tokenizer_is_refused_with_the_command(tmp_path: Path) -> None:
    folder, other = write_tokenizer(tmp_path / "one"), write_tokenizer(tmp_path / "two", kind="own")
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    out = tmp_path / "out"
    words = ["prepare", "--source", "jsonl", "--input", source, "--tokenizer", folder, "--out", out]
    assert run_here(*words).returncode == 0
    meta = load_meta(out)

    require_same_tokenizer(meta, data=out, folder=folder, init="one")
    with pytest.raises(CheckpointError) as caught:
        require_same_tokenizer(meta, data=out, folder=other, init=str(other), error=CheckpointError)

    assert f"--source jsonl --input {source} --tokenizer {other} --out {out}-two" in str(
        caught.value
    )


def test_a_damaged_tokenizer_of_the_data_is_noticed(tmp_path: Path) -> None:
    folder, out = write_tokenizer(tmp_path / "one"), tmp_path / "out"
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    words = ["prepare", "--source", "jsonl", "--input", source, "--tokenizer", folder, "--out", out]
    assert run_here(*words).returncode == 0

    content = (out / "tokenizer.json").read_bytes()
    (out / "tokenizer.json").write_bytes(content.replace(b"BPE", b"BpE"))

    done = run_here("verify", out)
    assert done.returncode == 10
    assert "tokenizer.json: sha256 is" in done.stderr


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer.json", b"{", "not JSON"),
        ("tokenizer.json", b"[]", "the key 'model' is missing"),
        ("tokenizer.json", b'{"model": {"type": "Martian"}}', "cannot be loaded"),
        ("tokenizer.json", b"[" * 100_000, "nested too deeply"),
        ("tokenizer.json", None, "Write tokenizer.json with: "),
        ("tokenizer_config.json", None, "no eos_token in tokenizer_config.json"),
        ("tokenizer_config.json", b"7", "expected an object, got 7"),
        ("tokenizer_config.json", b'{"eos_token": "<gone>"}', "'<gone>' is not in tokenizer.json"),
        ("tokenizer_config.json", b'{"eos_token_id": -1}', "eos_token_id = -1 is not in"),
    ],
)
def test_a_damaged_tokenizer_is_one_line_and_writes_nothing(
    tmp_path: Path, name: str, content: bytes | None, said: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_tokenizer(tmp_path), folder)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)

    with pytest.raises(DataError, match=r"\S") as caught:
        load_tokenizer(str(folder))

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_link_out_of_the_folder_is_refused_and_one_of_the_hubs_cache_is_not(
    tmp_path: Path, name: str
) -> None:
    blobs = small_tokenizer(tmp_path).rename(tmp_path / "blobs")
    (blobs / name).touch()
    for folder in (tmp_path / "model", tmp_path / "snapshots" / "1234"):
        shutil.copytree(blobs, folder)
        (folder / name).unlink()
        (folder / name).symlink_to(blobs / name)

    assert load_tokenizer(str(tmp_path / "snapshots" / "1234")).vocab_size == 3
    with pytest.raises(DataError, match=f"{name}: a link that leads out of its folder"):
        load_tokenizer(str(tmp_path / "model"))


def small_tokenizer(tmp_path: Path) -> Path:
    """Write a vocabulary with a single word, made without training."""
    folder = tmp_path / "small"
    folder.mkdir()
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "</s>": 2}, "merges": []}
    raw = {"version": "1.0", "added_tokens": [added(2)], "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.mark.parametrize("name", ["./gone", "/nowhere/at/all", "no such name"])
def test_an_unknown_tokenizer_name_is_one_line(tmp_path: Path, name: str) -> None:
    done = run_here("prepare", "--source", "stdlib", "--tokenizer", name, "--out", tmp_path / "o")

    assert done.returncode == 10
    assert done.stderr.count("\n") == 1
    assert "the folder does not exist" in done.stderr
    assert not (tmp_path / "o").exists()


def test_a_file_of_the_user_is_never_replaced(tmp_path: Path) -> None:
    folder, out = write_tokenizer(tmp_path / "one"), tmp_path / "out"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")

    done = run_here("prepare", "--source", "stdlib", "--tokenizer", folder, "--out", out)

    assert done.returncode == 10
    assert "differs from the new one, and was not written by `prepare`" in done.stderr
    assert contents(out) == {"tokenizer.json": b"mine"}
