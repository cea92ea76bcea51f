"""A checkpoint has the chat template of its data, from whichever file, not of its model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError
from payload.core.tasks import TaskKind
from payload.data.templates.chat_template import read_chat_template, templates_of
from payload.data.tokenizer_files import tokenizer_files
from payload.data.writing.meta import write_meta
from payload.formats.data_folder import load_meta
from tests.support.chat_data import (
    PLAIN_TEMPLATE,
    conversations,
    make_tokenizer,
    prepare,
    write_rows,
)
from tests.support.preference_data import pairs

pytestmark = pytest.mark.processes  # a process renders the template

TRAINED = PLAIN_TEMPLATE.replace("message['role']", "'to ' + message['role']").replace(
    "assistant\n", "to assistant\n"
)


def config_with_template(folder: Path) -> Path:
    """Write a tokenizer whose template is in tokenizer_config.json."""
    make_tokenizer(folder, template=None)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TRAINED}))
    return folder


def source(folder: Path, task: TaskKind) -> Path:
    rows = pairs(20) if task == "preference" else [{"messages": m} for m in conversations(20)]
    return write_rows(folder / "in.jsonl", rows)


@pytest.mark.parametrize("given", ["--chat-template", "tokenizer_config.json", "older version"])
@pytest.mark.parametrize("task", ["chat", "preference"])
def test_a_checkpoint_has_the_template_that_its_data_was_rendered_with(
    task: TaskKind, given: str, tmp_path: Path
) -> None:
    model, out = make_tokenizer(tmp_path / "model"), tmp_path / "out"
    if given == "--chat-template":
        (tmp_path / "own.jinja").write_text(TRAINED)
        prepare(model, source(tmp_path, task), out, given, tmp_path / "own.jinja", task=task)
    else:
        prepare(config_with_template(tmp_path / "t"), source(tmp_path, task), out, task=task)
    meta = load_meta(out)
    if given == "older version":
        (out / "chat_template.jinja").unlink()
        files = {k: v for k, v in meta.tokenizer_files.items() if k != "chat_template.jinja"}
        meta = replace(meta, tokenizer_files=files)
        write_meta(out, meta)
    else:
        assert (out / "chat_template.jinja").read_text() == TRAINED

    for folder in (model, None):
        files_of = tokenizer_files(meta, data=out, source=folder, context=64)
        assert files_of["chat_template.jinja"].decode() == TRAINED


def test_a_checkpoint_has_the_special_tokens_that_its_data_was_rendered_with(
    tmp_path: Path,
) -> None:
    model, other = make_tokenizer(tmp_path / "model"), make_tokenizer(tmp_path / "other")
    out = prepare(model, source(tmp_path, "chat"), tmp_path / "out")
    (other / "special_tokens_map.json").write_text('{"eos_token": "<|im_start|>"}')
    found = tokenizer_files(load_meta(out), data=out, source=other, context=64)
    assert "special_tokens_map.json" not in found
    assert json.loads(found["tokenizer_config.json"])["eos_token"] == "<|im_end|>"


FIRST_LINE = "\n  first {{ messages[0].content }} \n"
"""A template with white space at both ends, which Jinja could remove."""


def test_of_several_templates_the_one_for_tools_renders_tools_as_in_transformers(
    tmp_path: Path,
) -> None:
    from transformers import AutoTokenizer

    model = config_with_template(tmp_path / "model")
    path = model / "tokenizer_config.json"
    raw = json.loads(path.read_text())
    named = [
        {"name": "tool_use", "template": FIRST_LINE + "{{ tools | tojson }}"},
        {"name": "default", "template": FIRST_LINE},
    ]
    path.write_text(json.dumps({**raw, "chat_template": named}))
    check_equal(model, AutoTokenizer.from_pretrained(model))
    template = read_chat_template(model)
    assert templates_of({path.name: path.read_bytes()}) == [template.source]

    path.write_text(json.dumps({**raw, "chat_template": named[:1]}))
    with pytest.raises(DataError, match="the model has no chat template"):
        read_chat_template(model)

    (model / "chat_template.jinja").write_text(FIRST_LINE)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | length }}\n")
    check_equal(model, AutoTokenizer.from_pretrained(model))


def check_equal(model: Path, own: Any) -> None:
    """Require the text of transformers with and without tools."""
    messages = [{"role": "user", "content": "a"}]
    for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
        found = read_chat_template(model).render(messages, add_generation_prompt=False, tools=tools)
        assert found == own.apply_chat_template(messages, tools=tools, tokenize=False)


@pytest.mark.parametrize(("task", "name"), [("text", "eos_token"), ("classify", "pad_token")])
def test_a_checkpoint_ends_and_fills_up_texts_with_the_tokens_of_its_data(
    task: TaskKind, name: str, tmp_path: Path
) -> None:
    rows = [{"text": f"{kind} {n}", "label": kind} for n in range(10) for kind in ("red", "blue")]
    model, other = make_tokenizer(tmp_path / "model"), make_tokenizer(tmp_path / "other")
    out = prepare(model, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out", task=task)
    config = other / "tokenizer_config.json"
    raw = json.loads(config.read_text())
    config.write_text(json.dumps({**raw, "bos_token": "<|im_start|>"}))
    found = tokenizer_files(load_meta(out), data=out, source=other, context=64)
    assert "bos_token" in json.loads(found["tokenizer_config.json"])  # from the model
    config.write_text(json.dumps({**raw, name: "<|im_start|>"}))
    found = tokenizer_files(load_meta(out), data=out, source=other, context=64)
    assert json.loads(found["tokenizer_config.json"])[name] == "<|im_end|>"


def test_data_without_its_template_is_refused(tmp_path: Path) -> None:
    model, out = make_tokenizer(tmp_path / "model"), tmp_path / "out"
    prepare(model, source(tmp_path, "chat"), out)
    meta = load_meta(out)
    assert meta.chat is not None
    other = replace(meta, chat=replace(meta.chat, template_sha256="0" * 64))
    with pytest.raises(DataError, match="the chat template of its conversations is missing"):
        tokenizer_files(other, data=out, source=model, context=64)
