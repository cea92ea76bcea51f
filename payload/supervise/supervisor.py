"""Supervises one run from start to end: runs attempts, writes state.json and the summary."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from payload.config.run_config import load_run_config
from payload.core.errors import BudgetError, ExitCode, PreflightError, TileforgeError
from payload.formats.checkpoint_listing import newest_valid
from payload.launch.budget import JobTime, cost_usd, limit_verdict, time_limit
from payload.launch.environment import launcher_environment
from payload.launch.launchers.registry import find
from payload.launch.outcome import Verdict, stopped_by_system
from payload.launch.plan_record import LaunchPlan
from payload.launch.ranks import load_ranks
from payload.launch.restart import AttemptEnd, decide, restart_note, waiting_note
from payload.machines.inventory import ClusterInventory
from payload.machines.machine import hostname
from payload.run_record.checkpoint_grace import GracePeriod
from payload.run_record.reserved_space import write_record
from payload.run_record.run_files import (
    DEFAULT_GRACE_S,
    MOST_EVENTS,
    EventKind,
    RunEvent,
    RunPaths,
    RunState,
    RunStatus,
    point_latest_at,
)
from payload.run_record.run_repair import known_state, known_summary
from payload.supervise.attempt import Attempt
from payload.supervise.heartbeat_receiver import NodeStream, close_all, wait_for_nodes
from payload.supervise.processes import kill_until_none, processes_of, wait_for_orphans
from payload.supervise.rank_heartbeats import RankHeartbeats
from payload.supervise.shared_folders import FolderWatch, describe, folders_of
from payload.supervise.stop_requests import Stopping, Wakeups
from payload.supervise.summary import complete_summary
from payload.supervise.uploader_and_restore import Uploader

_STATE_EVERY_S = 5.0
_PAUSE_TICK_S = 0.5
_LIFELINE_S = 60.0
_FOLDERS_RETURN_S = 60.0
_KILL_S = 5.0
_JOB_MARGIN_S = 10.0
_EVENT_CHARS = 1_000
_ENDS: Mapping[RunStatus, EventKind] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


class Supervisor:
    """Supervises one run. Create it and call `run` once, while holding the run's lock."""

    def __init__(
        self,
        paths: RunPaths,
        *,
        wakeups: Wakeups,
        owner_pid: int | None,
        grace_s: float,
        env: Mapping[str, str],
        job_ends_unix: float | None = None,
    ) -> None:
        """`job_ends_unix` is the time at which a scheduler will kill the run's job."""
        self._paths = paths
        self._wakeups = wakeups
        self._env = env
        self._plan = LaunchPlan.load(paths.plan)
        self._ranks = load_ranks(paths.ranks)
        self._config = load_run_config(paths.config)
        self._inventory = ClusterInventory.load(paths.inventory)
        self._node = hostname() if self._plan.off_head else self._ranks[0].node
        """This machine's name."""
        self._is_shared = self._inventory.access.shares_folder
        # On a cluster, the `latest` link is in the operator's runs folder, which has the copies.
        self._is_latest = not self._is_shared
        self._streams = self._node_streams()
        self._folders = FolderWatch(self._folder_names(), env=env)
        self._folder_message = ""
        previous = known_state(paths)
        self._crashed = previous if previous is not None and previous.exit_class is None else None
        """The state that an earlier supervisor wrote, if it was killed before the run ended."""
        self._is_unknown = previous is None
        """True if the run folder has no readable state of the run."""
        self._spent_before_s = previous.spent_s if previous else 0.0
        self._began_s = self._written_s = time.monotonic()
        self._limit = time_limit(self._config.limits, self._inventory.nodes)
        left_s = self._left_s(grace_s=grace_s)
        self._job_ends_unix = job_ends_unix
        self._job: JobTime | None = None
        """The time limit of the job, if the job ends before the run's time limit."""
        if job_ends_unix is not None:
            job = JobTime(left_s=job_ends_unix - time.time(), run_id=paths.run_id)
            job_s = job.stop_after_s(grace_s=grace_s)
            if left_s is None or job_s < left_s:
                self._job, left_s = job, job_s
        self._stopping = Stopping(
            paths,
            wakeups,
            owner_pid=owner_pid,
            grace_s=grace_s,
            limit_s=left_s,
        )
        now = time.time()
        self._state = RunState(
            run_id=paths.run_id,
            status="starting",
            supervisor_pid=os.getpid(),
            node=self._node,
            started_unix=now,
            updated_unix=now,
            attempt=previous.attempt + 1 if previous else 1,
            resumes=previous.resumes + 1 if previous else 0,
            events=previous.events if previous else (),
        )
        self._note_event("resume" if previous else "start")
        self._uploading = Uploader(paths, plan=self._plan, config=self._config, env=env)
        before = known_summary(paths)
        self._wall_before_s = before.wall_s if before else 0.0

    def run(self) -> ExitCode:
        """Start the ranks, wait until all processes are gone, and record how the run ended."""
        with hold_port(self._plan.master_port):
            self._stopping.discard_old_request()
            self._require_room()
            self._write_state(self._state.status)
            for stream in self._streams:
                stream.start()
            try:
                verdict = self._wait_for_predecessor() or self._restored() or self._until_it_ends()
            except TileforgeError as error:
                verdict = Verdict(status="failed", exit_code=error.exit_code, error=str(error))
            finally:
                close_all(self._streams)
                self._folders.close()
        limit = self._job or self._limit
        if self._stopping.by_limit and limit:
            verdict = limit_verdict(verdict, limit, spent_s=self._spent_s())
        self._write_state(self._state.status)
        self._note_event(_ENDS[verdict.status], verdict.error or "")
        # Record the end before the last uploads: a scheduler or a shutdown may not wait for them.
        self._record_end(verdict)
        self._uploading.drain(
            pause=lambda seconds: self._pause_for_store(seconds, verdict), most_s=self._job_left_s()
        )
        self._record_end(verdict)
        self._uploading.end(at_once=self._stopping.kind == "forced")
        return verdict.exit_code

    def _record_end(self, verdict: Verdict) -> None:
        """Complete the summary and state.json; a second call updates the state of the store."""
        with contextlib.suppress(OSError):
            complete_summary(
                self._paths,
                verdict,
                plan=self._plan,
                state=replace(self._state, store=self._uploading.state()),
                wall_s=self._wall_before_s + time.monotonic() - self._began_s,
            )
        self._write_state(verdict.status, verdict=verdict)

    def _job_left_s(self) -> float | None:
        """Return the time until a scheduler kills the job, less a margin; None without a job."""
        if self._job_ends_unix is None:
            return None
        return max(0.0, self._job_ends_unix - time.time() - _JOB_MARGIN_S)

    def _require_room(self) -> None:
        """Raise PreflightError if the disk has no space for state.json."""
        try:
            write_record(self._paths.state, self._state)
        except OSError as error:
            raise PreflightError(
                f"{self._paths.state} cannot be written ({error.strerror}). Free disk space and "
                "start the run again."
            ) from None

    def _spent_s(self) -> float:
        return self._spent_before_s + time.monotonic() - self._began_s

    def _left_s(self, *, grace_s: float) -> float | None:
        """Return the time until the run must stop. Raises BudgetError if no time is left."""
        if self._limit is None:
            return None
        left_s = self._limit.stop_at_s(grace_s=grace_s) - self._spent_s()
        if left_s <= 0:
            raise BudgetError(f"{self._limit.message(spent_s=self._spent_s())}.")
        return left_s

    def _wait_for_predecessor(self) -> Verdict | None:
        """Wait until the ranks of a killed supervisor have ended; return a verdict on a failure."""
        if processes_of(self._paths.root):
            note = (
                "an earlier supervisor of this run was killed; waiting until its ranks have saved "
                "a checkpoint"
            )
            self._state = replace(self._state, note=note)
            self._write_state("starting")
            wait_for_orphans(self._paths, self._grace_period(), pause=self._pause_unless_forced)
            self._state = replace(self._state, note=None)
        if self._crashed is not None:
            away = wait_for_nodes(self._streams, pause=self._pause)
            if away and self._stopping.kind == "none":
                error = f"not started: {away}"
                return Verdict(status="failed", exit_code=ExitCode.RANK_LOST, error=error)
        if self._stopping.kind != "none":
            return self._stopped("stopped before it was started")
        return None

    def _restored(self) -> Verdict | None:
        """Restore the run from its store, then start the uploader; return a verdict on a stop."""
        before = self._uploading.restore(pause=self._pause, note=self._note)
        if self._stopping.kind != "none":
            return self._stopped("stopped before it was started")
        if before is not None and self._is_unknown:
            self._take_over(before)
        self._uploading.begin()
        return None

    def _take_over(self, before: RunState) -> None:
        """Continue attempts, time, cost and limits from the state that the store has."""
        self._spent_before_s = self._wall_before_s = before.spent_s
        self._state = replace(
            self._state,
            attempt=before.attempt + 1,
            resumes=before.resumes + 1,
            events=before.events,
        )
        self._note_event("resume")
        left_s = self._left_s(grace_s=self._stopping.grace_s)
        if left_s is not None and self._stopping.limit(left_s):
            self._job = None

    def _grace_period(self) -> GracePeriod:
        return GracePeriod(
            self._paths,
            grace_s=self._crashed.grace_s if self._crashed else DEFAULT_GRACE_S,
            stall_timeout_s=self._config.limits.hang_timeout_s,
        )

    def _until_it_ends(self) -> Verdict:
        """Run attempts until the restart policy allows no more."""
        beats = RankHeartbeats(self._paths, self._ranks, self._streams, is_shared=self._is_shared)
        limit = self._config.limits.max_restarts
        restarts = 0
        while True:
            attempt = self._new_attempt(beats)
            verdict = attempt.run(lambda: self._tick(beats))
            if verdict.exit_code is ExitCode.HANG and self._silent_folders():
                verdict = _with_reason(verdict, self._silent_folders())
            decision = decide(
                AttemptEnd(
                    verdict=verdict,
                    stop_requested=self._stopping.kind != "none",
                    restarts=restarts,
                    began_at_step=attempt.began_at_step(),
                    reached_step=attempt.reached_step(),
                ),
                max_restarts=limit,
            )
            if decision.pause_s is None:
                return _with_reason(verdict, decision.why)
            failure = self._wait_for_restart(verdict, pause_s=decision.pause_s)
            if failure is not None:
                return failure
            restarts += 1
            note = restart_note(
                verdict,
                checkpoint=newest_valid(self._paths.checkpoints),
                restart=restarts,
                max_restarts=limit,
            )
            self._state = replace(self._state, attempt=self._state.attempt + 1, note=note)
            self._note_event("restart", note)
            self._write_state("starting")

    def _wait_for_restart(self, verdict: Verdict, *, pause_s: float) -> Verdict | None:
        """Wait until the next attempt can start; return a verdict if it cannot start."""
        note_before = self._state.note
        self._note_event("failure", verdict.error or "")
        self._state = replace(self._state, note=waiting_note(verdict))
        self._write_state("starting")
        # A rank that waits for a file server may be unkillable until the server answers again.
        away = self._wait_for_folders() if verdict.exit_code is ExitCode.HANG else None
        away = away or self._leftovers() or wait_for_nodes(self._streams, pause=self._pause)
        if not away and self._pause(pause_s):
            return None
        self._state = replace(self._state, note=note_before)
        if self._stopping.kind != "none":
            before = f"stopped before the restart; the run had failed: {verdict.error}"
            return self._stopped(before)
        return _with_reason(verdict, f"not restarted: {away}")

    def _leftovers(self) -> str | None:
        left = kill_until_none(self._paths.root, timeout_s=_KILL_S)
        return f"processes {sorted(left)} could not be ended" if left else None

    def _wait_for_folders(self) -> str | None:
        """Wait until all shared folders answer; return an error message if a folder does not."""
        ends = time.monotonic() + _FOLDERS_RETURN_S
        while message := self._silent_folders():
            if time.monotonic() > ends or not self._pause(_PAUSE_TICK_S):
                return message
        return None

    def _folder_names(self) -> list[str]:
        return folders_of(self._config, work_dir=self._plan.work_dir)

    def _silent_folders(self) -> str:
        """Return a message about shared folders that do not answer; empty if all answer."""
        of_nodes = {stream.node.name: stream.troubles() for stream in self._streams}
        of_nodes[self._node] = self._folders.troubles()
        return ", ".join(describe(node, found) for node, found in of_nodes.items() if found)

    def _pause(self, seconds: float) -> bool:
        """Wait at most `seconds`; return False if a stop is requested during that time."""
        ends = time.monotonic() + seconds
        while self._stopping.kind == "none" and time.monotonic() < ends:
            self._wakeups.sleep(min(_PAUSE_TICK_S, seconds))
            self._stopping.next_action()
            self._write_state_regularly()
        return self._stopping.kind == "none"

    def _pause_unless_forced(self, seconds: float) -> bool:
        """Wait for ranks of an earlier supervisor to save; return False for a forced stop."""
        self._wakeups.sleep(seconds)
        self._stopping.next_action(saving=True)
        self._write_state_regularly()
        return self._stopping.kind in ("none", "graceful")

    def _pause_for_store(self, seconds: float, verdict: Verdict) -> bool:
        """Wait for the store; return False if an immediate end is requested."""
        self._wakeups.sleep(seconds)
        self._stopping.next_action(saving=True)
        if time.monotonic() - self._written_s > _STATE_EVERY_S:
            self._write_state(verdict.status, verdict=verdict)
        return self._stopping.kind != "forced"

    def _stopped(self, effect: str) -> Verdict:
        """Return the verdict on a run that was stopped between two attempts."""
        if self._stopping.by_system:
            return stopped_by_system(effect)
        return Verdict(status="stopped", exit_code=ExitCode.OK, error=effect)

    def _new_attempt(self, beats: RankHeartbeats) -> Attempt:
        return Attempt(
            self._paths,
            plan=self._plan,
            ranks=self._ranks,
            config=self._config,
            beats=beats,
            streams=self._streams,
            stopping=self._stopping,
            wakeups=self._wakeups,
            node=self._node,
            node_of={node.address: node.name for node in self._inventory.nodes},
            env=self._env,
        )

    def _tick(self, beats: RankHeartbeats) -> None:
        if self._state.status == "starting" and beats.rank_0_progress() is not None:
            self._write_state("running")
        if not self._is_latest and (beats.steps() or 0) > 0:
            self._is_latest = True
            with contextlib.suppress(OSError):
                point_latest_at(self._paths)
        self._check_store()
        self._check_folders()
        self._write_state_regularly()

    def _check_store(self) -> None:
        """Restart an ended uploader; report each failure and each recovery of the store once."""
        if time.monotonic() - self._written_s <= _STATE_EVERY_S:
            return
        self._uploading.begin()
        news = self._uploading.news()
        if news is not None:
            self._state = replace(self._state, note=news)

    def _check_folders(self) -> None:
        """Report once that a shared folder does not answer, and once that it answers again."""
        message = self._silent_folders()
        before, self._folder_message = self._folder_message, message
        if message and not before:
            self._state = replace(
                self._state, note=f"{message}; a program that reads this folder blocks"
            )
            self._write_state(self._state.status)
        elif before and not message:
            self._state = replace(self._state, note="the shared folder answers again")

    def _node_streams(self) -> list[NodeStream]:
        """Return a stream for every node except this machine."""
        launcher, reaches = find(self._plan.launcher), self._plan.ssh or self._plan.node_command
        if not reaches or not launcher.needs_heartbeats:
            return []
        env = self._env
        if self._plan.node_command:
            env = launcher_environment(env, {}, keeps=launcher.keeps)
        lifeline_s = max(_LIFELINE_S, self._config.limits.hang_timeout_s)
        return [
            NodeStream(
                node,
                plan=self._plan,
                run_dir=self._paths.root,
                lifeline_s=lifeline_s,
                env=env,
                folders=self._folder_names(),
            )
            for node in self._inventory.nodes[0 if self._plan.off_head else 1 :]
        ]

    def _note_event(self, kind: EventKind, text: str = "") -> None:
        """Add an event for the report; the next state.json contains it."""
        event = RunEvent(
            kind=kind, time_unix=time.time(), attempt=self._state.attempt, text=text[:_EVENT_CHARS]
        )
        events = (*self._state.events, event)[-MOST_EVENTS:]
        self._state = replace(self._state, events=events)

    def _note(self, text: str) -> None:
        self._state = replace(self._state, note=text)

    def _write_state_regularly(self) -> None:
        if time.monotonic() - self._written_s > _STATE_EVERY_S:
            self._write_state(self._state.status)

    def _write_state(self, status: RunStatus, *, verdict: Verdict | None = None) -> None:
        """Replace state.json; a full disk must not end the run."""
        self._written_s = time.monotonic()
        self._state = replace(
            self._state,
            status=status,
            exit_class=verdict.exit_code.label if verdict else None,
            error=verdict.error if verdict else None,
            failed_rank=verdict.rank if verdict else None,
            spent_s=self._spent_s(),
            cost_usd=cost_usd(self._inventory.nodes, spent_s=self._spent_s()),
            grace_s=self._stopping.grace_s,
            store=self._uploading.state(),
            updated_unix=time.time(),
        )
        with contextlib.suppress(OSError):
            write_record(self._paths.state, self._state)


def _with_reason(verdict: Verdict, reason: str | None) -> Verdict:
    return replace(verdict, error=f"{verdict.error}; {reason}") if reason else verdict


def hold_port(port: int) -> socket.socket:
    """Reserve `port` with a socket, so that only rank 0 can still listen on it.

    Both the returned socket and rank 0's socket set SO_REUSEADDR, and the returned socket never
    listens. Linux then allows rank 0 to bind, but does not give the port to outgoing connections or
    to a program that binds without this option. On other systems, the port is only checked and
    released. Raises PreflightError if the port is in use.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        holder.bind(("0.0.0.0", port))
    except OSError as error:
        holder.close()
        raise PreflightError(
            f"port {port}, where the ranks would meet, is in use ({error.strerror}). Start the run "
            "again; the new start chooses another port."
        ) from None
    if sys.platform != "linux":
        holder.close()
    return holder
