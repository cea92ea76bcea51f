"""Keeps summary.json up to date during a run, on rank 0."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from payload.core.errors import ExitCode, TileforgeError, TrainingError
from payload.run_record.reserved_space import write_record
from payload.run_record.run_files import RunPaths, RunState, RunStatus, Summary, last_record
from payload.run_record.run_statistics import with_best, with_metrics, with_time
from payload.train.rank_metrics_and_heartbeat import versions
from payload.train.ranks.world import World, as_rank_lost


class SummaryFile:
    """Writes `running` on entry, `failed` after an error, otherwise the status passed to `end`.

    Nothing is written if the run folder does not exist: a run that is rejected early creates no
    folder.
    """

    def __init__(self, paths: RunPaths, world: World) -> None:
        self._paths = paths
        self._world = world
        state = last_record(RunState, paths.state)
        self._summary = Summary(
            run_id=paths.run_id,
            status="running",
            exit_class=ExitCode.OK.label,
            world_size=world.world_size,
            nodes=world.nodes(),
            restarts=state.restarts() if state else 0,
            resumes=state.resumes if state else 0,
            versions=versions(),
        )
        self._started_s = time.perf_counter()
        self._wall_s: float | None = None

    def __enter__(self) -> Self:
        self._try_to_write()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if value is not None:
            known = as_rank_lost(value, world=self._world) or value
            code = known.exit_code if isinstance(known, TileforgeError) else ExitCode.TRAINING
            self._summary = replace(
                self._summary, status="failed", exit_class=code.label, error=str(known)
            )
            # The run ends with `value`, even if the summary cannot be written.
            self._try_to_write()
            return
        try:
            self._write()
        except OSError as error:
            raise TrainingError(
                f"{self._paths.summary} cannot be written ({error.strerror}). Free disk space and "
                "resume; the training itself is complete and saved."
            ) from None

    def begin(self) -> None:
        """Write the summary for the first time, now that the run folder exists."""
        self._try_to_write()

    def calibrated(self, *, peak_flops_per_s: float, dequantized_per_s: float | None) -> None:
        """Record the calibration's measurements."""
        self._summary = replace(
            self._summary, peak_flops_per_s=peak_flops_per_s, dequantized_per_s=dequantized_per_s
        )
        self._try_to_write()

    def predicted(self, *, step_s: float) -> None:
        """Record the predicted time of a step."""
        self._summary = replace(self._summary, predicted_step_s=step_s)
        self._try_to_write()

    def ready(self, start_s: Mapping[str, float]) -> None:
        """Record the times of the phases before training. Training begins now."""
        rounded = {part: round(seconds, 3) for part, seconds in start_s.items()}
        self._summary = replace(self._summary, ready_unix=time.time(), start_s=rounded)
        self._try_to_write()

    def end(self, status: RunStatus, *, wall_s: float) -> None:
        """Record the final status of the run.

        The last sync check must have found all ranks equal.
        """
        self._summary = replace(self._summary, status=status, ranks_identical=True)
        self._wall_s = wall_s

    def _try_to_write(self) -> None:
        """Write the summary; ignore write errors, because a full disk must not end the run."""
        with contextlib.suppress(OSError):
            self._write()

    def _write(self) -> None:
        if self._world.is_main and self._paths.root.is_dir():
            wall_s = self._wall_s or time.perf_counter() - self._started_s
            known = with_best(with_metrics(self._summary, self._paths), self._paths)
            write_record(self._paths.summary, with_time(known, self._paths, wall_s=wall_s))
