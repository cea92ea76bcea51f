"""The verdict on a silent run: hung, node lost, or healthy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from payload.core.errors import ExitCode
from payload.launch.liveness import LOST_S, NodeHeartbeat, Pace, RankHeartbeat, find_trouble
from payload.launch.outcome import Verdict

PACE = Pace(hang_timeout_s=120.0, longest_s=540.0, median_step_s=2.0)
ALIVE = NodeHeartbeat(node="node-1", quiet_s=0.5, unreachable_s=None)


def beat(rank: int, *, quiet_s: float, step: int = 7, phase: str = "step") -> RankHeartbeat:
    return RankHeartbeat(rank=rank, node=f"node-{rank}", step=step, phase=phase, quiet_s=quiet_s)


def look(*ranks: RankHeartbeat, node: NodeHeartbeat = ALIVE, pace: Pace = PACE) -> Verdict | None:
    return find_trouble(ranks, [node], world_size=2, age_s=10_000.0, pace=pace)


def test_a_rank_that_waits_for_one_that_works_is_no_hang() -> None:
    assert look(beat(0, quiet_s=1.0, phase="eval"), beat(1, quiet_s=5000.0)) is None


def test_no_progress_for_the_limit_is_a_hang_that_names_the_rank_behind() -> None:
    assert look(beat(0, quiet_s=119.0), beat(1, quiet_s=130.0, step=6)) is None
    verdict = look(beat(0, quiet_s=121.0), beat(1, quiet_s=130.0, step=6))
    assert verdict is not None and verdict.exit_code is ExitCode.HANG
    assert verdict.rank == 1
    assert verdict.error == (
        "no rank made progress for 121 s (limit 120 s); behind: rank 1 on node-1 at step 6 (step)"
    )


def test_of_two_ranks_at_one_step_the_one_in_the_earlier_phase_is_behind() -> None:
    verdict = look(beat(0, quiet_s=121.0), beat(1, quiet_s=130.0, phase="sync check"))
    assert verdict is not None and "behind: rank 1 on node-1 at step 7 (sync check)" in str(
        verdict.error
    )


def test_a_stopped_process_is_named_wherever_it_is() -> None:
    stopped = replace(beat(1, quiet_s=130.0), stopped=True)
    verdict = look(beat(0, quiet_s=130.0), stopped)
    assert verdict is not None and "stopped by a signal: rank 1 on node-1" in str(verdict.error)


def test_ranks_that_all_stop_at_one_step_are_reported() -> None:
    verdict = look(beat(0, quiet_s=130.0), beat(1, quiet_s=130.0))
    assert verdict is not None and verdict.rank is None
    assert "all ranks are at step 7 (step); see their logs" in str(verdict.error)


@pytest.mark.parametrize(
    ("median_step_s", "quiet_s", "hangs"),
    [(30.0, 290.0, False), (30.0, 310.0, True), (100.0, 530.0, False), (100.0, 545.0, True)],
)
def test_slow_steps_raise_the_limit_tenfold_but_not_past_gloos(
    median_step_s: float, quiet_s: float, hangs: bool
) -> None:
    pace = replace(PACE, median_step_s=median_step_s)
    verdict = look(beat(0, quiet_s=quiet_s), beat(1, quiet_s=quiet_s), pace=pace)
    assert (verdict is not None) is hangs


@pytest.mark.parametrize("phase", ["load", "calibration", "start", "checkpoint", "end"])
def test_phases_without_intermediate_progress_get_a_longer_limit(phase: str) -> None:
    def after(quiet_s: float) -> Verdict | None:
        return look(beat(0, quiet_s=quiet_s, phase=phase), beat(1, quiet_s=quiet_s))

    assert after(500.0) is None
    assert after(545.0) is not None


def test_before_the_first_step_and_the_first_heartbeats_the_limit_is_the_long_one() -> None:
    first = replace(PACE, median_step_s=None)
    assert look(beat(0, quiet_s=500.0), beat(1, quiet_s=500.0), pace=first) is None
    assert look(beat(0, quiet_s=500.0)) is None
    verdict = look(beat(0, quiet_s=545.0))
    assert verdict is not None and "rank(s) 1 never sent a heartbeat" in str(verdict.error)


def test_a_silent_node_that_takes_connections_is_frozen_in_any_phase() -> None:
    silent = replace(ALIVE, quiet_s=125.0)
    ranks = beat(0, quiet_s=121.0, phase="checkpoint"), beat(1, quiet_s=125.0)
    verdict = look(*ranks, node=silent)
    assert verdict is not None and verdict.exit_code is ExitCode.HANG
    assert "node frozen (accepts connections, but does not answer): node-1" in str(verdict.error)


def test_a_silent_node_in_a_run_that_makes_progress_is_ignored() -> None:
    silent = replace(ALIVE, quiet_s=1000.0, unreachable_s=1000.0)
    assert look(beat(0, quiet_s=1.0), beat(1, quiet_s=1000.0), node=silent) is None


def test_a_node_that_accepts_no_connection_is_lost_soon() -> None:
    gone = replace(ALIVE, quiet_s=20.0, unreachable_s=LOST_S)
    verdict = look(beat(0, quiet_s=19.0), beat(1, quiet_s=20.0), node=gone)
    assert verdict is not None and verdict.exit_code is ExitCode.RANK_LOST
    assert "node lost: node-1 cannot be reached" in str(verdict.error)
    assert look(beat(0, quiet_s=19.0), node=replace(gone, unreachable_s=LOST_S - 1)) is None


def test_a_step_longer_than_that_is_waited_for_twice() -> None:
    gone = replace(ALIVE, quiet_s=70.0, unreachable_s=60.0)
    slow = replace(PACE, median_step_s=40.0)
    assert look(beat(0, quiet_s=70.0), beat(1, quiet_s=70.0), node=gone, pace=slow) is None
    assert look(beat(0, quiet_s=81.0), beat(1, quiet_s=81.0), node=gone, pace=slow) is not None


@pytest.mark.parametrize("phase", ["start", "step", "checkpoint"])
def test_a_silent_node_gets_no_longer_limit_whatever_the_ranks_are_at(phase: str) -> None:
    silent = replace(ALIVE, quiet_s=130.0)
    early = replace(PACE, median_step_s=None)
    ranks = [beat(0, quiet_s=130.0, step=0, phase=phase)]
    assert look(*ranks, pace=early) is None
    verdict = look(*ranks, node=silent, pace=early)
    assert verdict is not None and verdict.exit_code is ExitCode.HANG
    assert "node-1" in str(verdict.error)


def test_a_silent_node_is_not_called_frozen_before_it_is_known_whether_it_can_be_reached() -> None:
    pace = replace(PACE, hang_timeout_s=9.0, median_step_s=0.1)
    ranks = [beat(0, quiet_s=10.0), beat(1, quiet_s=10.0)]
    assert look(*ranks, node=replace(ALIVE, quiet_s=10.0), pace=pace) is None
    ranks = [beat(0, quiet_s=16.0), beat(1, quiet_s=16.0)]
    gone = NodeHeartbeat(node="node-1", quiet_s=16.0, unreachable_s=5.0)
    assert look(*ranks, node=gone, pace=pace) is None
    lost = look(*ranks, node=replace(gone, unreachable_s=LOST_S), pace=pace)
    assert lost is not None and lost.exit_code is ExitCode.RANK_LOST
    frozen = look(*ranks, node=replace(ALIVE, quiet_s=16.0), pace=pace)
    assert frozen is not None and frozen.exit_code is ExitCode.HANG
