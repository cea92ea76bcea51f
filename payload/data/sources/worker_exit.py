"""Ends the worker processes for parquet files and chat templates, and reports how each ended."""

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
    """Return the signal's name or the exit code as text."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
