"""How long a run may live, by its limits and its nodes' prices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from payload.config.launch_sections import LimitsSection
from payload.core.errors import ConfigError, ExitCode
from payload.launch.outcome import Verdict
from payload.machines.inventory import Node, total_hourly_usd


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimit:
    """The stricter of what max_hours and max_usd allow."""

    seconds: float
    """Over all attempts of the run."""
    key: str
    value: float

    def stop_at_s(self, *, grace_s: float) -> float:
        """When the run is asked to save and stop: a tenth before, at most `grace_s` before."""
        return self.seconds - min(grace_s, self.seconds / 10)

    def words(self, *, spent_s: float) -> str:
        """Return the limit that is reached and the command that continues the run."""
        return (
            f"limits.{self.key} = {self.value:g} is reached: {spent_s / 3600:.2f} h of "
            f"{self.seconds / 3600:.2f} h are used. To go on, resume with a higher one: --set "
            f"limits.{self.key}={2 * self.value:g}"
        )


def time_limit(limits: LimitsSection, nodes: Sequence[Node]) -> TimeLimit | None:
    """Return the stricter limit; None without limits.

    Raises ConfigError when a price is missing that a limit needs.
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
    """The time until a scheduler kills the job that the run is in."""

    left_s: float
    run_id: str

    def stop_after_s(self, *, grace_s: float) -> float:
        """When the run is asked to save and stop: two minutes before, or a tenth if that is less.

        A longer `grace_s` counts instead of the two minutes.
        """
        return max(0.0, self.left_s - min(max(grace_s, _LEAST_JOB_MARGIN_S), self.left_s / 10))

    def words(self, *, spent_s: float) -> str:
        """Return what is reached, and how the run goes on."""
        return (
            "the job's time limit is near, so the run has saved and stopped. To go on in another "
            f"job: run --site slurm --resume {self.run_id} (more time: --set slurm.time=HH:MM:SS)"
        )


def limited(verdict: Verdict, limit: TimeLimit | JobTime, *, spent_s: float) -> Verdict:
    """The verdict on a run that was stopped because of its limit."""
    if verdict.status != "stopped":
        return verdict
    words = limit.words(spent_s=spent_s)
    error = f"{words}; {verdict.error}" if verdict.error else words
    return replace(verdict, exit_code=ExitCode.BUDGET, error=error)


def cost_usd(nodes: Sequence[Node], *, spent_s: float) -> float | None:
    """Return the nodes' cost so far, or None when a price is not known."""
    hourly_usd = total_hourly_usd(nodes)
    return None if hourly_usd is None else hourly_usd * spent_s / 3600
