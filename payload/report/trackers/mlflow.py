"""The tracker MLflow. Without MLFLOW_TRACKING_URI, it uses a file store in the run folder."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from payload.core.errors import ConfigError
from payload.core.files import write_whole
from payload.core.record_signing_key import is_signed, sign
from payload.core.regular_files import read_bytes
from payload.report.trackers.base import About, Row, Tracker

_MOST_AT_ONCE = 1_000
_MOST_PARAMETERS = 100
_ID = "mlflow_run_id"
_RUN = re.compile(r"([0-9a-f]{32})(?: ([0-9a-f]{64}))?")
"""The run's id, and a signed proof that this user's tracker created the run on the server."""


class MlflowTracker:
    """Logs to a file store or a server; a server password is read only from the environment."""

    starts_over: ClassVar[bool] = False

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""
        self._store: Path | None = None
        """The file store; None for a server."""

    def start(self, about: About) -> None:
        """Create or continue the experiment and the run."""
        # The file store is deprecated, but it is the only store that needs no database.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        about.folder.mkdir(parents=True, exist_ok=True)
        server = os.environ.get("MLFLOW_TRACKING_URI")
        store = about.folder / "mlruns"
        self._store = None if server else store
        self._client = MlflowClient(tracking_uri=server or store.as_uri())
        known = about.folder / _ID
        self._run = _known_run(known, server=server)
        if self._run:
            self._require_own_store()
            return
        experiment = self._client.get_experiment_by_name(about.name)
        at = experiment.experiment_id if experiment else self._client.create_experiment(about.name)
        self._run = self._client.create_run(at, run_name=about.run_id).info.run_id
        self._require_own_store()
        settings = [Param(name, str(value)[:500]) for name, value in about.config.items()]
        for first in range(0, len(settings), _MOST_PARAMETERS):
            self._client.log_batch(self._run, params=settings[first : first + _MOST_PARAMETERS])
        proof = sign(*_parts(known, server, self._run)) if server else ""
        write_whole(known, f"{self._run} {proof}".strip() + "\n")

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
        """Log the results as tags and the report page as an artifact, and close the run."""
        for name, value in summary.items():
            self._client.set_tag(self._run, f"summary.{name}", str(value)[:500])
        if report is not None:
            self._require_own_store()
            self._client.log_artifact(self._run, str(report))
        if summary:
            status = "FINISHED" if summary.get("status") == "finished" else "FAILED"
            self._client.set_terminated(self._run, status=status)

    def _require_own_store(self) -> None:
        """Raise ConfigError if the file store would put the report outside the store's folder.

        Files in the store name the location of a run's artifacts, which might be a different folder
        or a server.
        """
        if self._store is None:
            return
        found = self._client.get_run(self._run).info
        own = f"{self._store.as_uri()}/{found.experiment_id}/{self._run}/artifacts"
        if found.artifact_uri != own:
            raise ConfigError(
                f"{self._store} was made for another folder: the run's files would go to "
                f"{found.artifact_uri}. Move {self._store.parent} away"
            )


def _known_run(known: Path, *, server: str | None) -> str:
    """Return the id of the run to continue; empty for a new run.

    On a server, continue only a run that this user's tracker created: an untrusted run folder could
    contain the id of any other run on that server.
    """
    try:
        found = _RUN.fullmatch(read_bytes(known).decode(errors="replace").strip())
    except FileNotFoundError:
        return ""
    if found is None:
        return ""
    run, proof = found[1], found[2] or ""
    return "" if server and not is_signed(proof, *_parts(known, server, run)) else run


def _parts(known: Path, server: str | None, run: str) -> tuple[str | None, ...]:
    return "mlflow", os.path.realpath(known), server, run


def make() -> Tracker:
    """Return a tracker."""
    return MlflowTracker()
