"""Every token that a tokenizer's files declare is the same token in tokenizer.json, or an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.tokenizer_files import tokenizer_files
from payload.data.tokenizers import load_hf_tokenizer
from payload.formats.data_folder import load_meta
from tests.data.running import run_here
from tests.support.chat_data import END, START, make_tokenizer

Files = Mapping[str, Any]
_FLAGS = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
_OBJECT = {"content": START, "special": True, **_FLAGS}
_NEW = "<new>"

REFUSED: dict[str, tuple[Files, str]] = {
    "added_tokens.json": (
        {"added_tokens.json": {_NEW: 300}},
        r"added_tokens\.json declares '<new>' as token 300, .* lacks this added .* text as \[",
    ),
    "a list": (
        {"tokenizer_config.json": {"additional_special_tokens": [START, _NEW]}},
        "additional_special_tokens of tokenizer_config.json declares '<new>'",
    ),
    "a list of objects": (
        {"special_tokens_map.json": {"extra_special_tokens": [{"content": _NEW, **_FLAGS}]}},
        "extra_special_tokens of special_tokens_map.json declares '<new>'",
    ),
    "a named one": (
        {"tokenizer_config.json": {"unk_token": _NEW}},
        "unk_token of tokenizer_config.json declares '<new>'",
    ),
    "one that is a word": (
        {"tokenizer_config.json": {"cls_token": "the"}},
        "cls_token of tokenizer_config.json declares 'the'",
    ),
    "further named ones": (
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": _NEW}}},
        "image_token of tokenizer_config.json declares '<new>'",
    ),
    "the decoder": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"300": {**_OBJECT, "content": _NEW}}}},
        "added_tokens_decoder of tokenizer_config.json declares '<new>' as token 300",
    ),
    "another number": (
        {"added_tokens.json": {START: 7}},
        "declares '<|im_start|>' as token 7, but tokenizer.json lists it as token 0",
    ),
    "another number in the decoder": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"1": _OBJECT}}},
        "declares '<|im_start|>' as token 1, but tokenizer.json lists it as token 0",
    ),
    "another flag": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"0": {**_OBJECT, "lstrip": True}}}},
        "with lstrip = True, but tokenizer.json has lstrip = False",
    ),
}
ORDINARY: dict[str, Files] = {
    # As in the folders of Qwen2: each file has all tokens.
    "Qwen2": {
        "added_tokens.json": {START: 0, END: 1},
        "special_tokens_map.json": {"additional_special_tokens": [START, END], "eos_token": END},
        "tokenizer_config.json": {
            "added_tokens_decoder": {"0": _OBJECT, "1": {**_OBJECT, "content": END}},
            "additional_special_tokens": [START, END],
            **{"bos_token": None, "unk_token": None, "add_bos_token": False, "errors": "replace"},
        },
    },
    # As in the folders of Llama: objects in the map, no added_tokens.json.
    "Llama": {
        "special_tokens_map.json": {"bos_token": {"content": START, **_FLAGS}},
        "tokenizer_config.json": {"bos_token": START, "legacy": False, "add_bos_token": True},
    },
    # transformers ignores both files if tokenizer_config.json has added_tokens_decoder.
    "files of before": {
        "added_tokens.json": {_NEW: 300},
        "special_tokens_map.json": {"unk_token": _NEW},
        "tokenizer_config.json": {"added_tokens_decoder": {"0": _OBJECT}},
    },
    "nothing": {"added_tokens.json": {}, "special_tokens_map.json": {}},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "model")


def write(folder: Path, files: Files) -> Path:
    for name, content in files.items():
        path = folder / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **content}))
    return folder


def transformers_tokens(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    own: Any = AutoTokenizer.from_pretrained(folder)
    return list(own(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("case", REFUSED)
def test_a_token_that_tokenizer_json_does_not_make_is_refused(case: str, folder: Path) -> None:
    files, problem = REFUSED[case]
    with pytest.raises(DataError, match=problem) as refused:
        load_hf_tokenizer(str(write(folder, files)))
    assert "\n" not in str(refused.value)
    assert "save_pretrained" in str(refused.value)


@pytest.mark.parametrize("case", ORDINARY)
def test_files_that_agree_give_transformers_tokens(case: str, folder: Path) -> None:
    tokenizer, _ = load_hf_tokenizer(str(write(folder, ORDINARY[case])))
    text = f"a{START}b {END} the <new>"
    assert tokenizer.encode_one(text.encode()).tolist() == transformers_tokens(folder, text)


def test_refused_files_give_other_tokens_in_transformers_and_the_fix_repairs_them(
    folder: Path,
) -> None:
    from transformers import AutoTokenizer

    text = f"a{_NEW}b"
    before, _ = load_hf_tokenizer(str(folder))
    write(folder, REFUSED["added_tokens.json"][0])
    wanted = transformers_tokens(folder, text)
    assert 300 in wanted and before.encode_one(text.encode()).tolist() != wanted

    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)

    assert load_hf_tokenizer(str(folder))[0].encode_one(text.encode()).tolist() == wanted


def test_a_checkpoint_gets_no_files_that_declare_other_tokens(folder: Path) -> None:
    text, out, model = (folder.with_name(name) for name in ("in.txt", "out", "other"))
    text.write_text("\n\n".join(["the word list"] * 99))
    words = ("prepare", "--source", "text", "--input", text, "--tokenizer", folder, "--out", out)
    assert run_here(*words).returncode == ExitCode.OK
    shutil.copytree(folder, model)
    for files, is_models in (({"a.txt": {}}, True), (REFUSED["added_tokens.json"][0], False)):
        source = write(model, {"tokenizer_config.json": {"model_max_length": 17}, **files})
        found = tokenizer_files(load_meta(out), data=out, source=source, context=64)
        assert (json.loads(found["tokenizer_config.json"])["model_max_length"] == 17) is is_models
        assert "added_tokens.json" not in found


def test_a_tokenizer_that_takes_special_tokens_apart_is_refused(folder: Path) -> None:
    whole = transformers_tokens(folder, END)
    write(folder, {"tokenizer_config.json": {"split_special_tokens": True}})
    assert len(transformers_tokens(folder, END)) > len(whole)
    with pytest.raises(DataError, match="split_special_tokens of tokenizer_config"):
        load_hf_tokenizer(str(folder))


def test_numbers_that_the_package_ignores_are_refused(folder: Path) -> None:
    path = folder / "tokenizer.json"
    raw = json.loads(path.read_text())
    for token in (START, END):
        del raw["model"]["vocab"][token]
    raw["model"]["vocab"] = {word: n for n, word in enumerate(raw["model"]["vocab"])}
    raw["added_tokens"][0]["id"], raw["added_tokens"][1]["id"] = 299, 298
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match=r"added_tokens declares '<\|im_start\|>' as token 299, "):
        load_hf_tokenizer(str(folder))
    raw["added_tokens"][0]["id"], raw["added_tokens"][1]["id"] = 298, 299
    path.write_text(json.dumps(raw))
    load_hf_tokenizer(str(folder))
