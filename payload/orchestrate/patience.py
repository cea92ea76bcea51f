"""`preflight --wait`: machines that have just been made are asked again until they are ready."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from payload.errors import ExitCode, TileforgeError
from payload.orchestrate.findings import has_failed
from payload.orchestrate.preflight_report import Report

_T = TypeVar("_T")

# How a machine looks that boots: no host keys yet, no sshd, no account, no finished bootstrap.
_NOT_YET = (ExitCode.SSH_UNREACHABLE, ExitCode.SSH_AUTH, ExitCode.BOOTSTRAP)
_PAUSE_S = 10.0


class Patience:
    """Tries again while there is time; says why, each reason once."""

    def __init__(self, wait_s: float, say: Callable[[str], None]) -> None:
        """The time begins now."""
        self._ends = time.monotonic() + wait_s
        self._say = say
        self._said: str | None = None

    def until_found(self, look: Callable[[], _T]) -> _T:
        """What `look` returns. Raises what it raises, unless a machine that boots explains it."""
        while True:
            try:
                return look()
            except TileforgeError as error:
                if error.exit_code not in _NOT_YET or not self._has_paused(str(error)):
                    raise

    def until_ready(self, check: Callable[[], Report]) -> Report:
        """The first report on nodes that have booted, ready or not; else the last one."""
        while True:
            report = check()
            if not _is_booting(report) or not self._has_paused(_reason(report)):
                return report

    def _has_paused(self, reason: str) -> bool:
        """Pause and say yes, or say no where the time is too short for it."""
        if not time.monotonic() + _PAUSE_S <= self._ends:
            return False
        if reason != self._said:
            self._say(f"waiting: {reason}")
            self._said = reason
        time.sleep(_PAUSE_S)
        return True


def _is_booting(report: Report) -> bool:
    failed = any(has_failed(facts.bootstrap) for facts in report.facts.values())
    return report.exit_code in _NOT_YET and not failed


def _reason(report: Report) -> str:
    """One line, whatever the number of nodes."""
    errors = [finding for finding in report.findings if finding.severity == "error"]
    return "; ".join(f"{finding.node}: {finding.cause}" for finding in errors)
