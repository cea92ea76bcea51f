"""Runs one attempt: starts the launcher, monitors and stops the ranks, kills leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from payload.config.run_config import RunConfig
from payload.core.errors import ExitCode, PreflightError
from payload.core.files import discard
from payload.core.regular_files import open_regular
from payload.formats.checkpoint_listing import checkpoint_step
from payload.launch.environment import launcher_environment
from payload.launch.launchers.registry import find
from payload.launch.liveness import (
    SILENT_S,
    NodeHeartbeat,
    Pace,
    find_trouble,
    frozen_nodes,
    lost_nodes,
)
from payload.launch.outcome import Evidence, Verdict, is_failure, judge
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import Rank
from payload.run_record.checkpoint_grace import START_PHASES
from payload.run_record.run_files import RunPaths, Summary, last_record
from payload.supervise.heartbeat_receiver import NodeStream
from payload.supervise.processes import (
    kill_all,
    kill_until_none,
    reap_children,
    signal_process,
    wait_until_none,
)
from payload.supervise.rank_heartbeats import RankHeartbeats, StepTimes
from payload.supervise.stop_requests import Stopping, Wakeups

_TICK_S = 0.2
# After one rank has failed, the other ranks have this long to notice and to record their errors.
_ECHO_S = 5.0
# After the launcher has ended, its proxies and ranks have this long to end by themselves.
_AFTERMATH_S = 2.0
_KILL_S = 10.0
# A worker takes at most ten seconds to kill its processes, and one second to report.
_ANSWER_S = 15.0
_SILENT_ANSWER_S = 3.0
_LOG_BYTES = 2**20


class Attempt:
    """One attempt. Create it, then call `run` once."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        plan: LaunchPlan,
        ranks: Sequence[Rank],
        config: RunConfig,
        beats: RankHeartbeats,
        streams: Sequence[NodeStream],
        stopping: Stopping,
        wakeups: Wakeups,
        node: str,
        node_of: Mapping[str, str],
        env: Mapping[str, str],
    ) -> None:
        """`node` is this machine's name; `node_of` maps the nodes' addresses to their names."""
        self._paths = paths
        self._plan = plan
        self._launcher = find(plan.launcher)
        self._ranks = ranks
        self._config = config
        self._beats = beats
        self._streams = streams
        head = ranks[0].node
        self._head_stream = next((each for each in streams if each.node.name == head), None)
        """The stream from the head node; None if this machine is the head."""
        self._stopping = stopping
        self._wakeups = wakeups
        self._node = node
        self._node_of = node_of
        self._env = env
        checkpoint = paths.newest_checkpoint()
        self._checkpoint_step = checkpoint_step(checkpoint) if checkpoint else 0
        self._step_times = StepTimes(paths.metrics)
        self._trouble: Verdict | None = None
        self._failure_deadline: float | None = None
        self._ended_by_us_s: float | None = None
        self._launcher_killed_s: float | None = None

    def run(self, every_tick: Callable[[], None]) -> Verdict:
        """Run to the end; the verdict's error lists processes that could not be ended."""
        log_start = self._log_size()
        self._beats.begin()
        launcher = self._start()
        # Otherwise the summary of the last attempt would be taken for the summary of this attempt.
        discard(self._paths.summary)
        alive_s = time.monotonic()
        try:
            while launcher.poll() is None:
                alive_s = time.monotonic()
                self._wakeups.sleep(_TICK_S)
                self._watch()
                every_tick()
            if launcher.returncode < 0 and self._ended_by_us_s is None:
                self._launcher_killed_s = alive_s
        finally:
            left = self._end_local_processes()
            launcher.wait()
            reap_children()
        left |= self._end_remote_processes()
        self._trouble = self._trouble or self._removal()
        verdict = self._judge(launcher.returncode, log_start=log_start)
        return _with_leftovers(verdict, left)

    def began_at_step(self) -> int:
        """Return the step at which the attempt began; until ranks report it, the step of the
        checkpoint."""
        step = self._beats.began_at_step()
        return self._checkpoint_step if step is None else step

    def reached_step(self) -> int | None:
        """Return the last step that this attempt has reached; None without any heartbeat.

        metrics.jsonl is also read, because its last row can be newer than the last heartbeat, by up
        to half a second.
        """
        finished = self._step_times.reached_step(began_at=self.began_at_step())
        return max((s for s in (finished, self._beats.steps()) if s is not None), default=None)

    def _start(self) -> subprocess.Popen[bytes]:
        plan = self._plan
        settings = dict(plan.launcher_environment) | dict(plan.environment)
        # mpirun finds mpiexec.hydra, which is in the same folder, through PATH.
        settings["PATH"] = f"{Path(plan.argv[0]).parent}{os.pathsep}{self._env.get('PATH', '')}"
        self._paths.logs.mkdir(parents=True, exist_ok=True)
        with self._paths.launcher_log.open("ab") as log:
            try:
                return subprocess.Popen(
                    plan.argv,
                    env=launcher_environment(self._env, settings, keeps=self._launcher.keeps),
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
        """Check once for requests to stop, failed ranks and missing heartbeats."""
        self._beats.poll()
        saving = self._beats.saving(within_s=self._config.limits.hang_timeout_s)
        action = self._stopping.next_action(saving=saving)
        if action == "kill" or (action == "stop" and not self._request_stop()):
            self._end_now()
        now = time.monotonic()
        if self._failure_deadline is None and any(map(is_failure, self._beats.exits().values())):
            self._failure_deadline = now + _ECHO_S
        if self._failure_deadline is None and self._stopping.kind == "none":
            self._find_trouble()
            if self._trouble is not None:
                self._failure_deadline = now
        if self._failure_deadline is not None and now >= self._failure_deadline:
            self._end_after_failure(late_s=now - self._failure_deadline)
        elif self._ended_by_us_s is not None:
            self._end_now()  # processes that started while the others were killed

    def _end_after_failure(self, *, late_s: float) -> None:
        """End the ranks, but wait while rank 0 still writes a checkpoint."""
        limit_s = self._config.limits.hang_timeout_s
        writing = self._beats.writing(within_s=limit_s)
        if not writing or late_s > self._config.distributed.longest_wait_s():
            self._end_now()

    def _find_trouble(self) -> None:
        self._trouble = self._removal() or find_trouble(
            self._beats.ranks(),
            self._beats.nodes(),
            world_size=len(self._ranks),
            age_s=self._beats.age_s(),
            pace=Pace(
                hang_timeout_s=self._config.limits.hang_timeout_s,
                longest_s=self._config.distributed.longest_wait_s(),
                median_step_s=self._step_times.median_s(began_at=self.began_at_step()),
            ),
        )

    def _removal(self) -> Verdict | None:
        """Return a verdict if the run's folder is gone; a rank may notice this first."""
        if self._paths.root.is_dir():
            return None
        error = f"{self._paths.root} was removed while the run was active"
        return Verdict(status="failed", exit_code=ExitCode.TRAINING, error=error)

    def _request_stop(self) -> bool:
        """Send SIGTERM to rank 0. Rank 0 then stops all ranks after saving.

        Returns False if rank 0 does not train yet: killing the ranks then loses no step.
        """
        progress = self._beats.rank_0_progress()
        if progress is None or progress.phase in START_PHASES:
            # Rank 0 would handle the signal in its first step: minutes later for a large model.
            return False
        if self._head_stream is not None:
            # If rank 0 is gone, its wrapper or the launcher reports that.
            self._head_stream.request_stop(progress.pid)
            return True
        return signal_process(progress.pid, signal.SIGTERM, run_dir=self._paths.root)

    def _end_now(self) -> None:
        """Kill every process of the run; the loop in `run` then sees the end of the launcher."""
        if self._ended_by_us_s is None:
            self._ended_by_us_s = time.monotonic()
        kill_all(self._paths.root)

    def _end_local_processes(self) -> dict[str, list[int] | None]:
        """Wait briefly for the processes on this machine, then kill them; return the survivors."""
        if not wait_until_none(self._paths.root, timeout_s=_AFTERMATH_S):
            return {}
        self._end_now()
        left = kill_until_none(self._paths.root, timeout_s=_KILL_S)
        return {self._node: sorted(left)} if left else {}

    def _end_remote_processes(self) -> dict[str, list[int] | None]:
        """End the run's processes on other nodes; return the survivors, listed by node.

        A node that does not answer has no list.
        """
        if self._plan.node_command and self._stopping.by_system and self._head_stream is None:
            return {}  # the scheduler ends the job with all its processes on every node
        for stream in self._streams:
            stream.request_end()
        began = time.monotonic()
        left = {}
        for stream in self._streams:
            found = stream.wait_ended(0.0)
            while found is None:
                waited_s = time.monotonic() - began
                silent = stream.beat().quiet_s >= SILENT_S
                if waited_s > (_SILENT_ANSWER_S if silent else _ANSWER_S):
                    break
                found = stream.wait_ended(_TICK_S)
            if found is None or found:
                left[stream.node.name] = found
        self._beats.poll()
        return left

    def _log_size(self) -> int:
        try:
            return self._paths.launcher_log.stat().st_size
        except OSError:
            return 0

    def _launcher_text(self, log_start: int) -> str:
        """Return the tail of the launcher's output in this attempt."""
        try:
            with open_regular(self._paths.launcher_log) as log:
                size = os.fstat(log.fileno()).st_size
                log.seek(max(log_start, size - _LOG_BYTES))
                return log.read(_LOG_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def _judge(self, launcher_status: int, *, log_start: int) -> Verdict:
        summary = last_record(Summary, self._paths.summary)
        text = self._launcher_text(log_start)

        def verdict_with(trouble: Verdict | None) -> Verdict:
            return judge(
                Evidence(
                    ranks=self._ranks,
                    exits=self._beats.exits(),
                    launcher_status=launcher_status,
                    launcher_text=text,
                    launcher=self._launcher,
                    trainer_status=summary.status if summary else None,
                    stop=self._stopping.kind,
                    stop_by_system=self._stopping.by_system,
                    ended_by_us_s=self._ended_by_us_s,
                    launcher_killed_s=self._launcher_killed_s,
                    node_of=self._node_of,
                    trouble=trouble,
                    begun=bool(self._beats.ranks()),
                    trained=any(beat.phase not in START_PHASES for beat in self._beats.ranks()),
                )
            )

        verdict = verdict_with(self._trouble)
        if self._trouble is None and verdict.exit_code is ExitCode.RANK_LOST:
            # The launcher or gloo noticed a lost rank first. By now every node has been queried.
            return verdict_with(_explanation(self._beats.nodes()))
        return verdict


def _explanation(nodes: Sequence[NodeHeartbeat]) -> Verdict | None:
    """Return a verdict if nodes did not answer at the end, because that explains lost ranks."""
    silent = [beat for beat in nodes if beat.quiet_s >= SILENT_S]
    lost = [beat for beat in silent if beat.unreachable_s is not None]
    if lost:
        return lost_nodes(lost)
    return frozen_nodes(silent, after="the other ranks lost contact") if silent else None


def _with_leftovers(verdict: Verdict, left: Mapping[str, list[int] | None]) -> Verdict:
    """Add to the error the nodes that may still have processes of the run."""
    messages = [
        f"{node} does not answer, so the run's processes on it could not be ended"
        if pids is None
        else f"processes {pids} on {node} could not be ended"
        for node, pids in left.items()
    ]
    if not messages:
        return verdict
    error = "; ".join([verdict.error or verdict.status, *messages])
    return replace(verdict, error=error)
