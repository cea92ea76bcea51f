"""Collects the heartbeats of all local and remote ranks, and measures the run's speed."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from payload.core.errors import ConfigError
from payload.core.files import discard
from payload.core.validation.records import build
from payload.launch.liveness import NodeHeartbeat, RankHeartbeat
from payload.launch.outcome import is_failure
from payload.launch.ranks import Rank
from payload.run_record.checkpoint_grace import SAVING_PHASES
from payload.run_record.metrics_log import MetricsTail
from payload.run_record.reserved_space import write_record
from payload.run_record.run_files import RankExit, RankProgress, RunPaths, last_record
from payload.supervise.heartbeat import process_state
from payload.supervise.heartbeat_receiver import NodeStream

_STOPPED = "T"
_SKEW_SLACK_S = 1.0
_RECENT = 50

_Record = TypeVar("_Record", RankProgress, RankExit)


@dataclass(slots=True)
class _LastHeartbeat:
    record: RankProgress
    changed_s: float
    state: str | None = None


class RankHeartbeats:
    """Collects the records of all ranks, and copies records of remote ranks to the run folder."""

    def __init__(
        self,
        paths: RunPaths,
        ranks: Sequence[Rank],
        streams: Sequence[NodeStream],
        *,
        is_shared: bool = False,
    ) -> None:
        """With `is_shared`, all nodes share one run folder, so nothing is copied.

        If `streams` has no stream for the head node, this machine is the head.
        """
        self._paths = paths
        self._ranks = ranks
        self._streams = streams
        self._is_shared = is_shared
        self._head = ranks[0].node
        self._head_is_here = self._head not in {stream.node.name for stream in streams}
        self.begin()

    def begin(self) -> None:
        """Begin an attempt, discarding the records of earlier attempts."""
        self._began_at_step: int | None = None
        self._began_s = time.monotonic()
        self._last: dict[int, _LastHeartbeat] = {}
        self._exits: dict[int, RankExit] = {}
        for folder in (self._paths.rank_exit(0).parent, self._paths.rank_progress(0).parent):
            for path in folder.glob("*.json"):
                discard(path)

    def poll(self) -> None:
        """Read new records and messages."""
        for rank in self._ranks:
            if rank.node == self._head:
                self._poll_local(rank.rank)
        for stream in self._streams:
            for message in stream.messages():
                self.receive(stream.node.name, message)

    def age_s(self) -> float:
        """Return the time since the attempt began."""
        return time.monotonic() - self._began_s

    def steps(self) -> int | None:
        """Return the highest step that a rank has reported in this attempt."""
        return max((last.record.step for last in self._last.values()), default=None)

    def began_at_step(self) -> int | None:
        """Return the step at which the ranks began; None until they report it."""
        return self._began_at_step

    def exits(self) -> Mapping[int, RankExit]:
        """Return the exit records by rank; their times are converted to this machine's clocks."""
        return self._exits

    def rank_0_progress(self) -> RankProgress | None:
        """Return the last heartbeat record of rank 0."""
        last = self._last.get(0)
        return last.record if last else None

    def saving(self, *, within_s: float) -> bool:
        """Return True if rank 0 saves and ends, by a heartbeat of the last `within_s` seconds."""
        ended = self._exits.get(0)
        failed = ended is not None and is_failure(ended)
        return not failed and self._shows(SAVING_PHASES, within_s=within_s)

    def writing(self, *, within_s: float) -> bool:
        """Return True if rank 0 writes a checkpoint, by a heartbeat of the last `within_s` seconds.

        A thread of rank 0 may still write while the rank trains. In this case, the checkpoint's
        folder still has a temporary name, and no heartbeat is needed.
        """
        if 0 in self._exits:
            return False
        under_way = any(self._paths.checkpoints.glob("step_*.partial"))
        return under_way or self._shows(("checkpoint",), within_s=within_s)

    def ranks(self) -> list[RankHeartbeat]:
        """Return the last heartbeat of each rank that has sent a heartbeat in this attempt."""
        now = time.monotonic()
        return [
            RankHeartbeat(
                rank=number,
                node=last.record.node,
                step=last.record.step,
                phase=last.record.phase,
                quiet_s=now - last.changed_s,
                stopped=self._state(last) == _STOPPED,
            )
            for number, last in sorted(self._last.items())
        ]

    def nodes(self) -> list[NodeHeartbeat]:
        """Return the last heartbeat of each node that has a stream."""
        return [stream.beat() for stream in self._streams]

    def _shows(self, phases: Sequence[str], *, within_s: float) -> bool:
        last = self._last.get(0)
        return (
            last is not None
            and last.record.phase in phases
            and time.monotonic() - last.changed_s < within_s
        )

    def _state(self, last: _LastHeartbeat) -> str | None:
        here = self._head_is_here and last.record.node == self._head
        return process_state(last.record.pid) if here else last.state

    def _poll_local(self, rank: int) -> None:
        """Read the records of a rank on the head.

        On another machine than the head, the run's folder is shared, so progress is visible even if
        the head's stream is silent. Exit records come only from the stream. The stream corrects for
        the difference between the machines' clocks.
        """
        progress = _read(RankProgress, self._paths, rank)
        if progress is not None:
            self._note(progress)
        if self._head_is_here and rank not in self._exits:
            ended = _read(RankExit, self._paths, rank)
            if ended is not None:
                self._exits[rank] = ended

    def receive(self, node: str, message: Mapping[str, Any]) -> None:
        """Process one message of a worker; the message may contain records of earlier attempts.

        `skew_s` is the worker's wall clock minus the clock of this machine; `lag_s` is this
        machine's monotonic clock minus the monotonic clock of the worker.
        """
        skew_s, lag_s = message["skew_s"], message["lag_s"]
        here = {rank.rank for rank in self._ranks if rank.node == node}
        for progress in _records(RankProgress, message.get("progress")):
            by_our_clock = _by_our_clocks(progress, skew_s=skew_s, lag_s=lag_s)
            if progress.rank in here and self._is_fresh(by_our_clock):
                if self._note(progress):
                    self._copy(by_our_clock, self._paths.rank_progress(progress.rank))
                state = (message.get("states") or {}).get(str(progress.rank))
                self._last[progress.rank].state = state
        for ended in _records(RankExit, message.get("exits")):
            ended = _by_our_clocks(ended, skew_s=skew_s, lag_s=lag_s)
            fresh = ended.rank in here and self._is_fresh(ended)
            if fresh and ended.rank not in self._exits:
                self._exits[ended.rank] = ended
                self._copy(ended, self._paths.rank_exit(ended.rank))

    def _copy(self, record: RankProgress | RankExit, path: Path) -> None:
        """Write a record into the run folder; a full disk must not fail the run."""
        if self._is_shared:
            return
        with contextlib.suppress(OSError):
            write_record(path, record, durable=isinstance(record, RankExit))

    def _is_fresh(self, record: RankProgress | RankExit) -> bool:
        return record.monotonic_s >= self._began_s - _SKEW_SLACK_S

    def _note(self, progress: RankProgress) -> bool:
        """Keep a record with the clocks of its node; return False if the record is not newer.

        A shared folder may show an older record than the stream.
        """
        last = self._last.get(progress.rank)
        if last is not None and last.record == progress:
            return False
        if last is not None and progress.monotonic_s < last.record.monotonic_s:
            return False
        if progress.phase == "start":
            self._began_at_step = progress.step
        self._last[progress.rank] = _LastHeartbeat(record=progress, changed_s=time.monotonic())
        return True


class StepTimes:
    """Measures progress and speed of an attempt from the new rows of metrics.jsonl.

    Rows that exist at the start belong to earlier attempts.
    """

    def __init__(self, metrics: Path) -> None:
        self._tail = MetricsTail(metrics, from_end=True)
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._reached: int | None = None

    def median_s(self, *, began_at: int) -> float | None:
        """Return the median time of the last steps; None before the first step after `began_at`."""
        self._read(began_at)
        return statistics.median(self._recent) if self._recent else None

    def reached_step(self, *, began_at: int) -> int | None:
        """Return the last step completed after `began_at`, or None."""
        self._read(began_at)
        return self._reached

    def _read(self, began_at: int) -> None:
        for row in self._tail.new_rows():
            if "loss" in row and row["step"] > began_at:
                self._recent.append(row["step_time_s"])
                self._reached = row["step"]


def _read(cls: type[_Record], paths: RunPaths, rank: int) -> _Record | None:
    path = paths.rank_progress(rank) if cls is RankProgress else paths.rank_exit(rank)
    return last_record(cls, path)


def _by_our_clocks(record: _Record, *, skew_s: float, lag_s: float) -> _Record:
    return replace(
        record, time_unix=record.time_unix - skew_s, monotonic_s=record.monotonic_s + lag_s
    )


def _records(cls: type[_Record], raw: Any) -> list[_Record]:
    """Return the valid records, ignoring invalid ones."""
    found = []
    for entry in raw or ():
        with contextlib.suppress(ConfigError):
            found.append(build(cls, entry, where="a worker's record"))
    return found
