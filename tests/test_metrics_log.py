"""Rows of metrics.jsonl: valid rows, and steps without rows."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from payload.run_record.classification import MOST_LABELS_LOGGED, ClassMetrics
from payload.run_record.metrics_log import (
    EvalMetrics,
    RankTimes,
    StepMetrics,
    describe_missing,
    missing_steps,
    parse_row,
    rank_times,
    read_lines,
    read_metrics,
    stream_metrics,
    to_json_line,
)
from payload.storage.restore import last_step


def step_metrics(step: int) -> StepMetrics:
    """Return the row of one step."""
    return StepMetrics(
        step=step,
        tokens=step * 8,
        loss=5.0 - step / 100,
        lr=0.1,
        grad_norm=1.0,
        step_time_s=0.05,
        tokens_per_s=20.0,
        mfu=None,
        data_time_s=0.0,
        sync_time_s=0.0,
        rss_bytes=1,
    )


def step_line(step: int) -> str:
    """Return the line of one step."""
    return to_json_line(step_metrics(step))


def steps_of(path: Path) -> list[int]:
    """Return the steps with a row, in the order of the file."""
    return [row["step"] for row in read_metrics(path) if "loss" in row]


def lines(steps: Iterable[int]) -> str:
    return "".join(step_line(step) for step in steps)


SOUND = json.loads(step_line(3))


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"\xff\xfe\n",
        b"\0" * 100,
        b"[" * 20_000,
        b"7\n",
        b"[]\n",
        b"{}\n",
        *(
            json.dumps(SOUND | change).encode()
            for change in (
                {"step": "3"},
                {"step": True},
                {"step": 3.5},
                {"loss": None},
                {"loss": float("nan")},
                {"loss": float("inf")},
                {"step_time_s": "fast"},
                {"tokens": 10**30},
                {"mfu": [0.5]},
                {"val_loss": "x"},
            )
        ),
        json.dumps(SOUND).replace('"step": 3', '"step": ' + "3" * 5000).encode(),
        json.dumps(SOUND).replace('"loss": ', '"loss": 1e999, "x": ').encode(),
    ],
)
def test_a_damaged_line_is_no_row(line: bytes) -> None:
    assert parse_row(line) is None


def test_every_row_says_when_it_was_written_and_rows_of_old_count_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    old = json.dumps({name: value for name, value in SOUND.items() if name != "time_unix"})
    path.write_text(step_line(2) + old + "\n" + to_json_line(EvalMetrics(
        step=3, val_loss=4.0, val_tokens=9
    )))  # fmt: skip
    first, second, evaluation = read_metrics(path)
    assert first["time_unix"] > 1e9 and evaluation["time_unix"] > 1e9
    assert "time_unix" not in second


def test_rows_around_damaged_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    damaged = step_line(3).encode()[:20] + b"\n" + b"\xff\n" + b"x" * 3_000_000 + b"\n"
    path.write_bytes(lines([1, 2]).encode() + damaged + lines([4, 5]).encode() + b'{"step": 6')
    assert steps_of(path) == [1, 2, 4, 5]


def test_a_row_with_the_times_of_4096_ranks_is_read(tmp_path: Path) -> None:
    times = (0.123456789,) * 4096
    ranks = RankTimes(
        steps=1, data=times, forward=times, backward=times, wait=times, checkpoint=times
    )
    row = to_json_line(replace(step_metrics(2), ranks=ranks))
    (tmp_path / "metrics.jsonl").write_text(lines([1]) + row + lines([3]))
    assert len(row) > 2**16
    assert steps_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    found = rank_times(read_metrics(tmp_path / "metrics.jsonl")[1])
    assert found is not None and found.wait == times


def test_of_a_file_too_long_for_the_memory_the_newest_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(range(1, 101)))
    size = path.stat().st_size
    monkeypatch.setattr("payload.run_record.metrics_log._HELD_BYTES", size // 2)
    found = steps_of(path)
    assert (found[0] - 1) * size // 100 == pytest.approx(size / 2, rel=0.05) and found[-1] == 100
    monkeypatch.setattr("payload.run_record.metrics_log._HELD_ROWS", 7)
    assert steps_of(path) == list(range(94, 101))
    # A reader that keeps no rows in memory counts all of them.
    assert [row["step"] for row in stream_metrics(path)] == list(range(1, 101))


def test_a_file_of_too_many_rows_is_damaged_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(range(1, 11)))
    monkeypatch.setattr("payload.run_record.metrics_log._MAX_ROWS", 4)
    assert [row and row["step"] for _, row in read_lines(path)] == [1, 2, 3, 4, None]


def test_the_last_step_is_found_without_holding_the_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = b'{"step":9,"val_loss":0,"val_tokens":0}\n'
    path.write_bytes(row * 50_000)
    tracemalloc.start()
    try:
        assert last_step(path) == 9
        assert tracemalloc.get_traced_memory()[1] < len(row) * 50_000
    finally:
        tracemalloc.stop()
    assert last_step(tmp_path / "absent") == -1


@pytest.mark.parametrize(
    "junk",
    [
        {"x": [[]] * 20_000},
        {"x": [{}] * 20_000},
        {str(number): 1 for number in range(20_000)},
    ],
    ids=["lists", "objects", "names"],
)
def test_a_row_that_takes_far_more_memory_than_its_line_is_none(junk: dict[str, object]) -> None:
    tracemalloc.start()
    try:
        line = json.dumps(SOUND | junk, separators=(",", ":")).encode()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert parse_row(line) is None
        assert tracemalloc.get_traced_memory()[1] - before < len(line)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("labels", [2, 3, 10, 16, 30, MOST_LABELS_LOGGED])
def test_a_row_with_a_confusion_matrix_is_read(labels: int) -> None:
    matrix = ((0,) * labels,) * labels
    row = ClassMetrics(
        step=1,
        val_loss=0.5,
        val_tokens=9,
        val_texts=9,
        val_accuracy=1.0,
        val_f1=1.0,
        val_confusion=matrix,
    )
    found = parse_row(to_json_line(row).encode())
    assert found is not None and len(found["val_confusion"]) == labels


def test_what_is_no_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "link", "pipe", "absent"):
        assert read_metrics(tmp_path / name) == []


@pytest.mark.parametrize(
    ("steps", "trained", "missing", "words"),
    [
        ([], 0, (), ""),
        ([], 3, ((1, 3),), "1 to 3"),
        ([1, 2, 3], 3, (), ""),
        ([1, 2, 3, 4], 3, (), ""),
        ([1, 3, 4, 7], 9, ((2, 2), (5, 6), (8, 9)), "2, 5 to 6, 8 to 9"),
    ],
)
def test_steps_without_a_row_are_known(
    steps: list[int], trained: int, missing: tuple[tuple[int, int], ...], words: str
) -> None:
    assert missing_steps(steps, trained=trained) == missing
    assert describe_missing(missing) == words


@pytest.mark.parametrize("loss", ["evil", 1.0, None, {}])
def test_a_row_that_is_a_step_and_an_evaluation_is_no_row(loss: object, tmp_path: Path) -> None:
    """The attack: such a row was checked as an evaluation, and ended `list` and `report`."""
    row = json.loads(to_json_line(EvalMetrics(step=3, val_loss=1.0, val_tokens=1)))
    path = tmp_path / "metrics.jsonl"
    path.write_text(step_line(2) + json.dumps({**row, "loss": loss}) + "\n" + step_line(4))
    assert steps_of(path) == [2, 4] and len(read_metrics(path)) == 2
