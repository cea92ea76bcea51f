"""The end of a process that reads or renders for this one: a parquet file, a chat template."""

from __future__ import annotations

import contextlib
import signal
import subprocess


def end_worker(worker: subprocess.Popen[bytes]) -> None:
    """Kill it and close its pipes."""
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    worker.wait()


def how_it_ended(status: int) -> str:
    """Return the signal's name or the exit code in words."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
