"""The site for this machine: starts, follows and stops runs that have a local supervisor."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from payload.config.engine_packages import require_packages_here
from payload.config.run_config import RunConfig
from payload.core.errors import ConfigError, ExitCode, RankLostError, UsageError
from payload.estimates.disk_room import require_room
from payload.machines.inventory import ClusterInventory
from payload.machines.speed_process import cached_speed
from payload.orchestrate.follow.run_text import log_tail
from payload.orchestrate.hardware.nvidia import gpu_need, require_gpus
from payload.orchestrate.inventories.chosen import ResolvedInventory
from payload.orchestrate.machine_profiles.local_profile import LocalAccess, port_of
from payload.orchestrate.runs.mirror import mirror_file
from payload.orchestrate.runs.planning import PlanTarget, resolve
from payload.orchestrate.runs.resolved_plan import ResolvedPlacement, ResolvedPlan
from payload.orchestrate.runs.run_index import running_here, view_run
from payload.orchestrate.runs.run_request import PlanRequest, RunRequest
from payload.orchestrate.runs.site import CollectResult, InventorySite, RunPoll, SiteRun
from payload.orchestrate.terminal.narrow import print_message
from payload.run_record.run_files import (
    RunPaths,
    RunState,
    StopRequest,
    Summary,
    last_record,
    write_json,
)
from payload.run_record.run_lock import is_supervised
from payload.run_record.run_repair import known_state
from payload.run_record.suggested_run_commands import run_command
from payload.storage.store_access import require_new_in_store

_START_S = 30.0


def require_one_machine(chosen: ResolvedInventory) -> None:
    """Raise ConfigError if the inventory is neither this machine alone nor a Slurm job."""
    inventory = chosen.inventory
    access = inventory.access
    if not access.shares_folder:
        raise ConfigError(
            f"inventory ({chosen.why}): access kind {access.kind!r} is for other machines. Use "
            "'local' for this machine."
        )
    if access.is_this_machine and len(inventory.nodes) > 1:
        raise ConfigError(
            f"inventory ({chosen.why}): access kind 'local' with {len(inventory.nodes)} nodes; "
            "'local' is for one node, this machine. Use 'direct' or 'iap' for others."
        )


def is_on_these_cores(inventory: ClusterInventory, config: RunConfig) -> bool:
    """Return True if a run computes on the CPU cores of this machine."""
    return inventory.access.is_this_machine and gpu_need(config, inventory.nodes) is None


def require_disk(planned: ResolvedPlan) -> None:
    """Raise ConfigError if the disk has no space for the run's checkpoints."""
    size = planned.plan.arithmetic.checkpoint_bytes
    require_room(
        planned.paths.root,
        checkpoint_bytes=size,
        keep=planned.config.train.keep_checkpoints,
        uploads=planned.config.storage.address() is not None,
    )


class Local(InventorySite):
    """The machine on which the command runs, or the Slurm job around the command."""

    uses_this_environment = True

    def __init__(
        self, chosen: ResolvedInventory, access: LocalAccess, *, argument: str | None = None
    ) -> None:
        """Raise ConfigError for an inventory of several machines.

        `argument` is the value of `--inventory`, for messages.
        """
        require_one_machine(chosen)
        self._argument = argument
        self._chosen = chosen
        self._access = access

    def check(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Raise ConfigError for a setting that needs a package or device that this machine
        lacks."""
        inventory, gpus = self._chosen.inventory, self._chosen.nvidia
        need = self._chosen.gpu_need(config)
        # Without nvidia-smi, as in some containers, torch finds out whether the GPU works.
        if need is not None and gpus is not None and gpus.smi is not None:
            require_gpus(gpus, need=need, node=inventory.head)
        require_packages_here(config)

    def plan(
        self,
        paths: RunPaths,
        config: RunConfig,
        *,
        vocab_size: int | None,
        placed: ResolvedPlacement | None = None,
        mean_tokens: float | None = None,
    ) -> ResolvedPlan:
        """Return the plan of a run without starting it."""
        request = PlanRequest.of_run(paths, config, vocab_size=vocab_size)
        request = replace(request, mean_tokens=mean_tokens)
        with self._access.reserve_port() as holder:
            return resolve(request, self._target(paths, port=port_of(holder)), placed=placed)

    def find_run(self, run_id: str | None, *, runs_dir: Path, verb: str) -> SiteRun:
        """Raise UsageError: runs of this machine are found by their folders."""
        raise UsageError(
            f"--inventory {self._argument}: this is the machine of the command. Leave out "
            "--inventory."
        )

    def start(self, request: RunRequest) -> SiteRun:
        """Plan the run, write its folder and start its supervisor."""
        paths, talk = request.paths, request.talk
        others = running_here(paths.root.parent)
        if others:
            print_message(
                talk, f"note: {', '.join(others)} is also running here and shares the cores"
            )
        port = port_of(request.held.enter_context(self._access.reserve_port()))
        target = self._target(paths, port=port)
        if is_on_these_cores(self._chosen.inventory, request.config):
            speed = cached_speed(self._access.environment())
            target = replace(target, profile=self._access.with_speed(speed))
        planned = resolve(request.to_plan(), target, placed=request.placed)
        require_disk(planned)
        if not request.resumes:
            request.confirm(planned)
            require_new_in_store(request.config, paths.run_id, env=self._access.code_environment())
        for note in planned.notes():
            print_message(talk, note)
        with request.folder():
            # The run moves to this machine, from an ended job or from a store.
            paths.job.unlink(missing_ok=True)
            mirror_file(paths).unlink(missing_ok=True)
            planned.write(paths)
        talk.print(
            f"run {paths.run_id}: {planned.plan.world_size} rank(s) through "
            f"{planned.plan.launcher}; files: {paths.root}"
        )
        supervisor = self._access.start_supervisor(
            paths, detached=request.detach, grace_s=request.grace_s
        )
        run = LocalRun(paths, access=self._access, supervisor=supervisor, nodes=planned.plan.nodes)
        run.held = request.held.pop_all()
        return run

    def _target(self, paths: RunPaths, *, port: int) -> PlanTarget:
        return PlanTarget(
            chosen=self._chosen,
            profile=self._access,
            paths=paths,
            port=port,
        )


class LocalRun(SiteRun):
    """A run with a supervisor on this machine, possibly as a child of this process."""

    every_s = 0.2
    has_job = False
    # After a forced stop, a supervisor needs at most ten seconds to kill its processes.
    force_s = 15.0

    def __init__(
        self,
        paths: RunPaths,
        *,
        access: LocalAccess,
        supervisor: subprocess.Popen[bytes] | None = None,
        nodes: int = 1,
    ) -> None:
        """If `supervisor` is given, it is a child process of this command, and the run ends with
        the command."""
        self.paths, self.nodes, self.where = paths, nodes, "on this machine"
        self.outlives_us = supervisor is None
        self.held = ExitStack()
        self._access = access
        self._supervisor = supervisor

    def look(
        self,
        *,
        say: Callable[[str], None] = lambda _: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> RunPoll:
        """Return whether the supervisor is alive; the run's files are local."""
        if self._supervisor is None:
            return RunPoll(alive=is_supervised(self.paths))
        return RunPoll(alive=self._supervisor.poll() is None)

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Store the stop request and signal the supervisor; return whether it is alive."""
        if self._supervisor is None:
            return self._access.signal_supervisor(self.paths, [number], request=request)
        with suppress(OSError):
            write_json(self.paths.stop_request, replace(request, pids=(self._supervisor.pid,)))
        self._supervisor.send_signal(number)
        return self._supervisor.poll() is None

    def collect_results(self, *, at_once: bool = False) -> CollectResult:
        """Report an ended run; there is nothing to fetch because its files are local."""
        return CollectResult(alive=False)

    def start_line(self) -> str | None:
        """Return None, because the start has already printed everything."""
        return None

    def detached(self) -> str | None:
        """Wait until the supervisor has begun, then return a message; None if it ended first."""
        supervisor, deadline = self._supervisor, time.monotonic() + _START_S
        assert supervisor is not None, "this command has started the run"
        while time.monotonic() < deadline and supervisor.poll() is None:
            state = last_record(RunState, self.paths.state)
            if state is not None and state.supervisor_pid == supervisor.pid:
                # The supervisor outlives this process. A return code silences Popen's warning.
                supervisor.returncode = 0
                look = run_command("status", self.paths)
                return f"detached. See its state with: {look}; also: logs -f, stop"
            time.sleep(0.05)
        return None

    def end_text(self) -> str:
        """Return the run's status and step."""
        view = view_run(self.paths, now_unix=time.time())
        return f": {view.status} after step {view.step}"

    def result_line(self) -> str | None:
        """Return the run's status, step and error."""
        view = view_run(self.paths, now_unix=time.time())
        return f"{view.status} after step {view.step}" + (f": {view.error}" if view.error else "")

    def end_without_record(self) -> tuple[int, str] | None:
        """Return how the supervisor ended if the run folder does not record it."""
        if self._supervisor is None:
            return None
        paths, status = self.paths, self._supervisor.wait()
        if not paths.root.is_dir():
            return (status if status > 0 else ExitCode.TRAINING), (
                f"error: {paths.root} was removed while the run was active, with all its "
                "checkpoints. Start a new run."
            )
        if status < 0:
            return ExitCode.RANK_LOST, (
                f"error: the supervisor was killed by signal {-status} "
                f"({signal.Signals(-status).name}); the ranks save and stop"
            )
        state = last_record(RunState, paths.state)
        # The state of a different supervisor belongs to an earlier attempt.
        began = state is not None and state.supervisor_pid == self._supervisor.pid
        if began and last_record(Summary, paths.summary) is not None:
            return None
        lines = log_tail(paths.supervisor_log)
        message = lines[-1] if lines else f"error: the supervisor ended with {status}"
        return status or ExitCode.TRAINING, f"{message}\nlog: {paths.supervisor_log}"

    def overdue(self, waited_s: float, *, force: bool, talk: Console) -> None:
        """Kill the run's processes if a forced stop had no effect, for example on a frozen
        supervisor."""
        paths = self.paths
        if not force:
            raise RankLostError(
                f"run {paths.run_id} has not ended within {waited_s:.0f} s. To end it immediately, "
                f"without a checkpoint: {run_command('stop', paths, '--force')}"
            )
        talk.print(
            "the run's supervisor does not answer: killing the supervisor and the run's processes"
        )
        self._access.end_at_once(paths)
        if is_supervised(paths):
            raise RankLostError(
                f"run {paths.run_id} cannot be ended: its supervisor is not visible to this user. "
                "Stop the run as the user that started it, on the same machine."
            )
        before = known_state(paths)
        if before is not None:
            error = (
                "the run was killed by force, because its supervisor did not answer; the last "
                "checkpoint is unchanged"
            )
            ended = replace(before, status="stopped", exit_class=ExitCode.OK.label, error=error)
            write_json(paths.state, ended)

    def close(self) -> None:
        """Let other commands start the run, and release the port."""
        self.held.close()
