"""Selects the metrics of a task from an evaluation's row, and names them as in the results."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from payload.run_record.metrics_log import perplexity


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskMetric:
    """A metric by which runs of a task are judged."""

    key: str
    """Key in `val_metrics` of summary.json and of `list --json`."""
    name: str
    row_key: str
    """Key in an evaluation's row of metrics.jsonl."""
    better: Literal["low", "high"]
    text: Callable[[float], str]
    tells: str | None = None
    """Key that shows the task: only rows of the metric's task have this key. None if every row with
    `row_key` belongs to the task."""


def _percent(value: float) -> str:
    return f"{value:.2%}"


TASK_METRICS = (
    TaskMetric(
        key="accuracy",
        name="accuracy",
        row_key="val_accuracy",
        better="high",
        text=_percent,
        tells="val_f1",
    ),
    TaskMetric(
        key="macro_f1",
        name="macro F1",
        row_key="val_f1",
        better="high",
        text="{:.4f}".format,
    ),
    TaskMetric(
        key="preference_accuracy",
        name="preference accuracy",
        row_key="val_accuracy",
        better="high",
        text=_percent,
        tells="val_margin",
    ),
)
"""Metrics of all tasks. Results begin with the first metric of the task."""
PERPLEXITY = TaskMetric(
    key="perplexity",
    name="perplexity",
    row_key="val_loss",
    better="low",
    text="{:,.2f}".format,
)
"""The exponential of the loss per token, for rows without a metric of their task."""
SHOWN_METRICS = (*TASK_METRICS, PERPLEXITY)


def val_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an evaluation's row by their keys, the most important first.

    Invalid values are left out, because a reader of metrics.jsonl only checks the loss.
    """
    found = {
        each.key: float(row[each.row_key])
        for each in TASK_METRICS
        if _is_number(row.get(each.row_key)) and (each.tells is None or each.tells in row)
    }
    if "val_accuracy" not in row and (value := perplexity(row["val_loss"])) is not None:
        found = {PERPLEXITY.key: value}
    return found


def accuracy_of(row: Mapping[str, Any]) -> float | None:
    """Return the accuracy in an evaluation's row; None for a task without an accuracy."""
    value = row.get("val_accuracy")
    return float(value) if _is_number(value) else None


def named_metrics(found: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return name and value of each metric in `val_metrics`, as text."""
    return [(each.name, each.text(found[each.key])) for each in SHOWN_METRICS if each.key in found]


def confusion_of(row: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the confusion matrix of an evaluation's row; empty without a valid matrix."""
    rows = row.get("val_confusion")
    if not isinstance(rows, list | tuple) or not all(isinstance(each, list) for each in rows):
        return ()
    if any(len(each) != len(rows) or not all(map(_is_count, each)) for each in rows):
        return ()
    return tuple(map(tuple, rows))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
