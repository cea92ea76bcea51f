"""The figures by which runs are compared, on the page and in the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from payload.config.run_config import RunConfig
from payload.core.durations import in_words
from payload.report import markup
from payload.report.source import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One row: a value of summary.json."""

    name: str
    key: str
    form: Callable[[Any], str]
    better: Literal["low", "high", None] = None


COMPARED: Sequence[Compared] = (
    Compared(name="status", key="status", form=str),
    Compared(name="steps", key="steps", form=markup.count),
    Compared(name="tokens", key="tokens", form=markup.count),
    Compared(name="first loss", key="first_loss", form=markup.loss),
    Compared(name="final loss", key="final_loss", form=markup.loss, better="low"),
    Compared(name="validation loss", key="final_val_loss", form=markup.loss, better="low"),
    Compared(name="best validation loss", key="best_val_loss", form=markup.loss, better="low"),
    Compared(name="tokens/s", key="tokens_per_s", form=markup.count, better="high"),
    Compared(name="MFU", key="mfu", form=markup.percent, better="high"),
    Compared(name="nodes", key="nodes", form=markup.count),
    Compared(name="ranks", key="world_size", form=markup.count),
    Compared(name="restarts", key="restarts", form=markup.count),
    Compared(name="resumes", key="resumes", form=markup.count),
    Compared(name="wall time", key="wall_s", form=in_words),
    Compared(name="cost", key="cost_usd", form=markup.usd),
    Compared(
        name="cost per million tokens",
        key="usd_per_million_tokens",
        form=markup.usd,
        better="low",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting: its value in each of several runs."""

    name: str
    """As in `optimizer.lr`."""
    default: Any
    values: Sequence[Any]


def settings(runs: Sequence[Run]) -> list[Setting]:
    """Return every setting of the runs, in the order of run.toml."""
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
    """Return the settings that are not the default's in some run."""
    return [each for each in settings(runs) if any(value != each.default for value in each.values)]


def different(runs: Sequence[Run]) -> list[Setting]:
    """Return the settings that the runs do not share."""
    return [each for each in settings(runs) if any(v != each.values[0] for v in each.values[1:])]


def best_places(row: Compared, runs: Sequence[Run]) -> set[int]:
    """Return which runs have a row's best value; none where no other run has another one."""
    values = [run.summary.get(row.key) for run in runs]
    known = [value for value in values if value is not None]
    if row.better is None or len(known) < 2 or len(set(known)) == 1:
        return set()
    best = min(known) if row.better == "low" else max(known)
    return {place for place, value in enumerate(values) if value == best}
