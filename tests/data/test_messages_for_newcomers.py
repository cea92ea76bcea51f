"""Messages of `prepare` and its options that a first user needs: columns, shares, sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main as data
from payload.data.rows.named_columns import NamedColumns
from payload.data.sources.split import more_validation
from payload.weights.run_names import cached_copy
from tests.support.chat_data import make_tokenizer, turn, write_rows


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"Frage": "q", "b": 1}, {"user": "q", "b": 1}),
        ({"FRAGE": "p", "frage": "q"}, {"FRAGE": "p", "user": "q"}),
        ({"FRAGE": "p", "Frage": "q"}, {"FRAGE": "p", "Frage": "q"}),
    ],
)
def test_a_column_in_another_case_is_renamed_if_it_is_the_only_one(
    row: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert NamedColumns([("frage", "user")], []).convert(row) == expected


def test_the_advice_is_never_the_current_share() -> None:
    assert more_validation(wanted=20, documents=103, most=0.5, current=0.2) is None
    found = more_validation(wanted=20, documents=103, most=0.5, current=0.15)
    assert found == "Use --val-fraction 0.2 with --force."


@pytest.mark.processes
def test_the_advised_share_of_weighted_rows_is_sufficient(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = make_tokenizer(tmp_path / "model")
    rows = [{"messages": turn(f"word {number}", "two")} for number in range(60)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    words = ["prepare", "--task", "chat", "--tokenizer", str(model), "--out", str(tmp_path / "out")]
    words += ["--input", f"{source}:2", "--force", "--val-fraction"]
    assert data([*words, "0.15"]) == ExitCode.OK
    advised = re.search(r"--val-fraction (\S+) with", capsys.readouterr().err)
    assert advised is not None
    assert data([*words, advised[1]]) == ExitCode.OK
    assert "too few for a reliable loss" not in capsys.readouterr().err


@pytest.mark.processes
def test_an_error_about_columns_names_the_file_as_the_user_wrote_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"messages": turn("a", "b"), "quality": "good"}] * 30
    source = write_rows(tmp_path / "in.jsonl", rows)
    words = ["--task", "chat", "--tokenizer", str(make_tokenizer(tmp_path / "model"))]
    out = str(tmp_path / "out")
    assert data(["prepare", *words, "--input", str(source), "--out", out]) == ExitCode.CONFIG
    assert f"error: {source}: in the first" in capsys.readouterr().err


def test_a_model_that_make_run_fetched_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert cached_copy(name) == ""
    folder = tmp_path / "tileforge" / "models" / "smollm2-135m-instruct-1"
    folder.mkdir(parents=True)
    assert cached_copy(name).endswith(f"--model {folder}.")
    assert cached_copy("HuggingFaceTB/SmolLM2-135M") == ""
