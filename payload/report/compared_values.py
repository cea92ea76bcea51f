"""Selects the values that are compared between runs, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from payload.config.run_config import RunConfig
from payload.core.durations import in_words
from payload.report.number_formats import count, loss, percent, usd
from payload.report.source import Run
from payload.report.sourced import Sourced
from payload.report.task_results import metric_form, task_value
from payload.run_record.task_metrics import SHOWN_METRICS, TaskMetric


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row of the comparison."""

    name: str
    value_of: Callable[[Run], Sourced]
    form: Callable[[Any], str]
    better: Literal["low", "high", None] = None
    is_of_task: bool = False
    """True if values can be compared only between runs with the same task and data."""


def _summary_row(name: str, key: str, form: Callable[[Any], str], **more: Any) -> Compared:
    def value_of(run: Run) -> Sourced:
        return Sourced(value=run.summary.get(key), source=f"summary.json#{key}")

    return Compared(name=name, value_of=value_of, form=form, **more)


def _metric_row(metric: TaskMetric) -> Compared:
    return Compared(
        name=metric.name,
        value_of=lambda run: task_value(run, metric),
        form=metric_form(metric),
        better=metric.better,
        is_of_task=True,
    )


COMPARED: Sequence[Compared] = (
    _summary_row("status", "status", str),
    _summary_row("steps", "steps", count),
    _summary_row("tokens", "tokens", count),
    *map(_metric_row, SHOWN_METRICS),
    _summary_row("validation loss", "final_val_loss", loss, better="low", is_of_task=True),
    _summary_row("best validation loss", "best_val_loss", loss, better="low", is_of_task=True),
    _summary_row("first loss", "first_loss", loss),
    _summary_row("final loss", "final_loss", loss, better="low", is_of_task=True),
    _summary_row("tokens/s", "tokens_per_s", count, better="high"),
    _summary_row("MFU", "mfu", percent, better="high"),
    _summary_row("nodes", "nodes", count),
    _summary_row("ranks", "world_size", count),
    _summary_row("restarts", "restarts", count),
    _summary_row("resumes", "resumes", count),
    _summary_row("wall time", "wall_s", in_words),
    _summary_row("cost", "cost_usd", usd),
    _summary_row("cost per million tokens", "usd_per_million_tokens", usd, better="low"),
)


def compared(runs: Sequence[Run]) -> list[tuple[Compared, Sequence[Sourced], set[int]]]:
    """Return each row for which a run has a value, with all values and the indices of the best
    value."""
    of_one_task = have_equal_tasks(runs)
    rows: list[tuple[Compared, Sequence[Sourced], set[int]]] = []
    for row in COMPARED:
        cells = [row.value_of(run) for run in runs]
        values = [cell.value for cell in cells]
        if any(value is not None for value in values):
            is_marked = of_one_task or not row.is_of_task
            rows.append((row, cells, _best_indices(row, values) if is_marked else set[int]()))
    return rows


def have_equal_tasks(runs: Sequence[Run]) -> bool:
    """Return True if the runs have the same task, data and sequence length, so losses are
    comparable."""
    return all(_task_of(run) == _task_of(runs[0]) for run in runs[1:])


def _task_of(run: Run) -> tuple[object, ...]:
    data = run.data.fingerprint if run.data else str(run.data_folder)
    return run.config.task.kind, run.config.task.beta, run.config.data.sequence_length, data


def _best_indices(row: Compared, values: Sequence[Any]) -> set[int]:
    """Return the indices of the best value in a row; empty if the values do not differ."""
    known = [value for value in values if value is not None]
    if row.better is None or len(set(known)) < 2:
        return set()
    best = min(known) if row.better == "low" else max(known)
    return {index for index, value in enumerate(values) if value == best}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting with its value in each run."""

    name: str
    """Section and key, such as `optimizer.lr`."""
    default: Any
    values: Sequence[Any]


def settings(runs: Sequence[Run]) -> list[Setting]:
    """Return all settings of the runs, in the order of run.toml."""
    default = RunConfig()
    return [
        Setting(
            name=f"{section.name}.{key.name}",
            default=getattr(getattr(default, section.name), key.name),
            values=[getattr(getattr(run.config, section.name), key.name) for run in runs],
        )
        for section in fields(RunConfig)
        for key in fields(getattr(default, section.name))
    ]


def changed(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings that differ from the default in at least one run."""
    return [each for each in settings(runs) if any(value != each.default for value in each.values)]


def different(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings in which the runs differ."""
    return [each for each in settings(runs) if any(v != each.values[0] for v in each.values[1:])]
