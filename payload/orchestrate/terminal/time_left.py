"""CONTRACT: predicts the remaining time, evaluations and checkpoints of a run."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from payload.config.training_sections import TrainSection
from payload.estimates.evaluations_and_saves_left import evaluations_left, saves_left
from payload.run_record.checkpoint_grace import START_PHASES
from payload.run_record.run_files import RankProgress

# Number of recent steps in the median step time.
_RECENT = 20


class Eta:
    """Predicts the remaining time from past steps, evaluations, checks and checkpoints."""

    def __init__(self, train: TrainSection) -> None:
        self._train = train
        self._step = 0
        self._step_s: deque[float] = deque(maxlen=_RECENT)
        self._phase_s: dict[str, list[float]] = {}
        self._last: RankProgress | None = None
        self._phase_began_unix = 0.0
        self._since_s = time.monotonic()

    def step(self, row: Mapping[str, Any]) -> None:
        """Add a finished step."""
        self._step = row["step"]
        self._step_s.append(row["step_time_s"])
        self._since_s = time.monotonic()

    def progress(self, progress: RankProgress) -> None:
        """Add a heartbeat; the durations of phases are measured by the clock of rank 0."""
        last, self._last = self._last, progress
        if last is not None and last.phase == progress.phase:
            return
        if last is not None:
            took_s = max(0.0, progress.time_unix - self._phase_began_unix)
            self._phase_s.setdefault(last.phase, []).append(took_s)
        is_start = progress.phase in START_PHASES
        self._step = progress.step if is_start else max(self._step, progress.step)
        self._phase_began_unix, self._since_s = progress.time_unix, time.monotonic()

    def left_s(self) -> float | None:
        """Return the predicted remaining time, or None before the first measurement."""
        step_s, last = self._median_step_s(), self._last
        if step_s is None or last is None:
            return None
        done, train = self._step, self._train
        left_s = (train.steps - done) * step_s
        left_s += evaluations_left(train, done) * self._mean_s("eval")
        left_s += saves_left(train, done) * (
            self._mean_s("checkpoint") + self._mean_s("sync check")
        )
        since_s = time.monotonic() - self._since_s
        if last.phase == "step":
            return max(0.0, left_s - min(since_s, step_s))
        return left_s + max(0.0, self._mean_s(last.phase) - since_s)

    def _median_step_s(self) -> float | None:
        """Return the median step time; before the first step it is estimated from micro-steps."""
        if self._step_s:
            return statistics.median(self._step_s)
        last = self._last
        if last is None or last.phase != "step" or not last.micro_step or not last.micro_steps:
            return None
        took_s = last.time_unix - self._phase_began_unix
        return took_s / last.micro_step * last.micro_steps

    def _mean_s(self, phase: str) -> float:
        times_s = self._phase_s.get(phase)
        return statistics.fmean(times_s) if times_s else 0.0
