"""The metrics of a run's task: the values that a report shows first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from payload.formats.hf_folder import label_names
from payload.report.number_formats import count, loss, percent
from payload.report.source import Run
from payload.report.sourced import Sourced
from payload.run_record.task_metrics import (
    PERPLEXITY,
    SHOWN_METRICS,
    TaskMetric,
    accuracy_of,
    confusion_of,
    val_metrics,
)

_LAST = "metrics.jsonl#evaluations.last."
_TEXTS = (("val_texts", "validation texts"), ("val_pairs", "validation pairs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """A metric in the last evaluation."""

    metric: TaskMetric
    measured: Sourced
    form: Callable[[Any], str]


def task_results(run: Run) -> list[TaskResult]:
    """Return the metrics in the run's last evaluation, the most important first."""
    found = [(metric, task_value(run, metric)) for metric in SHOWN_METRICS]
    return [
        TaskResult(metric=metric, measured=measured, form=metric_form(metric))
        for metric, measured in found
        if measured.value is not None
    ]


def task_value(run: Run, metric: TaskMetric) -> Sourced:
    """Return a metric in the run's last evaluation."""
    found = val_metrics(run.evaluations[-1]) if run.evaluations else {}
    is_derived = metric is PERPLEXITY
    return Sourced(
        value=found.get(metric.key),
        source=metric.key if is_derived else _LAST + metric.row_key,
        is_derived=is_derived,
    )


def metric_form(metric: TaskMetric) -> Callable[[Any], str]:
    """Return the format of a metric's values."""
    return percent if metric.row_key == "val_accuracy" else loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A metric at the start and at the end of a run."""

    name: str
    first: Sourced
    last: Sourced
    form: Callable[[Any], str]


def headline(run: Run) -> Change | None:
    """Return the change of the task's accuracy, otherwise of the loss; None if unknown."""
    rows, kind, key, name = run.evaluations, "evaluations", "val_loss", "validation loss"
    if len(rows) < 2:
        rows, kind, key, name = run.steps, "steps", "loss", "training loss"
        if len(rows) < 2:
            return None
    form: Callable[[Any], str] = loss
    first = next(iter(task_results(run)), None)
    if first and kind == "evaluations" and accuracy_of(rows[0]) is not None:
        key, name, form = first.metric.row_key, first.metric.name, first.form
    values = ((rows[0][key], "first"), (rows[-1][key], "last"))
    ends = [
        Sourced(value=value, source=f"metrics.jsonl#{kind}.{end}.{key}") for value, end in values
    ]
    return Change(name=name, first=ends[0], last=ends[1], form=form)


def evaluated_on(run: Run) -> str:
    """Return the number of samples in the last evaluation, such as `12 validation texts`."""
    row = run.evaluations[-1]
    named = next((each for each in _TEXTS if isinstance(row.get(each[0]), int)), None)
    key, name = named or ("val_tokens", "validation tokens")
    return f"{count(row[key])} {name}"


def confusion(run: Run) -> tuple[Sequence[str], Sequence[Sequence[int]]]:
    """Return a classifier's labels and the confusion matrix of its last evaluation, or nothing."""
    rows = confusion_of(run.evaluations[-1]) if run.evaluations else ()
    return label_names(run.paths.newest_checkpoint(), num_labels=len(rows)), rows
