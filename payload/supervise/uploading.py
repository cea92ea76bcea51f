"""The process that keeps a run's results in its store, and the restore before the first attempt.

Google's client is in processes of its own: one that hangs, or takes the machine's memory, is
not the supervisor's.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import BinaryIO

from payload.checkpoint_files import newest_sound
from payload.errors import PreflightError
from payload.launch.plan import LaunchPlan
from payload.results import RunPaths, RunState, last_record
from payload.run_config import RunConfig
from payload.store_state import StoreState
from payload.untrusted import one_line

RESTORED = "restored"
"""Folder in the run's with the records that came from the store."""
_DRAIN = "drain\n"
_LOOK_S = 0.2
_LAST_RECORDS_S = 15.0
"""The part of the final wait that is left for summary.json and state.json."""
_RESTART_S = 30.0


class Uploading:
    """The uploader of one run: started, watched, and waited for no longer than was agreed."""

    def __init__(
        self, paths: RunPaths, *, plan: LaunchPlan, config: RunConfig, env: Mapping[str, str]
    ) -> None:
        """Nothing is started; without a store nothing ever is."""
        self._paths = paths
        self._plan = plan
        self._final_wait_s = config.storage.final_wait_s
        self._has_store = config.storage.address() is not None
        self._env = env
        self._process: subprocess.Popen[str] | None = None
        self._started_s = float("-inf")
        self._ends_s: float | None = None
        self._problem: str | None = None

    def restore(self, *, pause: Callable[[float], bool]) -> RunState | None:
        """Bring back what the store has and the disk has not; return the state from before.

        `pause` sleeps and says whether to go on. A store that cannot be read is no error where the
        disk has a checkpoint. Raises PreflightError where training would begin anew.
        """
        if not self._has_store or not self._plan.resumes:
            return None
        process = self._start("restore", stderr=subprocess.PIPE)
        while process.poll() is None and pause(_LOOK_S):
            continue
        if process.poll() is None:
            process.kill()
        _, said = process.communicate()
        if process.returncode == 0:
            return last_record(RunState, self._paths.root / RESTORED / self._paths.state.name)
        lines = said.strip().splitlines()
        why = one_line(lines[-1].removeprefix("error: ") if lines else "no reason given")
        if process.returncode > 0 and newest_sound(self._paths.checkpoints) is None:
            raise PreflightError(
                f"there is no checkpoint on the disk, and none came from the store: {why} Without "
                "it the run would begin anew."
            )
        return None

    def begin(self) -> None:
        """Start the uploader, or start it again where it has ended."""
        alive = self._process is not None and self._process.poll() is None
        if not self._has_store or alive or time.monotonic() - self._started_s < _RESTART_S:
            return
        self._started_s = time.monotonic()
        new = [] if self._plan.resumes else ["--new"]
        with suppress(OSError):
            self._paths.logs.mkdir(exist_ok=True)
            with (self._paths.logs / "storage.log").open("ab") as log:
                self._process = self._start("upload", *new, stderr=log)

    def state(self) -> StoreState | None:
        """Return what of the run is in the store; None without one."""
        return last_record(StoreState, self._paths.store_state) if self._has_store else None

    def news(self) -> str | None:
        """Return a sentence when the store begins to fail, and when it no longer does."""
        state = self.state()
        problem = state.problem if state else None
        before, self._problem = self._problem, problem
        if problem is not None and before is None:
            return f"results do not reach the store: {problem}. Training goes on"
        if problem is None and before is not None:
            return "the store takes results again"
        return None

    def drain(self, *, pause: Callable[[float], bool]) -> None:
        """Wait until the store has all checkpoints, metrics and logs, but not for too long.

        `pause` sleeps, and says false when somebody wants the end at once.
        """
        if self._process is None or self._process.stdin is None:
            return
        self._ends_s = time.monotonic() + self._final_wait_s
        with suppress(OSError):
            self._process.stdin.write(_DRAIN)
            self._process.stdin.flush()
        # The last records need some of the time, a short one shared evenly.
        until_s = self._ends_s - min(_LAST_RECORDS_S, self._final_wait_s / 2)
        while time.monotonic() < until_s and self._process.poll() is None:
            state = self.state()
            if state is not None and (state.is_drained or state.lost):
                return
            if not pause(_LOOK_S):
                return

    def end(self, *, at_once: bool) -> None:
        """Let the last records follow, then end the uploader; `at_once` kills it."""
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        ends_s = self._ends_s or time.monotonic() + min(_LAST_RECORDS_S, self._final_wait_s)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.0 if at_once else max(_LOOK_S, ends_s - time.monotonic()))
            return
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel stays
            process.wait(_LOOK_S)

    def _start(self, verb: str, *more: str, stderr: int | BinaryIO) -> subprocess.Popen[str]:
        program = [sys.executable, "-m", "payload.storage"]
        return subprocess.Popen(
            [*program, verb, "--run-dir", str(self._paths.root), *more],
            env=dict(self._env),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
