"""The tracker trackio, a local database and dashboard by Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from payload.report.trackers.base import About, Row, Tracker


class TrackioTracker:
    """Logs to trackio's folder on this machine (TRACKIO_DIR) and uploads nothing."""

    starts_over: ClassVar[bool] = False

    def __init__(self) -> None:
        self._trackio: Any = None

    def start(self, about: About) -> None:
        """Open or continue the run."""
        import trackio

        self._trackio = trackio
        trackio.init(
            project=about.name,
            name=about.run_id,
            config=dict(about.config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, rows: Sequence[Row]) -> None:
        """Log each row at its step."""
        for row in rows:
            values = {name: value for name, value in row.items() if name != "step"}
            self._trackio.log(values, step=int(row["step"]))

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Log the results as metrics of the last step, and the report page as an artifact."""
        numbers = {
            f"summary/{name}": value
            for name, value in summary.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if numbers:
            self._trackio.log(numbers, step=int(summary["steps"]))
        if report is not None:
            self._trackio.log_artifact(report, name="report", type="report")
        self._trackio.finish()


def make() -> Tracker:
    """Return a tracker."""
    return TrackioTracker()
