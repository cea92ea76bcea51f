"""CONTRACT: detects slow ranks (stragglers) from the rows of metrics.jsonl.

Ranks wait for each other, so all ranks take as long as the slowest rank. Only a rank's work time
shows whether the rank is slow: reading data, and the forward and backward passes without waiting.
"""

from __future__ import annotations

import itertools
import statistics
from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from payload.core.validation.fields import checked
from payload.run_record.metrics_log import RankTimes, rank_times

_SLOW = 1.25
"""Ratio above which a rank is slow: the rank's work time divided by the other ranks' median. A rank
with half the cores takes 2 times as long."""
_WELL = 1.1
"""A slow rank counts as recovered below this ratio to the median."""
_LEAST_S = 0.003
"""Smallest difference in seconds that counts. A smaller difference is noise."""
_ROWS = 7
_EPISODE_ROWS = 1000
_STEPS = 5
"""Number of steps for a decision; the median tolerates outliers in up to half of the steps."""
_WARM_UP_STEPS = 2
"""The first steps are ignored: building kernels and warming caches takes varying times."""
_SETTLE_STEPS = 20
_REMIND_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One episode in which a rank was slow and the other ranks waited for it."""

    rank: int = checked(low=0)
    first_step: int = checked(low=0)
    last_step: int | None = checked(None, low=0)
    """Last step of the episode; None if the rank is still slow, or was slow until the run ended."""
    work_s: float = checked(low=0)
    """Work time of the rank per step: `others_s` times a ratio. The ratio is the median, over the
    slow steps, of the rank's work time divided by the other ranks' work time. So the ratio is never
    below the threshold, even if steps differ much in length."""
    others_s: float = checked(low=0)
    """Median work time of the other ranks in the same steps."""

    def words(self, *, node: str | None = None) -> str:
        """Return the episode as a sentence."""
        return SlowRank(self).words(node=node)

    def ratio(self) -> float:
        """Return the ratio to the work time of the other ranks; 0 if their work took no time."""
        return self.work_s / self.others_s if self.others_s else 0.0


class SlowRank:
    """All episodes of one rank, with a sentence that summarizes them."""

    def __init__(self, *stragglers: Straggler) -> None:
        """`stragglers` are the episodes of one rank in chronological order."""
        self._stragglers = stragglers

    @property
    def rank(self) -> int:
        """Return the number of the rank."""
        return self._stragglers[-1].rank

    @property
    def is_slow(self) -> bool:
        """Return True if the last episode has not ended."""
        return self._stragglers[-1].last_step is None

    def words(self, *, node: str | None = None) -> str:
        """Return a sentence with the steps of the episodes and the worst ratio."""
        first, last, count = self._stragglers[0], self._stragglers[-1], len(self._stragglers)
        worst = max(self._stragglers, key=Straggler.ratio)
        at = f" on {node}" if node else ""
        when, take, wait = f"has been slow since step {last.first_step}", "takes", "wait"
        often, worst_words = (f" ({count} times)", "at worst ") if count > 1 else ("", "")
        if last.last_step is not None:
            when = f"was slow from step {first.first_step} to {last.last_step}"
            take, wait = "took", "waited"
        elif count > 1:
            often = f" ({count} times since step {first.first_step})"
        return (
            f"rank {self.rank}{at} {when}{often}: {worst_words}its own work {take} "
            f"{worst.work_s:.3g} s a step, {worst.ratio():.1f} times as long as the work of the "
            f"other ranks ({worst.others_s:.3g} s), which {wait} for this rank"
        )


@dataclass(frozen=True, slots=True)
class _Row:
    """The work times of all ranks in one row."""

    step: int
    steps: int
    work: tuple[float, ...]
    others: tuple[float, ...]
    """For each rank, the median work time of the other ranks."""

    def ratio(self, rank: int) -> float:
        return self.work[rank] / self.others[rank] if self.others[rank] else 1.0


class StragglerWatch:
    """Detects from each new row which ranks become slow, or are no longer slow."""

    def __init__(self) -> None:
        self._rows: deque[_Row] = deque(maxlen=_ROWS)
        self._slow: dict[int, Straggler] = {}
        self._episodes: dict[int, deque[_Row]] = {}
        """For each slow rank, the rows in which it was slow."""

    def add(self, row: Mapping[str, Any]) -> list[Straggler]:
        """Return the episodes of slow ranks that begin or end with this row."""
        times = rank_times(row)
        return [] if times is None else self.add_times(row["step"], times)

    def add_times(self, step: int, times: RankTimes) -> list[Straggler]:
        """Return the episodes of slow ranks that begin or end with the row of this step."""
        if step <= _WARM_UP_STEPS or len(times.data) < 2:
            return []
        work = times.work()
        if self._rows and len(self._rows[-1].work) != len(work):
            self._rows.clear()
            self._slow.clear()
            self._episodes.clear()
        elif self._rows and step <= self._rows[-1].step:
            # Restarted ranks repeat steps.
            self._rows.clear()
        self._rows.append(_Row(step, times.steps, work, _others(work)))
        is_even = max(work) < _SLOW * min(work)
        if (is_even and not self._slow) or sum(each.steps for each in self._rows) < _STEPS:
            return []
        return [change for rank in range(len(work)) if (change := self._update(rank)) is not None]

    def slow(self) -> list[Straggler]:
        """Return the current episode of each slow rank."""
        return [self._measured(each) for each in self._slow.values()]

    def is_slow(self, rank: int) -> bool:
        """Return True if the rank is slow now."""
        return rank in self._slow

    def _update(self, rank: int) -> Straggler | None:
        ratio = statistics.median(each.ratio(rank) for each in self._rows)
        known = self._slow.get(rank)
        if known is not None and ratio < _WELL:
            del self._slow[rank]
            return replace(self._measured(known), last_step=self._rows[-1].step)
        if known is not None:
            if self._rows[-1].ratio(rank) >= _SLOW:
                self._episodes[rank].append(self._rows[-1])
            return None
        rows = [each for each in self._rows if each.ratio(rank) >= _SLOW]
        if ratio < _SLOW or self._difference_s(rank) < _LEAST_S:
            return None
        self._episodes[rank] = deque(rows, maxlen=_EPISODE_ROWS)
        first = Straggler(rank=rank, first_step=self._since(rank), work_s=0.0, others_s=0.0)
        self._slow[rank] = first
        return self._measured(first)

    def _difference_s(self, rank: int) -> float:
        """Return how much longer this rank works than the others: the median over recent rows."""
        return statistics.median(each.work[rank] - each.others[rank] for each in self._rows)

    def _measured(self, straggler: Straggler) -> Straggler:
        """Return the episode with the medians over its rows."""
        rows, rank = self._episodes[straggler.rank], straggler.rank
        ratio = statistics.median(each.ratio(rank) for each in rows)
        others_s = statistics.median(each.others[rank] for each in rows)
        return replace(straggler, work_s=ratio * others_s, others_s=others_s)

    def _since(self, rank: int) -> int:
        """Return the first step of the current episode among the recent rows."""
        slow = itertools.takewhile(lambda each: each.ratio(rank) >= _SLOW, reversed(self._rows))
        return min((each.step - each.steps + 1 for each in slow), default=self._rows[-1].step)


@dataclass(slots=True)
class _Reported:
    """The reports so far about one rank."""

    ended: list[Straggler] = field(default_factory=list)
    """Ended episodes that the next report will include."""
    is_slow: bool = False
    """True if the last report was that the rank is slow."""
    settle_steps: int = 0
    """Number of steps in which the rank must not be slow before the end of an episode is
    reported."""
    remind_steps: int = _REMIND_STEPS
    remind_at: int = 0


class StragglerNews:
    """Selects from the episodes of all ranks the reports for a console.

    The start of a rank's first episode is reported immediately. On a busy machine, ranks take turns
    being slow for a moment. Therefore, from the second episode on, an end is reported only if the
    rank has not been slow for a number of steps. This number doubles with each episode. Episodes in
    between are counted. A rank that stays slow is reported again after a number of steps, which
    also doubles. This gives about 20 lines per rank in 100,000 steps. While a rank is slow, the
    last report about the rank always says that it is slow.
    """

    def __init__(self) -> None:
        self._watch = StragglerWatch()
        self._reported: defaultdict[int, _Reported] = defaultdict(_Reported)

    def add(self, row: Mapping[str, Any]) -> list[SlowRank]:
        """Return the reports that are due after this row."""
        for each in self._watch.add(row):
            reported = self._reported[each.rank]
            if each.last_step is not None:
                reported.ended.append(each)
        return [report for rank in [*self._reported] if (report := self._report(rank, row["step"]))]

    def _report(self, rank: int, step: int) -> SlowRank | None:
        """Return the report about one rank if it is due at this step."""
        past = self._reported[rank]
        if self._watch.is_slow(rank):
            if past.is_slow and step < past.remind_at:
                return None
            past.remind_steps *= 2 if past.is_slow else 1
            past.is_slow, past.remind_at = True, step + past.remind_steps
            current = next(each for each in self._watch.slow() if each.rank == rank)
            return SlowRank(*past.ended, current)
        settled_at = (past.ended[-1].last_step or 0) + past.settle_steps if past.ended else 0
        if not past.is_slow or step < settled_at:
            return None
        # If no episode has ended, the run was restarted with a different number of ranks.
        report = SlowRank(*past.ended) if past.ended else None
        past.ended, past.is_slow = [], False
        past.settle_steps = max(_SETTLE_STEPS, 2 * past.settle_steps)
        return report


def by_rank(stragglers: Iterable[Straggler]) -> list[SlowRank]:
    """Group episodes by rank; the rank with the latest episode is last."""
    found: dict[int, list[Straggler]] = {}
    for each in stragglers:
        found[each.rank] = found.pop(each.rank, [])
        found[each.rank].append(each)
    return [SlowRank(*each) for each in found.values()]


def find_stragglers(rows: Iterable[Mapping[str, Any]]) -> tuple[Straggler, ...]:
    """Return all episodes in chronological order."""
    steps = (row for row in rows if "loss" in row)
    return stragglers_of((row["step"], times) for row in steps if (times := rank_times(row)))


def stragglers_of(timed_steps: Iterable[tuple[int, RankTimes]]) -> tuple[Straggler, ...]:
    """Return all episodes in chronological order, from each step's number and times."""
    watch, ended = StragglerWatch(), []
    for step, times in timed_steps:
        ended += [each for each in watch.add_times(step, times) if each.last_step is not None]
    return tuple(sorted([*ended, *watch.slow()], key=lambda each: (each.first_step, each.rank)))


def _others(work: Sequence[float]) -> tuple[float, ...]:
    """Return for each rank the median work time of the other ranks."""
    order = sorted(work)
    # Without one value, the median is one of the two or three middle values.
    middle, is_odd = len(order) // 2, len(order) % 2
    found = []
    for own in work:
        place = bisect_left(order, own)
        if is_odd:
            low, high = (middle - (place >= middle), middle + (place <= middle))
            found.append((order[low] + order[high]) / 2)
        else:
            found.append(order[middle] if place < middle else order[middle - 1])
    return tuple(found)
