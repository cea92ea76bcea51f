"""Programs of a stage: each has a log and a process group, and ends with the stage."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.contenders import REPO
from payload.supervise.processes import die_with_parent

_NAMES_ERROR = re.compile(r"(error|(\w+\.)*\w*(Error|Exception|Exit)): ")
_LOG_BYTES = 2**20
"""Length of a log's end that is searched for the cause."""


class ProgramError(RuntimeError):
    """A program that failed or ran into its limit; the message is the cause, in one line."""

    def __init__(self, cause: str, *, log: Path) -> None:
        super().__init__(cause)
        self.log = log


@dataclass(frozen=True, slots=True)
class Program:
    """A program that was started."""

    name: str
    log: Path
    process: subprocess.Popen[bytes]


class Programs:
    """Starts programs below a common time limit. The log of one that succeeds is removed."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        """Folder of the logs."""
        self.limit_s = 0.0
        """Time that the programs of the present stage have together."""
        self._ends_s = 0.0
        self._running: list[Program] = []

    def limit(self, seconds: float) -> None:
        """Give the programs this time from now."""
        self.limit_s, self._ends_s = seconds, time.monotonic() + seconds

    def start(self, name: str, module: str, *arguments: str, threads: int | None = None) -> Program:
        """Start `python -m module` with `threads` compute threads; None = the default."""
        self.logs.mkdir(parents=True, exist_ok=True)
        search = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
        settings = {
            "PYTHONPATH": os.pathsep.join(search),
            "PYTHONUNBUFFERED": "1",
            # Nothing is downloaded: without it each look at the hub waits for a timeout.
            "HF_HUB_OFFLINE": "1",
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
                # A visit that is killed leaves nothing on the GPU.
                preexec_fn=die_with_parent(signal.SIGKILL),
            )
        program = Program(name, log, process)
        self._running.append(program)
        return program

    def wait(self, program: Program) -> None:
        """Wait for the program's end. Raises ProgramError where it failed or ran into the limit."""
        left_s = max(0.0, self._ends_s - time.monotonic())
        try:
            status = program.process.wait(timeout=left_s)
        except subprocess.TimeoutExpired:
            self._end(program)
            raise ProgramError(
                f"{program.name} was killed at the limit of {self.limit_s:.0f} s; last output: "
                f"{cause_in(program.log)}",
                log=program.log,
            ) from None
        self._end(program)
        if status:
            how = f"exit code {status}" if status > 0 else f"killed by {_signal_name(-status)}"
            raise ProgramError(f"{program.name}, {how}: {cause_in(program.log)}", log=program.log)
        program.log.unlink(missing_ok=True)

    def run(self, name: str, module: str, *arguments: str) -> None:
        """Start a program and wait for its end. Raises ProgramError."""
        self.wait(self.start(name, module, *arguments))

    def stop(self) -> None:
        """Kill every program that still runs, and remove its log; keep those of failures."""
        for program in list(self._running):
            self._end(program)
            program.log.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # It has logs, or was never made.
            self.logs.rmdir()

    def remove_logs(self) -> None:
        """Remove the logs of an earlier visit."""
        for log in self.logs.glob("*.log"):
            log.unlink()

    def _end(self, program: Program) -> None:
        """Kill what is left of the program's process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(program.process.pid, signal.SIGKILL)
        program.process.wait()
        self._running.remove(program)


def cause_in(log: Path) -> str:
    """Return the line of a log that names the error, else its last line."""
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
