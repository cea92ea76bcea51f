"""Computes the time limit of a run from its settings, node prices and the job of a scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from payload.config.launch_sections import LimitsSection
from payload.core.errors import ConfigError, ExitCode
from payload.launch.outcome import Verdict
from payload.machines.inventory import Node, total_hourly_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The time limit of a run, from the stricter of `max_hours` and `max_usd`."""

    seconds: float
    """Limit on the total time of all attempts of the run."""
    key: str
    value: float

    def stop_at_s(self, *, grace_s: float) -> float:
        """Return the time in seconds at which the run must save and stop: `grace_s` before the
        limit.

        If a tenth of the limit is shorter than `grace_s`, that tenth is used instead.
        """
        return self.seconds - min(grace_s, self.seconds / 10)

    def message(self, *, spent_s: float) -> str:
        """Return a message with the limit that was reached and the command that resumes."""
        return (
            f"limits.{self.key} = {self.value:g} is reached: {spent_s / 3600:.2f} h of "
            f"{self.seconds / 3600:.2f} h are used. To continue, resume with a higher limit: --set "
            f"limits.{self.key}={2 * self.value:g}"
        )


def time_limit(limits: LimitsSection, nodes: Sequence[Node]) -> TimeLimit | None:
    """Return the stricter limit, or None if no limit is set.

    Raises ConfigError if a limit needs a price that is missing.
    """
    found = []
    if limits.max_hours is not None:
        hours = limits.max_hours
        found.append(TimeLimit(seconds=3600 * hours, key="max_hours", value=hours))
    if limits.max_usd is not None:
        hourly_usd = total_hourly_usd(nodes)
        if hourly_usd is None or hourly_usd <= 0:
            unknown = [node.name for node in nodes if not node.hourly_usd]
            raise ConfigError(
                f"limits.max_usd = {limits.max_usd:g}, but the inventory has no hourly_usd for "
                f"{', '.join(unknown)}. Add the price, or use limits.max_hours."
            )
        seconds = 3600 * limits.max_usd / hourly_usd
        found.append(TimeLimit(seconds=seconds, key="max_usd", value=limits.max_usd))
    return min(found, key=lambda limit: limit.seconds, default=None)


_LEAST_JOB_MARGIN_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTime:
    """The time until a scheduler kills the job that runs the ranks."""

    left_s: float
    run_id: str

    def stop_after_s(self, *, grace_s: float) -> float:
        """Return the seconds until the run must save and stop: two minutes before the job's end.

        `grace_s` replaces the two minutes if `grace_s` is longer. The run never stops before nine
        tenths of the remaining time have passed.
        """
        return max(0.0, self.left_s - min(max(grace_s, _LEAST_JOB_MARGIN_S), self.left_s / 10))

    def message(self, *, spent_s: float) -> str:
        """Return a message with the limit that was reached and the command that resumes."""
        return (
            "the job's time limit is near, so the run has saved and stopped. To continue in "
            f"another job: run --site slurm --resume {self.run_id}; for more time, add --set "
            "slurm.time=HH:MM:SS"
        )


def limit_verdict(verdict: Verdict, limit: TimeLimit | JobTime, *, spent_s: float) -> Verdict:
    """Return the verdict, extended by the limit that stopped the run."""
    if verdict.status != "stopped":
        return verdict
    message = limit.message(spent_s=spent_s)
    error = f"{message}; {verdict.error}" if verdict.error else message
    return replace(verdict, exit_code=ExitCode.BUDGET, error=error)


def cost_usd(nodes: Sequence[Node], *, spent_s: float) -> float | None:
    """Return the cost of the nodes so far; None if a price is unknown."""
    hourly_usd = total_hourly_usd(nodes)
    return None if hourly_usd is None else hourly_usd * spent_s / 3600
