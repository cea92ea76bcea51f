"""Values of `finetune --data` that are not raw data."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from payload.config.run_config import load_run_config
from payload.core.errors import ExitCode
from payload.data.training_command import training_command
from payload.finetune.__main__ import main
from payload.formats.data_folder import load_meta
from tests.support.chat_data import conversations, make_tokenizer, prepare, write_rows


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
