"""This machine as a site: what planning asks of it, and the runs whose supervisor is here."""

from __future__ import annotations

import ctypes.util
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from shutil import which

from rich.console import Console

from payload.config.engines import require_means_here
from payload.config.run_config import RunConfig
from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import ExitCode, PreflightError, RankLostError, UsageError
from payload.core.interpreter import code_environment, code_path, module_words
from payload.estimates.disk_room import require_room
from payload.estimates.step_time import LOOPBACK_BYTES_PER_S
from payload.launch.launchers.base import Launcher, Reach
from payload.launch.launchers.registry import AUTO
from payload.launch.plan import auto_batch_size, rank_program
from payload.machines.core_speed import has_bf16, typical_core_flops_per_s
from payload.machines.inventory import RANK_PORTS, Node
from payload.machines.machine import free_memory_bytes
from payload.orchestrate.node import control
from payload.orchestrate.nvidia import require_gpus
from payload.orchestrate.planning import InventorySite, PlannedRun, plan_run
from payload.orchestrate.run.mirror import mirror_file
from payload.orchestrate.run.report import log_tail
from payload.orchestrate.run.store import Order, running_here, view_run
from payload.orchestrate.sites.choose import (
    Chosen,
    Home,
    Seen,
    SiteRun,
    require_one_machine,
)
from payload.run_record.results import (
    RunPaths,
    RunState,
    StopRequest,
    Summary,
    last_record,
    write_json,
)
from payload.run_record.run_hints import run_command
from payload.run_record.run_lock import is_supervised
from payload.run_record.run_repair import known_dtype, known_state
from payload.storage.here import require_new_in_store

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_TCMALLOC = ("tcmalloc", "tcmalloc_minimal")
_KILL_S = 10.0
_START_S = 30.0


class LocalAccess:
    """This machine as a cluster of one node."""

    python = sys.executable
    link_bytes_per_s = LOOPBACK_BYTES_PER_S
    launcher = AUTO

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def environment(self) -> dict[str, str]:
        """Return the operator's own environment, for programs that run on this machine."""
        return dict(self._env)

    def code_environment(self) -> dict[str, str]:
        """Return the same with this code on Python's path, for modules of it."""
        return code_environment(self._env)

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return loopback for every node."""
        return {node.name: LOOPBACK for node in nodes}

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Return None: the trainer measures it at its start."""
        return None

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Return fp32 for `auto` where this CPU has no instructions for bf16: it is faster."""
        if choice != "auto":
            return choice
        return "fp32" if has_bf16() is False else "bf16"

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak of a typical core, with bf16 emulated where this CPU lacks it."""
        return typical_core_flops_per_s(dtype, emulates_bf16=has_bf16() is False)

    def free_memory_bytes(self) -> int | None:
        """Return the memory that is free without swapping, or None where that is not known."""
        return free_memory_bytes()

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the command line of each rank."""
        return rank_program(python=self.python, run_dir=paths.root)

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path. Raises PreflightError that says why there is none."""
        unfit = launcher.unfit(sys.platform, platform.machine())
        if unfit is not None:
            raise PreflightError(f"{unfit}.")
        if launcher.program is None:
            return self.python
        beside = Path(sys.executable).parent / launcher.program
        on_path = which(launcher.program, path=self._path())
        found = str(beside) if os.access(beside, os.X_OK) else on_path
        if found is None:
            raise PreflightError(
                f"no {launcher.program} beside {sys.executable} nor on PATH. Install it: "
                f"{launcher.install}"
            )
        # A script may call its helper, which lies beside it, by its bare name.
        path = f"{Path(found).parent}{os.pathsep}{self._path()}"
        # It may read settings from its current folder, which is not the user's own here.
        version = subprocess.run(
            [Path(found).absolute(), "--version"],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
            env={"PATH": path},
        )
        if launcher.version not in version.stdout:
            first = (version.stdout or version.stderr).strip().partition("\n")[0]
            raise PreflightError(
                f"{found} prints {first or 'no version'!r}, which is not {launcher.version}. "
                f"Install it: {launcher.install}"
            )
        return found

    def reach(self) -> Reach:
        """Return loopback, without ssh."""
        return Reach(interface=LOOPBACK)

    def python_path(self) -> str | None:
        """Return the PYTHONPATH of this code's processes, or None when it is installed."""
        return code_path(self._env)

    def tcmalloc(self) -> str:
        """Return tcmalloc's path. Raises PreflightError with the line that installs it."""
        for name in _TCMALLOC:
            found = ctypes.util.find_library(name)
            if found:
                return found
        raise PreflightError(
            "launch.malloc = 'tcmalloc', but this machine has no libtcmalloc. Install it: sudo "
            "apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
        )

    def reserve_port(self) -> socket.socket:
        """Return a socket that keeps a free port for the ranks until a supervisor holds it.

        Two runs that start at once get different ports.
        """
        for port in random.sample(RANK_PORTS, k=100):
            holder = _try_port(port)
            if holder is not None:
                return holder
        raise PreflightError(
            f"none of 100 ports between {RANK_PORTS.start} and {RANK_PORTS.stop} is free. Stop "
            "what holds them."
        )

    def supervisor_words(self) -> list[str]:
        """Return options of the supervisor that come from where it runs."""
        return []

    def start_supervisor(
        self, paths: RunPaths, *, detached: bool, grace_s: float
    ) -> subprocess.Popen[bytes]:
        """Start the run's supervisor in a session of its own.

        Unless detached, it stops the run when this process dies.
        """
        owner = [] if detached else ["--owner-pid", str(os.getpid())]
        words = ["--run-dir", str(paths.root), *owner, *self.supervisor_words()]
        paths.logs.mkdir(parents=True, exist_ok=True)
        with paths.supervisor_log.open("ab") as log, control.held_back(control.STOP_SIGNALS):
            return subprocess.Popen(
                module_words("payload.supervise", *words, "--grace", str(grace_s)),
                env=self.code_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def signal_supervisor(
        self,
        paths: RunPaths,
        numbers: Sequence[signal.Signals],
        *,
        request: StopRequest,
    ) -> bool:
        """Send signals to the run's supervisor, with what it finds then; tell whether it lives.

        Raises UsageError when it is another user's.
        """
        try:
            answer = control.send(paths.root, [int(number) for number in numbers], asdict(request))
        except PermissionError:
            raise UsageError(
                f"run {paths.run_id} belongs to another user. Stop it as that user."
            ) from None
        return bool(answer["alive"])

    def end_at_once(self, paths: RunPaths) -> None:
        """Kill the run's supervisor, which does not answer, and every process of the run."""
        control.send(paths.root, [int(signal.SIGKILL)])
        ends = time.monotonic() + _KILL_S
        while control.left(paths.root, kill=True)["pids"] and time.monotonic() < ends:
            time.sleep(0.1)

    def _path(self) -> str:
        return self._env.get("PATH", os.defpath)


def _try_port(port: int) -> socket.socket | None:
    """Return a socket bound to `port` if nobody else is, or None."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind(("0.0.0.0", port))
    except OSError:
        holder.close()
        return None
    # Only now, so that this bind shared with nobody; from here on the supervisor and rank 0 may
    # bind as well, see payload.supervise.supervisor.hold_port.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def require_disk(planned: PlannedRun) -> None:
    """Raise ConfigError where the disk has no room for the run's checkpoints."""
    size = planned.plan.arithmetic.checkpoint_bytes
    require_room(
        planned.paths.root,
        checkpoint_bytes=size,
        keep=planned.config.train.keep_checkpoints,
        uploads=planned.config.storage.address() is not None,
    )


class Local(InventorySite):
    """The machine that the command runs on, or the Slurm job that it is in."""

    uses_this_environment = True

    def __init__(self, chosen: Chosen, access: LocalAccess, *, argument: str | None = None) -> None:
        """Raise ConfigError for an inventory of several machines.

        `argument` is `--inventory` as it was given, for messages.
        """
        require_one_machine(chosen)
        self._argument = argument
        self._chosen = chosen
        self._access = access

    def check(self, config: RunConfig, env: Mapping[str, str]) -> None:
        """Raise ConfigError for a setting whose packages or device this machine lacks."""
        inventory, gpus = self._chosen.inventory, self._chosen.nvidia
        need = self._chosen.gpu_need(config)
        # Without nvidia-smi, as in some containers, the device itself decides.
        if need is not None and gpus is not None and gpus.smi is not None:
            require_gpus(gpus, need=need, node=inventory.head)
        require_means_here(config)

    def plan(self, paths: RunPaths, config: RunConfig, *, vocab_size: int | None) -> PlannedRun:
        """Return the plan of a run that is not started."""
        with self._access.reserve_port() as holder:
            return self._plan(paths, config, vocab_size=vocab_size, port=port_of(holder))

    def find_run(self, run_id: str | None, *, runs_dir: Path, verb: str) -> SiteRun:
        """Raise UsageError: runs of this machine are found by their folders."""
        raise UsageError(
            f"--inventory {self._argument}: that is this machine. Leave it out for a run here."
        )

    def start(self, order: Order) -> SiteRun:
        """Plan the run, write its folder and start its supervisor."""
        paths, talk = order.paths, order.talk
        others = running_here(paths.root.parent)
        if others:
            talk.print(f"note: {', '.join(others)} is running here too and shares the cores")
        port = port_of(order.held.enter_context(self._access.reserve_port()))
        planned = self._plan(
            paths, order.config, vocab_size=order.vocab_size, port=port, resumes=order.resumes
        )
        require_disk(planned)
        if not order.resumes:
            require_new_in_store(order.config, paths.run_id, env=self._access.code_environment())
        for note in planned.notes():
            talk.print(note)
        with order.folder():
            # A site's job has ended, a cluster's run comes from its store: it is a run here now.
            paths.job.unlink(missing_ok=True)
            mirror_file(paths).unlink(missing_ok=True)
            planned.write(paths)
        talk.print(
            f"run {paths.run_id}: {planned.plan.world_size} rank(s) through "
            f"{planned.plan.launcher}; everything in {paths.root}"
        )
        supervisor = self._access.start_supervisor(
            paths, detached=order.detach, grace_s=order.grace_s
        )
        run = LocalRun(paths, access=self._access, supervisor=supervisor, nodes=planned.plan.nodes)
        run.held = order.held.pop_all()
        return run

    def _plan(
        self,
        paths: RunPaths,
        config: RunConfig,
        *,
        vocab_size: int | None,
        port: int,
        resumes: bool = False,
    ) -> PlannedRun:
        return plan_run(
            paths,
            config=config,
            chosen=self._chosen,
            access=self._access,
            vocab_size=vocab_size,
            work_dir=Path.cwd(),
            port=port,
            auto_size=auto_batch_size(paths.plan),
            kept_dtype=known_dtype(paths),
            resumes=resumes,
        )


def port_of(holder: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    return int(holder.getsockname()[1])


class LocalRun(SiteRun):
    """A run whose supervisor is on this machine, perhaps a child of this process."""

    every_s = 0.2
    has_job = False
    # A supervisor that is told to end at once kills for at most ten seconds.
    force_s = 15.0

    def __init__(
        self,
        paths: RunPaths,
        *,
        access: LocalAccess,
        supervisor: subprocess.Popen[bytes] | None = None,
        nodes: int = 1,
    ) -> None:
        """`supervisor` is the one that this command has started, so that the run ends with it."""
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
    ) -> Seen:
        """Return whether the supervisor lives; the run's files are here."""
        if self._supervisor is None:
            return Seen(alive=is_supervised(self.paths))
        return Seen(alive=self._supervisor.poll() is None)

    def signal(self, number: signal.Signals, request: StopRequest) -> bool:
        """Signal the supervisor, with the request that says who asks."""
        if self._supervisor is None:
            return self._access.signal_supervisor(self.paths, [number], request=request)
        with suppress(OSError):
            write_json(self.paths.stop_request, replace(request, pids=(self._supervisor.pid,)))
        self._supervisor.send_signal(number)
        return self._supervisor.poll() is None

    def bring_home(self, *, at_once: bool = False) -> Home:
        """Return that it does not go on: all of it is here."""
        return Home(alive=False)

    def start_line(self) -> str | None:
        """Return None: the start has printed more than is known here."""
        return None

    def detached(self) -> str | None:
        """Return words once the supervisor is at work; None where it has ended before."""
        supervisor, deadline = self._supervisor, time.monotonic() + _START_S
        assert supervisor is not None, "a run that was started here"
        while time.monotonic() < deadline and supervisor.poll() is None:
            state = last_record(RunState, self.paths.state)
            if state is not None and state.supervisor_pid == supervisor.pid:
                # It outlives this process on purpose; nobody will wait for it here.
                supervisor.returncode = 0
                look = run_command("status", self.paths)
                return f"detached. Look with: {look}; also: logs -f, stop"
            time.sleep(0.05)
        return None

    def ended_as(self) -> str:
        """Return the run's status and step."""
        view = view_run(self.paths, now_unix=time.time())
        return f": {view.status} after step {view.step}"

    def result_line(self) -> str | None:
        """Return the run's status, its step and its error."""
        view = view_run(self.paths, now_unix=time.time())
        return f"{view.status} after step {view.step}" + (f": {view.error}" if view.error else "")

    def end_without_record(self) -> tuple[int, str] | None:
        """Return how the supervisor ended where it could not say so in the run folder."""
        if self._supervisor is None:
            return None
        paths, status = self.paths, self._supervisor.wait()
        if not paths.root.is_dir():
            return (status if status > 0 else ExitCode.TRAINING), (
                f"error: {paths.root} was removed while the run went on, with all that it had "
                "saved. Start a new run."
            )
        if status < 0:
            return ExitCode.RANK_LOST, (
                f"error: the supervisor was killed by signal {-status} "
                f"({signal.Signals(-status).name}); the ranks save and stop"
            )
        state = last_record(RunState, paths.state)
        # Without a state of its own, what lies there is the last attempt's.
        began = state is not None and state.supervisor_pid == self._supervisor.pid
        if began and last_record(Summary, paths.summary) is not None:
            return None
        said = log_tail(paths.supervisor_log)
        words = said[-1] if said else f"error: the supervisor ended with {status}"
        return status or ExitCode.TRAINING, f"{words}\nlog: {paths.supervisor_log}"

    def overdue(self, waited_s: float, *, force: bool, talk: Console) -> None:
        """Kill the run's processes where the stop is at once: its supervisor may be frozen."""
        paths = self.paths
        if not force:
            raise RankLostError(
                f"run {paths.run_id} has not ended within {waited_s:.0f} s. End it at once, "
                f"without a checkpoint: {run_command('stop', paths, '--force')}"
            )
        talk.print("its supervisor does not answer: killing it and the run's processes")
        self._access.end_at_once(paths)
        if is_supervised(paths):
            raise RankLostError(
                f"run {paths.run_id} cannot be ended: its supervisor is no process that this user "
                "can see here. Stop it where and as whom it was started."
            )
        before = known_state(paths)
        if before is not None:
            error = (
                "killed by force, its supervisor did not answer; the last checkpoint is as it was"
            )
            ended = replace(before, status="stopped", exit_class=ExitCode.OK.label, error=error)
            write_json(paths.state, ended)

    def close(self) -> None:
        """Let other commands start the run, and the port go."""
        self.held.close()
