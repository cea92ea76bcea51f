"""The process that keeps a run's results in its store, and the restore before the first attempt.

Google's client is in processes of its own: one that hangs, or takes the machine's memory, is
not the supervisor's.
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
from payload.core.python_processes import code_environment, module_words
from payload.launch.plan import LaunchPlan
from payload.run_record.run_files import RunPaths, RunState, last_record, write_json
from payload.run_record.store_state import StoreState

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
        """Bring back what the store has and the disk has not; return the state from before.

        `pause` sleeps and says whether to go on; `note` gets what happens, in one line. Raises
        PreflightError where the store cannot be read: the run might start from scratch, or from an
        older checkpoint.
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
            while process.poll() is None and pause(_LOOK_S):
                if said := _last_line(log, begins):
                    note(said)
            if process.poll() is None:  # somebody wants the run to stop
                _kill(process)
                return None
            said = _last_line(log, begins)
        if process.returncode != 0:
            why = said.removeprefix("error: ") or "no reason given"
            if process.returncode < 0:
                why = f"the process was killed by signal {-process.returncode}"
            raise PreflightError(
                f"the newest checkpoint could not be had from the store: {one_line(why)} Nothing "
                "was trained. Try again, or go on from the disk alone: --set storage.results=none"
            )
        if said:
            note(said)
        return last_record(RunState, self._paths.restored.state)

    def begin(self) -> None:
        """Start the uploader, or start it again where it has ended."""
        alive = self._process is not None and self._process.poll() is None
        if not self._has_store or alive or time.monotonic() - self._started_s < _RESTART_S:
            return
        state = self.state()
        if self._process is not None and state is not None and state.lost:
            return  # another place has the run now
        self._started_s = time.monotonic()
        new = [] if self._plan.resumes else ["--new"]
        with suppress(OSError):
            if state is not None:  # what an earlier process said is no word of this one
                fresh = StoreState(
                    address=state.address, checkpoint=state.checkpoint, token=state.token
                )
                if self._process is not None:  # it died, and the run goes on
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

    def drain(self, *, pause: Callable[[float], bool], most_s: float | None = None) -> None:
        """Wait until the store has all checkpoints, metrics and logs, but not for too long.

        `pause` sleeps, and says false when somebody wants the end at once. `most_s` is less than
        what was agreed where nobody may wait so long.
        """
        if self._process is None or self._process.stdin is None:
            return
        wait_s = self._final_wait_s if most_s is None else min(most_s, self._final_wait_s)
        self._ends_s = time.monotonic() + wait_s
        with suppress(OSError):
            self._process.stdin.write(_DRAIN)
            self._process.stdin.flush()
        # The last records need some of the time, a short one shared evenly.
        until_s = self._ends_s - min(_LAST_RECORDS_S, wait_s / 2)
        while time.monotonic() < until_s and self._process.poll() is None:
            state = self.state()
            if state is not None and (state.is_idle or state.lost):
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
        _kill(process)

    def _start(self, verb: str, *more: str, stderr: int | BinaryIO) -> subprocess.Popen[str]:
        # Where the supervisor is, nobody may have named the store; the operator's command did.
        words = ["--run-dir", str(self._paths.root), "--started-here", *more]
        return subprocess.Popen(
            module_words("payload.storage", verb, *words),
            env=code_environment(self._env),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )


def _kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # one that hangs in the kernel stays
        process.wait(_LOOK_S)


def _last_line(log: BinaryIO, begins: int) -> str:
    """Return the last line that was written to a log since it had `begins` bytes."""
    log.seek(begins)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
