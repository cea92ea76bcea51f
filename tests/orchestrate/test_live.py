"""The live line: its text at several widths, and its prediction of the end."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from payload.config.training_sections import TrainSection
from payload.core.durations import as_clock
from payload.estimates.evaluations_and_saves_left import evaluations_left, saves_left
from payload.orchestrate.terminal import time_left
from payload.orchestrate.terminal.console import View
from payload.orchestrate.terminal.time_left import Eta
from payload.run_record.run_files import RankProgress

ROW = {"step": 11, "tokens": 10**7, "loss": 4.56789, "tokens_per_s": 12345.6, "mfu": 0.312}
HEARTBEAT = RankProgress(
    rank=0, node="a", pid=1, step=11, phase="step", time_unix=100.0, micro_step=3, micro_steps=12
)
VIEW = View(
    steps=20, nodes=3, status="running", progress=HEARTBEAT, row=ROW, elapsed_s=3725.4,
    left_s=725.0, cost_usd=1.5,
)  # fmt: skip


def test_a_wide_line_has_everything() -> None:
    assert VIEW.line(199) == (
        "step 12/20  micro-step 3/12  [#############-----------]  loss 4.5679  12,346 tokens/s  "
        "MFU 31.2%  $1.50 ($0.15 per M tokens)  3 nodes  1:02:05 elapsed  ETA 12:05"
    )


def test_a_narrow_line_keeps_what_matters_most() -> None:
    assert VIEW.line(79) == (
        "step 12/20  (3/12)  loss 4.5679  12,346 tokens/s  1:02:05 elapsed  ETA 12:05"
    )
    assert VIEW.line(39) == "step 12/20  (3/12)  1:02:05  ETA 12:05"
    assert VIEW.line(25) == "step 12/20  1:02:05"


@pytest.mark.parametrize("phase", ["load", "kernels", "step", "eval", "sync check", "checkpoint"])
def test_a_line_is_never_wider_than_the_terminal(phase: str) -> None:
    for width in range(201):
        for row in (None, ROW):
            for status in ("starting", "stopping"):
                view = replace(
                    VIEW, progress=replace(HEARTBEAT, phase=phase), row=row, status=status
                )
                assert len(view.line(width)) <= width


@pytest.mark.parametrize(
    ("phase", "words"),
    [
        ("load", "loading, step 11/20"),
        ("calibration", "calibrating, step 11/20"),
        ("kernels", "building kernels, step 11/20"),
        ("eval", "evaluating, step 11/20"),
        ("sync check", "checking ranks, step 11/20"),
        ("checkpoint", "saving, step 11/20"),
    ],
)
def test_every_phase_is_named(phase: str, words: str) -> None:
    assert replace(VIEW, progress=replace(HEARTBEAT, phase=phase)).line(199).startswith(words)


def test_before_the_first_heartbeat_and_while_stopping_the_line_says_so() -> None:
    fresh = View(steps=20, nodes=1, elapsed_s=4.0)
    assert fresh.line(39) == "starting ranks  0:04 elapsed"
    assert replace(VIEW, status="stopping").line(199).startswith("stopping: step 12/20  micro-step")


@dataclass(slots=True)
class Clock:
    """The clock of the predictions; tests set it."""

    now_s: float = 50.0

    def monotonic(self) -> float:
        """Return the time of the clock."""
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A stopped clock, independent of delays on a busy machine."""
    clock = Clock()
    monkeypatch.setattr(time_left, "time", clock)
    return clock


def test_the_eta_counts_evaluations_and_checkpoints() -> None:
    train = TrainSection(steps=10, eval_every=2, checkpoint_every=5)
    eta = Eta(train)
    began = 1000.0
    eta.progress(replace(HEARTBEAT, step=0, phase="eval", time_unix=began))
    assert eta.left_s() is None
    eta.progress(replace(HEARTBEAT, step=0, phase="step", time_unix=began + 30, micro_step=None))
    eta.progress(replace(HEARTBEAT, step=0, phase="checkpoint", time_unix=began + 31))
    eta.progress(replace(HEARTBEAT, step=0, phase="step", time_unix=began + 36, micro_step=None))
    for step in (1, 2, 3):
        eta.step({"step": step, "step_time_s": 10.0})
    left_s = eta.left_s()
    # 7 steps, the evaluations at 4, 6, 8 and 10, the checkpoints at 5 and 10.
    assert left_s is not None and left_s == pytest.approx(7 * 10 + 4 * 30 + 2 * 5)


def test_the_first_steps_micro_steps_tell_the_time_already() -> None:
    eta = Eta(TrainSection(steps=2, eval_every=0, checkpoint_every=0))
    eta.progress(replace(HEARTBEAT, step=0, time_unix=100.0, micro_step=None))
    assert eta.left_s() is None
    eta.progress(replace(HEARTBEAT, step=0, time_unix=115.0, micro_step=3))
    # The phase of the step began at 100; later heartbeats do not change it.
    left_s = eta.left_s()
    assert left_s is not None and left_s == pytest.approx(120.0)


def test_the_eta_moves_between_two_steps(clock: Clock) -> None:
    eta = Eta(TrainSection(steps=10, eval_every=0, checkpoint_every=0))
    eta.progress(HEARTBEAT)
    eta.step({"step": 5, "step_time_s": 60.0})
    before = eta.left_s()
    clock.now_s += 20.0
    after = eta.left_s()
    assert before is not None and after is not None and before - after == pytest.approx(20.0)


def test_what_is_left_is_counted_from_the_step() -> None:
    train = TrainSection(steps=20, eval_every=5, checkpoint_every=8)
    assert [evaluations_left(train, step) for step in (0, 4, 5, 15, 19, 20)] == [4, 4, 3, 1, 1, 0]
    assert [saves_left(train, step) for step in (0, 8, 16, 20)] == [3, 2, 1, 0]
    never = TrainSection(steps=20, eval_every=0, checkpoint_every=0)
    assert (evaluations_left(never, 3), saves_left(never, 3)) == (1, 1)


def test_durations_read_as_a_clock() -> None:
    assert [as_clock(s) for s in (0.4, 42.2, 725, 3725.4)] == ["0:00", "0:42", "12:05", "1:02:05"]
    assert [as_clock(s) for s in (100_000, 30_811.4 * 60)] == ["27:46:40", "21 d 9 h"]
    assert [as_clock(float(s)) for s in ("inf", "-inf", "nan")] == ["?", "?", "?"]
