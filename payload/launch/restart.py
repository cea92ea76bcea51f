"""The restart policy: decides which failed attempts are retried, and after which delay."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from payload.core.errors import ExitCode
from payload.launch.outcome import Verdict

# Other failures would repeat: a wrong setting, a diverged loss, ranks with different parameters, an
# unfit machine. A stop and a reached limit are intended.
_WORTH_RETRYING = (ExitCode.RANK_LOST, ExitCode.HANG)
_FIRST_PAUSE_S = 2.0
_PAUSE_GROWTH = 3.0
_LONGEST_PAUSE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptEnd:
    """The facts about a finished attempt that determine whether it is retried."""

    verdict: Verdict
    stop_requested: bool
    restarts: int
    """Number of restarts so far."""
    began_at_step: int
    """Step of the checkpoint that the attempt began from; 0 without a checkpoint."""
    reached_step: int | None
    """The last step that the attempt has reached; None if no rank sent a heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The decision about a failed attempt."""

    pause_s: float | None
    """Time until the next attempt; None if the run is not retried."""
    why: str | None = None
    """Why a failure of a retryable kind is not retried."""


def decide(end: AttemptEnd, *, max_restarts: int) -> Decision:
    """Decide to retry after a lost rank, a lost node or a hang, while attempts make progress.

    An attempt that did not complete a step after its checkpoint is not retried, because the next
    attempt would fail the same way.
    """
    if end.stop_requested or end.verdict.exit_code not in _WORTH_RETRYING or max_restarts == 0:
        return Decision(pause_s=None)
    if end.restarts >= max_restarts:
        why = f"not restarted: limits.max_restarts = {max_restarts} is reached"
        return Decision(pause_s=None, why=why)
    if end.reached_step is None or end.reached_step <= end.began_at_step:
        why = f"not restarted: no step was completed beyond step {end.began_at_step}"
        return Decision(pause_s=None, why=why)
    pause_s = min(_FIRST_PAUSE_S * _PAUSE_GROWTH**end.restarts, _LONGEST_PAUSE_S)
    return Decision(pause_s=pause_s)


def waiting_note(verdict: Verdict) -> str:
    """Return the note for state.json while it is unknown whether the run can be restarted."""
    return f"{verdict.error}. Checking whether the run can be restarted"


def restart_note(
    verdict: Verdict, *, checkpoint: Path | None, restart: int, max_restarts: int
) -> str:
    """Return the note for state.json about a restart: the failure, and where the run resumes."""
    where = f"from checkpoint {checkpoint.name}" if checkpoint else "from the start"
    return f"{verdict.error}. Continuing {where} (restart {restart} of {max_restarts})"
