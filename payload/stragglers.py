"""CONTRACT: which rank is slow, since when and by how much, from the rows of metrics.jsonl.

Ranks that wait for each other all take as long as the slowest one. What tells them apart is their
own work: reading data, and the forward and backward passes without the waiting in them.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from payload.metrics_log import RankTimes, rank_times
from payload.untrusted import checked

_SLOW = 1.25
"""A rank whose work takes so many times the others' is slow. Half its cores make that 2."""
_WELL = 1.1
"""Below this it is slow no more."""
_LEAST_S = 0.002
"""A smaller difference is noise."""
_ROWS = 7
_STEPS = 5
"""So many steps must agree, of which half may be disturbed."""
_WARM_UP_STEPS = 2
"""The first steps build kernels and warm caches, on each rank in its own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One rank that the others waited for."""

    rank: int = checked(low=0)
    first_step: int = checked(low=0)
    last_step: int | None = checked(None, low=0)
    """None while it is slow, and where it was slow to the end."""
    work_s: float = checked(low=0)
    """Its own work in a step, the median of those last seen."""
    others_s: float = checked(low=0)
    """The others' in the same steps."""

    def words(self, *, node: str | None = None) -> str:
        """Return a sentence."""
        at = f" on {node}" if node else ""
        until = "" if self.last_step is None else f" to {self.last_step}"
        verb = "is slow since step" if self.last_step is None else "was slow from step"
        times = self.work_s / self.others_s if self.others_s else 0.0
        return (
            f"rank {self.rank}{at} {verb} {self.first_step}{until}: its own work takes "
            f"{self.work_s:.3g} s a step, the other ranks' {self.others_s:.3g} s ({times:.1f} "
            "times); they wait for it"
        )


class StragglerWatch:
    """Takes in rows as they come, and says when a rank becomes slow or is well again."""

    def __init__(self) -> None:
        self._rows: deque[tuple[int, RankTimes]] = deque(maxlen=_ROWS)
        self._slow: dict[int, Straggler] = {}

    def add(self, row: Mapping[str, Any]) -> list[Straggler]:
        """Return the ranks that this row shows to be slow, or not to be any more."""
        times = rank_times(row)
        if times is None or row["step"] <= _WARM_UP_STEPS or len(times.data) < 2:
            return []
        if self._rows and len(self._rows[-1][1].data) != len(times.data):
            self._rows.clear()
            self._slow.clear()
        if self._rows and row["step"] <= self._rows[-1][0]:
            # Ranks that were started again repeat steps.
            self._rows.clear()
        self._rows.append((row["step"], times))
        if sum(each.steps for _, each in self._rows) < _STEPS:
            return []
        return [
            news
            for rank in range(len(times.data))
            if (news := self._look_at(rank, step=row["step"])) is not None
        ]

    def slow(self) -> list[Straggler]:
        """Return the ranks that are slow now."""
        return list(self._slow.values())

    def _look_at(self, rank: int, *, step: int) -> Straggler | None:
        seen = [_own_and_others(times.work(), rank) for _, times in self._rows]
        work_s = statistics.median(own for own, _ in seen)
        others_s = statistics.median(others for _, others in seen)
        ratio = statistics.median(own / others if others else 1.0 for own, others in seen)
        known = self._slow.get(rank)
        if known is not None:
            if ratio < _WELL:
                del self._slow[rank]
                return replace(known, last_step=step)
            self._slow[rank] = replace(known, work_s=work_s, others_s=others_s)
            return None
        if ratio < _SLOW or work_s - others_s < _LEAST_S:
            return None
        found = Straggler(rank=rank, first_step=self._since(seen), work_s=work_s, others_s=others_s)
        self._slow[rank] = found
        return found

    def _since(self, seen: Sequence[tuple[float, float]]) -> int:
        """Return the first step of the present slowness that is still known."""
        first = self._rows[-1][0]
        for (step, times), (own, others) in zip(reversed(self._rows), reversed(seen), strict=True):
            if others and own / others < _SLOW:
                break
            first = step - times.steps + 1
        return first


def find_stragglers(rows: Iterable[Mapping[str, Any]]) -> tuple[Straggler, ...]:
    """Return every rank that was slow for a while, in the order of time."""
    watch, ended = StragglerWatch(), []
    for row in rows:
        if "loss" in row:
            ended += [each for each in watch.add(row) if each.last_step is not None]
    return tuple(sorted([*ended, *watch.slow()], key=lambda each: (each.first_step, each.rank)))


def _own_and_others(work: Sequence[float], rank: int) -> tuple[float, float]:
    return work[rank], statistics.median([*work[:rank], *work[rank + 1 :]])
