"""A column `split` declares which rows are for training, for validation, or test rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import DataError, ExitCode
from payload.data.rows.open_rows import open_rows
from payload.data.sources.source_flags import SourceRequest
from payload.data.sources.split_columns import split_of_row
from payload.formats.data_folder import load_meta
from tests.data.running import run_here
from tests.support.chat_data import conversations, make_tokenizer, turn, write_rows
from tests.support.preference_data import pairs


@pytest.mark.parametrize(
    ("value", "split"),
    [
        ("train", "train"),
        ("Train_SFT", "train"),
        ("validation", "valid"),
        ("VAL", "valid"),
        ("dev", "valid"),
        ("eval", "valid"),
        ("test", "test"),
        (" test_prefs ", "test"),
        ("held-out", "test"),
        ("contest", None),
        ("latest", None),
        ("the test of time, told in a long text about the years of the war and after", None),
        (3, None),
        (None, None),
    ],
)
def test_a_value_of_the_column_names_a_split_by_its_words(value: object, split: str | None) -> None:
    found = split_of_row({"text": "a", "Split": value})
    assert found == (None if split is None else ("Split", split))


def rows_of(task: str, count: int) -> list[dict[str, Any]]:
    """Return rows for a task; every sixth is a test row, and the next one is for validation."""
    rows: list[dict[str, Any]]
    if task == "preference":
        rows = pairs(count)
    elif task == "chat":
        rows = [{"messages": each} for each in conversations(count)]
    else:
        rows = [
            {"text": f"red {number}", "label": "ab"[number // 6 % 2]} for number in range(count)
        ]
    names = ["test", "validation", *["train"] * 4]
    return [{**row, "split": names[number % 6]} for number, row in enumerate(rows)]


@pytest.mark.processes
@pytest.mark.parametrize("task", ["chat", "preference", "classify", "text"])
def test_test_rows_are_not_trained_and_validation_rows_validate_in_every_task(
    task: str, tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", rows_of(task, 60))
    words = ["prepare", "--task", task, "--input", source, "--out", tmp_path / "out"]
    words += ["--tokenizer", make_tokenizer(tmp_path / "model"), "--dedup", "none"]
    done = run_here(*words)
    assert done.returncode == ExitCode.OK, done.stderr
    assert "left out 10 rows: split = 'test'" in done.stderr
    assert "10 rows are for validation by the column 'split'" in done.stderr
    assert "ignored columns" not in done.stderr
    meta = load_meta(tmp_path / "out")
    assert (meta.split.method, meta.train_documents, meta.val_documents) == ("files", 40, 10)

    again = run_here(*words, "--force", "--ignore-key", "split")
    assert again.returncode == ExitCode.OK, again.stderr
    meta = load_meta(tmp_path / "out")
    assert meta.train_documents + meta.val_documents == 60 and meta.split.method != "files"

    refused = run_here(*words, "--force", "--val-fraction", 0.2)
    assert refused.returncode != ExitCode.OK
    assert "the column 'split' declares the validation data" in refused.stderr


def opened(rows: Sequence[dict[str, Any]], folder: Path) -> Any:
    source = open_rows(
        SourceRequest(kind="auto", inputs=(str(write_rows(folder / "a.jsonl", rows)),))
    )
    source.identity()
    return source


def test_rows_are_for_validation_by_their_own_column_although_others_are_left_out(
    tmp_path: Path,
) -> None:
    names = ["validation", "train", "test", "valid", "train", "validation"]
    rows = opened([{"text": str(n), "split": each} for n, each in enumerate(names)], tmp_path)
    left = []
    for row in rows.stream():
        if row.values["text"] == "3":  # as a row with weight 0
            rows.leave_out("weight = 0")
        else:
            left.append((row.values["text"], row.number))
    assert left == [("0", 0), ("1", 1), ("4", 2), ("5", 3)]
    split = rows.survey().split
    assert split.val_mask(split.marked).all() and split.marked.tolist() == [0, 3]
    assert split.record.val_fraction == 0.5


def test_a_source_without_a_row_for_training_is_refused_with_the_option(tmp_path: Path) -> None:
    rows = opened([{"text": "a", "split": "test"}, {"text": "b", "split": "dev"}], tmp_path)
    with pytest.raises(DataError, match=r"1 validation and 1 test rows.*--ignore-key split"):
        list(rows.read())


def test_the_state_of_an_interrupted_run_has_the_splits(tmp_path: Path) -> None:
    made = [{"text": str(n), "split": "val" if n % 3 == 0 else "train"} for n in range(9)]
    whole = opened(made, tmp_path)
    list(whole.read())
    first = opened(made, tmp_path)
    stream = first.stream()
    for _ in range(4):
        next(stream)
    state = json.loads(json.dumps(first.state()))
    list(stream)
    second = opened(made, tmp_path)
    second.restore(state)
    assert len(list(second.read())) == 5
    assert (
        second.survey().split.marked.tolist() == whole.survey().split.marked.tolist() == [0, 3, 6]
    )
    assert second.notes() == whole.notes()


def test_text_whose_first_row_has_no_split_but_a_later_one_is_refused(tmp_path: Path) -> None:
    rows = [{"text": "red blue"}] * 20 + [{"text": "two three", "split": "test"}]
    source = write_rows(tmp_path / "in.jsonl", rows)
    words = ["prepare", "--task", "text", "--input", source, "--out", tmp_path / "out"]
    done = run_here(*words, "--tokenizer", "gpt2")
    assert done.returncode != ExitCode.OK
    assert "in.jsonl line 21: split = 'test', but the first row" in done.stderr
    done = run_here(*words, "--tokenizer", "gpt2", "--ignore-key", "split")
    assert done.returncode == ExitCode.OK, done.stderr


def test_the_lines_about_a_file_list_the_column_as_read(tmp_path: Path) -> None:
    rows = [{"messages": turn("a", "b"), "split": "train", "source": "web"}] * 3
    done = run_here("show", write_rows(tmp_path / "in.jsonl", rows))
    assert "columns read: 'messages', 'split'" in done.stdout + done.stderr
    assert "ignored as metadata: 'source' (3 of 3 rows)" in done.stdout + done.stderr
