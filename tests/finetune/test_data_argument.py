"""Values of `finetune --data`: missing files, prepared data, and several files with weights."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode
from payload.data.__main__ import main as data
from payload.data.detect import DataOptions, detect_data
from payload.data.training_command import training_command
from payload.finetune.__main__ import main
from payload.formats.data_folder import load_meta
from tests.finetune.test_command import in_process, place
from tests.support.chat_data import (
    conversations,
    make_tokenizer,
    prepare,
    prepare_words,
    turn,
    write_rows,
)

__all__ = ["in_process", "place"]  # fixtures


@pytest.mark.parametrize(
    ("inputs", "fault"),
    [
        (["no.jsonl"], "--data no.jsonl: file or folder not found. "),
        (["one.jsonl:2", "no.jsonl:3"], "--data no.jsonl: file or folder not found. "),
        (["one.jsonl:many"], "--data one.jsonl:many: the weight 'many' is not a number "),
        (["one.jsonl:2", "one.jsonl"], "--data one.jsonl: given twice, with weights. "),
    ],
)
def test_inputs_that_cannot_be_read_give_only_the_error(
    inputs: list[str],
    fault: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "one.jsonl", [{"text": "a"}])
    words = ["--model", str(make_tokenizer(tmp_path / "model")), "--dry-run"]
    assert main([*words, "--data", *inputs]) == ExitCode.CONFIG
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(f"error: {fault}")


@pytest.mark.processes
@pytest.mark.usefixtures("in_process")
def test_several_files_are_mixed_by_weight_as_prepare_mixes_them(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": each} for each in conversations(20, seed=1)]
    write_rows(tmp_path / "b.jsonl", rows)
    mixed = ["--data", f"{place / 'chats.jsonl'}:3", "--data", "b.jsonl:0.5"]
    words = ["--model", str(place / "model"), "--inventory", "local", *mixed, "--dry-run"]
    assert main(words) == ExitCode.OK
    out = capsys.readouterr().out
    assert 'name = "chats-mix"' in out and 'dir = "finetuned/chats-mix/data"' in out
    line = next(each for each in out.splitlines() if "payload.data prepare" in each)
    assert f"--input {place / 'chats.jsonl'}:3 b.jsonl:0.5 " in line
    typed = shlex.split(line)
    assert data(typed[typed.index("prepare") :]) == ExitCode.OK
    selection = load_meta(Path("finetuned/chats-mix/data")).selection
    assert selection is not None
    assert [each.weight for each in selection.inputs] == [3.0, 0.5]


def test_the_first_rows_of_each_input_decide(tmp_path: Path) -> None:
    short = [{"messages": turn("a", "b")}] * 2500
    write_rows(tmp_path / "a.jsonl", short)
    write_rows(tmp_path / "b.jsonl", [{"messages": turn("long " * 200, "answer")}])
    found = detect_data([f"{tmp_path / 'a.jsonl'}:2", str(tmp_path / "b.jsonl")], DataOptions())
    assert len(found.rows) == 1001 and "b.jsonl line 1" in found.rows[-1].where
    assert f"--input {tmp_path / 'a.jsonl'}:2 {tmp_path / 'b.jsonl'}" in " ".join(found.arguments())


@pytest.mark.processes
@pytest.mark.parametrize("has_weights", [True, False])
def test_prepare_ends_with_the_command_that_trains_the_folder(
    has_weights: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(tmp_path / "the model")
    if has_weights:
        (model / "config.json").write_text("{}", encoding="utf-8")
    source = write_rows(tmp_path / "in.jsonl", [{"messages": each} for each in conversations(20)])
    words = prepare_words(model, source, tmp_path / "out")
    words.remove("--quiet")
    assert data(words) == ExitCode.OK
    *_, head, train = capsys.readouterr().err.splitlines()
    trained = str(model) if has_weights else "MODEL"
    expected = training_command(tmp_path / "out", load_meta(tmp_path / "out"), model=trained)
    assert (head, train) == ("next:", f"  {expected}")
    for more in ("--quiet", "--json", "--no-next"):
        assert data([*words, more]) == ExitCode.OK
        assert "next:" not in capsys.readouterr().err


@pytest.mark.processes
def test_a_prepared_folder_is_named_with_the_command_that_trains_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(tmp_path / "model")
    rows = [{"messages": each} for each in conversations(20)]
    folder = prepare(model, write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out")
    capsys.readouterr()
    assert main(["--model", str(model), "--data", str(folder)]) == ExitCode.CONFIG
    said = capsys.readouterr().err
    train = training_command(folder, load_meta(folder), model=str(model))
    assert said.count("\n") == 1 and train in said
    words = shlex.split(train)
    sets = [words[n + 1] for n, word in enumerate(words) if word == "--set"]
    config = load_run_config(Path(words[words.index("--config") + 1]), overrides=sets)
    assert config.task.kind == "chat" and config.data.dir == str(folder)
    chat = load_meta(folder).chat
    assert chat is not None and config.data.sequence_length == chat.sequence_length
