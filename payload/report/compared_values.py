"""Selects the values that are compared between runs, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from payload.config.run_config import RunConfig
from payload.core.durations import in_words
from payload.report.number_formats import count, loss, percent, usd
from payload.report.source import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row of the comparison: a value of summary.json."""

    name: str
    key: str
    form: Callable[[Any], str]
    better: Literal["low", "high", None] = None


COMPARED: Sequence[Compared] = (
    Compared(name="status", key="status", form=str),
    Compared(name="steps", key="steps", form=count),
    Compared(name="tokens", key="tokens", form=count),
    Compared(name="first loss", key="first_loss", form=loss),
    Compared(name="final loss", key="final_loss", form=loss, better="low"),
    Compared(name="validation loss", key="final_val_loss", form=loss, better="low"),
    Compared(name="best validation loss", key="best_val_loss", form=loss, better="low"),
    Compared(name="tokens/s", key="tokens_per_s", form=count, better="high"),
    Compared(name="MFU", key="mfu", form=percent, better="high"),
    Compared(name="nodes", key="nodes", form=count),
    Compared(name="ranks", key="world_size", form=count),
    Compared(name="restarts", key="restarts", form=count),
    Compared(name="resumes", key="resumes", form=count),
    Compared(name="wall time", key="wall_s", form=in_words),
    Compared(name="cost", key="cost_usd", form=usd),
    Compared(
        name="cost per million tokens",
        key="usd_per_million_tokens",
        form=usd,
        better="low",
    ),
)


def compared(runs: Sequence[Run]) -> list[tuple[Compared, Sequence[Any], set[int]]]:
    """Return each row for which a run has a value, with all values and the indices of the best."""
    found = [(row, [run.summary.get(row.key) for run in runs]) for row in COMPARED]
    return [
        (row, values, _best_indices(row, values))
        for row, values in found
        if any(value is not None for value in values)
    ]


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
