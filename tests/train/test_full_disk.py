"""Records and metrics on a full disk, which is a real one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import TrainingError
from payload.run_record.metrics_log import EvalMetrics, read_metrics
from payload.run_record.reserved_space import (
    preallocate_spare_file,
    remove_spare_file,
    write_record,
)
from payload.run_record.run_files import RankExit, RunPaths, read_json, write_json
from payload.train.rank_metrics_and_heartbeat import MetricsFile
from tests.support.small_disk import SmallDisk

pytestmark = pytest.mark.processes

RECORD = RankExit(rank=0, node="a", exit_code=40, error="the loss is nan", time_unix=1.0)


def test_a_record_goes_over_the_old_one_or_into_its_room(small_disk: SmallDisk) -> None:
    old, kept, absent = (small_disk.path / name for name in ("old", "kept", "absent"))
    write_record(old, replace(RECORD, error="a longer error " * 20))
    preallocate_spare_file(kept)
    small_disk.fill()
    with pytest.raises(OSError, match="No space left"):
        write_json(old, RECORD)
    for path in (old, kept):
        write_record(path, RECORD)
        assert read_json(RankExit, path) == RECORD
    for path, error in ((absent, "short"), (old, "longer than a block " * 1000)):
        with pytest.raises(OSError, match="No space left"):
            write_record(path, replace(RECORD, error=error))
    assert read_json(RankExit, old) == RECORD
    assert sorted(path.name for path in small_disk.path.iterdir()) == ["filler", "kept", "old"]


def test_room_that_was_not_needed_is_given_back(tmp_path: Path) -> None:
    for name in ("a", "b"):
        preallocate_spare_file(tmp_path / name)
    write_record(tmp_path / "a", RECORD)
    remove_spare_file(tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_rows_wait_for_room_and_a_checkpoint_does_not_go_ahead_of_them(
    small_disk: SmallDisk, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(small_disk.path)
    words = "metrics.jsonl cannot be written .No space left on device.. Free disk space"
    at_the_end = pytest.raises(TrainingError, match=words)
    with at_the_end, MetricsFile(paths, resumed_at_step=0) as metrics:
        small_disk.fill()
        for step in range(200):
            metrics.append(EvalMetrics(step=step, val_loss=1.0, val_tokens=1))
        with pytest.raises(TrainingError, match=words):
            metrics.require_written()
        assert len(caplog.records) == 1 and "Trying again" in caplog.text
        assert len(read_metrics(paths.metrics)) < 200
        small_disk.free()
        metrics.append(EvalMetrics(step=200, val_loss=1.0, val_tokens=1))
        metrics.require_written()
        assert [row["step"] for row in read_metrics(paths.metrics)] == list(range(201))
        small_disk.fill()
        for step in range(201, 401):
            metrics.append(EvalMetrics(step=step, val_loss=1.0, val_tokens=1))
