"""`prepare --task classify`: labels from two columns, and one error line for invalid input."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from payload.core.errors import DataError, UsageError
from payload.data.__main__ import main
from payload.data.reading.labelled import LabelledTexts, open_labelled
from payload.data.tasks.classify_job import label_map, label_of, stratified
from payload.data.tokenizers.gpt2 import END_OF_TEXT, gpt2_encoding
from payload.formats.data_folder import MOST_NAME_TOKENS, load_meta

ROWS = [
    (f"{'good ' * (1 + i % 5)}{i}", "up") if i % 3 else (f"bad, it's {i}", "down")
    for i in range(30)
]
TEXTS, LABELS = [text for text, _ in ROWS], [label for _, label in ROWS]


def write_csv(path: Path, rows: Sequence[Sequence[object]], header: Sequence[str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def write_rows(folder: Path, kind: str, rows: Sequence[tuple[Any, Any]] = ROWS) -> Path:
    """Write `text` and `label` as csv, jsonl or parquet."""
    path = folder / f"rows.{kind}"
    if kind == "csv":
        return write_csv(path, rows, ("text", "label"))
    objects = [{"text": text, "label": label} for text, label in rows]
    if kind == "jsonl":
        path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    else:
        pq.write_table(pa.Table.from_pylist(objects), path)
    return path


def prepare(path: Path, out: Path, *more: str, kind: str | None = None) -> int:
    source = kind or path.suffix.removeprefix(".")
    words = ["--task", "classify", "--source", source, "--input", str(path), "--out", str(out)]
    return main(["prepare", *words, "--quiet", *more])


def small_tokenizer(folder: Path, *, prepends: bool, joins: bool) -> Path:
    """Write a tokenizer of a few letters.

    With `prepends` it puts a space before each text, like Llama 2's; otherwise it has no spaces.
    With `joins` it has a token for a colon and a space.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    letters = ["</s>", "\u2581", *"uplabexn:"]
    tokens = [*letters, "up", "\u2581up", "\u2581\u2581", ":\u2581"]
    merges = [(":", "\u2581")] if joins else []
    merges += [("u", "p"), ("\u2581", "up"), ("\u2581", "\u2581")]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    if prepends:
        spaces = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(spaces)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


def named(folder: Path) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the label names of a folder."""
    record = load_meta(folder).classify
    assert record is not None
    return record.label_tokens


def split(folder: Path, name: str, *, sequence_length: int = 64) -> LabelledTexts:
    return open_labelled(folder / name, meta=load_meta(folder), sequence_length=sequence_length)


def decoded(folder: Path) -> list[tuple[str, str]]:
    """Return all texts of a folder with their labels."""
    meta = load_meta(folder)
    assert meta.classify is not None
    found = []
    for name in ("train.bin", "val.bin"):
        texts = split(folder, name)
        tokens, labels = texts.gather(np.arange(texts.num_texts()))
        for row, length, label in zip(tokens.tolist(), texts.lengths, labels, strict=True):
            assert set(row[length:]) <= {END_OF_TEXT}
            found.append((gpt2_encoding().decode(row[:length]), meta.classify.labels[label]))
    return found


@pytest.mark.parametrize(
    "kind", ["csv", "jsonl", pytest.param("parquet", marks=pytest.mark.processes)]
)
def test_every_text_is_there_once_with_its_label(tmp_path: Path, kind: str) -> None:
    path = write_rows(tmp_path, kind)
    assert prepare(path, tmp_path / "data", "--val-fraction", "0.2") == 0
    assert sorted(decoded(tmp_path / "data")) == sorted(ROWS)
    meta = load_meta(tmp_path / "data")
    assert meta.classify is not None and meta.task == "classify"
    assert meta.classify.labels == ("down", "up")
    assert (meta.classify.train_counts, meta.classify.val_counts) == ((8, 16), (2, 4))
    names = [gpt2_encoding().decode(list(each)) for each in meta.classify.label_tokens]
    assert names == [" down", " up"]
    assert main(["verify", str(tmp_path / "data")]) == 0


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "csv")
    assert prepare(path, tmp_path / "data", "--val-fraction", "0.2") == 0
    texts = split(tmp_path / "data", "train.bin")
    damaged = texts.tokens.copy()
    damaged[3] = 60_000
    with pytest.raises(DataError, match="token 60000 is outside the vocabulary of 50257"):
        replace(texts, tokens=damaged, check=None).gather(np.arange(texts.num_texts()))


@pytest.mark.parametrize("joins", [False, True])
def test_a_names_tokens_are_those_that_end_a_text_where_a_tokenizer_begins_it_with_a_space(
    tmp_path: Path, joins: bool
) -> None:
    tokenizer = small_tokenizer(tmp_path / "tokenizer", prepends=True, joins=joins)
    rows = [(f"x label {each}", each) for each in ("up", "nap") for _ in range(4)]
    path, out = write_rows(tmp_path, "csv", rows), tmp_path / "data"
    assert prepare(path, out, "--tokenizer", str(tokenizer)) == 0
    texts = split(out, "train.bin")
    tokens, labels = texts.gather(np.arange(texts.num_texts()))
    for row, length, label in zip(tokens.tolist(), texts.lengths, labels, strict=True):
        name = named(out)[label]
        # Joined to a colon, the space is not part of the name, so the name is encoded alone.
        assert joins or tuple(row[:length][-len(name) :]) == name
    lengths = {label: len(each) for label, each in zip(("nap", "up"), named(out), strict=True)}
    assert lengths == {"nap": 4, "up": 2 if joins else 1}


def test_no_label_has_name_tokens_if_a_name_has_no_tokens(tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path / "tokenizer", prepends=False, joins=False)
    path = write_rows(tmp_path, "csv", [("x up", each) for each in ("up", "?") for _ in range(4)])
    assert prepare(path, tmp_path / "data", "--tokenizer", str(tokenizer)) == 0
    assert named(tmp_path / "data") == ()


def test_a_name_may_be_no_text_and_longer_than_meta_json_has_tokens_of_it(tmp_path: Path) -> None:
    rows = [("text", each) for each in ("\ud800", "up " * 2000) for _ in range(4)]
    assert prepare(write_rows(tmp_path, "jsonl", rows), tmp_path / "data") == 0
    long, replaced = sorted(named(tmp_path / "data"), key=len, reverse=True)
    assert len(long) == MOST_NAME_TOKENS
    assert gpt2_encoding().decode(list(long)) == " up" * MOST_NAME_TOKENS
    assert gpt2_encoding().decode(list(replaced)) == " ?"


def test_the_columns_are_chosen_by_name_and_a_second_time_nothing_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_csv(tmp_path / "a.csv", [(b, a) for a, b in ROWS], ("kind", "body"))
    flags = ("--text-column", "body", "--label-column", "kind")
    assert prepare(path, tmp_path / "data", *flags) == 0
    assert sorted(decoded(tmp_path / "data")) == sorted(ROWS)
    assert (
        "2 labels, texts for training + validation: down 9 + 1, up 18 + 2"
        in capsys.readouterr().out
    )
    assert prepare(path, tmp_path / "data", *flags, "--json") == 0
    assert json.loads(capsys.readouterr().out)["was_ready"] is True


def test_ratings_become_labels_by_a_table(tmp_path: Path) -> None:
    rows = [(f"text {i}", 1 + i % 5) for i in range(50)]
    path = write_rows(tmp_path, "jsonl", rows)
    table = ("--label-map", "1,2=negative", "4,5=positive", "3=")
    assert prepare(path, tmp_path / "data", *table) == 0
    names = {1: "negative", 2: "negative", 4: "positive", 5: "positive"}
    wanted = [(text, names[rating]) for text, rating in rows if rating != 3]
    assert sorted(decoded(tmp_path / "data")) == sorted(wanted)
    meta = load_meta(tmp_path / "data")
    assert meta.classify is not None and meta.classify.labels == ("negative", "positive")


def test_numbers_are_labels_in_their_own_order(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "jsonl", [(f"text {i}", (10, 9.0, 2)[i % 3]) for i in range(12)])
    assert prepare(path, tmp_path / "data") == 0
    meta = load_meta(tmp_path / "data")
    assert meta.classify is not None and meta.classify.labels == ("2", "9", "10")


def test_long_texts_lose_their_end_and_are_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path, "csv", [("one two three four five", label) for label in "aabb"])
    assert prepare(path, tmp_path / "data") == 0
    texts = split(tmp_path / "data", "train.bin", sequence_length=3)
    tokens, _ = texts.gather(np.arange(2))
    assert gpt2_encoding().decode(tokens[0].tolist()) == "one two three"
    assert texts.num_truncated == 2


def test_every_label_has_its_share_of_the_validation() -> None:
    labels = np.array([0] * 100 + [1] * 10 + [2] * 2, dtype=np.int64)
    is_val = stratified(labels, val_fraction=0.1, seed=1)
    assert [int(is_val[labels == label].sum()) for label in range(3)] == [10, 1, 1]
    assert not np.array_equal(is_val, stratified(labels, val_fraction=0.1, seed=2))


@pytest.mark.parametrize(
    ("value", "label"),
    [(1, "1"), (2.0, "2"), (" a ", "a"), (True, "true"), ("", None), (None, None), (0.5, None)],
)
def test_a_value_is_a_label(value: object, label: str | None) -> None:
    assert label_of(value) == label


@pytest.mark.parametrize("entries", [["1"], ["=a"], ["1=a", "1=b"], ["1,,2=a"]])
def test_an_invalid_label_map_is_refused(entries: list[str]) -> None:
    with pytest.raises(UsageError, match="--label-map"):
        label_map(entries)


BAD: Mapping[str, tuple[Any, tuple[str, ...], str]] = {
    "one class": ([("a", "x"), ("b", "x")], (), "every text has the label 'x'"),
    "missing in validation": (
        [*ROWS, ("text", "rare")],
        (),
        "label 'rare' has only one text, which leaves none for validation.",
    ),
    "no label": ([*ROWS, ("text", "")], (), "'label' is '', not a name or number"),
    "empty text": ([*ROWS, ("", "up")], (), "'text' is empty"),
    "no such label column": (
        ROWS,
        ("--label-column", "stars"),
        "no column 'stars'; its columns:",
    ),
    "no such text column": (ROWS, ("--text-column", "body"), "no column 'body'; its columns:"),
    "not in the table": (ROWS, ("--label-map", "up=1"), "label 'down' is not in --label-map"),
    "all left out": (ROWS, ("--label-map", "up=", "down="), "no labelled text"),
    "no rows": ([], (), ": no rows. Add rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_invalid_input_ends_in_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, flags, problem = BAD[name]
    path = write_rows(tmp_path, "csv", rows)
    assert prepare(path, tmp_path / "data", *flags) == 10
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and problem in said
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('text,label\n"a"b,up\n', "rows.csv line 2: not CSV in UTF-8"),
        ('text,label\na,"up\n', "rows.csv line 2: not CSV in UTF-8"),
        ("text,label\na\n", "rows.csv line 2: 1 fields, but 2 columns"),
        ("text,text\na,b\n", "line 1"),
        ("", ": no rows. Add rows"),
    ],
)
def test_a_broken_csv_is_refused_in_one_line(
    content: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    assert prepare(path, tmp_path / "data") == 10
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and problem in said


def test_flags_of_classification_belong_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path, "csv")
    assert prepare(path, tmp_path / "data", "--packing", "none") == 2
    assert "--packing is only for --task chat" in capsys.readouterr().err
    assert prepare(path, tmp_path / "data", "--text-column", "label") == 2
    assert prepare(path, tmp_path / "data", kind="text") == 2


@pytest.mark.parametrize(
    ("rows", "expected", "missing"),
    [
        (
            [(f"text {number}", "ab"[number % 2]) for number in range(20)],
            (
                "'a' and 1 more labels have only one validation text",
                "Add texts, or use --val-fraction 0.3",
            ),
            ("repeat", "class_weights"),
        ),
        (
            [(f"text {number}", "ab"[number % 2]) for number in range(16)],
            ("too few for a reliable accuracy. Add texts.",),
            ("--val-fraction",),
        ),
        (
            [(f"text {number % 39}", "a" if number % 39 % 2 else "b") for number in range(40)],
            ("note: 1 text repeats an earlier one", "remove them with --dedup exact"),
            ("1 texts", "different labels"),
        ),
        (
            [(f"text {number % 30}", "ab"[number % 2]) for number in range(60)],
            ("30 texts repeat an earlier one", "training rows that are also validation rows"),
            ("one validation text", "class_weights", "different labels"),
        ),
        (
            [(f"text {number % 35}", "ab"[number % 2]) for number in range(60)],
            ("25 texts repeat an earlier one", "25 repeated texts have different labels"),
            ("class_weights",),
        ),
        (
            [(f"text {number}", "a" if number % 5 else "b") for number in range(100)],
            ("'a' has 72 training texts, 'b' only 18", "task.class_weights=balanced"),
            ("one validation text", "repeat"),
        ),
    ],
)
def test_labels_that_make_the_accuracy_misleading_are_noted(
    rows: list[tuple[str, str]],
    expected: tuple[str, ...],
    missing: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--task", "classify", "--source", "csv", "--out", str(tmp_path / "data")]
    source = str(write_rows(tmp_path, "csv", rows))
    assert main(["prepare", *words, "--input", source]) == 0
    said = "".join(capsys.readouterr())
    assert all(text in said for text in expected), said
    assert not any(text in said for text in missing), said


def test_class_weights_are_not_suggested_to_a_run_that_has_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [(f"text {number}", "a" if number % 5 else "b") for number in range(100)]
    words = ["--task", "classify", "--out", str(tmp_path / "data"), "--has-class-weights"]
    assert main(["prepare", *words, "--input", str(write_rows(tmp_path, "csv", rows))]) == 0
    assert "task.class_weights" not in capsys.readouterr().err


def test_bad_rows_can_be_left_out(tmp_path: Path) -> None:
    rows = [*ROWS, ("", "up"), ("text", "")]
    assert prepare(write_rows(tmp_path, "jsonl", rows), tmp_path / "data", "--skip-bad") == 0
    assert load_meta(tmp_path / "data").skipped_documents == 2
    assert sorted(decoded(tmp_path / "data")) == sorted(ROWS)


def test_a_folder_made_without_bad_rows_is_named_so_where_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_rows(tmp_path, "jsonl", [*ROWS, ("", "up")])
    assert prepare(source, tmp_path / "data", "--skip-bad") == 0
    assert prepare(source, tmp_path / "data") == 10
    assert "--skip-bad. Choose another --out" in capsys.readouterr().err


def test_examples_that_are_not_meta_jsons_are_refused(tmp_path: Path) -> None:
    assert prepare(write_rows(tmp_path, "csv"), tmp_path / "data") == 0
    examples = tmp_path / "data" / "train.examples.bin"
    content = bytearray(examples.read_bytes())
    content[8] ^= 1
    examples.write_bytes(content)
    with pytest.raises(
        DataError, match=r"train\.examples\.bin: its SHA-256 differs from the one in meta"
    ):
        split(tmp_path / "data", "train.bin")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"task": "text"}, "files must be train"),
        ({"classify": None}, "contradict each other"),
        ({"labels": ["up", "up"]}, "classify has inconsistent counts or labels"),
        ({"train_counts": [1, 2]}, "classify has inconsistent counts or labels"),
        ({"pad_token": 10**6}, "classify has inconsistent counts or labels"),
        ({"label_tokens": [[1]]}, "classify has inconsistent counts or labels"),
        ({"label_tokens": [[1], [10**6]]}, "classify has inconsistent counts or labels"),
        ({"label_tokens": [[1], []]}, "classify has inconsistent counts or labels"),
        ({"label_tokens": [[1], [1] * 1025]}, "classify has inconsistent counts or labels"),
    ],
)
def test_a_damaged_meta_json_is_refused(
    tmp_path: Path, change: dict[str, Any], problem: str
) -> None:
    assert prepare(write_rows(tmp_path, "csv"), tmp_path / "data") == 0
    path = tmp_path / "data" / "meta.json"
    meta = json.loads(path.read_text())
    for key, value in change.items():
        (meta if key in meta else meta["classify"])[key] = value
    path.write_text(json.dumps(meta))
    with pytest.raises(DataError, match=problem):
        load_meta(tmp_path / "data")
