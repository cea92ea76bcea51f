"""The seam between a run folder and a tracker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

Row = Mapping[str, float]
"""One step's or evaluation's numbers; `step` and `time_unix` are always there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """The run that is tracked."""

    run_id: str
    name: str
    """run.name: what belongs together has one."""
    folder: Path
    """The tracker's own folder within the run's."""
    config: Mapping[str, Any]
    """Every setting, as `optimizer.lr`. It holds no key and no password."""


class Tracker(Protocol):
    """One tracker of one run. Whatever it raises is said once, and it is asked no more."""

    starts_over: ClassVar[bool]
    """True if it forgets what it had and takes all rows again when a run is continued."""

    def start(self, about: About) -> None:
        """Open the run, or go on with it. Raises ImportError without the package."""

    def log(self, rows: Sequence[Row]) -> None:
        """Take rows in the order in which they came."""

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Take the results and the page, and close. Without a summary the run goes on."""
