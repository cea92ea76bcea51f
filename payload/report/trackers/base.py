"""The interface of a tracker, which receives the metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

Row = Mapping[str, float]
"""Numbers of one step or evaluation, always with `step` and `time_unix`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The tracked run."""

    run_id: str
    name: str
    """The setting `run.name`. All runs of a project have the same name."""
    folder: Path
    """The tracker's folder in the run folder."""
    config: Mapping[str, Any]
    """All settings, by names such as `optimizer.lr`. They contain no keys or passwords."""


class Tracker(Protocol):
    """A tracker for one run; the first exception is logged and disables the tracker."""

    starts_over: ClassVar[bool]
    """True if the tracker discards its data and needs all rows again when a run is resumed."""

    def start(self, about: About) -> None:
        """Open or continue the run. Raises ImportError without the tracker's package."""

    def log(self, rows: Sequence[Row]) -> None:
        """Log rows in chronological order."""

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Log the results and the report page, and close.

        An empty summary means that the run continues.
        """
