"""The tracker Weights & Biases, offline if WANDB_MODE is not set; upload with `wandb sync`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, ClassVar

from payload.report.trackers.base import About, Row, Tracker


class WandbTracker:
    """Writes offline files of wandb into the run folder, and never stores an API key."""

    starts_over: ClassVar[bool] = False

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, about: About) -> None:
        """Open or continue the run."""
        about.folder.mkdir(parents=True, exist_ok=True)
        folder = about.folder.absolute()
        # A file wandb/settings in the current folder could send the API key to a wrong server.
        with chdir("/"):
            import wandb

            self._run = wandb.init(
                project=about.name,
                name=about.run_id,
                id=hashlib.sha256(about.run_id.encode()).hexdigest()[:16],
                resume="allow",
                dir=str(folder),
                config=dict(about.config),
                mode=os.environ.get("WANDB_MODE", "offline"),
                settings=wandb.Settings(
                    silent=True,
                    disable_code=True,
                    disable_git=True,
                    x_disable_stats=True,
                    x_disable_meta=True,
                    console="off",
                ),
            )

    def log(self, rows: Sequence[Row]) -> None:
        """Log each row at its step; an evaluation shares the step of training."""
        for row in rows:
            values = {name: value for name, value in row.items() if name != "step"}
            self._run.log(values, step=int(row["step"]))

    def end(self, summary: Mapping[str, Any], report: Path | None) -> None:
        """Log the results and the report page, and close the run."""
        self._run.summary.update(dict(summary))
        if report is not None:
            self._run.save(str(report), base_path=str(report.parent), policy="now")
        self._run.finish()


def make() -> Tracker:
    """Return a tracker."""
    return WandbTracker()
