"""MLflow: files below the run, unless MLFLOW_TRACKING_URI names a server."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from payload.report.trackers.base import About, Row, Tracker
from payload.results import write_whole

_MOST_AT_ONCE = 1_000
_MOST_PARAMETERS = 100
_ID = "mlflow_run_id"


class MlflowTracker:
    """Logs to a file store; a password for a server stays in the environment."""

    starts_over: ClassVar[bool] = False

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def start(self, about: About) -> None:
        """Make the experiment and the run, or go on with them."""
        # The file store is deprecated, not gone; it is the one that needs no database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        about.folder.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get("MLFLOW_TRACKING_URI") or (about.folder / "mlruns").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        known = about.folder / _ID
        if known.is_file():
            self._run = known.read_text(encoding="utf-8").strip()
            return
        experiment = self._client.get_experiment_by_name(about.name)
        at = experiment.experiment_id if experiment else self._client.create_experiment(about.name)
        self._run = self._client.create_run(at, run_name=about.run_id).info.run_id
        settings = [Param(name, str(value)[:500]) for name, value in about.config.items()]
        for first in range(0, len(settings), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=settings[first : first + _MOST_PARAMETERS])
        write_whole(known, f"{self._run}\n")

    def log(self, rows: Sequence[Row]) -> None:
        """Log each number at its step."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), int(row["time_unix"] * 1_000), int(row["step"]))
            for row in rows
            for name, value in row.items()
            if name not in ("step", "time_unix")
        ]
        for first in range(0, len(metrics), _MOST_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[first : first + _MOST_AT_ONCE])

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Log results as tags and the page as an artifact, and close."""
        for name, value in summary.items():
            self._client.set_tag(self._run, f"summary.{name}", str(value)[:500])
        if report is not None:
            self._client.log_artifact(self._run, str(report))
        if summary:
            status = "FINISHED" if summary.get("status") == "finished" else "FAILED"
            self._client.set_terminated(self._run, status=status)


def make() -> Tracker:
    """Return a tracker."""
    return MlflowTracker()
