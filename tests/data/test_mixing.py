"""`prepare --input a.jsonl:3`: exact shares of an epoch, for every task, also after a kill."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from payload.core.errors import ExitCode
from payload.core.tasks import TaskKind
from payload.data.__main__ import main
from payload.data.sources.input_weights import split_weights
from payload.data.writing.resumable_token_files import JOURNAL_NAME
from payload.formats.data_folder import load_meta
from tests.data.running import REPOSITORY, contents, data_command, environment
from tests.support.chat_data import make_tokenizer, turn, write_rows
from tests.support.prepared_rows import (
    TASK_CASES,
    TASKS,
    found,
    inputs_of,
    prepared,
    words,
    write_named,
)
from tests.support.sampled import sampled

pytestmark = pytest.mark.processes  # a process renders the template

A = [f"a{number}" for number in range(40)]
B = [f"b{number}" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "weights", [("3", "0.5"), pytest.param(("1.25", "2"), marks=pytest.mark.seeds)]
)
def test_every_training_row_is_in_an_epoch_as_often_as_its_weight(
    task: TaskKind, weights: tuple[str, str], tokenizer: Path, tmp_path: Path
) -> None:
    paths = [write_named(tmp_path / f"{name}.jsonl", task, rows) for name, rows in _named()]
    plain = prepared(task, tokenizer, tmp_path / "plain", paths, "--val-fraction", 0.2)
    mixed = tmp_path / "mixed"
    given = [f"{path}:{weight}" for path, weight in zip(paths, weights, strict=True)]
    train, val = prepared(task, tokenizer, mixed, given, "--val-fraction", 0.2)
    per_row = Counter({name: 1 for name in plain[0]})
    assert val == plain[1], "weights change the validation data"
    records = inputs_of(mixed)
    for name, weight, record in zip("ab", map(Fraction, weights), records, strict=True):
        rows = [each for each in per_row if each[0] == name]
        copies = Counter({each: train[each] for each in rows})
        whole, part = divmod(weight, 1)
        assert copies.total() == round(weight * len(rows))
        assert set(copies.values()) <= {int(whole), int(whole) + (part > 0)}
        assert record["train_rows"] == len(rows) and record["weight"] == float(weight)
        assert record["rows"] == len(rows) + record["val_rows"]
        assert record["rows_an_epoch"] == copies.total()
    assert load_meta(mixed).train_documents == train.total()
    assert main(["verify", str(mixed)]) == 0


def _named() -> list[tuple[str, list[str]]]:
    return [("a", A), ("b", B)]


@pytest.mark.parametrize("task", TASK_CASES)
def test_weights_of_one_give_the_bytes_of_a_command_without_weights(
    task: TaskKind, tokenizer: Path, tmp_path: Path
) -> None:
    paths = [write_named(tmp_path / f"{name}.jsonl", task, rows) for name, rows in _named()]
    prepared(task, tokenizer, tmp_path / "plain", paths)
    prepared(task, tokenizer, tmp_path / "ones", [f"{path}:1" for path in paths])
    assert contents(tmp_path / "ones") == contents(tmp_path / "plain")


def test_a_larger_fraction_keeps_the_rows_of_a_smaller_one(tokenizer: Path, tmp_path: Path) -> None:
    path = write_named(tmp_path / "a.jsonl", "text", B)
    kept = [
        set(prepared("text", tokenizer, tmp_path / share, [f"{path}:{share}"])[0])
        for share in ("0.25", "0.5", "0.75")
    ]
    assert kept[0] < kept[1] < kept[2]
    other = prepared("text", tokenizer, tmp_path / "other", [f"{path}:0.5"], "--seed", 3)[0]
    assert set(other) != kept[1]


def test_a_document_of_text_does_not_follow_its_copy(tokenizer: Path, tmp_path: Path) -> None:
    path = write_named(tmp_path / "a.jsonl", "text", A)
    out = tmp_path / "out"
    prepared("text", tokenizer, out, [f"{path}:3"])
    thrice, _ = found(tokenizer, out)
    assert set(thrice.values()) == {3}
    tokens = (out / "train.bin").read_bytes()
    third = len(tokens) // 3
    assert tokens[:third] == tokens[third : 2 * third] == tokens[2 * third :]


@pytest.mark.parametrize("source", ["auto", "text"])
def test_files_of_a_folder_have_the_weight_of_the_folder(
    source: str, tokenizer: Path, tmp_path: Path
) -> None:
    for name, rows in _named():
        folder = tmp_path / name
        folder.mkdir()
        if source == "auto":
            for half in (0, 1):
                write_named(folder / f"{half}.jsonl", "text", rows[half::2])
        else:
            for each in rows:
                (folder / f"{each}.txt").write_text(f"row {each} ends")
    out, given = tmp_path / "out", [f"{tmp_path / 'a'}:2", f"{tmp_path / 'b'}:3"]
    train, _ = prepared("text", tokenizer, out, given, "--source", source)
    assert {name[0]: count for name, count in train.items()} == {"a": 2, "b": 3}
    assert [each["rows"] for each in inputs_of(out)] == [40, 60]


def test_sections_of_a_single_text_file_have_its_weight(tokenizer: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(f"row {name} ends" for name in A))
    flags = ("--source", "auto")
    train, val = prepared("text", tokenizer, tmp_path / "out", [f"{path}:2"], *flags)
    assert set(train.values()) == {2} and set(train) | set(val) == set(A)


@pytest.mark.parametrize("task", ["text", "chat"])
def test_validation_files_are_not_weighted(task: TaskKind, tokenizer: Path, tmp_path: Path) -> None:
    train = write_named(tmp_path / "train.jsonl", task, A)
    valid = write_named(tmp_path / "valid.jsonl", task, B)
    both = prepared(task, tokenizer, tmp_path / "out", [f"{train}:2", f"{valid}:5"])
    assert both == (Counter(dict.fromkeys(A, 2)), Counter(dict.fromkeys(B, 1)))


def test_the_rows_of_a_batch_do_not_change_the_mixture(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write_named(tmp_path / f"{name}.jsonl", "chat", rows * 2) for name, rows in _named()]
    given, flags = [f"{paths[0]}:2.5", f"{paths[1]}:0.5"], ("--dedup", "exact")
    prepared("chat", tokenizer, tmp_path / "whole", given, *flags)
    monkeypatch.setattr("payload.data.tasks.chat_reader._BATCH_SIZE", 7)
    prepared("chat", tokenizer, tmp_path / "small", given, *flags)
    assert contents(tmp_path / "small") == contents(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("task", sampled(("text", "chat"), sample=("chat",)))
def test_a_killed_run_resumes_and_ends_with_the_same_bytes(
    task: TaskKind, tokenizer: Path, tmp_path: Path
) -> None:
    inputs = []
    for name, weight in (("a", "2.5"), ("b", "0.5")):
        named = [f"{name}{number % 90}" for number in range(100)]
        rows: list[dict[str, Any]] = [
            {"text": f" {each}" * 1000}
            if task == "text"
            else {"messages": turn("ask", f" {each}" * 1000)}
            for each in named
        ]
        inputs.append(f"{write_rows(tmp_path / f'{name}.jsonl', rows)}:{weight}")
    flags = ("--shard-mib", 1, "--dedup", "near")
    length = ("--sequence-length", 4096) if task == "chat" else ()
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert main(words(task, tokenizer, whole, inputs, *flags, *length)) == 0
    command = words(task, tokenizer, broken, inputs, *flags, *length)
    killed = subprocess.Popen(
        data_command(*command),
        cwd=REPOSITORY,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    journal = broken / JOURNAL_NAME
    while not (journal.exists() and journal.read_bytes().count(b"\n") > 1):
        assert killed.poll() is None, "it was to be killed before its end"
        time.sleep(0.002)
    killed.kill()
    killed.wait()
    assert main(command) == 0
    assert contents(broken) == contents(whole)
    assert [each["duplicates"] for each in inputs_of(whole)] == [10, 10]


def test_other_weights_are_other_data(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_named(tmp_path / "a.jsonl", "chat", A)
    assert main(words("chat", tokenizer, tmp_path / "out", [f"{path}:2"])) == 0
    said = capsys.readouterr().out
    assert f"{path}: 40 rows; 4 for validation, 36 for training with weight 2: 72 an epoch" in said
    assert main(words("chat", tokenizer, tmp_path / "out", [f"{path}:2"])) == 0
    assert main(words("chat", tokenizer, tmp_path / "out", [f"{path}:3"])) == 10
    assert "other settings" in capsys.readouterr().err


def test_a_dry_run_prints_the_shares(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for task in ("text", "chat"):
        paths = [write_named(tmp_path / f"{name}.jsonl", task, rows) for name, rows in _named()]
        given = [f"{paths[0]}:3", f"{paths[1]}:1"]
        assert main(words(task, tokenizer, tmp_path / "out", given, "--dry-run")) == 0
        assert "with weight 3" in capsys.readouterr().out
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e9", "three"])
def test_a_weight_that_is_no_positive_number_is_refused(
    weight: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_named(tmp_path / "a.jsonl", "text", A)
    assert main(["prepare", "--input", f"{path}:{weight}", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert f"the weight '{weight}' is not a number above 0" in said and "PATH:WEIGHT" in said


def test_a_missing_file_is_named_without_its_weight(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_named(tmp_path / "a.jsonl", "text", A)
    words = [
        "prepare",
        "--input",
        str(path),
        f"{tmp_path}/none.jsonl:2",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(words) == ExitCode.CONFIG
    problem = f"--input {tmp_path}/none.jsonl: file or folder not found. "
    assert problem in capsys.readouterr().err
    assert main(["prepare", "--input", "none.jsonl", "--out", "o"]) == ExitCode.CONFIG
    assert "--input none.jsonl: file or folder not found. " in capsys.readouterr().err


def test_a_weight_that_takes_no_row_and_a_file_with_two_weights_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_named(tmp_path / "a.jsonl", "text", A)
    out = ["--out", str(tmp_path / "out")]
    assert main(["prepare", "--input", f"{path}:0.01", *out]) == 10
    assert "the weight 0.01 takes none of 36 training rows" in capsys.readouterr().err
    assert main(["prepare", "--input", f"{path}:2", f"{path}:3", *out]) == 2
    assert "given twice" in capsys.readouterr().err


def test_an_existing_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    path = tmp_path / "a:2"
    path.write_text("")
    assert split_weights([str(path)]) == ((str(path),), ())
    assert split_weights([f"{path}:3"]) == ((str(path),), (Fraction(3),))
    assert split_weights(["owner/name", "folder:1/file"]) == (("owner/name", "folder:1/file"), ())
    assert split_weights(["owner/name:0.1"]) == (("owner/name",), (Fraction("0.1"),))
