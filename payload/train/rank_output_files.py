"""The files a rank writes: metrics.jsonl, its heartbeat and its exit record."""

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
from payload.core.files import require_file, set_aside, write_whole
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
    """Appends rows to metrics.jsonl; every step is there exactly once, also after a resume.

    A full disk is no reason to end: rows wait, until they are needed on disk.
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
        """Write one row, which a reader sees at once, or later if the disk is full."""
        is_first = not self._waiting
        self._waiting += to_json_line(row).encode()
        try:
            self._write_waiting()
        except OSError as error:
            if is_first:
                log.warning(f"{self._unwritable(error)} Trying again after every step.")

    def require_written(self) -> None:
        """Raise TrainingError unless all rows are on the disk: a checkpoint may not go ahead."""
        assert self._file is not None
        try:
            self._write_waiting()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from None

    def _write_waiting(self) -> None:
        assert self._file is not None
        while self._waiting:
            # A full disk takes a part of a row first; the rest of it follows when there is room.
            written = self._file.write(self._waiting)
            self._waiting = self._waiting[written:]

    def _unwritable(self, error: OSError) -> TrainingError:
        return TrainingError(
            f"{self._paths.metrics} cannot be written ({error.strerror}). Free disk space; "
            "training can be resumed from the last checkpoint."
        )

    def _keep_rows_up_to(self, step: int) -> None:
        """Keep each sound row up to the checkpoint once; steps past it are trained again.

        A damaged file is set aside as it is, and what it lost is said. A link gives way to a file
        with its rows: nothing is appended to what is not the run's.
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
            aside = set_aside(path)
            log.warning(f"{path}: {damaged} damaged line(s) left out. The file as it was: {aside}")
        content = b"".join(kept.values())
        if path.is_symlink() or not path.exists() or path.stat().st_size != len(content):
            write_whole(path, content.decode())
        missing = missing_steps((at for kind, at in kept if kind == "loss"), trained=step)
        if missing:
            log.warning(
                f"{path}: the rows of step(s) {describe_missing(missing)} are lost. The checkpoint "
                "is whole, so training goes on; summary.json lists them."
            )


class Heartbeat:
    """Replaces this rank's progress file; the supervisor reads it to tell slow from stuck.

    Without a run folder nobody reads it, and it says nothing.
    """

    def __init__(self, paths: RunPaths, world: World) -> None:
        self._run = paths.root
        self._path = paths.rank_progress(world.rank)
        self._rank = world.rank
        self._node = world.node
        self._last_s = 0.0
        self._last_phase = ""

    def tell(
        self, *, step: int, phase: str, micro_step: int | None = None, of: int | None = None
    ) -> None:
        """Say what comes next; at most twice a second, but every change of phase.

        `micro_step` counts what is done `of` the phase's passes.
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
        # Not worth the run: where it cannot be written, the next one may.
        with suppress(OSError):
            write_heartbeat(self._path, beat)


def write_rank_exit(paths: RunPaths, world: World, *, exit_code: ExitCode, error: str) -> None:
    """Leave this rank's own words about its end. Raises OSError."""
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
    """Return the versions that the run was made with."""
    found = {"tileforge": __version__, "python": platform.python_version()}
    for name in ("torch", "accelerate", "safetensors", "impi-rt", "intel-extension-for-pytorch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def rss_bytes() -> int:
    """Return the memory of this process that is in RAM now."""
    try:
        # psutil reads the same, and first takes 0.2 ms to look the process up.
        return int(_STATM.read_bytes().split()[1]) * resource.getpagesize()
    except OSError:
        return int(psutil.Process().memory_info().rss)
