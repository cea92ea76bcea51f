"""The failures that are retried."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from payload.core.errors import ExitCode
from payload.launch.outcome import Verdict
from payload.launch.restart import AttemptEnd, decide, restart_note

LOST = Verdict(status="failed", exit_code=ExitCode.RANK_LOST, error="rank 1 on a was killed")
END = AttemptEnd(verdict=LOST, stop_requested=False, restarts=0, began_at_step=10, reached_step=11)


@pytest.mark.parametrize("code", list(ExitCode))
def test_only_a_lost_rank_and_a_hang_are_worth_retrying(code: ExitCode) -> None:
    decision = decide(replace(END, verdict=replace(LOST, exit_code=code)), max_restarts=3)
    assert (decision.pause_s is not None) is (code in (ExitCode.RANK_LOST, ExitCode.HANG))
    assert decision.why is None


def test_a_run_that_was_asked_to_stop_is_not_restarted() -> None:
    assert decide(replace(END, stop_requested=True), max_restarts=3).pause_s is None


def test_restarts_are_counted_and_their_pause_grows() -> None:
    decisions = [decide(replace(END, restarts=n), max_restarts=6) for n in range(7)]
    assert [decision.pause_s for decision in decisions] == [2, 6, 18, 54, 120, 120, None]
    assert decisions[-1].why == "not restarted: limits.max_restarts = 6 is reached"


@pytest.mark.parametrize("reached_step", [None, 0, 10])
def test_an_attempt_that_got_nowhere_is_the_last(reached_step: int | None) -> None:
    decision = decide(replace(END, reached_step=reached_step), max_restarts=3)
    assert decision.pause_s is None
    assert decision.why == "not restarted: no step was completed beyond step 10"


def test_zero_means_never_and_prints_nothing() -> None:
    assert decide(END, max_restarts=0).why is None


def test_the_note_has_the_failure_and_the_point_of_resumption() -> None:
    note = restart_note(LOST, checkpoint=Path("c/step_00000010"), restart=1, max_restarts=3)
    assert note == (
        "rank 1 on a was killed. Continuing from checkpoint step_00000010 (restart 1 of 3)"
    )
    assert "Continuing from the start" in restart_note(
        LOST, checkpoint=None, restart=1, max_restarts=3
    )
