"""Computes how a run spent its time, in total and by rank."""

from __future__ import annotations

from collections.abc import Sequence

from payload.report.source import Run
from payload.run_record.metrics_log import RankTimes
from payload.run_record.stragglers import stragglers_of

MOST_RANKS = 64
_MOST_SLOW = 8


def parts(run: Run) -> list[tuple[str, float, str]]:
    """Return a key, the seconds and a name for each activity on which the run spent time."""
    steps = run.steps
    in_steps = sum(row["step_time_s"] for row in steps)
    data = sum(row["data_time_s"] for row in steps)
    waiting = sum(row["sync_time_s"] for row in steps)
    start = sum(run.summary.get("start_s", {}).values())
    spent = run.state.get("spent_s") or run.summary.get("wall_s") or 0.0
    found = [
        ("compute", max(0.0, in_steps - data - waiting), "computing steps"),
        ("wait", waiting, "waiting for gradients"),
        ("data", data, "reading data"),
        ("start", start, "the last start"),
        ("other", max(0.0, spent - in_steps - start), "evaluations, checkpoints, restarts"),
    ]
    return [part for part in found if part[1] > 0]


def slowest_ranks(means: RankTimes) -> Sequence[int]:
    """Return all ranks in order; if there are more than 64, the 64 slowest, the slowest first."""
    work = means.work()
    if len(work) <= MOST_RANKS:
        return range(len(work))
    return sorted(range(len(work)), key=lambda rank: -work[rank])[:MOST_RANKS]


def slow_ranks(run: Run) -> list[str]:
    """Return a sentence for each of the last 8 times that a rank was slow."""
    return [each.words() for each in stragglers_of(run.timed_steps)[-_MOST_SLOW:]]
