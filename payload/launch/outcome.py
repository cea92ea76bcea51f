"""Determines why a run ended, from the exit records of its ranks and the launcher's output."""

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
    """The end of a run, and its reason."""

    status: RunStatus
    exit_code: ExitCode
    error: str | None = None
    rank: int | None = None
    """The rank that caused the end; None if no rank did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that shows how a run ended."""

    ranks: Sequence[Rank]
    exits: Mapping[int, RankExit]
    """Exit records by rank; a rank that was killed before it could write a record is missing."""
    launcher_status: int
    """Return code of the launcher; as in `subprocess`, -N means that signal N killed it."""
    launcher_text: str
    """The launcher's output in this attempt."""
    launcher: Launcher
    """The launcher, which parses that output."""
    trainer_status: RunStatus | None
    """The status in the trainer's summary.json, or None."""
    stop: Literal["none", "graceful", "forced", "expired"]
    """The outcome of a request to stop the run."""
    stop_by_system: bool = False
    """True if the request was a signal to the supervisor that did not come from a command."""
    ended_by_us_s: float | None
    """When the supervisor began to kill the run's processes, by the head's monotonic clock (as the
    times in exit records). A signal after this time is from the supervisor."""
    launcher_killed_s: float | None = None
    """When the launcher was last seen alive, if a signal from outside killed it; otherwise None.
    Signals that ranks receive after this time come from the launcher's helpers."""
    trouble: Verdict | None = None
    """The verdict from the heartbeats: a hang, a frozen node or a lost node."""
    begun: bool = False
    """True once any rank has sent a heartbeat."""
    trained: bool = False
    """True once any rank has begun to train."""
    node_of: Mapping[str, str] = field(default_factory=dict)
    """Names of the nodes by the addresses that the launcher uses."""

    def report(self) -> Report:
        """Return the causes that the launcher's output shows."""
        return self.launcher.report(self.launcher_text)


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict with the root cause, such as a rank's error, not the consequences."""
    cause = _own_error_or_signal(evidence)
    if evidence.stop == "expired":
        return Verdict(
            status="failed",
            exit_code=ExitCode.HANG,
            error="the ranks did not stop in time and were killed; steps since the last checkpoint "
            "are lost",
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


def stopped_by_system(effect: str) -> Verdict:
    """Return the verdict if the supervisor received a signal that no command sent."""
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error="the supervisor was stopped by the system, not by a command (the machine may be "
        f"preempted or shutting down); {effect}",
    )


def is_failure(record: RankExit) -> bool:
    """Return True if the rank failed, so that the run cannot continue."""
    return record.exit_code != ExitCode.OK


def _stopped(evidence: Evidence) -> Verdict:
    if evidence.trainer_status == "finished":
        return Verdict(status="finished", exit_code=ExitCode.OK)
    error = None
    if not evidence.trained:
        error = "stopped while the ranks loaded; the last checkpoint is unchanged"
    elif evidence.trainer_status != "stopped":
        error = "stopped before it could save; steps since the last checkpoint are lost"
    if evidence.stop_by_system:
        return stopped_by_system(error or "the ranks saved and ended")
    return Verdict(status="stopped", exit_code=ExitCode.OK, error=error)


def _own_error_or_signal(evidence: Evidence) -> Verdict | None:
    """Return a verdict on the first rank that failed by itself; on a tie, prefer an error."""
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
        # All ranks report the same error, so it does not matter which rank was first.
        return Verdict(
            status="failed",
            exit_code=_exit_code(first.exit_code),
            error=f"all ranks: {first.error or f'ended with status {first.exit_code}'}",
        )
    reason = first.error or f"ended with status {first.exit_code} and no message; see its log"
    return Verdict(
        status="failed",
        exit_code=_exit_code(first.exit_code),
        error=f"{where}: {reason}",
        rank=first.rank,
    )


def _ended_alone(evidence: Evidence) -> list[RankExit]:
    """Return the records of ranks not ended by the supervisor or by a killed launcher."""
    ends = [s for s in (evidence.ended_by_us_s, evidence.launcher_killed_s) if s is not None]
    began_s = min(ends, default=math.inf)
    return [
        record
        for record in evidence.exits.values()
        if record.signal is None or record.monotonic_s < began_s
    ]


def _silent_rank(evidence: Evidence) -> Verdict | None:
    """Return a verdict on a rank without an exit record, if other ranks have one.

    Also returns a verdict if the launcher reports the rank as killed.
    """
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
    killed = "ended before it could" if len(silent) == 1 else "ended before they could"
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"{listed} {killed} report an error",
        rank=silent[0].rank,
    )


def _echo(evidence: Evidence) -> Verdict | None:
    """Return a verdict if all errors are from ranks that lost contact with another rank."""
    echoes = [record for record in _ended_alone(evidence) if is_failure(record)]
    if not echoes:
        return None
    silent = [rank for rank in evidence.ranks if rank.rank not in evidence.exits]
    first = min(echoes, key=lambda record: record.monotonic_s)
    lost = silent[0] if len(silent) == 1 else None
    named = f"rank {lost.rank} on {lost.node} was lost" if lost else "a rank was lost"
    reason = first.error or f"status {first.exit_code}"
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"{named}; rank {first.rank} on {first.node} reports: {reason}",
        rank=lost.rank if lost else first.rank,
    )


def _launcher_failure(evidence: Evidence) -> Verdict:
    """Return the verdict if no rank failed: the run finished, or the launcher failed."""
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
            error=f"the launcher failed (status {evidence.launcher_status}): "
            f"{_last_line(evidence)}",
        )
    reason = report.not_started or (
        f"the launcher started no rank (status {evidence.launcher_status}): {_last_line(evidence)}"
    )
    return Verdict(status="failed", exit_code=ExitCode.PREFLIGHT, error=reason)


def _launcher_killed(number: int) -> Verdict:
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"the launcher was killed by {_name(number)}",
    )


def _preempted(ended: Sequence[RankExit]) -> Verdict:
    """Return the verdict if a signal from outside made the ranks save and end."""
    stopped = [record for record in ended if record.error]
    who = ", ".join(f"rank {record.rank} on {record.node} {record.error}" for record in stopped)
    return Verdict(
        status="failed",
        exit_code=ExitCode.RANK_LOST,
        error=f"{who or 'a rank was stopped'}, but not by this run's supervisor (the machine may "
        "be preempted or shutting down); the ranks saved and ended",
        rank=stopped[0].rank if stopped else None,
    )


def _last_line(evidence: Evidence) -> str:
    lines = [line.strip() for line in evidence.launcher_text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"


def _signal_of(status: int) -> int | None:
    """Return the signal n that killed a process, from the return code -n or a shell's 128 + n."""
    if status < 0:
        return -status
    return status - 128 if 128 < status < 128 + signal.NSIG else None


def _exit_code(status: int) -> ExitCode:
    """Convert a process status to an exit code; an unknown status becomes a training error."""
    return ExitCode(status) if status in set(ExitCode) else ExitCode.TRAINING


def _name(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
    if number == signal.SIGKILL:
        return f"signal {number} ({name}), which the kernel sends when memory runs out"
    return f"signal {number} ({name})"
