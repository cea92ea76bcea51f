"""Compares time, memory and cost of a run with the predictions before training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from payload.report.number_formats import count, gib, seconds, usd
from payload.report.source import Run
from payload.report.sourced import Sourced

_BY_CALIBRATION = "summary.json#predicted_step_s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One row with a measured and a predicted value."""

    name: str
    form: Callable[[Any], str]
    measured: Sourced
    predicted: Sourced

    def difference(self) -> str:
        """Return the relative difference as text, such as `+12 %`; empty if a value is unknown."""
        measured, predicted = self.measured.value, self.predicted.value
        if not measured or not predicted:
            return ""
        return f"{measured / predicted - 1:+.0%}".replace("%", " %")


def predictions(run: Run) -> list[Prediction]:
    """Return the rows for which the run has a measured value."""
    return list(_predictions(run))


def _derived(value: float | None, how: str) -> Sourced:
    return Sourced(value=value, source=how, is_derived=True)


def _predictions(run: Run) -> Iterator[Prediction]:
    numbers = run.plan.arithmetic if run.plan else None
    summary = run.summary
    hourly = run.inventory.hourly_usd() if run.inventory else None
    # On one machine, only the calibration at the start measures the peak.
    by_plan = numbers is not None and numbers.step_s is not None
    origin = "plan" if by_plan else "calibration"
    step_s = numbers.step_s if numbers and by_plan else summary.get("predicted_step_s")
    speed = numbers.tokens_per_step / step_s if numbers and step_s else None
    per_million = hourly * 1e6 / 3600 / speed if hourly and speed else None

    def measured(key: str) -> Sourced:
        return Sourced(value=summary.get(key), source=f"summary.json#{key}")

    tokens_per_s = summary.get("tokens_per_s")
    if tokens_per_s is not None:
        yield Prediction(
            name="tokens/s",
            form=count,
            measured=measured("tokens_per_s"),
            predicted=_derived(speed, f"{origin}.tokens_per_s"),
        )
    if numbers and tokens_per_s:
        yield Prediction(
            name="a step",
            form=seconds,
            measured=_derived(numbers.tokens_per_step / tokens_per_s, "step_s"),
            predicted=Sourced(
                value=step_s,
                source="plan.json#arithmetic.step_s" if by_plan else _BY_CALIBRATION,
            ),
        )
    if run.steps and numbers:
        yield Prediction(
            name="memory of rank 0",
            form=gib,
            measured=_derived(max(row["rss_bytes"] for row in run.steps), "peak_rss"),
            predicted=Sourced(
                value=numbers.memory_bytes_per_rank,
                source="plan.json#arithmetic.memory_bytes_per_rank",
            ),
        )
    if summary.get("cost_usd") is not None:
        tokens = summary.get("tokens") or 0
        planned = per_million * tokens / 1e6 if per_million and tokens else None
        yield Prediction(
            name="dollars",
            form=usd,
            measured=measured("cost_usd"),
            predicted=_derived(planned, f"{origin}.usd"),
        )
        yield Prediction(
            name="dollars per million tokens",
            form=usd,
            measured=measured("usd_per_million_tokens"),
            predicted=_derived(per_million, f"{origin}.usd_per_million_tokens"),
        )
