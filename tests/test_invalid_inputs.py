"""Thirty wrong inputs to fine-tuning: one line each and exit code 10, before anything runs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from payload.data.__main__ import main as data
from payload.errors import ExitCode
from payload.finetune.__main__ import main as finetune
from payload.orchestrate.__main__ import main as orchestrate
from tests.support.chat_data import conversations, make_model, make_tokenizer, prepare, write_rows

USER = {"role": "user", "content": "what is red"}
ANSWER = {"role": "assistant", "content": "a word"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a tokenizer without a template, and a folder of conversations; not to be changed."""
    folder = tmp_path_factory.mktemp("invalid")
    make_model(folder / "model")
    make_tokenizer(folder / "no-template", template=None)
    rows = [{"messages": each} for each in conversations(40)]
    chats = write_rows(folder / "chats.jsonl", rows)
    prepare(folder / "model", chats, folder / "data", "--sequence-length", 64)
    return folder


def one_line(capsys: pytest.CaptureFixture[str], status: int, problem: str) -> None:
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert status == ExitCode.CONFIG, said
    assert len(said) == 1 and problem in said[0]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": [{"role": "tool", "content": "x"}, ANSWER]}, "unknown role 'tool'"),
        ({"messages": []}, "not a list of messages"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": [{"role": "user"}, ANSWER]}, "A message has 'role' and 'content'"),
        ({"messages": [USER, {"role": "assistant", "content": 3}]}, "not text"),
        ({"question": "a", "answer": "b"}, "no conversation among the columns"),
        ({"prompt": "a", "completion": None}, "not a list of messages"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no message of the assistant"),
        ({"instruction": 3, "output": "b"}, "instruction is 3, not text"),
    ],
)
def test_a_conversation_that_is_none(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    row: dict[str, object],
    problem: str,
) -> None:
    source = write_rows(tmp_path / "x.jsonl", [row] * 12)
    words = ["prepare", "--task", "chat", "--source", "jsonl", "--input", str(source)]
    words += ["--tokenizer", str(place / "model"), "--out", str(tmp_path / "out")]
    one_line(capsys, data(words), problem)
    assert not (tmp_path / "out" / "meta.json").exists()


@pytest.mark.parametrize(
    ("flags", "tokenizer", "problem"),
    [
        ((), "no-template", "chat template"),
        (("--sequence-length", "2"), "model", "token to train on"),
        (("--chat-template", "nowhere.jinja"), "model", "nowhere.jinja"),
        ((), "nowhere/", "no such folder"),
    ],
)
def test_a_template_or_a_length_that_leaves_nothing_to_train_on(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[str, ...],
    tokenizer: str,
    problem: str,
) -> None:
    words = ["prepare", "--task", "chat", "--source", "jsonl"]
    words += ["--input", str(place / "chats.jsonl"), "--out", str(tmp_path / "out"), *flags]
    name = tokenizer if tokenizer.endswith("/") else str(place / tokenizer)
    one_line(capsys, data([*words, "--tokenizer", name]), problem)


@pytest.mark.parametrize(
    ("table", "flags", "problem"),
    [
        ("text,label\nred,a\nblue,a\n", (), "needs two or more"),
        ("text,label\nred,a\nblue,a\nlist,b\n", (), "validation would lack it"),
        ('text,label\n"red,a\nblue,b\n', (), "quote"),
        ("text,label\nred,a,b\n", (), "3 fields, but 2 columns"),
        ("text,text\nred,a\n", (), "different column names"),
        ("text,stars\nred,1\n", (), "no column 'label'"),
        ("review,label\nred,1\n", (), "no column 'text'"),
        ("text,label\n,a\nblue,b\n", (), "is empty"),
        ("text,label\nred,\nblue,b\n", (), "no name or number"),
        ("text,label\nred,3\nblue,1\n", ("--label-map", "1=low"), "not in --label-map"),
        ("", (), ""),
    ],
)
def test_a_table_of_labels_that_cannot_be_learned(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    table: str,
    flags: tuple[str, ...],
    problem: str,
) -> None:
    (tmp_path / "x.csv").write_text(table, encoding="utf-8")
    words = ["prepare", "--task", "classify", "--source", "csv", "--input", str(tmp_path / "x.csv")]
    words += ["--tokenizer", str(place / "model"), "--out", str(tmp_path / "out"), *flags]
    one_line(capsys, data(words), problem)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("adapter.kind=lora", "adapter.rank=4096"), "above the width of the linears"),
        (("adapter.kind=lora", "adapter.target=c_fc"), "the model has no linear 'c_fc'"),
        (("adapter.kind=lora", "adapter.target=q_proj,,"), "a name is empty"),
        (("adapter.kind=lora", "model.init=scratch"), "has none. Name a model"),
        (("adapter.kind=lora", "engine.compile=true"), "without engine.compile"),
        (("model.quantize=nf4",), "weights of 4 bits cannot be trained"),
        (("model.quantize=nf4", "adapter.kind=lora", "precision.dtype=fp32"), "computes in bf16"),
        (("model.quantize=nf4", "adapter.kind=lora", "adapter.dora=true"), "adapter.dora"),
        (("task.kind=classify",), "was prepared with --task chat"),
        (("data.sequence_length=32",), "was packed into blocks of 64"),
        (("batch.micro_batch_size=most",), '(or "auto")'),
        (("batch.global_batch_size=7", "batch.micro_batch_size=2"), "not a multiple"),
        (("model.init=nowhere/model",), "nowhere"),
    ],
)
def test_settings_that_cannot_be(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    settings: tuple[str, ...],
    problem: str,
) -> None:
    own = ("task.kind=chat", f"data.dir={place / 'data'}", f"model.init={place / 'model'}")
    sets = [
        word for each in (*own, "data.sequence_length=64", *settings) for word in ("--set", each)
    ]
    words = ["run", "--inventory", "local", "--runs-dir", str(tmp_path), *sets]
    one_line(capsys, orchestrate(words, os.environ), problem)
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_is_no_base_for_another_adapter(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        **{"peft_type": "IA3", "base_model_name_or_path": str(place / "model"), "r": 4},
        **{"lora_alpha": 8, "target_modules": ["q_proj"]},
    }
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    own = ("task.kind=chat", f"data.dir={place / 'data'}", f"model.init={tmp_path / 'adapter'}")
    sets = [word for each in (*own, "data.sequence_length=64") for word in ("--set", each)]
    words = ["run", "--inventory", "local", "--runs-dir", str(tmp_path / "runs"), *sets]
    one_line(capsys, orchestrate(words, os.environ), "peft_type = 'IA3', only LORA")


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("x.json", "[]", ".json is not read"),
        ("x.jsonl", '{"a": 1}', "none that is known"),
    ],
)
def test_data_that_finetune_does_not_understand(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str,
    problem: str,
) -> None:
    (tmp_path / name).write_text(content)
    words = ["--model", str(place / "model"), "--data", str(tmp_path / name), "--dry-run"]
    one_line(capsys, finetune(words), problem)
