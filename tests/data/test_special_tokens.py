"""A chat template's special tokens are those of transformers, from both files."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.__main__ import main as data
from payload.data.tasks.classify_job import pad_token
from payload.data.templates.chat_template import read_chat_template
from payload.data.tokenizers import load_hf_tokenizer
from tests.support.chat_data import (
    END,
    PLAIN_TEMPLATE,
    START,
    conversations,
    make_tokenizer,
    prepare,
    prepare_words,
    turn,
    write_rows,
)
from tests.support.preference_data import pairs

pytestmark = pytest.mark.processes  # a process renders the template

_NAMES = (
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("image_token", "sound_token"),
)
SHOWS_ALL = "".join(f"[{{{{ {name} }}}}]" for name in _NAMES) + "{{ messages[0].content }}"
# transformers treats a token that no file defines as empty. Here it is an error, so it is null.
_NULL: dict[str, Any] = dict.fromkeys(_NAMES)
_OBJECT = {"content": START, "lstrip": False, "rstrip": False, "normalized": False}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "none": ({}, None),
    "config alone": ({"sep_token": START, "cls_token": END, "mask_token": START}, None),
    "map alone": ({}, {"bos_token": START, "unk_token": END}),
    "map in place of the config": ({"bos_token": END}, {"bos_token": START}),
    "objects": ({"cls_token": {"__type": "AddedToken", **_OBJECT}}, {"bos_token": _OBJECT}),
    "a map that does not count": (
        {"bos_token": END, "added_tokens_decoder": {"0": {**_OBJECT, "special": True}}},
        {"bos_token": START},
    ),
    "a list of further ones": ({}, {"additional_special_tokens": [START, END]}),
    "a further one by its name": ({"image_token": START}, None),
    "further ones as an object": (
        {"extra_special_tokens": {"image_token": START, "sound_token": END}},
        None,
    ),
}


def write(folder: Path, config: dict[str, Any], tokens: dict[str, Any] | None) -> Path:
    make_tokenizer(folder, template=SHOWS_ALL)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**_NULL, **json.loads(path.read_text()), **config}))
    if tokens is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(tokens))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_a_template_writes_what_transformers_writes(case: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write(tmp_path / "model", *CASES[case])
    messages = turn("a", "b")
    own: Any = AutoTokenizer.from_pretrained(folder)

    found = read_chat_template(folder).render(messages, add_generation_prompt=False)

    assert found == own.apply_chat_template(messages, tokenize=False)
    assert START in found or case in ("none", "a list of further ones", "a map that does not count")


@pytest.mark.parametrize("name", ["LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer"])
def test_a_token_that_no_file_names_is_the_one_of_the_tokenizers_class(
    name: str, tmp_path: Path
) -> None:
    import transformers

    folder = make_tokenizer(tmp_path, template="[{{ unk_token }}][{{ eos_token }}]")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    signature = inspect.signature(getattr(transformers, name).__init__)
    wanted = "".join(f"[{signature.parameters[key].default}]" for key in ("unk_token", "eos_token"))
    assert read_chat_template(folder).render(turn("a", "b"), add_generation_prompt=False) == wanted


def test_a_token_that_no_file_names_is_empty_as_in_transformers_or_refused(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = make_tokenizer(tmp_path, template="{{ messages[0].content }}{{ sep_token }}|")
    own: Any = AutoTokenizer.from_pretrained(folder)
    messages = turn("a", "b")
    found = read_chat_template(folder).render(messages, add_generation_prompt=False)
    assert found == own.apply_chat_template(messages, tokenize=False) == "a|"
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "OddTokenizer"}')
    with pytest.raises(
        DataError, match="the template uses sep_token, which is missing in tokenizer_config"
    ):
        read_chat_template(folder)


def test_the_end_of_a_document_and_padding_are_those_of_the_map(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {}, {"eos_token": START, "pad_token": START})
    tokenizer, _ = load_hf_tokenizer(str(folder))
    assert tokenizer.end == (0,) and pad_token(tokenizer) == 0
    assert tokenizer.end_note is not None
    assert tokenizer.end_note.endswith("eos_token of special_tokens_map.json")


@pytest.mark.parametrize(("task", "name"), [("chat", "bos_token"), ("preference", "pad_token")])
def test_other_special_tokens_are_other_data(
    task: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = "{{ bos_token }}" + PLAIN_TEMPLATE
    folder = make_tokenizer(tmp_path / "model", template=template)
    config = folder / "tokenizer_config.json"
    raw = {**json.loads(config.read_text()), "bos_token": START}
    config.write_text(json.dumps(raw))
    rows = pairs(8) if task == "preference" else [{"messages": each} for each in conversations(8)]
    words = (folder, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "data")
    flags = ("--sequence-length", 64)
    prepare(*words, *flags, task=task)
    prepare(*words, *flags, task=task)
    config.write_text(json.dumps({**raw, name: START if name == "pad_token" else END}))
    assert data(prepare_words(*words, *flags, task=task)) == ExitCode.CONFIG
    message = capsys.readouterr().err
    assert f"data: holds data made with {name} = " in message and "--force" in message
    prepare(*words, *flags, "--force", task=task)
