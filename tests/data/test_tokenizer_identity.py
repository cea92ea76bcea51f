"""Two tokenizers are the same if all settings that change tokens are equal."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.core.errors import CheckpointError, DataError
from payload.data.tokenizer_files import gpt2_files, tokenizer_files
from payload.data.tokenizers import load_tokenizer
from payload.data.tokenizers.gpt2 import Gpt2Tokenizer
from payload.formats.data_folder import load_meta
from payload.formats.tokenizer_identity import (
    GPT2_PIPELINE_SHA256,
    GPT2_SHA256,
    folder_identity,
    identity_of,
    require_same_tokenizer,
)
from payload.generate.codec import find_codec
from tests.data.running import run_here
from tests.data.test_hf_tokenizer import write_tokenizer
from tests.support.data_folders import make_data_folder

Change = Callable[[dict[str, Any]], object]
_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_BEGIN = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {
        "<|endoftext|>": {"id": "<|endoftext|>", "ids": [50256], "tokens": ["<|endoftext|>"]}
    },
}

OTHERS: Mapping[str, Change] = {
    "normalizer": lambda raw: raw.update(normalizer={"type": "Lowercase"}),
    "normalizer in a sequence": lambda raw: raw.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}]}
    ),
    "pre-tokenizer": lambda raw: raw["pre_tokenizer"].update(add_prefix_space=True),
    "no regex": lambda raw: raw["pre_tokenizer"].update(use_regex=False),
    "post-processor": lambda raw: raw.update(post_processor=_BEGIN),
    "added token": lambda raw: raw["added_tokens"].append(
        {"id": 50257, "content": " the", "special": False, **_FLAGS}
    ),
    "flag": lambda raw: raw["added_tokens"][0].update(lstrip=True),
    "model": lambda raw: raw["model"].update(ignore_merges=True),
}
SAME: Mapping[str, Change] = {
    "offsets": lambda raw: raw["pre_tokenizer"].update(trim_offsets=False),
    "decoder": lambda raw: raw.update(decoder=None),
    "lengths": lambda raw: raw.update(
        truncation={"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    ),
    "post-processor": lambda raw: raw.update(post_processor=None),
    "sequence of one": lambda raw: raw.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [raw["pre_tokenizer"]]}
    ),
    "empty sequence": lambda raw: raw.update(normalizer={"type": "Sequence", "normalizers": []}),
    "defaults": lambda raw: raw["model"].update(continuing_subword_prefix=None, fuse_unk=None),
    "no kind": lambda raw: raw["model"].pop("type"),
    "unknown token": lambda raw: raw["model"].update(unk_token="<|endoftext|>"),
    "merges as pairs": lambda raw: raw["model"].update(
        merges=[each.split(" ") for each in raw["model"]["merges"]]
    ),
    "added tokens apart": lambda raw: raw["model"]["vocab"].pop("<|endoftext|>"),
    "special": lambda raw: raw["added_tokens"][0].update(normalized=True, special=False),
}


def in_make_test(changes: Mapping[str, Change], *names: str) -> list[Any]:
    """Return all as parameters; those without a name here run only in `make test-all`.

    Reading and hashing GPT-2's tokenizer takes a second.
    """
    slow = pytest.mark.slow
    return [
        pytest.param(change, id=name, marks=() if name in names else slow)
        for name, change in changes.items()
    ]


@functools.cache
def packaged() -> Mapping[str, bytes]:
    """Return GPT-2's files."""
    return gpt2_files(context=1024)


def gpt2_folder(folder: Path, change: Change | None = None) -> Path:
    """Write GPT-2's tokenizer with a change."""
    folder.mkdir(parents=True)
    for name, content in packaged().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 50256}))
    if change is not None:
        raw = json.loads((folder / "tokenizer.json").read_bytes())
        change(raw)
        (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("change", in_make_test(OTHERS, "normalizer", "added token", "model"))
def test_a_changed_gpt2_is_neither_replaced_nor_the_datas_own(
    tmp_path: Path, change: Change
) -> None:
    folder, data = gpt2_folder(tmp_path / "model", change), make_data_folder(tmp_path / "data")
    meta = replace(load_meta(data), tokenizer_pipeline_sha256=GPT2_PIPELINE_SHA256)

    assert not isinstance(load_tokenizer(str(folder)), Gpt2Tokenizer)
    with pytest.raises(DataError, match="has another tokenizer") as caught:
        require_same_tokenizer(meta, data=data, folder=folder, init=str(folder))
    assert f"--tokenizer {folder} " in str(caught.value)


@pytest.mark.parametrize("change", in_make_test(SAME, "sequence of one", "merges as pairs"))
def test_what_changes_no_token_does_not_change_the_identity(tmp_path: Path, change: Change) -> None:
    folder = gpt2_folder(tmp_path / "model", change)
    raw = json.loads((folder / "tokenizer.json").read_bytes())

    assert identity_of(raw).pipeline_sha256 == GPT2_PIPELINE_SHA256


def test_only_gpt2_itself_is_replaced_by_the_packaged_one(tmp_path: Path) -> None:
    same = gpt2_folder(tmp_path / "same", SAME["sequence of one"])
    other = gpt2_folder(tmp_path / "other", OTHERS["normalizer"])

    assert isinstance(load_tokenizer(str(same)), Gpt2Tokenizer)
    assert find_codec(same).name == "GPT-2's"
    assert find_codec(other).encode("Text") == find_codec(same).encode("text")


@pytest.mark.parametrize("kind", ["gpt2", "digits", "llama3", "own"])
def test_a_file_that_the_package_writes_again_has_the_same_identity(
    tmp_path: Path, kind: str
) -> None:
    from tokenizers import Tokenizer

    folder = write_tokenizer(tmp_path / "one", kind=kind, bos=True)
    before = folder_identity(folder)
    path = str(folder / "tokenizer.json")
    Tokenizer.from_file(path).save(path)

    assert folder_identity(folder) == before


def test_data_of_a_lowercasing_tokenizer_has_its_tokens_and_identity(tmp_path: Path) -> None:
    folder = gpt2_folder(tmp_path / "model", OTHERS["normalizer"])
    source, out = tmp_path / "in.jsonl", tmp_path / "out"
    source.write_text("".join(json.dumps({"text": f"Text {n}"}) + "\n" for n in range(10)))

    done = run_here(
        "prepare", "--source", "jsonl", "--input", source, "--tokenizer", folder, "--out", out
    )

    assert done.returncode == 0, done.stderr
    meta = load_meta(out)
    assert meta.tokenizer_sha256 == GPT2_SHA256
    assert meta.tokenizer_pipeline_sha256 != GPT2_PIPELINE_SHA256
    assert "tokenizer.json" in meta.tokenizer_files
    lower = load_tokenizer("gpt2").encode_one(b"text").tolist()
    assert np.fromfile(out / "train.bin", np.uint16).tolist()[:1] == lower
    with pytest.raises(DataError, match=r"\(the two differ in: normalizer\)"):
        require_same_tokenizer(meta, data=out, folder=gpt2_folder(tmp_path / "plain"), init="plain")


@pytest.mark.parametrize(
    "name",
    [
        "added token",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("normalizer", "pre-tokenizer", "post-processor")
        ),
    ],
)
def test_data_of_an_older_version_is_compared_on_the_packaged_text(
    tmp_path: Path, name: str
) -> None:
    from payload.data.tokenizer_match import require_same_tokens

    data = make_data_folder(tmp_path / "data")
    meta = load_meta(data)
    assert (meta.tokenizer_sha256, meta.tokenizer_pipeline_sha256) == (GPT2_SHA256, "")
    same = gpt2_folder(tmp_path / "same", SAME["sequence of one"])
    other = gpt2_folder(tmp_path / "other", OTHERS[name])

    require_same_tokens(meta, data=data, folder=same, init="same")
    with pytest.raises(CheckpointError, match="'other' has another tokenizer"):
        require_same_tokens(meta, data=data, folder=other, init="other", error=CheckpointError)


def test_older_data_that_carries_its_tokenizer_is_compared_with_that(tmp_path: Path) -> None:
    from payload.data.tokenizer_match import require_same_tokens

    folder, out = write_tokenizer(tmp_path / "one"), tmp_path / "out"
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in range(10)))
    words = ["prepare", "--source", "jsonl", "--input", source, "--tokenizer", folder, "--out", out]
    assert run_here(*words).returncode == 0
    meta = replace(load_meta(out), tokenizer_pipeline_sha256="")
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_bytes())
    # A token that the packaged text lacks: older versions accepted such a tokenizer.
    more = {"id": 9999, "content": "<|more|>", "special": True, **_FLAGS}
    path.write_text(json.dumps({**raw, "added_tokens": [*raw["added_tokens"], more]}))
    require_same_tokens(meta, data=out, folder=folder, init="one")

    path.write_text(json.dumps({**raw, "normalizer": {"type": "NFKC"}}))

    with pytest.raises(DataError, match=r"differ in: normalizer\)"):
        require_same_tokens(meta, data=out, folder=folder, init="one")


def test_a_checkpoint_gets_the_tokenizer_of_the_data_not_the_models_other_one(
    tmp_path: Path,
) -> None:
    data = make_data_folder(tmp_path / "data")
    folder = gpt2_folder(tmp_path / "model", OTHERS["normalizer"])

    files = tokenizer_files(load_meta(data), data=data, source=folder, context=1024)

    assert json.loads(files["tokenizer.json"])["normalizer"] is None


def test_a_checkpoint_gets_no_file_behind_a_link_out_of_the_models_folder(tmp_path: Path) -> None:
    data = make_data_folder(tmp_path / "data")
    folder = gpt2_folder(tmp_path / "model")
    (tmp_path / "secret").write_text("key")
    (folder / "chat_template.jinja").symlink_to("../secret")

    with pytest.raises(CheckpointError, match=r"jinja: a link that leads out of its folder"):
        tokenizer_files(load_meta(data), data=data, source=folder, context=1024)


def test_the_identity_of_gpt2_is_that_of_the_packaged_files() -> None:
    raw = json.loads(gpt2_files(context=1024)["tokenizer.json"])

    identity = identity_of(raw)

    assert identity.pipeline_sha256 == GPT2_PIPELINE_SHA256 and identity.is_gpt2()
    assert identity.vocabulary_sha256 == GPT2_SHA256
    assert load_tokenizer("gpt2").pipeline_sha256 == GPT2_PIPELINE_SHA256


def test_the_packaged_text_is_the_same_everywhere_and_packages_agree_on_it() -> None:
    from payload.data.tokenizer_match import backend_encode, gpt2_encode
    from payload.data.tokenizers.probe import probe_texts, same_tokens

    texts = probe_texts()

    whole = "\0".join(texts).encode()
    assert 80_000 < len(whole) < 120_000
    assert hashlib.sha256(whole).hexdigest() == PROBE_SHA256
    hf = backend_encode(gpt2_files(context=1024)["tokenizer.json"], Path("gpt2"))
    assert same_tokens(gpt2_encode(), hf)


PROBE_SHA256 = "ef7d6f8924fad9c6753404a16dc8773a222ec57128c40a0c42dc01df03f93055"


@pytest.mark.parametrize(
    "raw",
    [
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": ["a"], "id": {}}, 7]},
        {"model": {"vocab": [[]], "merges": [7]}, "added_tokens": {"a": 1}},
        {"model": {"vocab": 7}, "normalizer": {"type": []}, "pre_tokenizer": 7},
        {"model": {}, "post_processor": {"type": "TemplateProcessing", "single": [7, {}]}},
        {"model": {}, "post_processor": {"type": "BertProcessing", "cls": 7}},
        {"model": {}, "normalizer": {"type": "Sequence", "normalizers": 7}},
    ],
)
def test_the_identity_of_a_damaged_file_is_some_hash(raw: dict[str, Any]) -> None:
    assert len(identity_of(raw).pipeline_sha256) == 64


def test_a_file_that_is_nested_deeply_is_one_line() -> None:
    step: dict[str, Any] = {"type": "Lowercase"}
    for _ in range(100_000):
        step = {"type": "Sequence", "normalizers": [step]}
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"more": nested}

    assert len(identity_of({"model": {}, "normalizer": step}).pipeline_sha256) == 64
    with pytest.raises(DataError, match="nested too deeply"):
        identity_of({"model": {}, "normalizer": {"type": "Odd", "value": nested}})


def old_folder(folder: Path, *, first: str | None = None) -> Path:
    """Write only GPT-2's vocab.json and merges.txt; `first` is swapped with the last token."""
    folder.mkdir(parents=True)
    model = json.loads(packaged()["tokenizer.json"])["model"]
    vocabulary, merges = model["vocab"], model["merges"]
    if first is not None:
        last = merges[-1].replace(" ", "")
        vocabulary[first], vocabulary[last] = vocabulary[last], vocabulary[first]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 50256}))
    return folder


def test_a_vocabulary_without_tokenizer_json_is_compared(tmp_path: Path) -> None:
    data = make_data_folder(tmp_path / "data")
    meta = load_meta(data)
    own = old_folder(tmp_path / "own")
    require_same_tokenizer(meta, data=data, folder=own, init="own")
    files = tokenizer_files(meta, data=data, source=own, context=64)
    assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
    find_codec(own)

    other = old_folder(tmp_path / "other", first="!")
    with pytest.raises(CheckpointError, match=r"'other' has vocab\.json but no tokenizer\.json, "):
        require_same_tokenizer(meta, data=data, folder=other, init="other", error=CheckpointError)
    with pytest.raises(
        CheckpointError,
        match=r"is not GPT-2's\. Write tokenizer\.json with: python",
    ):
        find_codec(other)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer.model": b"\n\x05"},
        {"vocab.json": b"[]"},
        {"vocab.json": b'{"<|endoftext|>": 0}'},
        {"vocab.json": b'{"a": 0}', "added_tokens.json": b'{"<|endoftext|>": 7}'},
    ],
    ids=["SentencePiece", "a list", "another end", "another added end"],
)
def test_a_vocabulary_that_cannot_be_the_datas_is_refused(
    files: Mapping[str, bytes], tmp_path: Path
) -> None:
    data = make_data_folder(tmp_path / "data")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"no tokenizer\.json, and .* may differ"):
        require_same_tokenizer(load_meta(data), data=data, folder=tmp_path, init="model")
    find = r"tokenizer\.json is missing, and \S+ is not GPT-2\'s"
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CheckpointError, match=find):
        find_codec(tmp_path)


def test_older_files_of_a_tokenizer_that_the_data_carries_are_compared_with_it(
    tmp_path: Path,
) -> None:
    folder = write_tokenizer(tmp_path / "model")
    raw = json.loads((folder / "tokenizer.json").read_text())
    text, out = tmp_path / "in.txt", tmp_path / "out"
    text.write_text("\n\n".join(f"some text {number}" for number in range(99)))
    words = ("prepare", "--source", "text", "--input", text, "--tokenizer", folder, "--out", out)
    assert run_here(*words, "--allow-odd-tokenizer").returncode == 0
    old = tmp_path / "old"
    old.mkdir()
    merges = [" ".join(each) for each in raw["model"]["merges"]]
    (old / "merges.txt").write_text("\n".join(merges))
    words_only = {word: n for word, n in raw["model"]["vocab"].items() if n > 1}
    (old / "vocab.json").write_text(json.dumps(words_only))
    (old / "added_tokens.json").write_text(json.dumps({"<s>": 0, "</s>": 1}))
    require_same_tokenizer(load_meta(out), data=out, folder=old, init="old")
    (old / "added_tokens.json").write_text(json.dumps({"<s>": 1, "</s>": 0}))
    with pytest.raises(DataError, match="may differ"):
        require_same_tokenizer(load_meta(out), data=out, folder=old, init="old")
