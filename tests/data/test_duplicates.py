"""Duplicates: --dedup exact and near, and training rows that also stand in validation."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from payload.core.tasks import TaskKind
from payload.data.__main__ import main
from payload.data.selection.content_keys import equal_groups, first_of_each, key_of, keys_of
from payload.data.selection.near_duplicates import Sketcher, near_groups
from tests.data.running import contents
from tests.support.chat_data import make_tokenizer, turn, write_rows
from tests.support.prepared_rows import TASK_CASES, found, inputs_of, prepared, words, write_named

pytestmark = pytest.mark.processes  # a process renders the template

UNIQUE = [f"a{number}" for number in range(60)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("how", ["exact", "near"])
@pytest.mark.parametrize("task", TASK_CASES)
def test_each_content_is_once_in_the_folder(
    task: TaskKind, how: str, tokenizer: Path, tmp_path: Path
) -> None:
    first = write_named(tmp_path / "a.jsonl", task, UNIQUE + UNIQUE[:20])
    second = write_named(tmp_path / "b.jsonl", task, ["b1", "a3", "b2", "b1"])
    out = tmp_path / "out"
    train, val = prepared(task, tokenizer, out, [first, second], "--dedup", how)
    assert train + val == Counter([*UNIQUE, "b1", "b2"]) and val
    assert [each["duplicates"] for each in inputs_of(out)] == [20, 2]
    assert [each["rows"] for each in inputs_of(out)] == [80, 4]


@pytest.mark.parametrize("task", TASK_CASES)
def test_without_duplicates_dedup_gives_the_same_files(
    task: TaskKind, tokenizer: Path, tmp_path: Path
) -> None:
    path = write_named(tmp_path / "a.jsonl", task, UNIQUE)
    prepared(task, tokenizer, tmp_path / "plain", [path])
    prepared(task, tokenizer, tmp_path / "exact", [path], "--dedup", "exact")
    plain, exact = contents(tmp_path / "plain"), contents(tmp_path / "exact")
    assert plain.pop("meta.json") != exact.pop("meta.json")
    assert plain == exact


@pytest.mark.parametrize("task", ["chat", "classify", "preference"])
def test_a_training_row_that_stands_in_validation_is_removed_and_counted(
    task: TaskKind, tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_file = write_named(tmp_path / "train.jsonl", task, [*UNIQUE, "a1", "a2"])
    valid = write_named(tmp_path / "valid.jsonl", task, ["a1", "a2", "v1", "v1"])
    out = tmp_path / "out"
    train, val = prepared(task, tokenizer, out, [train_file, valid])
    assert val == Counter(["a1", "a2", "v1", "v1"])
    assert train == Counter(set(UNIQUE) - {"a1", "a2"})
    assert inputs_of(out)[0]["also_in_validation"] == 4
    said = capsys.readouterr().out
    assert f"{train_file}: 62 rows; removed 4 training rows that are also validation rows" in said


@pytest.mark.parametrize("task", ["chat", "classify", "preference"])
def test_a_random_split_leaves_no_row_in_both_files(
    task: TaskKind, tokenizer: Path, tmp_path: Path
) -> None:
    names = UNIQUE + UNIQUE[:25] + [f"c{number}" for number in range(40)]
    random.Random(1).shuffle(names)
    path = write_named(tmp_path / "a.jsonl", task, names)
    out = tmp_path / "out"
    train, val = prepared(task, tokenizer, out, [f"{path}:2"], "--val-fraction", 0.3)
    assert not set(train) & set(val) and set(train) | set(val) == set(names)
    removed = inputs_of(out)[0]["also_in_validation"]
    assert removed > 0 and train.total() == 2 * (len(names) - val.total() - removed)


def test_weights_of_text_leave_no_document_in_both_files(tokenizer: Path, tmp_path: Path) -> None:
    path = write_named(tmp_path / "a.jsonl", "text", UNIQUE + UNIQUE[:25])
    train, val = prepared("text", tokenizer, tmp_path / "out", [f"{path}:2"], "--val-fraction", 0.3)
    assert not set(train) & set(val) and set(train) | set(val) == set(UNIQUE)


def test_a_few_rows_that_are_repeated_stay_and_are_noted(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_named(tmp_path / "a.jsonl", "chat", UNIQUE[:4] * 25)
    words_ = [each for each in words("chat", tokenizer, tmp_path / "out", [path])]
    words_.remove("--quiet")
    assert main(words_) == 0
    said = capsys.readouterr().err
    assert "rows of the training file kept although also in the validation file, because" in said
    assert "96 rows with the same content as an earlier row" in said
    assert main([*words_, "--dedup", "exact", "--force", "--val-fraction", "0.25"]) == 0
    assert "1 for validation, 3 for training" in capsys.readouterr().out


def test_dedup_none_keeps_every_row_and_counts_those_of_both_files(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_file = write_named(tmp_path / "train.jsonl", "chat", UNIQUE)
    valid = write_named(tmp_path / "valid.jsonl", "chat", ["a1", "v1"])
    given = words("chat", tokenizer, tmp_path / "out", [train_file, valid], "--dedup", "none")
    given.remove("--quiet")
    assert main(given) == 0
    assert found(tokenizer, tmp_path / "out") == (Counter(UNIQUE), Counter(["a1", "v1"]))
    assert (
        "1 row of the training file kept although also in the validation file. To"
        in capsys.readouterr().err
    )


def test_the_validation_copy_of_a_file_is_kept(tokenizer: Path, tmp_path: Path) -> None:
    train_file = write_named(tmp_path / "train.jsonl", "text", [*UNIQUE, "a1"])
    valid = write_named(tmp_path / "valid.jsonl", "text", ["a1", "v1"])
    flags = ("--dedup", "exact")
    train, val = prepared("text", tokenizer, tmp_path / "out", [train_file, valid], *flags)
    assert val == Counter(["a1", "v1"]) and train == Counter(set(UNIQUE) - {"a1"})


def test_groups_stay_together_without_duplicates(tokenizer: Path, tmp_path: Path) -> None:
    rows = [
        {"messages": turn("ask", f"row a{number % 50} ends"), "topic": f"t{number % 7}"}
        for number in range(70)
    ]
    path, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out"
    flags = ("--group-column", "topic", "--dedup", "exact", "--val-fraction", 0.3)
    train, val = prepared("chat", tokenizer, out, [path], *flags)
    assert train + val == Counter(f"a{number}" for number in range(50))
    sides = [{int(name[1:]) % 7 for name in side} for side in (train, val)]
    assert not sides[0] & sides[1] and len(sides[1]) == 3


def test_near_duplicates_are_found_and_other_rows_stay() -> None:
    draw = random.Random(5)
    vocabulary = [f"word{number}" for number in range(3000)]
    texts = [draw.choices(vocabulary, k=120) for _ in range(300)]
    copies = [[*text[:60], "changed", *text[61:]] for text in texts[:100]]  # similarity 0.92
    far = [text[:60] + draw.choices(vocabulary, k=60) for text in texts[100:200]]  # 0.33
    rows = [*texts, *copies, *far]
    sketcher = Sketcher()
    sketches = np.stack([sketcher.sketch([" ".join(row)]) for row in rows])
    groups = near_groups(np.arange(len(rows)), sketches)
    assert groups[300:400].tolist() == list(range(100))
    assert len(np.unique(groups)) == 400
    # Case and punctuation do not matter, and the text may come in parts.
    plain, loud = sketcher.sketch(["one two three, four five six"]), "ONE two; Three four"
    assert np.array_equal(sketcher.sketch([loud, "five SIX!"]), plain)


def test_the_estimated_similarity_is_that_of_the_sets() -> None:
    draw = random.Random(7)
    sketcher = Sketcher()
    errors = []
    for _ in range(60):
        one = [str(draw.random()) for _ in range(200)]
        cut = draw.randrange(200)
        other = one[:cut] + [str(draw.random()) for _ in range(200 - cut)]
        first, second = (_shingles(each) for each in (one, other))
        estimate = (sketcher.sketch([" ".join(one)]) == sketcher.sketch([" ".join(other)])).mean()
        errors.append(estimate - len(first & second) / len(first | second))
    assert abs(np.mean(errors)) < 0.02 and np.std(errors) < 0.06


def _shingles(words: list[str]) -> set[tuple[str, ...]]:
    flat = " ".join(words).replace(".", " ").split()
    return {tuple(flat[start : start + 5]) for start in range(len(flat) - 4)}


def test_system_messages_do_not_make_conversations_near_duplicates(
    tokenizer: Path, tmp_path: Path
) -> None:
    system = {"role": "system", "content": "word list " * 20}
    rows = [{"messages": [system, *turn("ask", f"row a{number} ends")]} for number in range(20)]
    path, out = write_rows(tmp_path / "in.jsonl", rows), tmp_path / "out"
    flags = ("--dedup", "near", "--sequence-length", 256)
    train, val = prepared("chat", tokenizer, out, [path], *flags)
    assert (train + val).total() == 20


def test_rows_are_equal_only_with_equal_keys() -> None:
    contents = [b"a", b"b", b"a", b"", b"b", b"a"]
    groups = equal_groups(keys_of(map(key_of, contents)))
    assert len(set(zip(groups.tolist(), contents, strict=True))) == len(np.unique(groups)) == 3
    nothing = np.zeros(6, dtype=np.bool_)
    assert first_of_each(groups, preferred=nothing).tolist() == [1, 1, 0, 1, 0, 0]
    last = np.array([0, 0, 0, 0, 1, 1], dtype=np.bool_)
    assert first_of_each(groups, preferred=last).tolist() == [0, 0, 0, 1, 1, 1]


def test_a_label_whose_texts_are_duplicates_of_others_is_named(
    tokenizer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"t{number}", "label": "x"} for number in range(20)]
    rows += [{"text": f"t{number}", "label": "y"} for number in (1, 2)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    given = words("classify", tokenizer, tmp_path / "out", [path])
    assert main(given) == 0
    assert main([*given, "--force", "--dedup", "exact"]) == 10
    assert "no training text with the label 'y' is left" in capsys.readouterr().err


def test_raw_data_shows_repeated_rows_and_labels_of_one_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": f"t{number % 8}", "label": "xy"[number % 2]} for number in range(10)]
    path = write_rows(tmp_path / "a.jsonl", [*rows, {"text": "new", "label": "rare"}])
    assert main(["show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "duplicates: 2 of 11 rows repeat an earlier row" in said
    assert "labels that only one row has: 'rare'" in said
