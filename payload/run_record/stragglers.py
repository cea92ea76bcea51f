"""CONTRACT: which rank is slow, since when and by how much, from the rows of metrics.jsonl.

Ranks that wait for each other all take as long as the slowest one. What tells them apart is their
own work: reading data, and the forward and backward passes without the waiting in them.
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
from payload.run_record.metrics_log import rank_times

_SLOW = 1.25
"""A rank whose work takes so many times the others' is slow. Half its cores make that 2."""
_WELL = 1.1
"""Below this it is slow no more."""
_LEAST_S = 0.003
"""A smaller difference is noise."""
_ROWS = 7
_EPISODE_ROWS = 1000
_STEPS = 5
"""So many steps must agree, of which half may be disturbed."""
_WARM_UP_STEPS = 2
"""The first steps build kernels and warm caches, on each rank in its own time."""
_SETTLE_STEPS = 20
_REMIND_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One rank that the others waited for."""

    rank: int = checked(low=0)
    first_step: int = checked(low=0)
    last_step: int | None = checked(None, low=0)
    """None while it is slow, and where it was slow to the end."""
    work_s: float = checked(low=0)
    """Its own work in a step: `others_s` times the median ratio of the steps in which it was slow.
    So the ratio is never below what counts as slow, however much the steps differ in length."""
    others_s: float = checked(low=0)
    """The others' work, the median of the same steps."""

    def words(self, *, node: str | None = None) -> str:
        """Return a sentence."""
        return SlowRank(self).words(node=node)

    def ratio(self) -> float:
        """Return how many times the others' work its own was; 0 where theirs took no time."""
        return self.work_s / self.others_s if self.others_s else 0.0


class SlowRank:
    """One rank's times of slowness, told in one sentence."""

    def __init__(self, *stragglers: Straggler) -> None:
        """Take one rank's stragglers, in the order of time."""
        self._stragglers = stragglers

    @property
    def rank(self) -> int:
        """Return the rank."""
        return self._stragglers[-1].rank

    @property
    def is_slow(self) -> bool:
        """Tell whether the last time of slowness goes on."""
        return self._stragglers[-1].last_step is None

    def words(self, *, node: str | None = None) -> str:
        """Return a sentence: since when or from when to when, and by how much at the worst."""
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
            f"{worst.work_s:.3g} s a step, the other ranks' {worst.others_s:.3g} s "
            f"({worst.ratio():.1f} times); they {wait} for it"
        )


@dataclass(frozen=True, slots=True)
class _Seen:
    """One row."""

    step: int
    steps: int
    work: tuple[float, ...]
    others: tuple[float, ...]
    """For each rank the median work of all others."""

    def ratio(self, rank: int) -> float:
        return self.work[rank] / self.others[rank] if self.others[rank] else 1.0


class StragglerWatch:
    """Takes in rows as they come, and says when a rank becomes slow or is well again."""

    def __init__(self) -> None:
        self._rows: deque[_Seen] = deque(maxlen=_ROWS)
        self._slow: dict[int, Straggler] = {}
        self._episodes: dict[int, deque[_Seen]] = {}
        """The rows in which each rank that is slow now was slow."""

    def add(self, row: Mapping[str, Any]) -> list[Straggler]:
        """Return the ranks that this row shows to be slow, or not to be any more."""
        times = rank_times(row)
        if times is None or row["step"] <= _WARM_UP_STEPS or len(times.data) < 2:
            return []
        work = times.work()
        if self._rows and len(self._rows[-1].work) != len(work):
            self._rows.clear()
            self._slow.clear()
            self._episodes.clear()
        elif self._rows and row["step"] <= self._rows[-1].step:
            # Ranks that were started again repeat steps.
            self._rows.clear()
        self._rows.append(_Seen(row["step"], times.steps, work, _others(work)))
        is_even = max(work) < _SLOW * min(work)
        if (is_even and not self._slow) or sum(each.steps for each in self._rows) < _STEPS:
            return []
        return [news for rank in range(len(work)) if (news := self._look_at(rank)) is not None]

    def slow(self) -> list[Straggler]:
        """Return the ranks that are slow now."""
        return [self._measured(each) for each in self._slow.values()]

    def is_slow(self, rank: int) -> bool:
        """Tell whether one rank is slow now."""
        return rank in self._slow

    def _look_at(self, rank: int) -> Straggler | None:
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
        """Return how much longer the rank's work takes than the others', in recent rows."""
        return statistics.median(each.work[rank] - each.others[rank] for each in self._rows)

    def _measured(self, straggler: Straggler) -> Straggler:
        """Return the straggler with the medians over its whole episode."""
        rows, rank = self._episodes[straggler.rank], straggler.rank
        ratio = statistics.median(each.ratio(rank) for each in rows)
        others_s = statistics.median(each.others[rank] for each in rows)
        return replace(straggler, work_s=ratio * others_s, others_s=others_s)

    def _since(self, rank: int) -> int:
        """Return the first step of the present slowness that is still known."""
        slow = itertools.takewhile(lambda each: each.ratio(rank) >= _SLOW, reversed(self._rows))
        return min((each.step - each.steps + 1 for each in slow), default=self._rows[-1].step)


@dataclass(slots=True)
class _Told:
    """One rank as the console has it."""

    spells: list[Straggler] = field(default_factory=list)
    """The ended times of slowness that the next sentence counts."""
    is_told: bool = False
    """The last sentence said that it is slow."""
    settle_steps: int = 0
    """It must not be slow for so long before its end is told."""
    remind_steps: int = _REMIND_STEPS
    remind_at: int = 0


class StragglerNews:
    """Takes in rows as they come, and picks what is worth a line on a console.

    A slow rank is told at once when it begins. On a busy machine ranks are slow for moments, in
    turns. So from the second time on the end is told only once the rank has been well for a while,
    which doubles each time, and what comes in between is counted. A rank that stays slow is told
    again after steps that double, too. So a rank has some 20 lines in 100,000 steps, and one that
    is slow never has a last line that says otherwise.
    """

    def __init__(self) -> None:
        self._watch = StragglerWatch()
        self._told: defaultdict[int, _Told] = defaultdict(_Told)

    def add(self, row: Mapping[str, Any]) -> list[SlowRank]:
        """Return the ranks to tell of after this row."""
        for each in self._watch.add(row):
            told = self._told[each.rank]
            if each.last_step is not None:
                told.spells.append(each)
        return [news for rank in [*self._told] if (news := self._news(rank, row["step"]))]

    def _news(self, rank: int, step: int) -> SlowRank | None:
        told = self._told[rank]
        if self._watch.is_slow(rank):
            if told.is_told and step < told.remind_at:
                return None
            told.remind_steps *= 2 if told.is_told else 1
            told.is_told, told.remind_at = True, step + told.remind_steps
            present = next(each for each in self._watch.slow() if each.rank == rank)
            return SlowRank(*told.spells, present)
        settled_at = (told.spells[-1].last_step or 0) + told.settle_steps if told.spells else 0
        if not told.is_told or step < settled_at:
            return None
        # Without an ended spell the run has gone on with other ranks.
        news = SlowRank(*told.spells) if told.spells else None
        told.spells, told.is_told = [], False
        told.settle_steps = max(_SETTLE_STEPS, 2 * told.settle_steps)
        return news


def by_rank(stragglers: Iterable[Straggler]) -> list[SlowRank]:
    """Return each rank that was slow, the one that was slow last at the end."""
    found: dict[int, list[Straggler]] = {}
    for each in stragglers:
        found[each.rank] = found.pop(each.rank, [])
        found[each.rank].append(each)
    return [SlowRank(*each) for each in found.values()]


def find_stragglers(rows: Iterable[Mapping[str, Any]]) -> tuple[Straggler, ...]:
    """Return every rank that was slow for a while, in the order of time."""
    watch, ended = StragglerWatch(), []
    for row in rows:
        if "loss" in row:
            ended += [each for each in watch.add(row) if each.last_step is not None]
    return tuple(sorted([*ended, *watch.slow()], key=lambda each: (each.first_step, each.rank)))


def _others(work: Sequence[float]) -> tuple[float, ...]:
    """Return the median of all other ranks' work, for each rank."""
    order = sorted(work)
    # The median without one value is among the two or three in the middle.
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
