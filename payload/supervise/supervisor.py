"""One run from start to end: start the launcher, watch the ranks, stop them, leave none behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from payload.errors import ConfigError, ExitCode, PreflightError
from payload.launch.environment import launcher_environment
from payload.launch.outcome import Evidence, Verdict, is_failure, judge
from payload.launch.plan import LaunchPlan
from payload.launch.ranks import load_ranks
from payload.results import (
    RankExit,
    RankProgress,
    RunPaths,
    RunState,
    RunStatus,
    Summary,
    read_json,
    write_json,
)
from payload.run_lock import FORCE_SIGNAL
from payload.supervise.processes import (
    kill_all,
    kill_until_none,
    reap_children,
    signal_process,
    wait_until_none,
)
from payload.supervise.summary import complete_summary, last_summary
from payload.supervise.wakeups import Wakeups
from payload.supervise.workers import fetch_exits

_TICK_S = 0.2
_STATE_EVERY_S = 5.0
# After one rank has failed, the others have this long to notice and to leave their own words.
_ECHO_S = 5.0
# After the launcher has ended: its proxies and ranks are on their way out.
_AFTERMATH_S = 2.0
_KILL_S = 10.0

Stop = Literal["none", "graceful", "forced", "expired"]


class Supervisor:
    """Watches one attempt of one run. Make one, call `run` once, holding the run's lock."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        wakeups: Wakeups,
        owner_pid: int | None,
        grace_s: float,
        env: Mapping[str, str],
    ) -> None:
        self._paths = paths
        self._wakeups = wakeups
        self._owner_pid = owner_pid
        self._grace_s = grace_s
        self._env = env
        self._plan = LaunchPlan.load(paths.plan)
        self._ranks = load_ranks(paths.ranks)
        previous = read_json(RunState, paths.state)
        now = time.time()
        self._state = RunState(
            run_id=paths.run_id,
            status="starting",
            supervisor_pid=os.getpid(),
            node=self._ranks[0].node,
            started_unix=now,
            updated_unix=now,
            attempt=previous.attempt + 1 if previous else 1,
        )
        before = last_summary(paths)
        self._wall_before_s = before.wall_s if before else 0.0
        self._stop: Stop = "none"
        self._stop_deadline: float | None = None
        self._failure_deadline: float | None = None
        self._ended_by_us_unix: float | None = None

    def run(self) -> ExitCode:
        """Start the ranks, stay until the last process is gone, and write how it ended."""
        with hold_port(self._plan.master_port):
            self._forget_last_attempt()
            self._tell(self._state.status)
            log_start = self._log_size()
            launcher = self._start()
            try:
                while launcher.poll() is None:
                    self._wakeups.sleep(_TICK_S)
                    self._watch()
            finally:
                left = self._leave_none()
                launcher.wait()
                reap_children()
        fetch_exits(self._paths, plan=self._plan, ranks=self._ranks, env=self._env)
        verdict = self._judge(launcher.returncode, log_start=log_start)
        complete_summary(
            self._paths,
            verdict,
            plan=self._plan,
            state=self._state,
            wall_before_s=self._wall_before_s,
        )
        error = verdict.error
        if left:
            error = f"{error or verdict.status}; processes {sorted(left)} could not be ended"
        self._tell(verdict.status, verdict=verdict, error=error)
        return verdict.exit_code

    def _forget_last_attempt(self) -> None:
        """Remove what the last attempt's ranks said, so that it is not taken for this one's."""
        for folder in (self._paths.rank_exit(0).parent, self._paths.rank_progress(0).parent):
            for path in folder.glob("*.json"):
                path.unlink()
        self._paths.summary.unlink(missing_ok=True)

    def _start(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        settings = dict(plan.launcher_environment) | dict(plan.environment)
        # mpirun calls mpiexec.hydra, which lies beside it, by its bare name.
        settings["PATH"] = f"{Path(plan.argv[0]).parent}{os.pathsep}{self._env.get('PATH', '')}"
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        with self._paths.launcher_log.open("ab") as log:
            try:
                return subprocess.Popen(
                    plan.argv,
                    env=launcher_environment(self._env, settings),
                    cwd=plan.work_dir,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise PreflightError(
                    f"the launcher {plan.argv[0]} cannot be started in {plan.work_dir}: "
                    f"{error.strerror}."
                ) from None

    def _watch(self) -> None:
        """One look around: wishes to stop, ranks that failed, the first sign of life."""
        if self._state.status == "starting" and self._paths.rank_progress(0).exists():
            self._tell("running")
        elif time.time() - self._state.updated_unix > _STATE_EVERY_S:
            self._tell(self._state.status)
        self._heed_stop()
        now = time.monotonic()
        if self._failure_deadline is None and any(map(is_failure, self._exits().values())):
            self._failure_deadline = now + _ECHO_S
        if self._failure_deadline is not None and now > self._failure_deadline:
            self._end_now()

    def _heed_stop(self) -> None:
        counts = self._wakeups.counts
        asked = counts[signal.SIGTERM] + counts[signal.SIGINT]
        orphaned = self._owner_pid is not None and os.getppid() != self._owner_pid
        # Two polite wishes are still polite: two people may type `stop`.
        forced = counts[FORCE_SIGNAL] or counts[signal.SIGINT] >= 2
        if forced and self._stop != "forced":
            self._stop = "forced"
            self._end_now()
        elif (asked or orphaned) and self._stop == "none":
            self._stop = "graceful"
            self._stop_deadline = time.monotonic() + self._grace_s
            self._ask_to_stop()
        elif self._stop == "graceful" and time.monotonic() > (self._stop_deadline or 0.0):
            self._stop = "expired"
            self._end_now()

    def _ask_to_stop(self) -> None:
        """SIGTERM to rank 0's program, which agrees with the others; if none, nothing is lost."""
        progress = read_json(RankProgress, self._paths.rank_progress(0))
        told = progress is not None and signal_process(
            progress.pid, signal.SIGTERM, run_dir=self._paths.root
        )
        if not told:
            self._end_now()

    def _end_now(self) -> None:
        """Kill every process of the run; the loop sees the launcher's end."""
        if self._ended_by_us_unix is None:
            self._ended_by_us_unix = time.time()
        kill_all(self._paths.root)

    def _leave_none(self) -> set[int]:
        """After the launcher: wait a moment for its ranks, then kill. Returns what still lives."""
        if not wait_until_none(self._paths.root, timeout_s=_AFTERMATH_S):
            return set()
        self._end_now()
        return kill_until_none(self._paths.root, timeout_s=_KILL_S)

    def _exits(self) -> dict[int, RankExit]:
        found = {}
        for rank in self._ranks:
            record = read_json(RankExit, self._paths.rank_exit(rank.rank))
            if record is not None:
                found[rank.rank] = record
        return found

    def _log_size(self) -> int:
        log = self._paths.launcher_log
        return log.stat().st_size if log.exists() else 0

    def _judge(self, launcher_status: int, *, log_start: int) -> Verdict:
        try:
            summary = read_json(Summary, self._paths.summary)
        except ConfigError:
            summary = None
        text = self._paths.launcher_log.read_bytes()[log_start:].decode(errors="replace")
        return judge(
            Evidence(
                ranks=self._ranks,
                exits=self._exits(),
                launcher_status=launcher_status,
                launcher_text=text,
                trainer_status=summary.status if summary else None,
                stop=self._stop,
                ended_by_us_unix=self._ended_by_us_unix,
            )
        )

    def _tell(
        self, status: RunStatus, *, verdict: Verdict | None = None, error: str | None = None
    ) -> None:
        """Replace state.json."""
        state = self._state
        self._state = RunState(
            run_id=state.run_id,
            status=status,
            exit_class=verdict.exit_code.label if verdict else None,
            error=error,
            failed_rank=verdict.rank if verdict else None,
            supervisor_pid=state.supervisor_pid,
            node=state.node,
            started_unix=state.started_unix,
            updated_unix=time.time(),
            attempt=state.attempt,
        )
        write_json(self._paths.state, self._state)


def hold_port(port: int) -> socket.socket:
    """A socket bound to `port` that keeps others off it, while rank 0 can still listen there.

    Both set SO_REUSEADDR, and this one never listens: Linux then allows a second bind, but neither
    hands the port out for outgoing connections nor to a program that binds without the option.
    Elsewhere the port is looked at and let go. Raises PreflightError when it is taken.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("0.0.0.0", port))
    except OSError as error:
        holder.close()
        raise PreflightError(
            f"port {port}, where the ranks would meet, is taken ({error.strerror}). Start the run "
            "again; it chooses another."
        ) from None
    if sys.platform != "linux":
        holder.close()
    return holder
