"""Programs of a stage, each with a log and a process group, which end with the stage."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import REPO
from payload.supervise.processes import die_with_parent

_NAMES_ERROR = re.compile(r"(error|(\w+\.)*\w*(Error|Exception|Exit)): ")
_LOG_BYTES = 2**20
"""Number of bytes at the end of a log that are searched for the cause of a failure."""


class ProgramError(RuntimeError):
    """A program failed or exceeded its limit; the message is the cause in one line."""

    def __init__(self, cause: str, *, log: Path, status: int | None = None) -> None:
        super().__init__(cause)
        self.log = log
        self.status = status
        """Exit status; None if the program exceeded a limit."""


@dataclass(frozen=True, slots=True)
class Program:
    """A started program."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]


class Programs:
    """Starts programs with a common time limit, and removes the logs of those that succeed."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        """Folder of the logs."""
        self.limit_s = 0.0
        """Time limit for all programs of the current stage together."""
        self._ends_s = 0.0
        self._running: list[Program] = []

    def left_s(self) -> float:
        """Return the seconds that are left of the stage's time limit."""
        return max(0.0, self._ends_s - time.monotonic())

    def limit(self, seconds: float) -> None:
        """Limit the programs to this time from now."""
        self.limit_s, self._ends_s = seconds, time.monotonic() + seconds

    def start(self, name: str, module: str, *arguments: str, threads: int | None = None) -> Program:
        """Start `python -m module` with `threads` compute threads; None means the default."""
        self.logs.mkdir(parents=True, exist_ok=True)
        search = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {
            "PYTHONPATH": os.pathsep.join(search),
            "PYTHONUNBUFFERED": "1",
            # Without it each request to the hub would wait for a timeout.
            "HF_HUB_OFFLINE": "1",
            # transformers' Trainer would use every GPU in one process.
            "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0],
        }
        if threads is not None:
            settings["OMP_NUM_THREADS"] = str(threads)
        log = self.logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                cwd=REPO,
                env=os.environ | settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # If the visit is killed, no program stays on the GPU.
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        program = Program(name, log, process)
        self._running.append(program)
        return program

    def wait(self, program: Program, *, limit_s: float = math.inf) -> None:
        """Wait for the program, for at most `limit_s` within the stage's limit.

        Raises ProgramError if the program failed or exceeded a limit.
        """
        allowed_s = min(limit_s, self.limit_s)
        try:
            status = program.process.wait(timeout=min(limit_s, self.left_s()))
        except subprocess.TimeoutExpired:
            self._end(program)
            raise ProgramError(
                f"{program.name} was killed at the limit of {allowed_s:.0f} s; last output: "
                f"{cause_in(program.log)}",
                log=program.log,
            ) from None
        self._end(program)
        if status:
            reason = f"exit code {status}" if status > 0 else f"killed by {_signal_name(-status)}"
            raise ProgramError(
                f"{program.name}, {reason}: {cause_in(program.log)}",
                log=program.log,
                status=status,
            )
        program.log.unlink(missing_ok=True)

    def run(self, name: str, module: str, *arguments: str, limit_s: float = math.inf) -> None:
        """Start a program and wait for it. Raises ProgramError."""
        self.wait(self.start(name, module, *arguments), limit_s=limit_s)

    def stop(self) -> None:
        """Kill every running program and remove its log; keep the logs of failures."""
        for program in list(self._running):
            self._end(program)
            program.log.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # The folder has logs, or does not exist.
            self.logs.rmdir()

    def remove_logs(self) -> None:
        """Remove the logs of an earlier visit."""
        for log in self.logs.glob("*.log"):
            log.unlink()

    def _end(self, program: Program) -> None:
        """Kill the program's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait()
        self._running.remove(program)


def cause_in(log: Path) -> str:
    """Return the line of a log with the error, or its last line."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if _NAMES_ERROR.match(line)]
    return (named or lines or ["no output"])[-1]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
