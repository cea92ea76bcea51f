"""`prepare --task preference`: formats, answer tokens, truncation, and rejected input."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from payload.core.errors import ExitCode
from payload.data.__main__ import main
from payload.data.reading.pairs import Pairs, open_pairs
from payload.data.show import read_samples
from payload.formats.data_folder import IGNORED_TARGET, load_meta
from tests.support import chat_data
from tests.support.chat_data import MARKED_TEMPLATE, make_tokenizer, turn, write_rows
from tests.support.preference_data import pairs

prepare = partial(chat_data.prepare, task="preference")
pytestmark = pytest.mark.processes  # a process renders the template

LENGTH = 64
ROWS = pairs(40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def folder(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("data")
    source = write_rows(place / "in.jsonl", ROWS)
    return prepare(tokenizer, source, place / "out", "--sequence-length", LENGTH)


def opened(folder: Path) -> Pairs:
    return open_pairs(folder, split="train", sequence_length=LENGTH)


def content(folder: Path) -> list[bytes]:
    names = ("train.bin", "train.marks.bin", "train.pairs.bin", "val.bin")
    return [(folder / name).read_bytes() for name in names]


def as_messages(row: dict[str, Any]) -> dict[str, Any]:
    prompt = turn(row["prompt"], "")[:1]
    answers = {name: turn("", row[name])[1:] for name in ("chosen", "rejected")}
    return {"prompt": prompt, **answers}


def as_conversations(row: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {name: turn(row["prompt"], row[name]) for name in ("chosen", "rejected")} | more


SHAPES = {
    "messages": [as_messages(row) for row in ROWS],
    "conversations": [as_conversations(row) for row in ROWS],
    "conversations that repeat the prompt": [
        as_conversations(row, prompt=row["prompt"]) for row in ROWS
    ],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_gives_the_same_tokens(
    folder: Path, tokenizer: Path, tmp_path: Path, shape: str
) -> None:
    source = write_rows(tmp_path / "in.jsonl", SHAPES[shape])
    out = prepare(tokenizer, source, tmp_path / "out", "--sequence-length", LENGTH)
    assert content(out) == content(folder)


@pytest.mark.parametrize(
    "kind", ["csv", pytest.param("parquet", marks=pytest.mark.processes), "hf"]
)
def test_other_sources_have_the_same_pairs(
    folder: Path, tokenizer: Path, tmp_path: Path, kind: str
) -> None:
    source = tmp_path / ("in" if kind == "hf" else f"in.{kind}")
    if kind == "csv":
        with source.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, ["prompt", "chosen", "rejected"])
            writer.writeheader()
            writer.writerows(ROWS)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(SHAPES["messages"]), source)
    else:
        source.mkdir()
        write_rows(source / "train.jsonl", SHAPES["conversations"])
    prepare(tokenizer, source, tmp_path / "out", "--sequence-length", LENGTH)
    assert content(tmp_path / "out") == content(folder)


def test_the_loss_covers_the_answers_and_nothing_before_or_behind(
    folder: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Earlier answers are part of the prompt."""
    earlier = turn("red add", "blue add")
    rows = [
        {name: [*earlier, *turn(row["prompt"], row[name])] for name in ("chosen", "rejected")}
        for row in ROWS
    ]
    source = write_rows(tmp_path / "in.jsonl", rows)
    for template in ((), ("--chat-template", tmp_path / "marked.jinja")):
        (tmp_path / "marked.jinja").write_text(MARKED_TEMPLATE)
        out = tmp_path / f"out{len(template)}"
        prepare(tokenizer, source, out, "--sequence-length", 128, *template)
        meta = load_meta(out)
        for number in range(5):
            chosen, rejected = read_samples(out, meta, split="train", number=number)
            found = [
                "".join(text for text, flag in each.parts if flag) for each in (chosen, rejected)
            ]
            before = [each.parts[0][0] for each in (chosen, rejected)]
            assert before[0] == before[1] and "blue add<|im_end|>" in before[0]
            asked = before[0].rpartition("user\n")[2].partition("<|im_end|>")[0]
            (row,) = [each for each in ROWS if each["prompt"] == asked][:1]
            assert found == [f"{row[name]}<|im_end|>" for name in ("chosen", "rejected")]


def test_a_batch_has_the_better_answers_first_and_padding_alone(folder: Path) -> None:
    data = opened(folder)
    chosen = np.array([3, 0, 7], dtype=np.int64)
    tokens, targets, starts = (each.numpy() for each in data.gather(chosen))
    longest = int(data.longest(chosen).max())
    assert tokens.shape == targets.shape == starts.shape == (6, longest)
    for row, (side, pair) in enumerate([(side, pair) for side in (0, 1) for pair in chosen]):
        alone = [each.numpy() for each in data.gather(np.array([pair], dtype=np.int64))]
        length = int(data.lengths[pair, side])
        assert (tokens[row, :length] == alone[0][side, :length]).all()
        assert (starts[row, :length] == 0).all()
        assert (starts[row, length:] == np.arange(length, longest)).all()
        assert (targets[row, length - 1 :] == IGNORED_TARGET).all()
        trained = targets[row] != IGNORED_TARGET
        assert (targets[row][trained] == tokens[row][np.flatnonzero(trained) + 1]).all()
    assert data.num_tokens(chosen) == int(data.lengths[chosen].sum())


def test_a_long_answer_is_cut_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    long = {"prompt": "add", "chosen": "red " * 80, "rejected": "blue"}
    source = write_rows(tmp_path / "in.jsonl", [*ROWS, long])
    out = prepare(tokenizer, source, tmp_path / "out", "--sequence-length", LENGTH)
    record = load_meta(out).preference
    assert record is not None and record.truncated_answers == 1
    assert record.truncated_tokens > 10
    sides = [open_pairs(out, split=each, sequence_length=LENGTH) for each in ("train", "val")]
    assert max(int(each.lengths.max()) for each in sides) == LENGTH


def test_the_counts_of_meta_json_are_those_of_the_files(folder: Path) -> None:
    meta = load_meta(folder)
    assert meta.preference is not None
    assert meta.train_documents + meta.val_documents == len(ROWS)
    marks = np.fromfile(folder / "train.marks.bin", dtype=np.uint8)
    assert meta.preference.train_trained_tokens == int((marks != 0).sum())
    assert main(["verify", str(folder)]) == ExitCode.OK


def test_a_group_is_all_for_training_or_all_for_validation(tokenizer: Path, tmp_path: Path) -> None:
    rows = [{**row, "source": f"g{number // 4}"} for number, row in enumerate(ROWS)]
    source = write_rows(tmp_path / "in.jsonl", rows)
    out = prepare(tokenizer, source, tmp_path / "out", "--group-column", "source")
    assert load_meta(out).val_documents % 4 == 0


def test_show_prints_both_answers_in_colour(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(folder), "--sample", "2", "--color", "always"]) == 0
    said = capsys.readouterr()
    assert said.out.count("\x1b[32m") == 2
    first, second = said.err.splitlines()
    assert first.startswith("pair 2 of 36 in train, chosen: ")
    assert second.startswith("pair 2 of 36 in train, rejected: ")
