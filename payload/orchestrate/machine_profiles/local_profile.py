"""Profile of this machine for planning; it also controls local supervisors."""

from __future__ import annotations

import copy
import ctypes.util
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import which
from typing import Self

from payload.config.training_sections import DtypeChoice
from payload.core.dtype import Dtype
from payload.core.errors import PreflightError, UsageError
from payload.core.python_processes import code_environment, code_path, module_command
from payload.estimates.network import LOCAL_LINK
from payload.launch.launcher import Launcher, Reach
from payload.launch.launchers.registry import AUTO
from payload.launch.plan_record import rank_program
from payload.machines.core_speed import (
    CpuClass,
    cpu_class,
    has_bf16,
    table_source,
    typical_core_flops_per_s,
)
from payload.machines.inventory import RANK_PORTS, Node
from payload.machines.machine import free_memory_bytes
from payload.machines.machine_facts import read_cpu
from payload.machines.speed_cache import MachineSpeed, RankSpeed
from payload.orchestrate.node import control
from payload.run_record.run_files import (
    RunPaths,
    StopRequest,
)

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_TCMALLOC = ("tcmalloc", "tcmalloc_minimal")
_KILL_S = 10.0


class LocalAccess:
    """This machine as a cluster with one node."""

    python = sys.executable
    link = LOCAL_LINK
    launcher = AUTO

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env
        self._speed: MachineSpeed | None = None

    def with_speed(self, speed: MachineSpeed | None) -> Self:
        """Return this profile with the measured speed of this machine's cores."""
        found = copy.copy(self)
        found._speed = speed
        return found

    def environment(self) -> dict[str, str]:
        """Return the operator's environment, for programs on this machine."""
        return dict(self._env)

    def code_environment(self) -> dict[str, str]:
        """Return the environment with this code on PYTHONPATH, to run modules of this code."""
        return code_environment(self._env)

    def interfaces(self, nodes: Sequence[Node]) -> Mapping[str, str]:
        """Return loopback for every node."""
        return {node.name: LOOPBACK for node in nodes}

    def peak_flops_per_s(self, choice: DtypeChoice, *, threads: int) -> float | None:
        """Return the measured peak of `threads` cores; None if it was not measured."""
        if self._speed is None:
            return None
        share = min(threads, self._speed.cores) / self._speed.cores
        return share * self._speed.flops_per_s(self.dtype(choice))

    def rank_speed(self, dtype: Dtype, *, threads: int) -> RankSpeed | None:
        """Return the measured speed of a rank, or None."""
        return None if self._speed is None else self._speed.rank_speed(dtype, threads=threads)

    def speed_source(self) -> str:
        """Return the source of the speeds: the time of a measurement, or a row of the typical
        speeds."""
        if self._speed is None:
            return table_source(_cpu_class())
        return f"measured on this machine on {self._speed.date()}"

    def dtype(self, choice: DtypeChoice) -> Dtype:
        """Resolve `auto` by the measured speed.

        Without a measurement, `auto` is fp32 only if this CPU is known to lack bf16.
        """
        if choice != "auto":
            return choice
        if self._speed is not None:
            return self._speed.dtype()
        return "fp32" if has_bf16() is False else "bf16"

    def core_flops_per_s(self, dtype: Dtype) -> float:
        """Return the peak FLOP/s of a typical core; bf16 is emulated if this CPU lacks it."""
        return typical_core_flops_per_s(dtype, emulates_bf16=has_bf16() is False, cpu=_cpu_class())

    def free_memory_bytes(self) -> int | None:
        """Return the memory available without swapping, or None if unknown."""
        return free_memory_bytes()

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """Return the command line of each rank."""
        return rank_program(python=self.python, run_dir=paths.root)

    def executable(self, launcher: Launcher) -> str:
        """Return the launcher's path. Raises PreflightError if it is missing or unsuitable."""
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
                f"{launcher.program} not found next to {sys.executable} or on PATH. Install it: "
                f"{launcher.install}"
            )
        # A launcher script can call its helper, which is in the same folder, by name.
        path = f"{Path(found).parent}{os.pathsep}{self._path()}"
        # Run the launcher in / so that it reads no settings from the current folder.
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
                f"{found}: printed {first or 'no version'!r}, expected {launcher.version}. "
                f"Install it: {launcher.install}"
            )
        return found

    def reach(self) -> Reach:
        """Return loopback as the way to reach nodes, without ssh."""
        return Reach(interface=LOOPBACK)

    def python_path(self) -> str | None:
        """Return the PYTHONPATH for processes of this code, or None if this code is installed."""
        return code_path(self._env)

    def tcmalloc(self) -> str:
        """Return the tcmalloc library. Raises PreflightError if it is not installed."""
        for name in _TCMALLOC:
            found = ctypes.util.find_library(name)
            if found:
                return found
        raise PreflightError(
            "launch.malloc = 'tcmalloc', but this machine has no libtcmalloc. Install it: sudo "
            "apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
        )

    def reserve_port(self) -> socket.socket:
        """Return a socket that reserves a port for the ranks until the supervisor binds it.

        Two runs that start at the same time get different ports.
        """
        for port in random.sample(RANK_PORTS, k=100):
            holder = _try_port(port)
            if holder is not None:
                return holder
        raise PreflightError(
            f"no free port among 100 tried between {RANK_PORTS.start} and {RANK_PORTS.stop}. List "
            "the programs that use these ports: ss -ltnp"
        )

    def supervisor_words(self) -> list[str]:
        """Return the supervisor options that depend on the site."""
        return []

    def start_supervisor(
        self, paths: RunPaths, *, detached: bool, grace_s: float
    ) -> subprocess.Popen[bytes]:
        """Start the run's supervisor in a new session.

        If it is not detached, the supervisor stops the run when this process ends.
        """
        owner = [] if detached else ["--owner-pid", str(os.getpid())]
        options = ["--run-dir", str(paths.root), *owner, *self.supervisor_words()]
        paths.logs.mkdir(parents=True, exist_ok=True)
        with paths.supervisor_log.open("ab") as log, control.blocked(control.STOP_SIGNALS):
            return subprocess.Popen(
                module_command("payload.supervise", *options, "--grace", str(grace_s)),
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
        """Send signals and a stop request to the run's supervisor; return whether it is alive.

        Raises UsageError if the supervisor belongs to another user.
        """
        try:
            answer = control.send(paths.root, [int(number) for number in numbers], asdict(request))
        except PermissionError:
            raise UsageError(
                f"run {paths.run_id} belongs to another user. Stop it as that user."
            ) from None
        return bool(answer["alive"])

    def end_at_once(self, paths: RunPaths) -> None:
        """Kill the run's supervisor and every process of the run."""
        control.send(paths.root, [int(signal.SIGKILL)])
        ends = time.monotonic() + _KILL_S
        while control.left(paths.root, kill=True)["pids"] and time.monotonic() < ends:
            time.sleep(0.1)

    def _path(self) -> str:
        return self._env.get("PATH", os.defpath)


def _cpu_class() -> CpuClass | None:
    return cpu_class(read_cpu(Path("/proc/cpuinfo"))[1])


def _try_port(port: int) -> socket.socket | None:
    """Return a socket bound to `port`, or None if the port is in use."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        holder.bind(("0.0.0.0", port))
    except OSError:
        holder.close()
        return None
    # Set after bind, so that this bind was exclusive. Afterwards the supervisor and rank 0 can also
    # bind the port; see payload.supervise.supervisor.hold_port.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def port_of(holder: socket.socket) -> int:
    """Return the port that a socket is bound to."""
    return int(holder.getsockname()[1])
