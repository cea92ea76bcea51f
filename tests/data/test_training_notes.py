"""Notes about rows that are trained, but perhaps not as the user expects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main as data
from tests.support.chat_data import make_tokenizer, prepare_words, turn, write_rows

pytestmark = pytest.mark.processes  # a process renders the template


@pytest.mark.parametrize("flags", [(), ("--thoughts", "drop")])
def test_empty_answers_are_counted(
    flags: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]]
    rows = [{"messages": turn("a", each)} for each in ("b", "", " \n", "c")]
    rows += [{"messages": [*turn("a", "b"), *turn("c", "<think>one</think>")]}]
    rows += [{"messages": [{**each, "weight": 0} if not each["content"] else each
                           for each in [*turn("a", ""), *turn("b", "c")]]}]  # fmt: skip
    source = write_rows(tmp_path / "in.jsonl", rows * 4)
    model = make_tokenizer(tmp_path / "model")
    words = prepare_words(model, source, tmp_path / "out", *flags)
    words.remove("--quiet")
    assert data(words) == ExitCode.OK
    count = 12 if flags else 8
    place = f"{source} line 2"
    assert (
        f"note: {count} rows have an empty answer, of which training covers only the stop token, "
        f"for example {place}" in capsys.readouterr().err
    )


def test_an_empty_answer_of_a_pair_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"prompt": "a", "chosen": "b", "rejected": "" if n % 2 else "c"} for n in range(20)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    words = prepare_words(
        make_tokenizer(tmp_path / "model"), source, tmp_path / "out", task="preference"
    )
    words.remove("--quiet")
    assert data(words) == ExitCode.OK
    assert "note: 10 rows have an empty answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("files", "note"),
    [
        ({"config.json": {"eos_token_id": 1}}, None),
        ({"config.json": {"eos_token_id": [5, 1]}, "generation_config.json": {}}, "has no stop"),
        ({"config.json": {"eos_token_id": 0}}, "'<|im_start|>' (eos_token_id of config.json)"),
        ({"config.json": {}}, "has no stop token"),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {"eos_token_id": [0, 1]}},
         None),
        ({}, None),
    ],
)  # fmt: skip
def test_a_model_that_would_not_stop_at_the_trained_token_is_noted_once(
    files: dict[str, Any], note: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(tmp_path / "model")
    for name, config in files.items():
        (model / name).write_text(json.dumps(config), encoding="utf-8")
    source = write_rows(tmp_path / "in.jsonl", [{"messages": turn("a", "b")}] * 20)
    words = prepare_words(model, source, tmp_path / "out")
    words.remove("--quiet")
    assert data(words) == ExitCode.OK
    printed = capsys.readouterr().err
    assert printed.count("training teaches the stop token '<|im_end|>'") == (note is not None)
    assert note is None or note in printed
