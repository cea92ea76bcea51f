"""metrics.jsonl across a resume: each step once, damaged files kept, and losses logged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from payload.run_record.metrics_log import EvalMetrics, parse_row
from payload.run_record.run_files import RunPaths, Summary
from payload.run_record.run_statistics import with_metrics
from payload.train.rank_metrics_and_heartbeat import MetricsFile
from tests.test_checkpoint_listing import make_checkpoint
from tests.test_metrics_log import lines, step_line, steps_of


def resume(paths: RunPaths, *, step: int) -> None:
    """Open the file like a run that resumes from a checkpoint, and train two steps."""
    with MetricsFile(paths, resumed_at_step=step) as metrics:
        for following in (step + 1, step + 2):
            row = parse_row(step_line(following).encode())
            assert row is not None and "loss" in row
            metrics.append(EvalMetrics(step=following, val_loss=1.0, val_tokens=1))
            with paths.metrics.open("a") as file:
                file.write(step_line(following))


@pytest.mark.parametrize(
    "damage",
    [
        step_line(7).encode()[:30] + b"\n",
        step_line(7).encode().replace(b"loss", b"lo\xffs"),
        b"\0" * 400 + b"\n",
        b'{"step": 7, "loss": NaN}\n',
    ],
)
def test_a_damaged_line_is_set_aside_and_rows_are_whole_from_the_checkpoint_on(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    before = lines(range(1, 7)).encode() + damage + lines(range(8, 16)).encode()
    paths.metrics.write_bytes(before)
    with caplog.at_level(logging.WARNING):
        resume(paths, step=10)
    assert steps_of(paths.metrics) == [*range(1, 7), *range(8, 11), 11, 12]
    aside = tmp_path / "run" / "metrics.jsonl.damaged-1"
    assert aside.read_bytes() == before
    assert f"1 damaged line(s) were left out. The original file is {aside}" in caplog.text
    assert "the rows of step(s) 7 are lost" in caplog.text


def test_a_metrics_file_cut_to_half_is_said_and_the_summary_lists_the_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(tmp_path / "run")
    make_checkpoint(paths.checkpoint(20))
    text = lines(range(1, 21))
    paths.metrics.write_text(text[: len(text) // 2])
    left = steps_of(paths.metrics)[-1]
    blank = Summary(run_id="run", status="running", exit_class="ok", world_size=1, nodes=1)
    with caplog.at_level(logging.WARNING):
        resume(paths, step=20)
    assert steps_of(paths.metrics) == [*range(1, left + 1), 21, 22]
    assert f"the rows of step(s) {left + 1} to 20 are lost" in caplog.text
    assert with_metrics(blank, paths).missing_metrics == ((left + 1, 20),)
    paths.metrics.unlink()
    assert with_metrics(blank, paths).missing_metrics == ((1, 20),)
    assert with_metrics(blank, paths).steps == 20


def test_rows_that_are_there_twice_or_past_the_checkpoint_are_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.metrics.write_text(lines([1, 2, 3, 3, 2, 4, 5]) + step_line(6)[:10])
    resume(paths, step=4)
    assert steps_of(paths.metrics) == [1, 2, 3, 4, 5, 6]
    assert list(paths.root.iterdir()) == [paths.metrics]
    assert not caplog.records


def test_what_lies_in_the_place_of_the_metrics_is_set_aside(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.metrics.mkdir(parents=True)
    resume(paths, step=0)
    assert steps_of(paths.metrics) == [1, 2]
    assert (paths.root / "metrics.jsonl.damaged-1").is_dir()
    paths.metrics.unlink()
    paths.metrics.symlink_to(tmp_path / "nowhere")
    resume(paths, step=0)
    assert steps_of(paths.metrics) == [1, 2] and not (tmp_path / "nowhere").exists()
