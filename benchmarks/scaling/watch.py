"""Watches the runs of `benchmarks.scaling` until they have taken their steps, then kills them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from payload.run_record.metrics_log import read_metrics
from payload.run_record.run_files import RankProgress, RunPaths, read_json

# 0.3 % of a step of GPT-2 on one core.
_POLL_S = 0.05


@dataclass(slots=True)
class Watched:
    """One run, with its observed steps."""

    process: subprocess.Popen[str]
    """The `mpirun` process of the run."""
    paths: RunPaths
    ranks: int
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    """Rows of metrics.jsonl, one per step."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU time of rank 0 from its start to the end of each step, in seconds."""
    peak_bytes: int = 0
    """Largest resident set of a rank, set by `kill`."""

    def poll(self) -> None:
        """Read new steps."""
        rows = [row for row in read_metrics(self.paths.metrics) if "loss" in row]
        if len(rows) > len(self.rows):
            progress = read_json(RankProgress, self.paths.rank_progress(0))
            assert progress is not None, "a rank writes its progress before its first step"
            times = psutil.Process(progress.pid).cpu_times()
            self.cpu_s += [times.user + times.system] * (len(rows) - len(self.rows))
            self.rows = rows

    def kill(self) -> None:
        """Kill the ranks; mpirun then ends, too."""
        for rank in range(self.ranks):
            progress = read_json(RankProgress, self.paths.rank_progress(rank))
            if progress is not None:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    self.peak_bytes = max(self.peak_bytes, _peak_bytes(progress.pid))
                    os.kill(progress.pid, signal.SIGKILL)

    def step_cpu_s(self) -> list[float]:
        """Return the CPU time of each step after the first."""
        return [after - before for before, after in zip(self.cpu_s, self.cpu_s[1:], strict=False)]


def _peak_bytes(pid: int) -> int:
    """Return the high-water mark of a process's resident set."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    line = next(each for each in status.splitlines() if each.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def watch(runs: Sequence[Watched], *, steps: int, timeout_s: float) -> bool:
    """Wait until every run has taken `steps` steps; return False if one ended early.

    All runs continue until the last one is done, so that none has the machine for itself.
    """
    deadline_s = time.monotonic() + timeout_s
    while any(len(run.rows) < steps for run in runs):
        if any(run.process.poll() is not None for run in runs) or time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
        for run in runs:
            run.poll()
    return True
