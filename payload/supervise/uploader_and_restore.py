"""Controls the process that uploads a run's results, and restores a run from its store.

Google's client runs in separate processes, so the supervisor survives a client that hangs or uses
too much memory.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import BinaryIO

from payload.config.run_config import RunConfig
from payload.core.errors import PreflightError
from payload.core.printable_text import one_line
from payload.core.python_processes import code_environment, module_command
from payload.launch.plan_record import LaunchPlan
from payload.run_record.run_files import RunPaths, RunState, last_record, write_json
from payload.run_record.store_state import StoreState

_DRAIN = "drain\n"
_POLL_S = 0.2
_LAST_RECORDS_S = 15.0
"""Time at the end of the final wait that is reserved for uploading summary.json and state.json."""
_RESTART_S = 30.0


class Uploader:
    """Starts and restarts the uploader process of one run, and waits for it up to a limit."""

    def __init__(
        self, paths: RunPaths, *, plan: LaunchPlan, config: RunConfig, env: Mapping[str, str]
    ) -> None:
        """Start no process yet; a run without a store never starts an uploader."""
        self._paths = paths
        self._log = paths.logs / "storage.log"
        self._plan = plan
        self._final_wait_s = config.storage.final_wait_s
        self._has_store = config.storage.address() is not None
        self._env = env
        self._process: subprocess.Popen[str] | None = None
        self._started_s = float("-inf")
        self._ends_s: float | None = None
        self._problem: str | None = None

    def restore(
        self, *, pause: Callable[[float], bool], note: Callable[[str], None]
    ) -> RunState | None:
        """Fetch files that are only in the store; return the stored state of the run.

        `pause` sleeps and returns False to stop waiting; `note` receives one-line progress
        messages. Raises PreflightError if the store cannot be read, because the run might otherwise
        start from scratch or from an older checkpoint.
        """
        if not self._has_store or not self._plan.resumes:
            return None
        try:
            self._paths.logs.mkdir(exist_ok=True)
            log = self._log.open("a+b")
        except OSError as error:
            raise PreflightError(f"{self._log}: {error.strerror}. Free disk space.") from None
        with log:
            begins = log.seek(0, os.SEEK_END)
            process = self._start("restore", stderr=log)
            while process.poll() is None and pause(_POLL_S):
                if line := _last_line(log, begins):
                    note(line)
            if process.poll() is None:  # a stop of the run was requested
                _kill(process)
                return None
            line = _last_line(log, begins)
        if process.returncode != 0:
            why = line.removeprefix("error: ") or "no reason given"
            if process.returncode < 0:
                why = f"the process was killed by signal {-process.returncode}"
            raise PreflightError(
                f"the newest checkpoint could not be fetched from the store: {one_line(why)} "
                "Nothing was trained. Retry, or resume from the disk alone: --set "
                "storage.results=none"
            )
        if line:
            note(line)
        return last_record(RunState, self._paths.restored.state)

    def begin(self) -> None:
        """Start the uploader, or restart it if it has ended."""
        alive = self._process is not None and self._process.poll() is None
        if not self._has_store or alive or time.monotonic() - self._started_s < _RESTART_S:
            return
        state = self.state()
        if self._process is not None and state is not None and state.lost:
            return  # the run now runs elsewhere
        self._started_s = time.monotonic()
        new = [] if self._plan.resumes else ["--new"]
        with suppress(OSError):
            if state is not None:  # problems of an earlier process do not apply to this one
                fresh = StoreState(
                    address=state.address, checkpoint=state.checkpoint, token=state.token
                )
                if self._process is not None:  # it was killed while the run continued
                    fresh = replace(
                        fresh,
                        sent_bytes=state.sent_bytes,
                        sent_unix=state.sent_unix,
                        failures=state.failures,
                    )
                write_json(self._paths.store_state, fresh)
            self._paths.logs.mkdir(exist_ok=True)
            with self._log.open("ab") as log:
                self._process = self._start("upload", *new, stderr=log)

    def state(self) -> StoreState | None:
        """Return the state of the run in the store; None without a store."""
        return last_record(StoreState, self._paths.store_state) if self._has_store else None

    def news(self) -> str | None:
        """Return a message when the store begins to fail, and when it works again."""
        state = self.state()
        problem = state.problem if state else None
        before, self._problem = self._problem, problem
        if problem is not None and before is None:
            return f"results do not reach the store: {problem}. Training continues"
        if problem is None and before is not None:
            return "the store accepts results again"
        return None

    def drain(self, *, pause: Callable[[float], bool], most_s: float | None = None) -> None:
        """Wait until the store has all checkpoints, metrics and logs, up to a limit.

        `pause` sleeps and returns False if an immediate end is requested. `most_s` can shorten the
        configured wait.
        """
        if self._process is None or self._process.stdin is None:
            return
        wait_s = self._final_wait_s if most_s is None else min(most_s, self._final_wait_s)
        self._ends_s = time.monotonic() + wait_s
        with suppress(OSError):
            self._process.stdin.write(_DRAIN)
            self._process.stdin.flush()
        # Reserve time for the last records, but at most half of the wait.
        until_s = self._ends_s - min(_LAST_RECORDS_S, wait_s / 2)
        while time.monotonic() < until_s and self._process.poll() is None:
            state = self.state()
            if state is not None and (state.is_idle or state.lost):
                return
            if not pause(_POLL_S):
                return

    def end(self, *, at_once: bool) -> None:
        """Upload the last records, then end the uploader; with `at_once`, kill it immediately."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        ends_s = self._ends_s or time.monotonic() + min(_LAST_RECORDS_S, self._final_wait_s)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if at_once else max(_POLL_S, ends_s - time.monotonic()))
            return
        _kill(process)

    def _start(self, verb: str, *more: str, stderr: int | BinaryIO) -> subprocess.Popen[str]:
        # With --started-here, the store needs no approval here: the operator's command approved it.
        arguments = ["--run-dir", str(self._paths.root), "--started-here", *more]
        return subprocess.Popen(
            module_command("payload.storage", verb, *arguments),
            env=code_environment(self._env),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a process that hangs in the kernel stays
        process.wait(_POLL_S)


def _last_line(log: BinaryIO, begins: int) -> str:
    """Return the last line that was appended to a log after its first `begins` bytes."""
    log.seek(begins)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
