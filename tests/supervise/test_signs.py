"""What the head makes of the workers' messages."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from payload.launch.ranks import Rank
from payload.results import RankExit, RankProgress, RunPaths, read_json, write_json
from payload.supervise.pace import StepTimes
from payload.supervise.signs import Signs
from payload.supervise.stream import parse_message

HOUR_S = 3600.0


def make_signs(folder: Path) -> tuple[Signs, RunPaths]:
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
    return Signs(paths, ranks, []), paths


def progress(rank: int, *, age_s: float = 0.0, step: int = 3) -> RankProgress:
    """As a node writes it whose clock is an hour ahead."""
    return RankProgress(
        rank=rank,
        node=f"node-{rank}",
        pid=1,
        step=step,
        phase="step",
        time_unix=time.time() + HOUR_S - age_s,
    )


def message(*records: RankProgress, state: str = "S") -> dict[str, object]:
    return {
        "progress": [asdict(record) for record in records],
        "exits": [],
        "states": {"1": state},
        "skew_s": HOUR_S,
    }


def test_a_workers_record_is_kept_by_our_clock_and_lies_with_the_others(tmp_path: Path) -> None:
    signs, paths = make_signs(tmp_path)
    signs.take("node-1", message(progress(1), state="T"))
    (sign,) = signs.ranks()
    assert (sign.rank, sign.step, sign.phase, sign.stopped) == (1, 3, "step", True)
    kept = read_json(RankProgress, paths.rank_progress(1))
    assert kept is not None and abs(kept.time_unix - time.time()) < 60
    assert signs.steps() == 3


def test_the_same_record_again_is_no_progress(tmp_path: Path) -> None:
    signs, _ = make_signs(tmp_path)
    record = progress(1)
    signs.take("node-1", message(record))
    first = signs.ranks()[0].quiet_s
    signs.take("node-1", {**message(record), "skew_s": HOUR_S + 0.7})
    assert signs.ranks()[0].quiet_s >= first
    signs.take("node-1", message(progress(1, step=4)))
    assert signs.ranks()[0].quiet_s < 1.0 and signs.steps() == 4


def test_records_from_before_this_attempt_and_of_other_nodes_ranks_count_for_nothing(
    tmp_path: Path,
) -> None:
    signs, paths = make_signs(tmp_path)
    signs.take("node-1", message(progress(1, age_s=30.0), progress(0)))
    ended = RankExit(rank=1, node="node-1", exit_code=40, time_unix=time.time() + HOUR_S - 30)
    signs.take("node-1", {**message(), "exits": [asdict(ended), {"rank": "?"}, 5]})
    assert signs.ranks() == [] and not signs.exits()
    assert not paths.rank_exit(1).exists() and not paths.rank_progress(0).exists()


def test_rank_0_writes_as_long_as_the_checkpoint_has_not_its_name(tmp_path: Path) -> None:
    """The thread that writes it says nothing while the rank trains on."""
    signs, paths = make_signs(tmp_path)
    assert not signs.writing(within_s=1.0)
    partial = paths.checkpoints / "step_00000003.partial"
    partial.mkdir(parents=True)
    assert signs.writing(within_s=1.0)
    partial.rename(paths.checkpoint(3))
    assert not signs.writing(within_s=1.0)


def test_a_new_attempt_forgets_what_was_shown(tmp_path: Path) -> None:
    signs, paths = make_signs(tmp_path)
    write_json(paths.rank_exit(0), RankExit(rank=0, node="node-0", exit_code=40, time_unix=1.0))
    signs.look()
    assert signs.exits()[0].exit_code == 40
    signs.begin()
    signs.look()
    assert not signs.exits() and not paths.rank_exit(0).exists()


@pytest.mark.parametrize("line", [b"Welcome to node-1!", b"[1]", b"{}", b'{"now": null}', b"\xff"])
def test_what_is_no_message_is_passed_over(line: bytes) -> None:
    assert parse_message(line, now_unix=1.0) is None


def test_a_message_says_how_far_its_clock_is_off() -> None:
    parsed = parse_message(json.dumps({"now": 12.5}).encode(), now_unix=10.0)
    assert parsed is not None and parsed["skew_s"] == 2.5


def test_step_times_are_this_attempts_also_when_the_file_is_cut_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    row = '{"step": 1, "step_time_s": %s}\n'
    path.write_text(row % 100 + row % 100)
    times = StepTimes(path)
    assert times.median_s() is None
    path.write_text(row % 100)
    assert times.median_s() is None
    with path.open("a") as file:
        file.write(row % 1 + '{"val_loss": 1.0}\n' + row % 3 + row % 2 + '{"step_time_s": 5')
    assert times.median_s() == 2
