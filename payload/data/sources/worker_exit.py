"""Ends the workers that read parquet files or render templates, and reports how they ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess


def end_worker(worker: subprocess.Popen[bytes]) -> None:
    """Kill a worker and close its pipes."""
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    worker.wait()


def describe_exit(status: int) -> str:
    """Return text with the signal that ended a process, or with its exit code."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
