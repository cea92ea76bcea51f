"""The head's heartbeats from the workers' messages."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from payload.core.files import write_whole
from payload.launch.ranks import Rank
from payload.run_record.run_files import RankExit, RankProgress, RunPaths, read_json, write_json
from payload.supervise.heartbeat_receiver import parse_message
from payload.supervise.rank_heartbeats import RankHeartbeats, StepTimes
from tests.test_metrics_log import step_line

HOUR_S = 3600.0


def make_heartbeats(folder: Path) -> tuple[RankHeartbeats, RunPaths]:
    ranks = [
        Rank(
            rank=number,
            node=f"node-{number}",
            node_rank=number,
            local_rank=0,
            numa_domain=None,
            cores=(0,),
            threads=1,
        )
        for number in range(2)
    ]
    paths = RunPaths(folder)
    return RankHeartbeats(paths, ranks, []), paths


def progress(rank: int, *, age_s: float = 0.0, step: int = 3) -> RankProgress:
    """As a node writes it whose clocks are an hour ahead."""
    return RankProgress(
        rank=rank,
        node=f"node-{rank}",
        pid=1,
        step=step,
        phase="step",
        time_unix=time.time() + HOUR_S - age_s,
        monotonic_s=time.monotonic() + HOUR_S - age_s,
    )


def message(*records: RankProgress, state: str = "S") -> dict[str, object]:
    return {
        "progress": [asdict(record) for record in records],
        "exits": [],
        "states": {"1": state},
        "skew_s": HOUR_S,
        "lag_s": -HOUR_S,
    }


def test_a_workers_record_is_stored_by_our_clock_with_the_others(tmp_path: Path) -> None:
    beats, paths = make_heartbeats(tmp_path)
    beats.receive("node-1", message(progress(1), state="T"))
    (beat,) = beats.ranks()
    assert (beat.rank, beat.step, beat.phase, beat.stopped) == (1, 3, "step", True)
    kept = read_json(RankProgress, paths.rank_progress(1))
    assert kept is not None and abs(kept.time_unix - time.time()) < 60
    assert beats.steps() == 3


def test_the_same_record_again_is_no_progress(tmp_path: Path) -> None:
    beats, _ = make_heartbeats(tmp_path)
    record = progress(1)
    beats.receive("node-1", message(record))
    first = beats.ranks()[0].quiet_s
    beats.receive("node-1", {**message(record), "skew_s": HOUR_S + 0.7, "lag_s": 0.7 - HOUR_S})
    assert beats.ranks()[0].quiet_s >= first
    taken_s = time.monotonic()
    beats.receive("node-1", message(progress(1, step=4)))
    assert beats.ranks()[0].quiet_s <= time.monotonic() - taken_s and beats.steps() == 4


def test_an_older_record_is_ignored(tmp_path: Path) -> None:
    """The newer record counts, from the stream or from a shared folder."""
    beats, paths = make_heartbeats(tmp_path)
    older, newer = replace(progress(0), node="node-0"), replace(progress(0, step=4), node="node-0")
    beats.receive("node-0", message(newer))
    write_json(paths.rank_progress(0), older)
    beats.poll()
    assert beats.steps() == 4
    write_json(paths.rank_progress(0), replace(progress(0, step=5), node="node-0"))
    beats.poll()
    assert beats.steps() == 5


def test_records_from_before_this_attempt_and_of_other_nodes_ranks_count_for_nothing(
    tmp_path: Path,
) -> None:
    beats, paths = make_heartbeats(tmp_path)
    beats.receive("node-1", message(progress(1, age_s=30.0), progress(0)))
    then_s = time.monotonic() + HOUR_S - 30
    ended = RankExit(rank=1, node="node-1", exit_code=40, time_unix=1.0, monotonic_s=then_s)
    beats.receive("node-1", {**message(), "exits": [asdict(ended), {"rank": "?"}, 5]})
    assert beats.ranks() == [] and not beats.exits()
    assert not paths.rank_exit(1).exists() and not paths.rank_progress(0).exists()


def test_rank_0_writes_as_long_as_the_checkpoint_has_not_its_name(tmp_path: Path) -> None:
    """The thread that writes it sends nothing while the rank trains."""
    beats, paths = make_heartbeats(tmp_path)
    assert not beats.writing(within_s=1.0)
    partial = paths.checkpoints / "step_00000003.partial"
    partial.mkdir(parents=True)
    assert beats.writing(within_s=1.0)
    partial.rename(paths.checkpoint(3))
    assert not beats.writing(within_s=1.0)


def test_a_new_attempt_discards_earlier_records(tmp_path: Path) -> None:
    beats, paths = make_heartbeats(tmp_path)
    write_json(paths.rank_exit(0), RankExit(rank=0, node="node-0", exit_code=40, time_unix=1.0))
    beats.poll()
    assert beats.exits()[0].exit_code == 40
    beats.begin()
    beats.poll()
    assert not beats.exits() and not paths.rank_exit(0).exists()


def test_a_wall_clock_that_goes_back_makes_no_new_record_old(tmp_path: Path) -> None:
    """Neither this node's nor the worker's: both clocks may be set while the run is active."""
    beats, _ = make_heartbeats(tmp_path)
    ended = RankExit(
        rank=1,
        node="node-1",
        exit_code=40,
        time_unix=time.time() - 2 * HOUR_S,
        monotonic_s=time.monotonic() + HOUR_S,
    )
    back = replace(progress(1), time_unix=time.time() - 2 * HOUR_S)
    beats.receive("node-1", {**message(back), "exits": [asdict(ended)]})
    assert beats.steps() == 3
    assert beats.exits()[1].exit_code == 40
    assert abs(beats.exits()[1].monotonic_s - time.monotonic()) < 60


@pytest.mark.parametrize(
    "line",
    [
        b"Welcome to node-1!",
        b"[1]",
        b"{}",
        b"\xff",
        b'{"now": null, "monotonic_s": 1.0}',
        b'{"now": NaN, "monotonic_s": 1.0}',
        b'{"now": 1.0, "monotonic_s": 1.0, "ended": 5}',
        b'{"now": 1.0, "monotonic_s": 1.0, "states": ["S"]}',
        b'{"now": 1.0, "monotonic_s": 1.0, "progress": 7}',
        b'{"now": 1.0, "monotonic_s": 1.0, "x": ' + b"[" * 20_000,
    ],
)
def test_a_line_that_is_not_a_message_is_skipped(line: bytes) -> None:
    assert parse_message(line, now_unix=1.0, now_s=1.0) is None


def test_a_message_has_the_difference_of_the_clocks() -> None:
    line = json.dumps({"now": 12.5, "monotonic_s": 3.0}).encode()
    parsed = parse_message(line, now_unix=10.0, now_s=7.0)
    assert parsed is not None and (parsed["skew_s"], parsed["lag_s"]) == (2.5, 4.0)


def test_step_times_are_this_attempts_also_when_the_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(step_line(1) + step_line(2) + step_line(3))
    times = StepTimes(path)
    assert times.median_s(began_at=2) is None
    write_whole(path, step_line(1) + step_line(2))
    assert (times.median_s(began_at=2), times.reached_step(began_at=2)) == (None, None)
    rows = [step_line(step).replace("0.05", str(step)) for step in (3, 4, 5)]
    with path.open("a") as file:
        file.write(rows[0] + '{"val_loss": 1.0}\nx\n' + rows[1] + rows[2] + step_line(6)[:30])
    assert (times.median_s(began_at=2), times.reached_step(began_at=2)) == (4, 5)


def test_ranks_report_the_step_that_an_attempt_begins_from(tmp_path: Path) -> None:
    beats, _ = make_heartbeats(tmp_path)
    assert beats.began_at_step() is None
    beats.receive("node-1", message(replace(progress(1, step=20), phase="start")))
    beats.receive("node-1", message(progress(1, step=21)))
    assert (beats.began_at_step(), beats.steps()) == (20, 21)
