"""The files that a rank writes: metrics.jsonl, the heartbeat and the exit record."""

from __future__ import annotations

import logging
import os
import platform
import resource
import time
from contextlib import nullcontext, suppress
from importlib import metadata
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from payload import __version__
from payload.core.errors import ExitCode, TrainingError
from payload.core.files import move_aside, require_file, write_whole
from payload.run_record.metrics_log import (
    EvalMetrics,
    StepMetrics,
    describe_missing,
    missing_steps,
    read_lines,
    to_json_line,
)
from payload.run_record.reserved_space import write_heartbeat, write_record
from payload.run_record.run_files import RankExit, RankProgress, RunPaths
from payload.train.ranks.world import World

_PROGRESS_INTERVAL_S = 0.5
_STATM = Path("/proc/self/statm")

log = logging.getLogger(__name__)


class MetricsFile:
    """Appends rows to metrics.jsonl. The file has each step exactly once, even after a resume.

    If the disk is full, training continues and rows are kept in memory. The next checkpoint fails
    if rows are still missing on disk.
    """

    def __init__(self, paths: RunPaths, *, resumed_at_step: int) -> None:
        self._paths = paths
        self._resumed_at_step = resumed_at_step
        self._file: FileIO | None = None
        self._waiting = b""

    def __enter__(self) -> Self:
        path = self._paths.metrics
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._keep_rows_up_to(self._resumed_at_step)
            self._file = FileIO(path, "a")
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            with self._file, nullcontext() if value is None else suppress(TrainingError):
                self.require_written()

    def append(self, row: StepMetrics | EvalMetrics) -> None:
        """Write one row; if the disk is full, keep the row, and retry with the next row."""
        is_first = not self._waiting
        self._waiting += to_json_line(row).encode()
        try:
            self._write_waiting()
        except OSError as error:
            if is_first:
                log.warning(f"{self._unwritable(error)} Trying again after every step.")

    def require_written(self) -> None:
        """Raise TrainingError if rows are missing on disk.

        A checkpoint must not be newer than the rows.
        """
        assert self._file is not None
        try:
            self._write_waiting()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def _write_waiting(self) -> None:
        assert self._file is not None
        while self._waiting:
            # A disk that fills up may accept a part of a row; the rest is written when there is
            # room.
            written = self._file.write(self._waiting)
            self._waiting = self._waiting[written:]

    def _unwritable(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self._paths.metrics} cannot be written ({error.strerror}). Free disk space; "
            "training can be resumed from the last checkpoint."
        )

    def _keep_rows_up_to(self, step: int) -> None:
        """Keep one valid row for each step up to the checkpoint; later steps are trained again.

        Log the damaged lines, and move a damaged file aside unchanged. Replace a link by a regular
        file with the same rows: a run never appends to a file outside the run folder.
        """
        path = self._paths.metrics
        require_file(path)
        kept: dict[tuple[str, int], bytes] = {}
        damaged = 0
        with suppress(FileNotFoundError):
            for line, row in read_lines(path):
                if row is None:
                    damaged += 1
                elif row["step"] <= step:
                    kept["val_loss" if "val_loss" in row else "loss", row["step"]] = line
        if damaged:
            aside = move_aside(path)
            log.warning(
                f"{path}: {damaged} damaged line(s) were left out. The original file is {aside}"
            )
        content = b"".join(kept.values())
        if path.is_symlink() or not path.exists() or path.stat().st_size != len(content):
            write_whole(path, content.decode())
        missing = missing_steps((at for kind, at in kept if kind == "loss"), trained=step)
        if missing:
            log.warning(
                f"{path}: the rows of step(s) {describe_missing(missing)} are lost. The checkpoint "
                "is complete, so training continues; summary.json lists the steps."
            )


class Heartbeat:
    """Replaces this rank's progress file, from which the supervisor detects a hung rank.

    Nothing is written if the run folder does not exist.
    """

    def __init__(self, paths: RunPaths, world: World) -> None:
        self._run = paths.root
        self._path = paths.rank_progress(world.rank)
        self._rank = world.rank
        self._node = world.node
        self._last_s = 0.0
        self._last_phase = ""

    def report(
        self, *, step: int, phase: str, micro_step: int | None = None, of: int | None = None
    ) -> None:
        """Write the progress: at every change of phase, and within a phase at most twice a second.

        `of` is the number of micro-batches in the phase, and `micro_step` the number of finished
        micro-batches.
        """
        now = time.monotonic()
        if phase == self._last_phase and now - self._last_s < _PROGRESS_INTERVAL_S:
            return
        if not self._run.is_dir():
            return
        self._last_s, self._last_phase = now, phase
        beat = RankProgress(
            rank=self._rank,
            node=self._node,
            pid=os.getpid(),
            step=step,
            phase=phase,
            time_unix=time.time(),
            micro_step=micro_step,
            micro_steps=of,
            rss_bytes=rss_bytes(),
        )
        # A failed write must not end the run: the next write may succeed.
        with suppress(OSError):
            write_heartbeat(self._path, beat)


def write_rank_exit(paths: RunPaths, world: World, *, exit_code: ExitCode, error: str) -> None:
    """Write this rank's exit record. Raises OSError."""
    write_record(
        paths.rank_exit(world.rank),
        RankExit(
            rank=world.rank,
            node=world.node,
            exit_code=int(exit_code),
            error=error,
            time_unix=time.time(),
        ),
    )


def versions() -> dict[str, str]:
    """Return the versions of the software in this process."""
    found = {"tileforge": __version__, "python": platform.python_version()}
    for name in ("torch", "accelerate", "safetensors", "impi-rt", "intel-extension-for-pytorch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def rss_bytes() -> int:
    """Return this process's resident memory in bytes."""
    try:
        # psutil reads the same number, but its first call takes 0.2 ms.
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return int(psutil.Process().memory_info().rss)
