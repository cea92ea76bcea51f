"""How a run ended, from what its ranks and its launcher left behind."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from payload.core.errors import ExitCode
from payload.launch.launcher import Launcher, Report
from payload.launch.ranks import Rank
from payload.run_record.run_files import RankExit, RunStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a run ended, and why."""

    status: RunStatus
    exit_code: ExitCode
    error: str | None = None
    rank: int | None = None
    """The rank whose end is the cause, where one is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that tells how a run ended."""

    ranks: Sequence[Rank]
    exits: Mapping[int, RankExit]
    """By rank; a rank that died without a word is missing."""
    launcher_status: int
    """As `subprocess` gives it; below zero = killed by that signal."""
    launcher_text: str
    """The launcher's output in this attempt."""
    launcher: Launcher
    """The launcher, which parses that text."""
    trainer_status: RunStatus | None
    """The status in the trainer's summary.json, or None."""
    stop: Literal["none", "graceful", "forced", "expired"]
    """The outcome of a request to stop the run."""
    stop_by_system: bool = False
    """True if the request was a signal to the supervisor that no command sent."""
    ended_by_us_s: float | None
    """When the supervisor began to kill what was left, by the head's monotonic clock, as the
    records' times are; later signals are its own."""
    launcher_killed_s: float | None = None
    """When the launcher was last seen alive, if a signal of somebody else's ended it; its helpers
    kill the ranks, so that later signals are theirs."""
    trouble: Verdict | None = None
    """The verdict from the heartbeats: a hang, or a node that is frozen or gone."""
    begun: bool = False
    """True once any rank has sent a heartbeat."""
    trained: bool = False
    """True once any rank has begun to train."""
    node_of: Mapping[str, str] = field(default_factory=dict)
    """Names of the nodes by the addresses that the launcher knows them by."""

    def report(self) -> Report:
        """Return what the launcher's output says."""
        return self.launcher.report(self.launcher_text)


def judge(evidence: Evidence) -> Verdict:
    """Name the first cause: a rank's own error or a signal, and only then an echo of either."""
    cause = _own_error_or_signal(evidence)
    if evidence.stop == "expired":
        return Verdict(
            status="failed",
            exit_code=ExitCode.HANG,
            error="the ranks did not stop in time and were killed; what came after the last "
            "checkpoint is lost",
        )
    if evidence.stop != "none" and (cause is None or cause.exit_code is ExitCode.RANK_LOST):
        return _stopped(evidence)
    if evidence.trouble and (cause is None or cause.exit_code is ExitCode.RANK_LOST):
        return evidence.trouble
    if cause is not None:
        return cause
    if evidence.launcher_killed_s is not None:
        return _launcher_killed(-evidence.launcher_status)
    return _silent_rank(evidence) or _echo(evidence) or _launcher_failure(evidence)


def told_by_system(words: str) -> Verdict:
    """Judge a run whose supervisor was sent a signal by none of our commands."""
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error="the supervisor was told to stop by the system, not by a command, as when a machine "
        f"is preempted or shut down; {words}",
    )


def is_failure(record: RankExit) -> bool:
    """Return True if the run cannot go on after this end of a rank."""
    return record.exit_code != ExitCode.OK


def _stopped(evidence: Evidence) -> Verdict:
    if evidence.trainer_status == "finished":
        return Verdict(status="finished", exit_code=ExitCode.OK)
    error = None
    if not evidence.trained:
        error = "stopped while the ranks loaded; the last checkpoint is as it was"
    elif evidence.trainer_status != "stopped":
        error = "stopped before it could save; steps since the last checkpoint are lost"
    if evidence.stop_by_system:
        return told_by_system(error or "the ranks saved and ended")
    return Verdict(status="stopped", exit_code=ExitCode.OK, error=error)


def _own_error_or_signal(evidence: Evidence) -> Verdict | None:
    """The earliest end that was no consequence of another; a rank's own words win a tie."""
    causes = [
        record
        for record in _ended_alone(evidence)
        if is_failure(record)
        and (record.signal is not None or record.exit_code != ExitCode.RANK_LOST)
    ]
    if not causes:
        return None
    first = min(causes, key=lambda record: (record.monotonic_s, record.signal is not None))
    where = f"rank {first.rank} on {first.node}"
    if first.signal is not None:
        return Verdict(
            status="failed",
            exit_code=ExitCode.RANK_LOST,
            error=f"{where} was killed by {_name(first.signal)}",
            rank=first.rank,
        )
    if len(causes) == len(evidence.ranks) > 1 and len({each.error for each in causes}) == 1:
        # Each rank says it of all of them, so that who was first says nothing.
        return Verdict(
            status="failed",
            exit_code=_exit_code(first.exit_code),
            error=f"all ranks: {first.error or f'ended with status {first.exit_code}'}",
        )
    words = first.error or f"ended with status {first.exit_code} and no word; see its log"
    return Verdict(
        status="failed",
        exit_code=_exit_code(first.exit_code),
        error=f"{where}: {words}",
        rank=first.rank,
    )


def _ended_alone(evidence: Evidence) -> list[RankExit]:
    """The records of ranks that neither the supervisor nor a dying launcher killed."""
    ends = [s for s in (evidence.ended_by_us_s, evidence.launcher_killed_s) if s is not None]
    began_s = min(ends, default=math.inf)
    return [
        record
        for record in evidence.exits.values()
        if record.signal is None or record.monotonic_s < began_s
    ]


def _silent_rank(evidence: Evidence) -> Verdict | None:
    """A rank that left no record, while others did or the launcher reports it killed."""
    silent = [rank for rank in evidence.ranks if rank.rank not in evidence.exits]
    reported = evidence.report().killed
    if reported:
        number = reported.rank
        node = next((rank.node for rank in evidence.ranks if rank.rank == number), "?")
        if any(rank.rank == number for rank in silent):
            return Verdict(
                status="failed",
                exit_code=ExitCode.RANK_LOST,
                error=f"rank {number} on {node} was killed by {_name(reported.signal)}",
                rank=number,
            )
    if not silent or not evidence.exits or evidence.ended_by_us_s is not None:
        return None
    listed = ", ".join(f"rank {rank.rank} on {rank.node}" for rank in silent)
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"{listed} ended without a word",
        rank=silent[0].rank,
    )


def _echo(evidence: Evidence) -> Verdict | None:
    """Only ranks that lost contact are left to speak."""
    echoes = [record for record in _ended_alone(evidence) if is_failure(record)]
    if not echoes:
        return None
    silent = [rank for rank in evidence.ranks if rank.rank not in evidence.exits]
    first = min(echoes, key=lambda record: record.monotonic_s)
    lost = silent[0] if len(silent) == 1 else None
    named = f"rank {lost.rank} on {lost.node} was lost" if lost else "a rank was lost"
    words = first.error or f"status {first.exit_code}"
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"{named}; rank {first.rank} on {first.node} says: {words}",
        rank=lost.rank if lost else first.rank,
    )


def _launcher_failure(evidence: Evidence) -> Verdict:
    """No rank failed: either all is well, or no rank ever began."""
    ended = _ended_alone(evidence)
    if ended and evidence.trainer_status == "finished":
        return Verdict(status="finished", exit_code=ExitCode.OK)
    if ended and evidence.trainer_status == "stopped":
        return _preempted(ended)
    if ended:
        return Verdict(
            status="failed",
            exit_code=ExitCode.TRAINING,
            error="all ranks ended with status 0 but wrote no result; see rank 0's log",
            rank=0,
        )
    killer = _signal_of(evidence.launcher_status)
    if killer is not None:
        return _launcher_killed(killer)
    report = evidence.report()
    if evidence.begun and report.lost:
        node = evidence.node_of.get(report.lost.address, report.lost.address)
        return Verdict(
            status="failed",
            exit_code=ExitCode.RANK_LOST,
            error=f"node lost: the launcher's process on {node} {report.lost.how}",
        )
    if evidence.begun:
        return Verdict(
            status="failed",
            exit_code=ExitCode.RANK_LOST,
            error=f"the launcher gave up (status {evidence.launcher_status}): "
            f"{_last_line(evidence)}",
        )
    words = report.not_started or (
        f"the launcher started no rank (status {evidence.launcher_status}): {_last_line(evidence)}"
    )
    return Verdict(status="failed", exit_code=ExitCode.PREFLIGHT, error=words)


def _launcher_killed(number: int) -> Verdict:
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"the launcher was killed by {_name(number)}",
    )


def _preempted(ended: Sequence[RankExit]) -> Verdict:
    """Judge a run whose ranks saved and ended because somebody else told one of them to."""
    told = [record for record in ended if record.error]
    who = ", ".join(f"rank {record.rank} on {record.node} {record.error}" for record in told)
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"{who or 'a rank was told to stop'}, and not by this run's supervisor, as when a "
        "machine is preempted or shut down; the ranks saved and ended",
        rank=told[0].rank if told else None,
    )


def _last_line(evidence: Evidence) -> str:
    lines = [line.strip() for line in evidence.launcher_text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _signal_of(status: int) -> int | None:
    """The signal that ended a process, by its own status or, as 128 + n, by a shell's."""
    if status < 0:
        return -status
    return status - 128 if 128 < status < 128 + signal.NSIG else None


def _exit_code(status: int) -> ExitCode:
    """Our class for a process's status; a status that is none of ours is a training error."""
    return ExitCode(status) if status in set(ExitCode) else ExitCode.TRAINING


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    if number == signal.SIGKILL:
        return f"signal {number} ({name}), as the kernel does when memory runs out"
    return f"signal {number} ({name})"
