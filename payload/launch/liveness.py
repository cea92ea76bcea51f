"""Detects a hang or a lost node from the heartbeats of ranks and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from payload.core.errors import ExitCode
from payload.launch.outcome import Verdict
from payload.run_record.checkpoint_grace import START_PHASES

SILENT_S = 8.0
"""A node counts as silent if it has sent nothing for this time. Nodes send a heartbeat every
second."""
FROZEN_S = 15.0
"""A silent node that accepts connections counts as frozen after this time without data. By then,
the result of a new connection is known; a node that refuses connections may be lost."""
LOST_S = 12.0
"""A node that refuses connections for this time counts as lost if no rank makes progress."""

# Phases of a rank at the same step number, in order; ranks wait for the ranks that are behind.
_PHASES = (*START_PHASES, "sync check", "checkpoint", "eval", "step", "end")
# Each of these phases is one call without progress: loading, compiling, or a slow write.
_LONG_PHASES = (*START_PHASES, "checkpoint", "end")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHeartbeat:
    """The last heartbeat of a rank."""

    rank: int
    node: str
    step: int
    phase: str
    quiet_s: float
    """Time since the heartbeat last changed."""
    stopped: bool = False
    """True if the process is stopped, as by SIGSTOP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHeartbeat:
    """The last heartbeat of a node on which the supervisor does not run."""

    node: str
    quiet_s: float
    """Time since the node last sent anything."""
    unreachable_s: float | None
    """Time since the node began to refuse connections; None if it accepted the last attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times without progress after which the supervisor treats a run as hung."""

    hang_timeout_s: float
    longest_s: float
    """The time limit in phases that report no progress, and the upper bound of all time limits."""
    median_step_s: float | None
    """Median step time; None before the first step of the attempt is complete."""


def find_trouble(
    ranks: Sequence[RankHeartbeat],
    nodes: Sequence[NodeHeartbeat],
    *,
    world_size: int,
    age_s: float,
    pace: Pace,
) -> Verdict | None:
    """Return the verdict on a run that cannot continue, or None.

    `ranks` has the ranks that have sent a heartbeat in this attempt. The attempt began `age_s` ago.
    Ranks wait for each other in every step, so one stuck rank stops all ranks. While any rank makes
    progress, the run is healthy.
    """
    quiet_s = min([age_s, *(beat.quiet_s for beat in ranks)])
    lost = [
        beat for beat in nodes if beat.unreachable_s is not None and beat.unreachable_s >= LOST_S
    ]
    if lost and quiet_s >= max(LOST_S, 2 * (pace.median_step_s or 0.0)):
        return lost_nodes(lost)
    silent = [beat for beat in nodes if beat.quiet_s >= SILENT_S]
    # A healthy node sends data even if its ranks do not progress, so a silent node gets no longer
    # limit.
    patient = not silent and (
        pace.median_step_s is None
        or len(ranks) < world_size
        or any(beat.phase in _LONG_PHASES for beat in ranks)
    )
    limit_s = hang_limit_s(pace, patient=patient)
    if quiet_s < limit_s:
        return None
    cause = f"no rank made progress for {quiet_s:.0f} s (limit {limit_s:.0f} s)"
    if silent:
        frozen = [s for s in silent if s.quiet_s >= FROZEN_S and s.unreachable_s is None]
        return frozen_nodes(frozen, after=cause) if frozen else None
    return _stuck_ranks(ranks, world_size=world_size, cause=cause)


def hang_limit_s(pace: Pace, *, patient: bool) -> float:
    """Return how long the run may go without progress on any rank."""
    if patient:
        return pace.longest_s
    return min(max(pace.hang_timeout_s, 10 * (pace.median_step_s or 0.0)), pace.longest_s)


def lost_nodes(beats: Sequence[NodeHeartbeat]) -> Verdict:
    """Return the verdict on nodes that accept no connections."""
    listed = ", ".join(
        f"{beat.node} cannot be reached (last heartbeat {beat.quiet_s:.0f} s ago)" for beat in beats
    )
    return Verdict(status="failed", exit_code=ExitCode.RANK_LOST, error=f"node lost: {listed}")


def frozen_nodes(beats: Sequence[NodeHeartbeat], *, after: str) -> Verdict:
    """Return the verdict on nodes that accept connections but send nothing."""
    listed = ", ".join(f"{beat.node} (last heartbeat {beat.quiet_s:.0f} s ago)" for beat in beats)
    return Verdict(
        status="failed",
        exit_code=ExitCode.HANG,
        error=f"node frozen (accepts connections, but does not answer): {listed}; {after}",
    )


def _stuck_ranks(ranks: Sequence[RankHeartbeat], *, world_size: int, cause: str) -> Verdict:
    """Return a verdict that names the stopped ranks, absent ranks, or ranks that are behind."""
    stopped = [beat for beat in ranks if beat.stopped]
    begun = {beat.rank for beat in ranks}
    absent = [rank for rank in range(world_size) if rank not in begun]
    if stopped:
        which = "stopped by a signal: " + _listed(stopped)
        first: int | None = stopped[0].rank
    elif absent:
        which = f"rank(s) {', '.join(map(str, absent))} never sent a heartbeat"
        first = absent[0]
    else:
        last = min(map(_position, ranks))
        behind = [beat for beat in ranks if _position(beat) == last]
        if len(behind) < len(ranks):
            which, first = "behind: " + _listed(behind), behind[0].rank
        else:
            which, first = f"all ranks are at {_progress(ranks[0])}; see their logs", None
    return Verdict(status="failed", exit_code=ExitCode.HANG, error=f"{cause}; {which}", rank=first)


def _position(beat: RankHeartbeat) -> tuple[int, int]:
    return beat.step, _PHASES.index(beat.phase) if beat.phase in _PHASES else len(_PHASES)


def _listed(beats: Sequence[RankHeartbeat]) -> str:
    return ", ".join(f"rank {beat.rank} on {beat.node} at {_progress(beat)}" for beat in beats)


def _progress(beat: RankHeartbeat) -> str:
    return f"step {beat.step} ({beat.phase})"
