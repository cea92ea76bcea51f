"""A cluster that is this machine: what it has, its supervisor's start, signals to it."""

from __future__ import annotations

import ctypes.util
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from shutil import which

import payload
from payload.errors import PreflightError, UsageError
from payload.inventory import RANK_PORTS, ClusterInventory
from payload.launch.launchers.base import Launcher, Reach
from payload.launch.launchers.registry import AUTO
from payload.launch.plan import rank_program
from payload.machine import free_memory_bytes
from payload.orchestrate.node import control
from payload.results import RunPaths, StopWish
from payload.run_config import DtypeChoice
from payload.step_time import LOOPBACK_BYTES_PER_S

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_TCMALLOC = ("tcmalloc", "tcmalloc_minimal")
_KILL_S = 10.0


class LocalAccess:
    """This machine as a cluster of one node."""

    python = sys.executable
    link_bytes_per_s = LOOPBACK_BYTES_PER_S
    launcher = AUTO

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = env

    def environment(self) -> dict[str, str]:
        """The operator's own environment, for programs that run on this machine."""
        return dict(self._env)

    def interfaces(self, inventory: ClusterInventory) -> Mapping[str, str]:
        """Loopback."""
        return {node.name: LOOPBACK for node in inventory.nodes}

    def peak_flops_per_s(self, choice: DtypeChoice) -> float | None:
        """Not kept: the trainer measures it at its start."""
        return None

    def free_memory_bytes(self) -> int | None:
        """What the system could give without swapping, or None where it does not say."""
        return free_memory_bytes()

    def program(self, paths: RunPaths) -> tuple[str, ...]:
        """What each rank runs."""
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
        version = subprocess.run(
            [found, "--version"], capture_output=True, text=True, check=False, env={"PATH": path}
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
        """Where the payload package lies, or None when it is installed."""
        root = Path(payload.__file__).parent.parent
        installed = {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
        if root in installed:
            return None
        known = self._env.get("PYTHONPATH")
        return f"{root}{os.pathsep}{known}" if known else str(root)

    def tcmalloc(self) -> str:
        """Path of the tcmalloc library. Raises PreflightError with the line that installs it."""
        for name in _TCMALLOC:
            found = ctypes.util.find_library(name)
            if found:
                return found
        raise PreflightError(
            "launch.malloc = 'tcmalloc', but this machine has no libtcmalloc. Install it: sudo "
            "apt-get install libtcmalloc-minimal4 (or use launch.malloc = 'tuned')."
        )

    def reserve_port(self) -> socket.socket:
        """A socket that keeps a free port for the ranks; close it once a supervisor holds it.

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
        command = [self.python, "-m", "payload.supervise", "--run-dir", str(paths.root), *owner]
        command += self.supervisor_words()
        paths.logs.mkdir(parents=True, exist_ok=True)
        env = dict(self._env)
        python_path = self.python_path()
        if python_path:
            env["PYTHONPATH"] = python_path
        with paths.supervisor_log.open("ab") as log, control.held_back(control.STOP_SIGNALS):
            return subprocess.Popen(
                [*command, "--grace", str(grace_s)],
                env=env,
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
        wish: StopWish,
    ) -> bool:
        """Send signals to the run's supervisor, with what it finds then; tell whether it lives.

        Raises UsageError when it is another user's.
        """
        try:
            answer = control.send(paths.root, [int(number) for number in numbers], asdict(wish))
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
    """A socket bound to `port` if nobody else is, or None."""
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
